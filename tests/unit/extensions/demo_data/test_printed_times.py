"""Printed times: held-out times, image content and reproducibility."""

import io

import pytest
from PIL import Image, ImageChops

from torchmm.common.files import read_prepared_manifest
from torchmm.data.media.images import to_rgb
from torchmm.data.sources.map_sources import open_map_source
from torchmm.extensions.demo_data import printed_times, tokenizer
from torchmm.recipe.data_section import SourceConfig

OPTIONS = {"times": {"train": 60, "validation": 20}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    output = tmp_path_factory.mktemp("times")
    printed_times.prepare(output, output, OPTIONS)
    return output


def rows(prepared, split):
    source = open_map_source(SourceConfig(path=str(prepared / "printed_times"), split=split))
    return [source.read(number).columns for number in range(len(source))]


def test_held_out_times_are_not_in_training_split(prepared):
    texts = {split: [row["text"] for row in rows(prepared, split)] for split in OPTIONS["times"]}
    assert {split: len(set(actual)) for split, actual in texts.items()} == OPTIONS["times"]
    for split, actual in texts.items():
        assert {printed_times.is_held_out(time) for time in actual} == {split != "train"}
    every = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in range(60)]
    trained = [time for time in every if not printed_times.is_held_out(time)]
    assert {time[:2] for time in trained} == {time[:2] for time in every}
    assert {time[3:] for time in trained} == {time[3:] for time in every}


def test_printed_time_is_inside_image(prepared):
    side = printed_times.SIDE_PX
    ground = Image.new("RGB", (side, side), (printed_times.BACKGROUND_GRAY,) * 3)
    for row in rows(prepared, "train"):
        image = to_rgb(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert image.size == (side, side)
        left, top, right, bottom = ImageChops.difference(image, ground).getbbox()
        assert left > 0 and top > 0 and right < side and bottom < side, row["text"]
        assert bottom - top > side // 2, "both lines"


def test_printed_times_are_reproducible(prepared, tmp_path):
    printed_times.prepare(tmp_path, tmp_path, OPTIONS)
    first, again = (read_prepared_manifest(path)["printed_times"] for path in (prepared, tmp_path))
    assert first == again


def test_byte_vocabulary_has_one_token_per_letter():
    actual = tokenizer.train_tokenizer(["14:37"] * 100, tokenizer.BYTE_VOCAB_SIZE)
    assert len(actual) == tokenizer.BYTE_VOCAB_SIZE
    assert len(actual("14:37", add_special_tokens=False)["input_ids"]) == len("14:37")
