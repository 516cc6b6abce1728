"""Optimus: encoders in the bubbles of the LLM pipeline."""
