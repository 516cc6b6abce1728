"""Ranks that are slow, lost, hang, or compute what is no number: noticed by all ranks, and named.

Begin with `peers.py`, which every step of a run calls.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "non_finite": ("where_non_finite",),
        "preflight": ("check_ranks",),
        "peers": ("Health", "SideGroup", "check_finite"),
    },
)
