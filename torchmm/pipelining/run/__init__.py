"""Executes one rank's actions of a plan, knowing no schedule.

Begin with `runtime.py`, then `step_state.py`, which remembers by task what a step needs.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "cut": ("cut_for_rank",),
        "runtime": ("PipelineRuntime", "StepResult"),
        "stage": ("PipelineStage",),
    },
)
