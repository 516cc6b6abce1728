"""torchmm/models/hf."""
