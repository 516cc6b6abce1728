"""Scores of what a model writes for held-out questions, pictures and sounds.

Begin with `scores.py`. A run scores its own texts (`training/validation.py`); `exported.py` has an
export write them.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(__name__, {"scores": ("Answer", "score")})
