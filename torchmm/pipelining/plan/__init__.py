"""torchmm/pipelining/plan."""
