"""The same plan as the runtime's, timed and weighed for devices that are not at hand.

Begin with `simulator.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "simulator": ("SimulatedStep",),
        "workload": ("sample_microbatches",),
    },
)
