"""torchmm/training."""
