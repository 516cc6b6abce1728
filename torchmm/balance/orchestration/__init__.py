"""DistTrain's orchestrator: how many devices and which sizes every module gets (section 4.3).

Begin with `problem.py`, then `search.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "problem": ("OrchestrationProblem",),
        "search": ("OrchestrationPlan",),
        "space": ("PlanSpace",),
    },
)
