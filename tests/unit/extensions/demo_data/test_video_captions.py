"""Datasets of captioned videos: motion as in the caption, and held-out videos."""

from __future__ import annotations

import numpy as np
import pytest
from data_cases import encode, write_parquet
from PIL import Image

from torchmm.common.errors import DataError
from torchmm.data.media.video import VideoFile
from torchmm.data.media.video_writer import encode_video
from torchmm.data.sources.map_sources import open_map_source
from torchmm.extensions.demo_data import manifest, video_captions
from torchmm.extensions.demo_data.parquet_files import assign_split
from torchmm.extensions.demo_data.video_captions import (
    CAMERA_PATHS,
    VIDEOS_PER_FILM,
    SourceVideo,
    _DecodedFilm,
    _film_rows,
)
from torchmm.recipe.data_section import SourceConfig

OPTIONS = {"fps": 4, "frames": 4, "size_px": 32}


def first_and_last(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    video = VideoFile(data, 10_000)
    assert video.frames == 4 and video.duration_s == pytest.approx(1.0, abs=0.01)
    first, last = video.decode([0, 3])
    return np.asarray(first.convert("L")), np.asarray(last.convert("L"))


def test_stamp_videos_move_in_every_file_format(tmp_path) -> None:
    rows = [
        {
            "image": {"bytes": encode(Image.new("RGB", (20, 14 + i % 5)), "PNG"), "path": None},
            "text": f"Number {i}.",
            "file": f"{i}.png",
        }
        for i in range(30)
    ]
    with pytest.raises(DataError, match="tuxpaint_stamps is missing"):
        video_captions.prepare_stamps(tmp_path, tmp_path, OPTIONS)
    write_parquet(tmp_path / "tuxpaint_stamps" / "train", rows)
    manifest.record_data_set(
        tmp_path, "tuxpaint_stamps", [], "GPL-2", {"options": {}, "counts": {}}
    )
    video_captions.prepare_stamps(tmp_path, tmp_path, {"source": {}, **OPTIONS})
    file_types, motions = set(), set()
    for split in ("train", "validation"):
        source = open_map_source(SourceConfig(path=str(tmp_path / "stamp_videos"), split=split))
        for i in range(len(source)):
            row = source.read(i).columns
            assert assign_split(row["file"]) == split
            file_types.add(row["video"][:4])
            dark = [np.nonzero(frame < 128) for frame in first_and_last(row["video"])]
            (y0, x0), (y1, x1) = [tuple(axis.mean() for axis in frame) for frame in dark]
            words = row["text"].split(". ")[1]
            motions.add(words)
            right, down, area = x1 - x0, y1 - y0, len(dark[1][0]) / len(dark[0][0])
            actual = {
                "It moves to the right.": right > 4,
                "It moves to the left.": right < -4,
                "It moves up.": down < -4,
                "It moves down.": down > 4,
                "It grows.": area > 2,
                "It shrinks.": area < 0.5,
            }
            assert actual[words] and sum(actual.values()) == 1
    assert len(file_types) == 3 and len(motions) == 6


def test_film_sections_match_captions_and_split() -> None:
    # Brightness increases to the right and over 10 s.
    x = np.linspace(0, 100, 64)
    frames = [
        Image.fromarray(np.broadcast_to(x + 2 * t, (48, 64)).astype(np.uint8)) for t in range(50)
    ]
    film_video = _DecodedFilm.of(encode_video(frames, 5))
    assert film_video.duration_s == pytest.approx(10.0)
    film = SourceVideo("film.mp4", "Gray.")
    rows = {split: list(_film_rows(film, film_video, split, OPTIONS)) for split in VIDEOS_PER_FILM}
    assert [len(part) for part in rows.values()] == list(VIDEOS_PER_FILM.values())
    starts = {s: [float(r["file"].split()[2]) for r in part] for s, part in rows.items()}
    assert max(starts["train"]) <= 6.5 and 7.5 <= min(starts["validation"]) <= 9.0
    for row in rows["train"][: len(CAMERA_PATHS)]:
        first, last = first_and_last(row["video"])
        brighter = float(last.mean()) - float(first.mean())
        spread = float(np.ptp(last.mean(axis=0))) / float(np.ptp(first.mean(axis=0)))
        if "right" in row["text"]:
            assert brighter > 25
        elif "left" in row["text"]:
            assert brighter < -25
        else:
            assert abs(brighter) < 20
        assert ("closer" in row["text"]) == (spread < 0.6)
        assert ("away" in row["text"]) == (spread > 1.7)
