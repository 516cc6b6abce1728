"""Compute matmuls in float8, and store optimizer states in 16 or 8 bits or in host memory."""
