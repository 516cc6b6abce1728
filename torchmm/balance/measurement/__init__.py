"""Timing of real devices and modules for the cost model (`scripts/calibrate.py`)."""
