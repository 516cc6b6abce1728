"""torchmm/balance/costs."""
