"""Saving and resuming in any layout, with atomic checkpoints."""
