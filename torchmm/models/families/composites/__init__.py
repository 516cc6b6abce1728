"""Composite Hugging Face models, one file for each kind, and the table of them.

A composite says which config is which part, and how its files name them. Begin with `table.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(__name__, {"table": ("COMPOSITES",), "parts": ("CompositeParts",)})
