"""torchmm/balance/bubbles."""
