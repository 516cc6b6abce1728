"""Imports of server processes, whose forks then start without them."""

import gc
from importlib import import_module

from PIL import Image

MODULES = (
    "torchmm.commands.train",
    "torchmm.training.run",
    "torchmm.training.hooks.recording",
    "torchmm.training.hooks.checkpoints",
    "torchmm.training.hooks.garbage_collection",
    "transformers.models.llama.modeling_llama",
    "transformers.models.siglip.modeling_siglip",
    "transformers.models.siglip.image_processing_pil_siglip",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "scipy.io",
)


def preload_modules() -> None:
    """Import the modules of a run, and exclude their objects from garbage collection.

    Runs import some of these modules only when they need them, which takes a second per rank.
    """
    for name in MODULES:
        import_module(name)
    Image.preinit()
    extensions = import_module("torchmm.common.extensions")
    for extension in extensions.extension_names():
        if extension == "torchmm.extensions.generation":
            continue  # few tests need diffusers, which takes a second
        for entries in import_module(f"{extension}.extension").ENTRIES.values():
            for entry in entries:
                import_module(entry.target.partition(":")[0])
    target = import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()  # the first call of a compiled function does both
    target.target_context.refresh()
    gc.freeze()  # collections in forks skip these objects, so that forks share their pages
