"""Families of causal LMs: what each has of its own, and the table of them.

Most are a line of `table.py`. Begin with `family.py`, what a line can say.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(__name__, {"table": ("LLM_FAMILIES",), "family": ("LlmFamily",)})
