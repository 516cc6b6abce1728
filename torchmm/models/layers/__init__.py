"""Layers that replace those of Hugging Face: packed attention, experts, connectors, loss."""
