"""torchmm/training/checkpoint."""
