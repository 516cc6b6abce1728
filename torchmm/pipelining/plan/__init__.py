"""What a step is: stages, tasks and messages, an order of them, the actions of every rank.

Pure data, no process group. Begin with `graph.py`, then `plan.py`; `lowering.py` turns an order of
tasks into actions with sends, receives and waits.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "actions": ("Action", "ActionType"),
        "graph": ("StageGraph", "StageLayout", "StageSpec", "Task"),
        "lowering": ("lower_plan",),
        "plan": ("ComputeOrder", "PipelinePlan"),
    },
)
