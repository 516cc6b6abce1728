"""torchmm/planning."""
