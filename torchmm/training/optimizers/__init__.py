"""Optimizers whose tensors rest in fewer bytes: bfloat16, 8 bits, the host's memory; Muon.

Begin with `compact.py`. What all runs share (groups, learning rate, norm, clipping) is in
`training/optim.py`, which also has torch's fused AdamW, for float32.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(__name__, {"compact": ("CompactOptimizer",)})
