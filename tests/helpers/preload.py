"""Imports of server processes, whose forks then start without them."""

import gc
from importlib import import_module


def preload_modules() -> None:
    """Import the modules of a run, and exclude their objects from garbage collection.

    Runs import some of these modules only when they need them, which takes a second per rank.
    """
    import_module("torchmm.commands.train")
    import_module("torchmm.training.run")
    import_module("matplotlib.figure")
    import_module("matplotlib.backends.backend_agg")
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
