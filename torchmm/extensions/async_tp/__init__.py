"""Overlap tensor-parallel communication with matmuls (StepCCL)."""
