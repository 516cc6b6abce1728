"""How numbers are stored: dtypes by the names that recipes and device profiles use, and pixels as
bytes.

Image processors end by rescaling and normalising, which gives one number for each of the 256 values
of a channel. So pixels stay bytes in workers' queues, in messages and in page-locked memory, a
quarter of what the numbers would take, and are looked up on the device, by who is about to
read them. The table has the processor's own numbers: a look-up gives the same bits on any device.
Rejected: mean and deviation, which every processor and every device would round in its own way.

Shape legend: N images, P patches, C channels, H height, W width, D values of a patch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchmm.common.device_copies import to_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ByteValues:
    """The float32 that each byte stands for.

    Args:
        table_C256: float32; one row where all channels have the same.
        channels_last: whether neighbours in a patch are the channels of one pixel; otherwise a
            channel's values follow one another.
    """

    def __init__(self, table_C256: np.ndarray, channels_last: bool = False) -> None:
        self.table_C256 = table_C256
        self.channels_last = channels_last

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ByteValues)
            and self.channels_last == other.channels_last
            and np.array_equal(self.table_C256, other.table_C256)
        )

    def __hash__(self) -> int:
        return hash(self.table_C256.tobytes())

    def look_up(self, pixels: Tensor) -> Tensor:
        """float32 of the same shape.

        Args:
            pixels: uint8, (N, C, H, W) or (P, D).
        """
        device = pixels.device
        channels = len(self.table_C256)
        if pixels.ndim == 4:
            channel = torch.arange(channels, dtype=torch.int32, device=device)[:, None, None]
        else:
            place_D = torch.arange(pixels.shape[1], dtype=torch.int32, device=device)
            each = pixels.shape[1] // channels
            channel = place_D % channels if self.channels_last else place_D // each
        table = to_device(torch.from_numpy(self.table_C256).flatten(), device)
        index = pixels.int() + 256 * channel
        return table.index_select(0, index.flatten()).view(pixels.shape)
