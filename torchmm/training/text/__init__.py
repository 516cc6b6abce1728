"""Writes text behind prompts, in every layout, token by token with a cache.

Begin with `generate.py`; `sampling.py` chooses tokens from logits, `prompts.py` makes prompts of
what is asked, `opened.py` opens trained models to write with on this machine.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "generate": ("generate_tokens",),
        "opened": ("open_writer",),
        "prompts": ("Request", "read_prompts"),
        "sampling": ("Sampling",),
    },
)
