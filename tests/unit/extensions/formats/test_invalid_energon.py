"""Incorrect or hostile `.nv-meta` files raise DataError with their name within seconds."""

from __future__ import annotations

import random
import time

import pytest
import yaml
from data_cases import png, write_shard

from torchmm.common.errors import DataError
from torchmm.data.sources.map_sources import open_map_source
from torchmm.recipe.data_section import SourceConfig

DATASET = "__class__: CaptioningSample\nfield_map: {image: png, caption: txt}\n"
SPLIT = "split_parts: {train: [s.tar]}\n"


def alias_bomb(merge: str = "") -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]" if not merge else "a0: &a0 {x: 1}"]
    for level in range(1, 10):
        parts = ", ".join([f"*a{level - 1}"] * 9)
        body = f"{{<<: [{parts}]}}" if merge else f"[{parts}]"
        lines.append(f"a{level}: &a{level} {body}")
    return "\n".join(lines) + "\n"


def open_source(directory, dataset: str, split: str):
    (directory / "data/.nv-meta").mkdir(parents=True, exist_ok=True)
    for name in ("data/s.tar", "outside/s.tar"):
        write_shard(directory / name, {"a.png": png(8, 8, 1), "a.txt": b"red"}.items())
    (directory / "data/.nv-meta/dataset.yaml").write_text(dataset)
    (directory / "data/.nv-meta/split.yaml").write_text(split.replace("OUT", str(directory)))
    return open_map_source(SourceConfig(path=str(directory / "data")))


def test_valid_folder_is_read(tmp_path):
    split = "split_parts: {train: ['{s,s}.tar']}\nexclude: &e []\nmore: *e\n"
    source = open_source(tmp_path, DATASET, split)
    assert len(source) == 2 and source.read(1).columns["text"] == "red"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("split_parts: {train: ['s{0..999999999999}.tar']}", "stands for 1e+12 names"),
        (f"split_parts: {{train: ['{'{a,b}' * 40}.tar']}}", "stands for 1.1e+12 names"),
        (f"split_parts: {{train: ['{'{0..99}' * 40}.tar']}}", "stands for 1e+80 names"),
        (f"split_parts: {{train: ['s{{0..{'9' * 5000}}}.tar']}}", "File name too long"),
        (SPLIT + "exclude: ['s{0..999999999999}.tar']", "stands for 1e+12 names"),
        (SPLIT + f"exclude: ['{'{a,b}' * 40}']", "stands for 1.1e+12 names"),
        ("split_parts: {train: ['../outside/s.tar']}", "use a relative path"),
        ("split_parts: {train: ['{..,..}/outside/s.tar']}", "use a relative path"),
        ("split_parts: {train: [OUT/outside/s.tar]}", "use a relative path"),
        (SPLIT + "exclude: ['../outside/s.tar/a']", "use a relative path"),
        ("split_parts: {train: s.tar}", "is not a list of names"),
        ("split_parts: {train: [5]}", "is not a list of names"),
        ("split_parts: {train: [[s.tar]]}", "is not a list of names"),
        (SPLIT + "exclude: {a: 1}", "is not a list of names"),
        (f"split_parts: {{train: [{'9' * 5000}]}}", "cannot be read"),
        ("split_parts: {1: [s.tar]}", "use one of 1"),
        ("split_parts: [s.tar]", "no split_parts"),
        ("[" * 5000, "cannot be read"),
        ("a: 2001-99-99", "cannot be read"),
        ("a: &a [*a]", "contains it"),
        (alias_bomb() + SPLIT, "once its aliases are written out"),
        (alias_bomb("<<") + SPLIT, "merge keys"),
    ],
)
def test_hostile_split_is_rejected(tmp_path, split, message):
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"/data") as caught:
        open_source(tmp_path, DATASET, split)
    assert message in str(caught.value) and len(str(caught.value)) < 1000
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "dataset",
    [
        "__class__: CaptioningSample\nfield_map: [image, caption]\n",
        "__class__: CaptioningSample\nfield_map: png\n",
        "__class__: CaptioningSample\nfield_map: {image: {a: {b: png}}, caption: txt}\n",
        "__class__: CaptioningSample\nfield_map: {image: [png], caption: txt}\n",
        f"__class__: CaptioningSample\nfield_map: {{image: {'9' * 5000}, caption: txt}}\n",
        "__class__: CaptioningSample\nfield_map: {image: 5, caption: txt}\n",
        "__class__: {a: 1}\nfield_map: {image: png}\n",
        "sample_type: [CaptioningSample]\n",
        "sample_type: 5\n",
        "[1, 2]\n",
        "field_map: {? [a] : b}\n",
        alias_bomb() + "__class__: CaptioningSample\nfield_map: {image: *a9}\n",
        alias_bomb() + "__class__: *a9\n",
        alias_bomb() + "sample_loader: *a9\n",
    ],
)
def test_hostile_description_is_rejected(tmp_path, dataset):
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"data/\.nv-meta/dataset\.yaml") as caught:
        open_source(tmp_path, dataset, SPLIT)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - begin < 30


def test_long_index_of_field_costs_sample(tmp_path):
    dataset = DATASET.replace("txt", f"'txt[{'9' * 5000}]'")
    source = open_source(tmp_path, dataset, SPLIT)
    with pytest.raises(ValueError, match="field caption"):
        source.read(0)


@pytest.mark.parametrize("seed", range(4))
def test_random_values_give_data_error_or_source(tmp_path, seed):
    draws = random.Random(seed)
    values = [None, 0, -1, 2.5, True, "", "s.tar", "..", "/", "{", "}{", "{,}", [], {}, "x\0y"]

    def value(depth: int = 0):
        kind = draws.randrange(4 if depth < 3 else 2)
        if kind < 2:
            return draws.choice(values)
        items = [value(depth + 1) for _ in range(draws.randrange(3))]
        return (
            items if kind == 2 else dict(zip(("train", "image", "field_map"), items, strict=False))
        )

    for _ in range(60):
        dataset = {
            **yaml.safe_load(DATASET),
            draws.choice(("field_map", "__class__", "sample_type")): value(),
        }
        split = {**yaml.safe_load(SPLIT), draws.choice(("split_parts", "exclude")): value()}
        try:
            source = open_source(tmp_path, yaml.dump(dataset), yaml.dump(split))
            source.read(0)
        except (DataError, ValueError) as error:
            assert isinstance(error, DataError) or type(error).__name__ == "CorruptSampleError"
