"""What torchmm computes instead of Hugging Face: packed attention, experts, connectors, loss.

Begin with `attention.py`: segments of a packed sequence that do not attend to each other.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "attention": ("Segments",),
        "loss": ("summed_cross_entropy",),
    },
)
