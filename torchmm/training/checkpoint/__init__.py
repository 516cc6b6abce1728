"""Saving and resuming: any layout to any layout, and never half a checkpoint.

Begin with `manager.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "manager": ("CheckpointManager",),
        "manifest": ("find_problems", "list_steps"),
    },
)
