"""Commands of the program `torchmm`: train, plan, simulate, generate, export and others."""
