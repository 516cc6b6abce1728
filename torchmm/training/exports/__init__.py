"""What a trained model becomes for others: Hugging Face directories, with a card.

Begin with `write.py`, which a run calls at its end; `checkpoint.py` exports without one.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "checkpoint": ("export_checkpoint",),
        "write": ("write_export",),
    },
)
