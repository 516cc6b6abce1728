"""What layers cost: FLOPs, times, bytes; from a device's data sheet or its calibration.

Begin with `model.py` (times of operators) and `blocks.py` (which layers a task runs).
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "model": ("CostModel",),
        "profiles": ("load_profile", "save_profile"),
        "step_costs": ("PlanCosts", "plan_costs"),
    },
)
