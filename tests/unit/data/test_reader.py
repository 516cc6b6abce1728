from __future__ import annotations

import dataclasses

import pytest
from data_cases import CLIP, QWEN, png

from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import Record
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig


@pytest.fixture
def make(tokenizer, text_spec):
    def build(specs, length=32, spec=text_spec, **data):
        return SampleReader(DataConfig(**data), length, spec, specs, tokenizer)

    return build


def document(*widths):
    images = [image for w in widths for image in (png(w, 16), None)]
    return Record({"images": images, "texts": [None, "red"] * len(widths)})


@pytest.mark.parametrize("columns", [{"text": ""}, {"image": png(8, 8), "text": ""}])
def test_samples_without_text_are_corrupt(make, columns):
    with pytest.raises(CorruptSampleError, match="nothing to predict"):
        make({"vision": CLIP}).read(Record(columns))


def test_an_image_longer_than_the_sequence_is_corrupt(make):
    record = Record({"image": png(96, 96), "text": "a red dog"})
    with pytest.raises(CorruptSampleError, match="sequence_length = 4"):
        make({"vision": QWEN}, length=4).read(record)


def test_images_cut_off_are_neither_measured_nor_decoded(make):
    sample = make({"vision": CLIP}, length=16).read(document(*[16] * 5))
    assert len(sample.images) == len(sample.files) == len(sample.text.image_starts) == 2


def test_five_hundred_images_are_limited(make):
    sample = make({"vision": CLIP}, length=4096, max_images_per_sample=3).read(document(*[8] * 500))
    assert len(sample.images) == 3 and len(sample.text.ids) > 500


def test_the_limit_on_pixels_is_the_recipes(make):
    with pytest.raises(CorruptSampleError, match=r"data\.max_image_pixels is 255"):
        make({"vision": CLIP}, max_image_pixels=255).read(document(16))


def test_an_encoder_needs_an_image_token(make, text_spec):
    with pytest.raises(ConfigError, match=r"model\.image_token"):
        make({"a": CLIP}, spec=dataclasses.replace(text_spec, image_token_id=None))
