"""Tensor-parallel communication that overlaps with matrix products (StepCCL)."""
