"""torchmm/data/sources."""
