"""torchmm/recipe."""
