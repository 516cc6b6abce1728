"""torchmm/pipelining/run."""
