"""Why a plan is refused before it runs: missing tasks, crossed messages, deadlocks, memory.

Begin with `validate.py`; `rules.py` says what must come before what, `scan.py` plays it through.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "validate": ("validate_plan",),
        "problems": ("PlanProblem",),
    },
)
