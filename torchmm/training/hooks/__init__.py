"""Hooks that run before and after training steps, from validation to checkpoints."""
