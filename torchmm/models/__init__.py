"""Hugging Face models as layered modules that can be split, sharded and exported."""
