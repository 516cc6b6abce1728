"""The plan of every step of a run: one rank of a pipeline has it made, the others get it.

Begin with `sharing.py`, what ranks of a pipeline tell each other before a step; `leader.py` decides
where the plan comes from.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "leader": ("PlanLeader",),
        "sharing": ("SharedPlans",),
    },
)
