"""torchmm/pipelining/checks."""
