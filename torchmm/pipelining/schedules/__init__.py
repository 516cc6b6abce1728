"""How layers become stages, and in which fixed order stages work: 1F1B and its relatives.

Pure functions. Begin with `names.py`, the schedules by name, and `classic.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "names": ("order_named", "schedule_layout"),
        "classic": ("gpipe", "interleaved_1f1b", "one_f_one_b"),
        "separated": ("separated",),
    },
)
