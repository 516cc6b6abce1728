"""One run, with process groups: build, plan, step, validate, record, save.

Imports everything above. Begin with `trainer.py`, the loop, and `build.py`, what it is made of.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "trainer": ("Trainer", "train"),
        "pipeline": ("Pipeline",),
        "step": ("TrainStep",),
    },
)
