"""Videos of stamps match their captions and their split."""

from __future__ import annotations

import io

import numpy as np
import pytest
from data_cases import encode, write_parquet
from PIL import Image

from torchmm.common.errors import DataError
from torchmm.common.generated import GeneratedMeta, GeneratorSpec
from torchmm.data.media.images import decode_frames
from torchmm.data.sources.map_sources import open_map_source
from torchmm.extensions.demo_data import manifest, moving_stamps
from torchmm.extensions.demo_data.parquet_files import assign_split
from torchmm.recipe.data_section import SourceConfig

OPTIONS = {"source": {}, "frames": 5, "size_px": 32}
MAX_PIXELS = 10_000


@pytest.fixture
def prepared(tmp_path):
    """Prepare videos of 40 black rectangles."""
    rows = [
        {
            "image": {"bytes": encode(Image.new("RGB", (20, 10 + i % 7)), "PNG"), "path": None},
            "text": f"Number {i}.",
            "file": f"{i}.png",
        }
        for i in range(40)
    ]
    write_parquet(tmp_path / "tuxpaint_stamps" / "train", rows)
    manifest.record_data_set(
        tmp_path, "tuxpaint_stamps", [], "GPL-2", {"options": {}, "counts": {}}
    )
    moving_stamps.prepare(tmp_path, tmp_path, OPTIONS)
    return tmp_path


def read_videos(prepared, split):
    source = open_map_source(
        SourceConfig(path=str(prepared / "moving_stamps"), split=split, target_image_column="clip")
    )
    return [source.read(i) for i in range(len(source))]


def track_stamp(video: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the center (x, y) and the area of dark pixels in each frame."""
    centers, areas = [], []
    for frame in decode_frames(video, MAX_PIXELS, OPTIONS["frames"]):
        y, x = np.nonzero(np.asarray(frame.convert("L")) < 128)
        centers.append((x.mean(), y.mean()))
        areas.append(len(x))
    return np.asarray(centers), np.asarray(areas)


def test_stamp_motion_matches_caption(prepared):
    motions = set()
    for record in [*read_videos(prepared, "train"), *read_videos(prepared, "validation")]:
        centers, areas = track_stamp(record.columns["clip"])
        (right, down), larger = centers[-1] - centers[0], areas[-1] / areas[0]
        words = record.columns["text"].partition(". ")[2]
        motions.add(words)
        matches = {
            "It moves to the right.": right > 5,
            "It moves to the left.": right < -5,
            "It moves up.": down < -5,
            "It moves down.": down > 5,
            "It grows.": larger > 4,
            "It shrinks.": larger < 0.25,
        }
        assert [caption for caption, moved in matches.items() if moved] == [words]
    assert len(motions) == len(moving_stamps.MOTIONS)


def test_stamps_have_two_motions_in_one_split(prepared):
    for split in ("train", "validation"):
        files = [record.columns["file"] for record in read_videos(prepared, split)]
        assert files and {files.count(file) for file in files} == {2}
        assert {assign_split(file) for file in files} == {split}
        texts = [record.columns["text"] for record in read_videos(prepared, split)]
        assert len(set(texts)) == len(texts)


def test_generator_receives_all_frames(prepared):
    images = pytest.importorskip("torchmm.extensions.generation.images")
    targets = images.DiffusionImages(GeneratorSpec(16, 8, frames=3), 0, MAX_PIXELS)
    data = read_videos(prepared, "train")[0].columns["clip"]
    meta = GeneratedMeta(targets.grid(data), targets.context(4))
    assert meta.grid_thw == (3, 2, 2)
    decoded = targets.decode(data, meta, 4, ("s", 0, 0, 0)).patches_PV.reshape(3, -1)
    assert len({frame.tobytes() for frame in decoded}) == 3
    assert io.BytesIO(data).read(4) == b"\x89PNG"


def test_stamp_videos_require_stamps(tmp_path):
    with pytest.raises(DataError, match="prepare tuxpaint_stamps first"):
        moving_stamps.prepare(tmp_path, tmp_path, OPTIONS)
