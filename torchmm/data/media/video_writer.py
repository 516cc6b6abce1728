"""Write video files, for generated datasets and tests."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from torchmm.common.errors import DataError, install_command


class VideoFormat(NamedTuple):
    """File format with a video codec."""

    name: str
    codec: str
    pixel_format: str
    options: dict[str, str]


VIDEO_FORMATS = {
    "mp4": VideoFormat("mp4", "libx264", "yuv420p", {"crf": "20", "preset": "veryfast"}),
    "webm": VideoFormat(
        "webm", "libvpx-vp9", "yuv420p", {"crf": "24", "b:v": "0", "cpu-used": "8"}
    ),
    "gif": VideoFormat("gif", "gif", "rgb8", {}),
}
"""Formats by file suffix. H.264 and VP9 require even heights and widths."""


def encode_video(images: Sequence[Image.Image], fps: int, suffix: str = "mp4") -> bytes:
    """Return the content of a video file.

    Args:
        images: RGB frames of equal size, in order.
        fps: Frames per second.
        suffix: File format, a key of `VIDEO_FORMATS`.

    Raises:
        DataError: PyAV is not installed.
    """
    try:
        import av  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise DataError(f"writing videos requires PyAV; {install_command('video')}") from error
    container = VIDEO_FORMATS[suffix]
    stream = io.BytesIO()
    with av.open(stream, "w", format=container.name) as file:
        track: Any = file.add_stream(container.codec, rate=fps, options=container.options)
        track.width, track.height = images[0].size
        track.pix_fmt = container.pixel_format
        track.codec_context.thread_count = 1  # the same bytes on every machine
        for image in images:
            frame = av.VideoFrame.from_ndarray(np.asarray(image.convert("RGB")), format="rgb24")
            file.mux(track.encode(frame))
        file.mux(track.encode())
    return stream.getvalue()
