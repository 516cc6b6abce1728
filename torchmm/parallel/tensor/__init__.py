"""Tensor and sequence parallelism, with collectives before matmuls or overlapped with them."""
