"""Read videos, sample evenly spaced frames, and preprocess them for image encoders.

The number of frames is from all packets of the container, because headers may lack it or be wrong.
Size and rotation are from the first frame. These values and the recipe determine the sampled
frames, with the rule of the Qwen processors of Hugging Face. Planning decodes only the first frame.
Decoding seeks to key frames if it skips many frames.

PyAV reads files with its bundled FFmpeg, without threads, because workers are processes. torchcodec
requires a system FFmpeg that matches torch, and OpenCV has neither timestamps nor rotation. Formats
that refer to other files, such as playlists, are rejected.

`VideoMedia` prepares three formats, depending on the encoder:

    patches span frames (Qwen2-VL)     one input for the video, with time in the position ids
    Qwen3-VL, GLM-4V                   one input per group of frames, with its time as text
    image encoders                     one input per frame, with its time as text

The time is a text before the frames ("<1.5 seconds>", mean of the group) or after them (first
frame), see `ClipText`. All formats use the image processor of the encoder. A patch of two frames
consists of halves of their patches. The video processors of Hugging Face require torchvision.

Shape legend: F frames, G groups of them that make patches, P patches of a frame, D values of a
patch.
"""

from __future__ import annotations

import importlib.util
import io
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from torchmm.common.batch import ImageMeta, MarkerText, TextSpec
from torchmm.common.dtypes import ByteValues
from torchmm.common.errors import ConfigError, install_command
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import ImagePreprocessor, OpenedImage, to_rgb
from torchmm.data.record_formats.columns import encode_wav
from torchmm.data.record_formats.sample import MAX_ASPECT_RATIO, NO_OPTIONS, MediaOptions
from torchmm.recipe.data_section import VideoConfig

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,gif,apng"
"""FFmpeg demuxers for untrusted data."""
MAX_DURATION_S = 1e6
"""Maximum plausible duration of a video in seconds."""
MAX_AUDIO_S = 3600
"""Maximum duration of the audio track of a video in seconds."""
MIN_SEEK_FRAMES = 48
"""Minimum number of skipped frames for which decoding seeks to a key frame."""


class Video(ABC):
    """Video whose sizes are read immediately and whose frames are decoded on demand.

    Attributes:
        frames: Number of frames.
        duration_s: Duration in seconds.
        width_px: Upright width in pixels.
        height_px: Upright height in pixels.
    """

    frames: int
    duration_s: float
    width_px: int
    height_px: int

    def __init__(self) -> None:
        self._selected_frames: set[int] = set()

    @property
    @abstractmethod
    def data(self) -> bytes:
        """Content that determines the selected frames."""

    @abstractmethod
    def frame_time_s(self, frame: int) -> float:
        """Return the time of a frame in seconds after the first frame."""

    @abstractmethod
    def decode(self, frames: Sequence[int]) -> list[Image.Image]:
        """Decode frames to upright RGB images.

        Args:
            frames: Frame numbers in ascending order.

        Raises:
            CorruptSampleError: Frames cannot be decoded, or the file ends before them.
        """

    def audio(self, start_s: float | None, end_s: float | None) -> bytes | None:
        """Return the audio track as a WAVE file, or None if the video has no audio.

        Raises:
            CorruptSampleError: The audio cannot be decoded.
        """
        raise CorruptSampleError("use_audio_in_video = true, but a list of frames has no audio")

    def check_files(self) -> None:  # noqa: B027 - files of a single header
        """Raise CorruptSampleError if the header of a selected frame is not valid."""

    def select(self, frames: Sequence[int]) -> VideoFrames:
        """Return a selection of frames. All selected frames are decoded together."""
        self._selected_frames.update(frames)
        return VideoFrames(self, tuple(frames))

    @cached_property
    def decoded(self) -> dict[int, Image.Image]:
        """RGB images of all selected frames by frame number. May raise CorruptSampleError."""
        frames = sorted(self._selected_frames)
        return dict(zip(frames, self.decode(frames), strict=True))

    def time_range(self, start_s: float | None, end_s: float | None) -> tuple[range, float]:
        """Return the frames from `start_s` to `end_s`, and their duration in seconds.

        Raises:
            CorruptSampleError: The range has no frame.
        """
        first = 0
        stop = self.frames
        if start_s is not None:
            first = bisect_left(range(stop), start_s, key=self.frame_time_s)
        if end_s is not None:
            stop = bisect_right(range(stop), end_s, key=self.frame_time_s)
        if first >= stop:
            raise CorruptSampleError(
                f"video of {self.duration_s:g} s has no frame between video_start = {start_s} and "
                f"video_end = {end_s}"
            )
        last_s = self.frame_time_s(stop) if stop < self.frames else self.duration_s
        return range(first, stop), last_s - self.frame_time_s(first)


class FrameFiles(Video):
    """Video whose frames are image files of equal size.

    Args:
        read: Function that returns the content of a frame. It is called for selected frames only.
        frames: Number of frames.
        frame_rate: Number of frames per second.
        max_pixels: Maximum number of pixels of a frame.

    Raises:
        CorruptSampleError: The first frame is not a supported image, or a size exceeds a limit.
    """

    def __init__(
        self, read: Callable[[int], bytes], frames: int, frame_rate: float, max_pixels: int
    ) -> None:
        super().__init__()
        self._read = lru_cache(maxsize=None)(read)
        self.frames = frames
        self.frame_rate = frame_rate
        self.duration_s = frames / frame_rate
        self._max_pixels = max_pixels
        if self.duration_s >= MAX_DURATION_S:
            raise CorruptSampleError(f"video of {frames} frames with a rate of {frame_rate} Hz")
        self.width_px, self.height_px = self._open(0).size()

    @property
    def data(self) -> bytes:
        """Content of the selected frames."""
        return b"".join(self._read(frame) for frame in sorted(self._selected_frames))

    def check_files(self) -> None:
        """Raise CorruptSampleError if the header of a selected frame is not valid."""
        for frame in self._selected_frames:
            self._open(frame)

    def frame_time_s(self, frame: int) -> float:
        """Return the time of a frame in seconds."""
        return frame / self.frame_rate

    def decode(self, frames: Sequence[int]) -> list[Image.Image]:
        """Decode frames to upright RGB images. May raise CorruptSampleError."""
        return [self._open(frame).rgb() for frame in frames]

    def _open(self, frame: int) -> OpenedImage:
        try:
            opened = OpenedImage(self._read(frame), self._max_pixels)
        except CorruptSampleError as error:
            raise CorruptSampleError(f"frame {frame + 1} of a video: {error}") from error
        size = (self.width_px, self.height_px) if frame else opened.size()
        if opened.size() != size:
            raise CorruptSampleError(
                f"frame {frame + 1} of a video has {opened.size()[0]}x{opened.size()[1]} pixels, "
                f"but frame 1 has {size[0]}x{size[1]}; resize the frames to one size"
            )
        return opened


class VideoFile(Video):
    """Video file.

    Args:
        data: Content of the file.
        max_pixels: Maximum number of pixels of a frame.

    Raises:
        ConfigError: PyAV is not installed.
        CorruptSampleError: The file is not a supported video, or its size exceeds a limit.
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        if importlib.util.find_spec("av") is None:
            raise ConfigError(f"videos in the data require PyAV; {install_command('video')}")
        super().__init__()
        self._data = data
        self._max_pixels = max_pixels
        with self._open_stream() as (container, stream):
            packets = [p for p in container.demux(stream) if p.size and not p.is_discard]
            if not packets or any(_timestamp(packet) is None for packet in packets):
                raise CorruptSampleError(
                    f"video of {len(packets)} frames, or of frames without timestamps"
                )
            packets.sort(key=_timestamp)
            self._unit_s: Fraction = stream.time_base
            self._times: list[int] = [_timestamp(packet) for packet in packets]
            self._keys = [_timestamp(packet) for packet in packets if packet.is_keyframe]
            last = packets[-1].duration or 0
        self.frames = len(packets)
        span = self._times[-1] - self._times[0]
        # If the duration of the last frame is unknown, use the mean of the preceding frames. The
        # fraction is exact, so that six frames at 3 fps last exactly 2 s.
        last = last or Fraction(span, max(1, self.frames - 1)) or 1
        self.duration_s = float((span + last) * self._unit_s)
        if not 0 < self.duration_s < MAX_DURATION_S:
            raise CorruptSampleError(f"video of {self.duration_s} seconds")
        first = self.decode([0])[0]
        self.width_px, self.height_px = first.size

    @property
    def data(self) -> bytes:
        """Content of the file."""
        return self._data

    def frame_time_s(self, frame: int) -> float:
        """Return the time of a frame in seconds after the first frame."""
        return float((self._times[frame] - self._times[0]) * self._unit_s)

    def decode(self, frames: Sequence[int]) -> list[Image.Image]:
        """Decode frames to upright RGB images. See `Video.decode`."""
        times = [self._times[number] for number in frames]
        decoded = self._decode(times, seek=True)
        if [time for time, _ in decoded] != times:  # seeking fails in some files
            decoded = self._decode(times, seek=False)
        return [image for _, image in decoded]

    def audio(self, start_s: float | None, end_s: float | None) -> bytes | None:
        """Return the audio track as a WAVE file. See `Video.audio`."""
        import av  # noqa: PLC0415 - an extra

        with self._open_stream() as (container, _):
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            rate = stream.codec_context.sample_rate
            resampler = av.AudioResampler(format="fltp")
            last_sample = None if end_s is None else int(end_s * rate)
            parts: list[np.ndarray] = []
            samples = 0
            for frame in (*container.decode(stream), None):
                for converted in resampler.resample(frame):
                    parts.append(converted.to_ndarray())
                    samples += parts[-1].shape[1]
                if samples > MAX_AUDIO_S * rate:
                    raise CorruptSampleError(f"audio of a video is longer than {MAX_AUDIO_S} s")
        if not samples:
            return None
        array_CS = np.concatenate(parts, axis=1)[:, int((start_s or 0) * rate) : last_sample]
        return encode_wav({"array": array_CS.mean(0), "sampling_rate": rate}, "audio")

    def _decode(self, times: Sequence[int], seek: bool) -> list[tuple[int, Image.Image]]:
        """Return the first frame at or after each time, with the time of the frame."""
        decoded: list[tuple[int, Image.Image]] = []
        with self._open_stream() as (container, stream):
            frames = container.decode(stream)
            now, last_seek, frame = -1, -1, None
            for time in times:
                while frame is None or now < time:
                    key = self._keyframe_before(now, time) if seek and frame is not None else -1
                    if key > last_seek:
                        container.seek(key, stream=stream)
                        frames = container.decode(stream)
                        last_seek = key
                    frame = next(frames, None)
                    if frame is None:
                        raise CorruptSampleError(
                            f"video ends before one of its {self.frames} expected frames"
                        )
                    now = _timestamp(frame)
                    if now is None:
                        raise CorruptSampleError("video has frames without timestamps")
                decoded.append((now, self._rgb(frame)))
        return decoded

    def _keyframe_before(self, now: int, time: int) -> int:
        """Return the time of the last key frame before `time` if it is far ahead, else -1."""
        at = bisect_right(self._keys, time) - 1
        if at < 0:
            return -1
        passed = bisect_left(self._times, self._keys[at]) - bisect_left(self._times, now)
        return self._keys[at] if passed > MIN_SEEK_FRAMES else -1

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
    def _open_stream(self) -> Iterator[tuple[Any, Any]]:
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
class VideoFrames:
    """Selected frames of a video."""

    video: Video
    frame_indices: tuple[int, ...]

    def images(self) -> list[Image.Image]:
        """Return upright RGB images. May raise CorruptSampleError."""
        return [self.video.decoded[number] for number in self.frame_indices]


def sample_frame_indices(
    frames: int,
    duration_s: float,
    config: VideoConfig,
    group: int = 1,
    frame_limit: int | None = None,
) -> list[int]:
    """Return evenly spaced frame numbers of a video, in complete groups if possible.

    Args:
        frames: Number of frames of the video.
        duration_s: Duration of the video in seconds.
        config: Frame rate and limits.
        group: Number of frames per patch.
        frame_limit: Additional maximum number of frames.

    Returns:
        At least one number, ascending.
    """
    limit = min(config.max_frames, frames, frame_limit or frames)
    target = min(max(duration_s * config.fps, config.min_frames), limit // group * group)
    count = max(1, floor(target / group) * group)
    return [number * frames // count for number in range(count)]


def _timestamp(packet_or_frame: Any) -> Any:
    time = packet_or_frame.pts
    return packet_or_frame.dts if time is None else time


class VideoPart(NamedTuple):
    """Frames of a video that are one input of the encoder."""

    before: str
    """Text before the frames, for example their time."""
    markers: tuple[MarkerText, ...]
    """Markers before and after the frames. Empty if the part is the complete video."""
    file: VideoFrames
    meta: ImageMeta


class VideoMedia:
    """Preprocessor of videos for one encoder, like `torchmm.data.media.preprocessors.ImageMedia`.

    Args:
        images: Image preprocessor of the encoder.
        config: Frame rate and limits.
        text: Format of the text for the LLM.
    """

    def __init__(self, images: ImagePreprocessor, config: VideoConfig, text: TextSpec) -> None:
        self.spec = images.spec
        self._text = text
        self._images = images
        self._config = config
        self._group = images.frames_per_patch
        self.is_stacked = self._group > 1
        """Whether patches span several frames."""

    @property
    def byte_values(self) -> ByteValues | None:
        """Mapping of uint8 inputs to model inputs. None for float32 inputs."""
        return self._images.byte_values

    def parts(self, video: Video, options: MediaOptions = NO_OPTIONS) -> list[VideoPart]:
        """Return the encoder inputs of a video, in order.

        Args:
            video: The video.
            options: Options of the record.

        Raises:
            CorruptSampleError: The video or the encoder does not support the options.
        """
        frame_indices, duration_s, _ = self._sample(video, options)
        groups = -(-len(frame_indices) // self._group)
        frames = groups * self._group
        limit_px = 0
        if self.spec.inputs != "fixed":
            limit_px = max(1, self._config.max_pixels // frames)
            if options.total_pixels is not None:
                limit_px = min(limit_px, max(1, options.total_pixels * self._group // frames))
        meta = self._images.meta(video.width_px, video.height_px, limit_px, options)
        if self.is_stacked and not self.spec.splits_clips:
            meta = replace(
                meta,
                patches=groups * meta.patches,
                tokens=groups * meta.tokens,
                frames=groups,
                duration_ms=_to_ms(duration_s),
            )
            return [VideoPart("", (), video.select(frame_indices), meta)]
        meta = replace(meta, duration_ms=_to_ms(duration_s / groups))
        return [
            self._part(
                video, group, meta, group[0] == frame_indices[0], group[-1] == frame_indices[-1]
            )
            for group in _split_groups(frame_indices, self._group)
        ]

    def count_dropped_frames(self, video: Video, options: MediaOptions = NO_OPTIONS) -> int:
        """Return the number of frames that are not read because of the limits of the recipe."""
        return self._sample(video, options)[2]

    def _sample(self, video: Video, options: MediaOptions) -> tuple[list[int], float, int]:
        """Return the sampled frames of a video.

        Returns:
            Frame numbers, their duration in seconds, and the number of frames that the record
            requests, but the recipe does not allow.

        Raises:
            CorruptSampleError: The video is shorter than the record requires.
        """
        config = self._config
        group = self._group
        span, duration_s = video.time_range(options.video_start, options.video_end)
        limit = self._max_frames(video)
        fps = options.fps or config.fps
        requested = min(duration_s * fps, len(span))
        min_frames = options.min_frames or config.min_frames
        max_frames = options.max_frames or len(span)
        if options.nframes is not None:
            max_frames = requested = min_frames = round(options.nframes / group) * group
            if not 0 < max_frames <= len(span):
                raise CorruptSampleError(
                    f"nframes = {options.nframes} is {max_frames} frames in groups of {group}, but "
                    f"the video has {len(span)}; use a number from {group} to {len(span)}"
                )
        elif isinstance(video, FrameFiles) and None in (options.fps, options.sample_fps):
            if len(span) <= min(limit, max_frames):  # the last frame may be repeated, as in Qwen
                frames = -(-len(span) // group) * group
                return list(span), frames / video.frame_rate, 0
            requested = min_frames = len(span)
        rule = config.model_copy(
            update={
                "fps": fps,
                "min_frames": min_frames,
                "max_frames": min(max_frames, config.max_frames),
            }
        )
        frame_indices = sample_frame_indices(len(span), duration_s, rule, group, limit)
        dropped = max(0, int(min(requested, max_frames)) - limit)
        return [span[number] for number in frame_indices], duration_s, dropped

    def _max_frames(self, video: Video) -> int:
        config = self._config
        if self.spec.inputs != "fixed":
            return config.max_frames
        # Frames of a fixed size cannot be downscaled.
        grid = self._images.grid(video.width_px, video.height_px)
        frame_px = grid.rows * grid.columns * self.spec.patch_size_px**2
        return min(config.max_frames, max(1, config.max_pixels // frame_px))

    def _part(
        self,
        video: Video,
        frame_indices: Sequence[int],
        meta: ImageMeta,
        first: bool,
        last: bool,
    ) -> VideoPart:
        """Return the input of a frame or a group of frames, with its time."""
        text = self._text
        first_s = video.frame_time_s(frame_indices[0])
        mean_s = (first_s + video.frame_time_s(frame_indices[-1])) / 2
        written = text.clip.group if self._config.timestamps else "{frames}"
        before, after = (
            text_around.format(first_s=first_s, whole_s=int(first_s), mean_s=mean_s)
            for text_around in written.split("{frames}")
        )
        prefix = text.image_prefix
        suffix = text.image_suffix
        if after:
            suffix += (after,)
        if first:
            prefix = text.clip.prefix + prefix
        if last:
            suffix += text.clip.suffix
        return VideoPart(before, (prefix, suffix), video.select(frame_indices), meta)

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the patch grid as (frames, rows, columns)."""
        grid = self._images.grid_of(meta)
        return meta.frames, grid.rows, grid.columns

    def token_grid(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the grid of output tokens as (frames, rows, columns)."""
        frames, rows, columns = self.grid_thw(meta)
        return frames, rows // self.spec.merge, columns // self.spec.merge

    def pixels(self, file: VideoFrames, meta: ImageMeta) -> np.ndarray:
        """Return the inputs of frames in storage format.

        Returns:
            (C, H, W) or (P, D) for a frame, or (G P, D) for groups of frames.

        Raises:
            CorruptSampleError: The frames cannot be decoded.
        """
        images = [self._images.inputs(image, meta) for image in file.images()]
        if not self.is_stacked:
            return images[0]
        images += [images[-1]] * (meta.frames * self._group - len(images))
        # A patch of an image contains the frame several times, by color.
        pixels = self.spec.patch_size_px**2
        x_GFPcfp = np.stack(images).reshape(
            meta.frames, self._group, len(images[0]), -1, self._group, pixels
        )
        x_GPcfp = np.stack([x_GFPcfp[:, f, :, :, f] for f in range(self._group)], axis=3)
        return x_GPcfp.reshape(meta.patches, -1)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Return all-zero inputs of the same shape."""
        frame = self._images.blank_of(meta)
        return np.concatenate([frame] * meta.frames) if self.is_stacked else frame


def _split_groups(frame_indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [frame_indices[at : at + size] for at in range(0, len(frame_indices), size)]


def _to_ms(duration_s: float) -> int:
    """Return a duration in ms, at least 1, because 0 is the duration of images.

    It is rounded up, because Qwen2.5-VL rounds the times of frames down.
    """
    return max(1, ceil(1000 * duration_s - 1e-6))
