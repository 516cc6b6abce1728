"""torchmm/models/families."""
