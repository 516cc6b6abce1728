"""From a recipe to sizes, layouts and plans, still without a process group.

Imports everything above. Begin with `resolved.py` (a recipe on a number of devices), `step.py`
(from microbatches to a plan) and `dry_run.py` (what `--dry-run` prints). `search/` finds parallel
sizes; `placement.py` fills in sizes that a recipe leaves open.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "dry_run": ("describe_run",),
        "executions": ("module_executions",),
        "forecast": ("Forecast", "Forecaster"),
        "placement": ("orchestrated",),
        "resolved": ("Resolved", "resolve"),
        "step": ("plan_layout", "plan_step"),
    },
)
