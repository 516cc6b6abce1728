"""Hugging Face files: configs, sharded loading of weights, exports."""
