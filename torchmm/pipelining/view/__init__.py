"""Steps made visible: pictures, bubbles by class, traces, orders as CSV files.

Begin with `timeline.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "draw": ("timelines_svg",),
        "timeline": ("analyze_timeline",),
        "records": ("read_records", "write_records"),
    },
)
