"""Times real devices and modules, for the cost model to be true (scripts/calibrate.py).

Imports everything above. Begin with `operators.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "operators": ("measure",),
        "trials": ("make_trials",),
    },
)
