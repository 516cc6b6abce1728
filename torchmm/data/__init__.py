"""Samples to packed microbatches, in an order that no number of ranks changes; never a model.

Imports `common` and `recipe`. Begin with `loader.py`, which puts the rest together: `sources/`
finds and reads records, `layouts/` says what they mean, `steps/` says which come when, packs them
and deals them to ranks, `media/` decodes. `serve.py` is a program:
producers that prepare samples elsewhere.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "corrupt": ("CorruptLimit", "CorruptSampleError"),
        "loader": ("Loader", "StepBatch", "build_loader"),
        "tokenizer": ("load_tokenizer",),
    },
)
