"""torchmm/balance/simulation."""
