"""torchmm/balance/orchestration."""
