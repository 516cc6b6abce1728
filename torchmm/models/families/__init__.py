"""One class for each family of encoders, composites and generators, and the tables of them.

A new encoder is a class with a table entry in `encoders.py`, a new composite one in `composites.py`
(docs/add_a_model.md). Begin with `encoder_family.py`, what a family has to answer.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "encoder_family": ("EncoderFamily",),
        "encoders": ("ENCODER_FAMILIES",),
        "composites": ("COMPOSITES",),
    },
)
