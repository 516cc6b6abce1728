"""From costs to decisions: pure functions, deterministic, without process group or whole recipe.

Imports `common`, the types of `recipe`, and `pipelining.plan`, `.schedules` and `.checks`. Begin
with `costs/` (what a task takes) and `simulation/` (what a step takes); the rest decides:
`planners.py` and `order_search/` orders, `recomputation/` memory, `bubbles/` Optimus,
`orchestration/` and `reordering/` DistTrain.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "planners": ("PLANNERS",),
        "segments": ("partition",),
    },
)
