"""One run, with process groups: build, plan, step, validate, record, save.

Imports everything above. Begin with `run.py` (from a recipe to results) and `trainer.py`, the loop;
`build.py` makes what the loop works with, `planner.py` decides the order of each step.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "run": ("train",),
        "trainer": ("Trainer",),
        "planner": ("StepPlanner",),
        "pipeline": ("Pipeline",),
        "step": ("TrainStep",),
    },
)
