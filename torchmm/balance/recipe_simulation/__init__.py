"""Simulated training steps of a recipe: time, MFU and memory."""
