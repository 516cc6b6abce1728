"""torchmm/measure."""
