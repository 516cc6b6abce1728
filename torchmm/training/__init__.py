"""One run, with process groups: build, plan, step, validate, record, save.

Imports everything above. Begin with `run.py` (from a recipe to results) and `trainer.py`, the loop.
`build.py` creates the components of the run (`parts.py`), `planner.py` plans each step, `hooks/`
contains everything that happens after a step.
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
