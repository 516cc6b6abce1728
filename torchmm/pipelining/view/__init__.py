"""torchmm/pipelining/view."""
