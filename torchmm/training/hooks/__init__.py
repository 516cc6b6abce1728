"""Hooks: what happens after a training step, from validation to checkpoints."""
