"""PipeWeaver's search for the order of a step's tasks (section 6).

Begin with `best_order.py`, then `search.py`; `dispatcher*.py` turns priorities into an order.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "best_order": ("plan_searched",),
        "search": ("Budget",),
    },
)
