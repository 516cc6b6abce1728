"""torchmm/balance/recomputation."""
