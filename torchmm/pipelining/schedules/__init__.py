"""torchmm/pipelining/schedules."""
