"""Hugging Face modules as layered modules that can be cut, sharded and exported.

Imports `common` and `recipe`, never `data`. Begin with `registry.py` (from a recipe to a model) and
`layered.py` (what a module is to the rest). `families/` has a class for each kind of encoder or
generator, `layers/` what torchmm computes itself, `hf/` reads and writes files.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "registry": ("build_model",),
        "multimodal": ("MultimodalModel", "materialize"),
        "layered": ("LayeredModule",),
        "initialize": ("init_weights",),
    },
)
