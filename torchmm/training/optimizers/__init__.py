"""Optimizers (`optimizer.py` has the interface), and the moving average of weights."""
