"""Families of image and audio encoders, and the table of them.

Begin with `family.py`, what a family has to answer.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__, {"family": ("EncoderFamily",), "table": ("ENCODER_FAMILIES",)}
)
