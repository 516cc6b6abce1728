"""Plans of the next step, made in another process while this step trains (PipeWeaver §7.1).

Begin with `work.py`, how a step's plan is made from a request; `process.py` has the process that
does so beside training, and replaces one that died.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "process": ("KeptPlanning", "PlanningProcess"),
        "requests": ("PlannedStep", "PlanningSetup", "PlanRequest"),
        "work": ("plan_before_step",),
    },
)
