"""What a sample consists of, made into tensors: text and chats, images, sounds, clips.

Begin with `medium.py`, what every modality has to offer.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "medium": ("MediaPreprocessor",),
        "text": ("TextEncoder",),
    },
)
