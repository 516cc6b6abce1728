"""torchmm/models/layers."""
