"""Tensor and sequence parallelism, with communication before the matrix products or below them.

Begin with `apply.py`; `overlap_*.py` is asynchronous tensor parallelism
(docs/understand/async_tp.md); `bubbles.py`, `pieces.py`, `collectives.py` and `groups.py` run
encoders while the LLM communicates (docs/understand/optimus.md).
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "apply": ("apply_tensor_parallel",),
        "overlap_choice": ("choose_overlap",),
    },
)
