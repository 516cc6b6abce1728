"""Optimizers with states in bfloat16, in 8 bits or in host memory, and Muon."""
