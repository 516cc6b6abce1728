"""The search for parallel sizes: candidates, bounds, simulation.

Begin with `search.py`, then `space.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "result": ("Candidate", "SearchResult"),
        "search": ("search_plans",),
        "space": ("METHODS",),
    },
)
