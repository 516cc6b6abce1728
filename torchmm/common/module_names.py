"""Names that modules of a model always have; encoders are named by the recipe.

Apart from the types in `batch.py`, which need torch: the recipe is read without it.
"""

LLM = "llm"
"""The backbone, in tables and metrics."""

GENERATOR = "generator"
"""The module that draws what the LLM describes."""
