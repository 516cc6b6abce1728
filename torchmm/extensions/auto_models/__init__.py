"""Support encoders and LLMs of model types that no family registers."""
