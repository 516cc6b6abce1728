"""Hugging Face's files: configurations, weights read shard by shard, exports.

Begin with `load.py`. Nothing here runs code that a model brings.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "config": ("load_config",),
        "load": ("load_weights",),
        "export": ("export_hf",),
    },
)
