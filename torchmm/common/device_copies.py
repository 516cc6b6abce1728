"""Small copies to and from the device, and a list of synchronizations in a training step.

CUDA is asynchronous. Reading a value of a device tensor (`item`, `tolist`, `nonzero`, copies from
and to unpinned memory) makes the host wait for the device, and afterwards the device is idle until
the host launches new work. A step synchronizes only here:

| where | values | reason |
|---|---|---|
| `training.agreement.check_losses` | losses and gradient norm, one vector | the run stops if they \
are not finite. The update is launched before, and has no effect in this case |
| expert parallelism, once per layer and forward pass | number of tokens to and from each rank | \
message sizes |

All other values that ranks exchange (sizes of the batch, stop requests, times) are host values, and
use the CPU process group. Action times are CUDA events, which are read after the first
synchronization, when all of them are complete. Steps with validation, checkpoints, generation or
profiling synchronize more often. `tests/cuda_emulation` asserts the number of synchronizations.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to `device` without synchronizing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Asynchronous copy of a small device tensor in host memory.

    Work that is launched after the constructor runs while the host waits in `tolist`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[float]:
        """Wait for the copy and return its values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
