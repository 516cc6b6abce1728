"""DistTrain's reordering inside the global batch: even ranks, few gaps (section 6).

Begin with `step.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "groups": ("balance_groups",),
        "microbatches": ("reorder_microbatches",),
        "step": ("StepReorder",),
        "slices": ("slice_items",),
    },
)
