"""How published data sets arrange their records, and what each becomes.

Imports `recipe` and `corrupt.py`, nothing else of `data`: everything else in `data` may ask here.
Begin with `recognise.py`: one table of layouts, tried in order. `sample.py` and `conversation.py`
are what they end in; the other files are a layout, or a few alike, each.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "recognise": ("LAYOUTS", "parse_record"),
        "sample": ("Record", "Sample", "SampleOptions"),
        "conversation": ("Conversation", "Turn"),
    },
)
