"""Names of modules that all models have. Recipes name additional encoders.

Separate from the types in `batch.py`, which import torch. Recipes are read without torch.
"""

LLM = "llm"
"""LLM, in tables and metrics."""

GENERATOR = "generator"
"""Module that generates images from LLM hidden states."""

VISION = "vision"
"""Image encoder of a composite Hugging Face model without encoder names in the recipe."""

AUDIO = "audio"
"""Audio encoder of such a model."""
