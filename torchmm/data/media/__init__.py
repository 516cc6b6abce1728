"""torchmm/data/media."""
