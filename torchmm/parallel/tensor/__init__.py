"""torchmm/parallel/tensor."""
