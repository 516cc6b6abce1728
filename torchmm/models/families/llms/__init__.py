"""Causal LMs: layers, sizes and positions."""
