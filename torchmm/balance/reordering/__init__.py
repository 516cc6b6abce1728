"""DistTrain's reordering inside the global batch: even ranks, few gaps (sections 5.1 and 5.2).

Begin with `step.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "groups": ("balance_groups",),
        "microbatches": ("reorder_microbatches",),
        "step": ("StepReorder",),
    },
)
