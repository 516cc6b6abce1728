"""Dtypes by name in recipes and device profiles, and lookup of uint8 pixels.

Image processors rescale and normalize pixels, so each of the 256 values of a channel has one
result. Pixels are therefore stored as bytes in worker queues, messages and pinned memory, with a
quarter of the size of float32. They are converted on the device just before they are needed. The
table has the exact values of the processor, so the results are bitwise identical on all devices.
Applying mean and standard deviation would be rounded differently on each device.

Shape legend: N images, P patches, C channels, H height, W width, D values of a patch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchmm.common.device_copies import to_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ByteValues:
    """float32 value of each byte.

    Args:
        table_C256: float32 values. One row if all channels have the same values.
        channels_last: Whether the channels of a pixel are adjacent in a patch. Otherwise, all
            values of a channel are adjacent.
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
        """Convert uint8 pixels to float32.

        Args:
            pixels: (N, C, H, W) or (P, D), uint8.
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
