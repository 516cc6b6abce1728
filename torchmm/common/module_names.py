"""Names that modules of a model always have; other encoders are named by the recipe.

Separate from the types in `batch.py`, which need torch: the recipe is read without it.
"""

LLM = "llm"
"""The backbone, in tables and metrics."""

GENERATOR = "generator"
"""The module that draws what the LLM describes."""

VISION = "vision"
"""The image encoder of a composite Hugging Face model, whose recipe names none."""

AUDIO = "audio"
"""The audio encoder of one."""
