"""Parallelism degrees, stage layouts and plans of a recipe, without process groups."""
