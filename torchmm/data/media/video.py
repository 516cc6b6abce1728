"""Clips: container headers, evenly spaced frames, decoding of these alone.

Lengths come from the container's list of packets, which is read whole (headers of streamed files
lack them, and those of torn files are wrong), and from the first frame, which alone has rotation
and size. These numbers and the recipe determine which frames are read, so that a plan can be made
without decoding; the rule is that of Hugging Face's Qwen processors. Frames far apart are reached
through their key frames.

Files are read by FFmpeg through PyAV, which includes its own copy, within the process and without
threads: workers are processes. Rejected: torchcodec (needs the machine's FFmpeg, in a version that
fits torch's), OpenCV (neither times nor rotation), a pipe to the `ffmpeg` program (a process per
clip). Only container formats that hold their own data are allowed: playlists name other files.

`ClipMedia` turns clips into inputs of an image encoder. Encoders whose patches span frames (Qwen's:
two) read a clip as one image of several frames, after one marker; their LLM's positions follow the
time. Qwen3-VL's and GLM-4V's read each group of frames as an image of its own, with its time as
text: the mean of its frames' before it ("<1.5 seconds>"), or the first one's after it (`ClipText`).
All others read single frames that way. All use the encoder's image processor: a patch of two frames
consists of halves of theirs. Rejected: Hugging Face's video processors, which need torchvision and
otherwise differ little (its resizing from Pillow's).

Shape legend: F frames, G groups of them that make patches, P patches of a frame, D values of a
patch.
"""

from __future__ import annotations

import importlib.util
import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from torchmm.common.batch import ImageMeta, Marks, TextSpec
from torchmm.common.dtypes import ByteValues
from torchmm.common.errors import ConfigError, install_command
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import MAX_ASPECT_RATIO, ImagePreprocessor, to_rgb
from torchmm.recipe.data_section import VideoConfig

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,gif,apng"
"""FFmpeg demuxers that may see untrusted bytes."""
LONGEST_S = 1e6
"""Longest clip whose times are plausible."""
SEEK_FRAMES = 48
"""From this many frames to skip, the next key frame is looked for instead."""


class Clip:
    """One clip: its sizes at once, its frames when they are asked for.

    Args:
        data: the file.
        max_pixels: of the largest frame that is decoded.

    Attributes:
        data: the file.
        frames: in the file.
        duration_s: of all of them.
        width_px, height_px: upright.

    Raises:
        ConfigError: PyAV is not installed.
        CorruptSampleError: no clip in a known format, or of an unacceptable size.
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        if importlib.util.find_spec("av") is None:
            raise ConfigError(f"videos in the data require PyAV; {install_command('video')}")
        self.data = data
        self._max_pixels = max_pixels
        with self._opened() as (container, stream):
            packets = [p for p in container.demux(stream) if p.size and not p.is_discard]
            if not packets or any(_time(packet) is None for packet in packets):
                raise CorruptSampleError(
                    f"video of {len(packets)} frames, or of frames without timestamps"
                )
            packets.sort(key=_time)
            self._unit_s: Fraction = stream.time_base
            self._times: list[int] = [_time(packet) for packet in packets]
            self._keys = [_time(packet) for packet in packets if packet.is_keyframe]
            last = packets[-1].duration or 0
        self.frames = len(packets)
        shown = self._times[-1] - self._times[0]
        # Without a duration the last frame stays as long as the others. Exact: six frames at three
        # per second last two seconds, and not a little less.
        last = last or Fraction(shown, max(1, self.frames - 1)) or 1
        self.duration_s = float((shown + last) * self._unit_s)
        if not 0 < self.duration_s < LONGEST_S:
            raise CorruptSampleError(f"video of {self.duration_s} seconds")
        self._wanted: set[int] = set()
        first = self.decode([0])[0]
        self.width_px, self.height_px = first.size

    def at_s(self, frame: int) -> float:
        """When a frame is shown, from the first one on."""
        return float((self._times[frame] - self._times[0]) * self._unit_s)

    def select(self, frames: Sequence[int]) -> ClipFrames:
        """Some of its frames; all that were ever selected are decoded together."""
        self._wanted.update(frames)
        return ClipFrames(self, tuple(frames))

    @cached_property
    def decoded(self) -> dict[int, Image.Image]:
        """RGB of all selected frames. Raises CorruptSampleError."""
        frames = sorted(self._wanted)
        return dict(zip(frames, self.decode(frames), strict=True))

    def decode(self, frames: Sequence[int]) -> list[Image.Image]:
        """Upright RGB of some frames, in ascending order.

        Raises:
            CorruptSampleError: they cannot be decoded, or the file ends before them.
        """
        wanted = [self._times[number] for number in frames]
        found = self._decode(wanted, seek=True)
        if [time for time, _ in found] != wanted:  # seeking works in most files
            found = self._decode(wanted, seek=False)
        return [image for _, image in found]

    def _decode(self, wanted: Sequence[int], seek: bool) -> list[tuple[int, Image.Image]]:
        """The first frames at or after the wanted times, with their own times."""
        found: list[tuple[int, Image.Image]] = []
        with self._opened() as (container, stream):
            frames = container.decode(stream)
            now, sought, frame = -1, -1, None
            for time in wanted:
                while frame is None or now < time:
                    key = self._key_ahead(now, time) if seek and frame is not None else -1
                    if key > sought:
                        container.seek(key, stream=stream)
                        frames = container.decode(stream)
                        sought = key
                    frame = next(frames, None)
                    if frame is None:
                        raise CorruptSampleError(
                            f"video ends before one of its {self.frames} expected frames"
                        )
                    now = _time(frame)
                    if now is None:
                        raise CorruptSampleError("video has frames without timestamps")
                found.append((now, self._rgb(frame)))
        return found

    def _key_ahead(self, now: int, time: int) -> int:
        """The key frame to continue from, if it is far ahead; otherwise -1."""
        at = bisect_right(self._keys, time) - 1
        if at < 0:
            return -1
        passed = bisect_left(self._times, self._keys[at]) - bisect_left(self._times, now)
        return self._keys[at] if passed > SEEK_FRAMES else -1

    def _rgb(self, frame: Any) -> Image.Image:
        width, height = frame.width, frame.height
        if width * height > self._max_pixels:
            raise CorruptSampleError(
                f"video of {width}x{height} pixels is larger than data.max_image_pixels = "
                f"{self._max_pixels}"
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise CorruptSampleError(
                f"video of {width}x{height} pixels has an aspect ratio above 200"
            )
        if any(component.is_alpha for component in frame.format.components):
            image = to_rgb(Image.fromarray(frame.to_ndarray(format="rgba")))
        else:
            image = frame.to_image()
        return image.rotate(90 * round(frame.rotation / 90), expand=True)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        import av  # noqa: PLC0415 - an extra

        try:
            options = {"format_whitelist": FORMATS}
            with av.open(io.BytesIO(self.data), options=options) as container:
                if not container.streams.video:
                    raise CorruptSampleError("video without frames")
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1
                yield container, stream
        except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
            kind = f"{len(self.data)} bytes starting with {self.data[:12]!r}"
            text = f"{type(error).__name__}: {str(error)[:120]}"
            raise CorruptSampleError(f"not a video file ({kind}): {text}") from error


@dataclass(frozen=True)
class ClipFrames:
    """Some frames of a clip."""

    clip: Clip
    numbers: tuple[int, ...]

    def images(self) -> list[Image.Image]:
        """Upright RGB. Raises CorruptSampleError."""
        return [self.clip.decoded[number] for number in self.numbers]


def sampled_frames(
    frames: int, duration_s: float, config: VideoConfig, group: int = 1, most: int | None = None
) -> list[int]:
    """Which frames of a clip are read: evenly spaced, whole groups where there are enough.

    Args:
        frames: in the clip.
        duration_s: of the clip.
        config: rate and limits.
        group: frames that make one patch.
        most: a further limit.

    Returns:
        ascending numbers, at least one.
    """
    limit = min(config.max_frames, frames, most or frames)
    wanted = min(max(duration_s * config.fps, config.min_frames), limit // group * group)
    count = max(1, floor(wanted / group) * group)
    return [number * frames // count for number in range(count)]


def _time(packet_or_frame: Any) -> Any:
    shown = packet_or_frame.pts
    return packet_or_frame.dts if shown is None else shown


class ClipPart(NamedTuple):
    """The part of a clip that becomes one image of the encoder."""

    before: str
    """Text in front of it, e.g. when it is shown."""
    marks: tuple[Marks, ...]
    """Directly before and after it, if it is not the whole clip."""
    file: ClipFrames
    meta: ImageMeta


class ClipMedia:
    """Clips for one encoder; the counterpart of `torchmm.data.media.medium.ImageMedia`.

    Args:
        images: the encoder's preprocessing.
        config: which frames are read.
        text: how the LLM wants its text.
    """

    def __init__(self, images: ImagePreprocessor, config: VideoConfig, text: TextSpec) -> None:
        self.spec = images.spec
        self._text = text
        self._images = images
        self._config = config
        self._group = images.frames_per_patch
        self.grouped = self._group > 1
        """Whether patches span several frames."""

    @property
    def byte_values(self) -> ByteValues | None:
        """What uint8 inputs stand for; None: inputs are float32."""
        return self._images.byte_values

    def parts(self, clip: Clip) -> list[ClipPart]:
        """The images that a clip becomes, in order."""
        config = self._config
        size = (clip.width_px, clip.height_px)
        fixed = self.spec.inputs == "fixed"
        most = self._max_frames(clip)
        numbers = sampled_frames(clip.frames, clip.duration_s, config, self._group, most)
        groups = -(-len(numbers) // self._group)
        limit_px = 0 if fixed else max(1, config.max_pixels // (groups * self._group))
        meta = self._images.meta(*size, limit_px)
        if self.grouped and not self.spec.splits_clips:
            meta = replace(
                meta,
                patches=groups * meta.patches,
                tokens=groups * meta.tokens,
                frames=groups,
                duration_ms=_ms(clip.duration_s),
            )
            return [ClipPart("", (), clip.select(numbers), meta)]
        meta = replace(meta, duration_ms=_ms(clip.duration_s / groups))
        return [
            self._part(clip, shown, meta, shown[0] == numbers[0], shown[-1] == numbers[-1])
            for shown in _groups(numbers, self._group)
        ]

    def count_dropped_frames(self, clip: Clip) -> int:
        """Return the number of frames at `fps` that are not read because of the other limits."""
        at_rate = int(min(clip.duration_s * self._config.fps, clip.frames))
        return max(0, at_rate - self._max_frames(clip))

    def _max_frames(self, clip: Clip) -> int:
        config = self._config
        if self.spec.inputs != "fixed":
            return config.max_frames
        # Frames of a fixed size cannot become smaller.
        grid = self._images.grid(clip.width_px, clip.height_px)
        frame_px = grid.rows * grid.columns * self.spec.patch_size_px**2
        return min(config.max_frames, max(1, config.max_pixels // frame_px))

    def _part(
        self, clip: Clip, shown: Sequence[int], meta: ImageMeta, first: bool, last: bool
    ) -> ClipPart:
        """A frame, or a group of them, with its time."""
        text = self._text
        first_s = clip.at_s(shown[0])
        mean_s = (first_s + clip.at_s(shown[-1])) / 2
        written = text.clip.group if self._config.timestamps else "{frames}"
        before, after = (
            beside.format(first_s=first_s, whole_s=int(first_s), mean_s=mean_s)
            for beside in written.split("{frames}")
        )
        prefix = text.image_prefix
        suffix = text.image_suffix
        if after:
            suffix += (after,)
        if first:
            prefix = text.clip.prefix + prefix
        if last:
            suffix += text.clip.suffix
        return ClipPart(before, (prefix, suffix), clip.select(shown), meta)

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns)."""
        grid = self._images.grid(meta.width_px, meta.height_px, meta.frame_pixels)
        return meta.frames, grid.rows, grid.columns

    def block(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Output tokens as (frames, rows, columns)."""
        frames, rows, columns = self.grid_thw(meta)
        return frames, rows // self.spec.merge, columns // self.spec.merge

    def pixels(self, file: ClipFrames, meta: ImageMeta) -> np.ndarray:
        """(C, H, W) or (P, D) of a frame, or (G P, D) of one or more groups of frames; raises
        CorruptSampleError."""
        images = [self._images.stored(image, meta.frame_pixels) for image in file.images()]
        if not self.grouped:
            return images[0]
        images += [images[-1]] * (meta.frames * self._group - len(images))
        # An image's patch holds the same frame several times, color by color.
        pixels = self.spec.patch_size_px**2
        x_GFPcfp = np.stack(images).reshape(
            meta.frames, self._group, len(images[0]), -1, self._group, pixels
        )
        x_GPcfp = np.stack([x_GFPcfp[:, f, :, :, f] for f in range(self._group)], axis=3)
        return x_GPcfp.reshape(meta.patches, -1)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros of the same shape."""
        frame = self._images.blank(meta.width_px, meta.height_px, meta.frame_pixels)
        return np.concatenate([frame] * meta.frames) if self.grouped else frame


def _groups(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _ms(duration_s: float) -> int:
    """Never 0, which is the duration of images."""
    return max(1, round(1000 * duration_s))
