"""Modules on ranks of their own: their sizes, schedule and recomputation (DistTrain section 5).

Begin with `search.py`, then `problem.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "problem": ("sized_recipe",),
        "search": ("search_plans",),
    },
)
