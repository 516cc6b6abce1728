"""Multimodal models with a single Hugging Face class, one file per family."""
