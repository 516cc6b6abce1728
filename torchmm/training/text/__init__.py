"""Writes text behind prompts, in every layout, token by token with a cache.

Begin with `generate.py`; `sampling.py` chooses tokens from logits.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "generate": ("generate_tokens",),
        "sampling": ("Sampling",),
    },
)
