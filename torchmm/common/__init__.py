"""Types and small helpers that every folder shares; imports nothing of torchmm.

Begin with `batch.py`, samples and packed microbatches, and `layers.py`, descriptions of modules:
types in which data, models and planners meet without importing each other.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "batch": ("Microbatch", "MicrobatchMeta"),
        "errors": (
            "CheckpointError",
            "ConfigError",
            "DataError",
            "PeerError",
            "PlanError",
            "Preempted",
            "TorchmmError",
        ),
        "layers": ("LayerDescription", "ModuleDescription"),
    },
)
