"""Families of generators, the only files that need diffusers.

Begin with `build.py`, from a recipe to a generator.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__, {"build": ("build_generator",), "pixart": ("GENERATOR_FAMILIES",)}
)
