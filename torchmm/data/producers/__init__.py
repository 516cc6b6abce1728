"""Preparing samples elsewhere: what a data worker asks of producers, and what these do for it.

Begin with `messages.py`: what is asked and answered. `ask.py` is the trainer's side, `server.py`
and `work.py` are the producer's; the program is `torchmm/data/serve.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "ask": ("RemoteDecoder",),
        "server": ("Producer",),
    },
)
