"""torchmm/common."""
