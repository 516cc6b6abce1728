"""PipeWeaver's memory tuning: what each task's layers keep, recompute or move to the host.

Begin with `tuning.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "tuning": ("LayerTuning", "tune_layers"),
    },
)
