"""Where records come from: files, folders, the hub; with random access or as streams.

Begin with `open.py`. A record that cannot be used is corrupt with a reason (`corrupt.py`, one
floor below), skipped and counted.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "open": ("open_samples",),
    },
)
