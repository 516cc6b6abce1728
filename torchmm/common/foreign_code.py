"""Models and tokenizers that bring their own code: it is never run, and errors say so."""

from __future__ import annotations


def describe_refusal(error: Exception) -> str:
    """Why Hugging Face could not load something, in one line.

    Its own remedy for foreign code is to trust it, which torchmm never does.
    """
    if "trust_remote_code" in str(error):
        return (
            "it consists of its own code, which is never run here; name a model or tokenizer "
            "whose classes are part of transformers, or save it as one"
        )
    return " ".join(str(error).split())
