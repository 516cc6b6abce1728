from __future__ import annotations

import dataclasses

import pytest
from data_cases import CLIP, QWEN, png

from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.reader import EXTRA_IMAGES, TRUNCATED_SAMPLES, UNREAD_FILES, SampleReader
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
    with pytest.raises(CorruptSampleError, match="no text in the loss"):
        make({"vision": CLIP}).read(Record(columns))


def test_image_longer_than_sequence_is_corrupt(make):
    record = Record({"image": png(96, 96), "text": "a red dog"})
    with pytest.raises(CorruptSampleError, match="sequence_length = 4"):
        make({"vision": QWEN}, length=4).read(record)


def test_truncated_images_are_not_read(make):
    sample = make({"vision": CLIP}, length=16).read(document(*[16] * 5))
    assert len(sample.images) == len(sample.files) == len(sample.text.image_starts) == 2


def test_read_truncates_before_extra_images(make):
    reader = make({"vision": CLIP}, length=4096, max_images_per_sample=3)
    sample = reader.read(document(*[8] * 500))
    assert sample.dropped == {EXTRA_IMAGES: 497}
    reference = reader.read(document(*[8] * 3))
    assert len(sample.images) == 3 and sample.images == reference.images
    assert (
        sample.text.ids == reference.text.ids[:-1] and reference.dropped == {}
    )  # without the end token


def test_chat_without_its_images_is_filtered(make):
    reader = make({"vision": CLIP}, length=4096, max_images_per_sample=2)
    question = [{"type": "image"}] * 3 + [{"type": "text", "text": "what is it"}]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]
    record = Record({"messages": turns, "images": [png(8, 8)] * 3})
    with pytest.raises(BeyondLimitError, match=r"data\.max_images_per_sample = 2") as raised:
        reader.read(record)
    assert "max_images_per_sample" in raised.value.limit


def test_unfitting_image_names_tokens_and_keys(make):
    record = Record({"image": png(96, 96), "text": "a red dog"}, location="rows.jsonl:1")
    with pytest.raises(BeyondLimitError) as raised:
        make({"vision": QWEN}, length=4).read(record)
    assert str(raised.value).startswith("rows.jsonl:1: no text in the loss in the first 1 tokens")
    assert "the next image has 4 tokens with its markers" in str(raised.value)
    assert "training.sequence_length = 4" in str(raised.value)
    assert "size.longest_edge of its image processor" in str(raised.value)


def test_read_counts_truncated_text(make):
    sample = make({"vision": CLIP}, length=8).read(Record({"text": "dogs in the sun " * 9}))
    assert sample.dropped == {TRUNCATED_SAMPLES: 1} and len(sample.text.ids) == 8


def test_read_counts_images_without_encoders(make):
    sample = make({}).read(Record({"image": png(8, 8), "text": "a red dog"}))
    assert sample.dropped == {UNREAD_FILES: 1} and sample.images == []


def test_max_image_pixels_limits_images(make):
    with pytest.raises(CorruptSampleError, match=r"data\.max_image_pixels = 255"):
        make({"vision": CLIP}, max_image_pixels=255).read(document(16))


def test_encoder_requires_image_token(make, text_spec):
    with pytest.raises(ConfigError, match=r"model\.image_token"):
        make({"a": CLIP}, spec=dataclasses.replace(text_spec, image_token_id=None))
