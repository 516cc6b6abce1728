"""What is particular to a family of models: a folder for each kind of module, with its table.

Begin with `encoders/family.py` and `llms/family.py`, what a family has to answer. A new one is a
line or a class there, a new pair of them with files of its own one in `composites/`
(docs/start/own_model.md).
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__, {"text": ("TextConventions", "Token"), "tiling": ("Tiling",)}
)
