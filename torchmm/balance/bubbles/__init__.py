"""Optimus: encoders in the bubbles of the LLM's pipeline.

Begin with `scheduler.py` and `llm_timeline.py`; `encoder_sizes.py` lists the encoders' parallel
plans.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "scheduler": ("BubbleSchedule", "fill_bubbles"),
        "encoder_sizes": ("colocated_plans",),
    },
)
