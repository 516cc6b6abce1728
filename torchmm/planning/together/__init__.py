"""Modules that share all ranks: their sizes, schedule and recomputation (Optimus section 4.1).

Begin with `search.py`, then `encoder_sizes.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "encoder_sizes": ("choose_encoders",),
        "search": ("search_together",),
    },
)
