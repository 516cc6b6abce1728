"""Planners of training steps, by name in a table."""
