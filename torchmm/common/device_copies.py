"""Small copies to the device, and where a training step waits for the device.

CUDA runs behind the host. Whoever asks for a number of a device tensor (`item`, `tolist`,
`nonzero`, copies from and to memory that is not page-locked) makes the host wait until the device
has come so far, and then the device until the host has sent it new work. A step waits only here:

| where | for what | why |
|---|---|---|
| `training.agreement.check_losses` | losses and gradient norm, one vector | the run stops if they \
are not finite. The update is queued before, and changes nothing then |
| experts that `parallel.expert` divides, once per layer and forward | how many tokens go to and \
come from each rank | lengths of messages |

Everything else that ranks tell each other (sizes of the batch, wishes to stop, times) are numbers
of the host, and travel by the CPU's process group. Action times are CUDA events. They are read
after the first wait, when all of them are complete. Steps that validate, save, draw or profile wait
more often.
`tests/cuda_emulation` runs recipes and asserts the number of waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy of a small CPU tensor on `device`, without waiting for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a small device tensor in host memory, which does not wait for the device.

    Work that is queued after its construction runs while the host waits in `tolist`.
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
