"""Tiled images: pixels, token ids and tile limits compared with Hugging Face processors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import transformers
from data_cases import png
from PIL import Image
from tile_cases import (
    SWITCHES,
    WRITTEN,
    composite_settings,
    hf_processor,
    image_processor,
    make_reader,
    make_tokenizer,
    varied_images,
)

from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.media.images import decode_rgb, make_processor
from torchmm.data.media.tile_schemes import join_markers
from torchmm.data.media.tiles import Tile
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.data.record_formats.sample import Record, SampleOptions
from torchmm.data.sources.reader import SampleReader
from torchmm.data.steps.packing import pack_all
from torchmm.models.build import build_model
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig

SIDES = {"internvl": 64, "idefics3": 48, "smolvlm": 64, "gemma3": 224}
LINES = {"llava_next": 56, "llava_onevision": 64}
"""Families with AnyRes, whose tiles have different numbers of tokens."""
PROMPT, CAPTION = "\nLook.", " a red dog"


PUBLISHED = {
    "internvl": 448,
    "idefics3": 364,
    "smolvlm": 512,
    "gemma3": 896,
    "llava_next": 336,
    "llava_onevision": 384,
}
"""Tile height and width in pixels of published checkpoints."""


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens (reader, processor, tokenizer) of a family with settings."""

    def open_family(family, data=None, recipe=None, sides=None, **settings):
        tokenizer = make_tokenizer(family)
        side = (sides or SIDES | LINES)[family]
        images = image_processor(family, side, **settings)
        reader = make_reader(family, tmp_path, images, tokenizer, side, data, **(recipe or {}))
        return reader, hf_processor(family, images, tokenizer), tokenizer

    return open_family


def hf_ids_and_pixels(family, processor, files, text=PROMPT + CAPTION, **settings):
    """Return token ids and pixels (tiles, C, H, W) of the Hugging Face processor."""
    images = [decode_rgb(file, 10**8) for file in files]
    written = WRITTEN.get(family, "<image>") * len(files) + text
    settings = {**SWITCHES.get(family, {}), **settings}
    outputs = processor(images=images, text=written, return_tensors="np", **settings)
    pixels = np.asarray(outputs["pixel_values"])
    return outputs["input_ids"][0].tolist(), pixels.reshape(-1, *pixels.shape[-3:])


def ids_and_pixels(reader, *files, prompt=PROMPT, text=CAPTION):
    """Return token ids without start and end tokens, and pixels, as in a training run."""
    if len(files) == 1:
        sample = reader.read(
            Record({"image": files[0], "text": text}, options=SampleOptions(prompt))
        )
    else:
        columns = {"images": [*files, None], "texts": [None] * len(files) + [prompt + text]}
        sample = reader.read(Record(columns))
    pairs = list(zip(sample.files, sample.images, strict=True))
    pixels = np.stack(
        [
            to_model_inputs(reader.pixels(f, i), reader.preprocessor_of(i).byte_values)
            for f, i in pairs
        ]
    )
    assert sample.text.ids.count(reader.text_spec.image_token_id) == sum(
        file.placeholders if isinstance(file, Tile) else image.tokens for file, image in pairs
    )
    return sample.text.ids[1:-1], pixels


@pytest.mark.parametrize("family", [*SIDES, *LINES])
def test_tiles_of_real_images_match_hugging_face(family, opened, real_data):
    compare(family, *opened(family)[:2], varied_images(real_data / "tuxpaint_stamps", 50))


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("source", ["tuxpaint_stamps", "gimp_help"])
def test_tiles_of_published_size_match_hugging_face(family, source, opened, real_data):
    """Compare at published tile sizes.

    With --all only: 12 to 17 tiles of 500,000 values take long.
    """
    if not (real_data / source).is_dir():
        pytest.skip(f"real data is missing; run: python scripts/prepare_data.py {source}")
    reader, processor, _ = opened(family, sides=PUBLISHED)
    compare(family, reader, processor, varied_images(real_data / source, 50))


def compare(family, reader, processor, files):
    """Check that token ids and pixels of every image equal those of Hugging Face."""
    tiles = []
    for file in files:
        ids, pixels = ids_and_pixels(reader, file)
        their_ids, their_pixels = hf_ids_and_pixels(family, processor, [file])
        assert ids == their_ids
        np.testing.assert_array_equal(pixels, their_pixels)
        tiles.append(len(pixels))
    assert len(tiles) == 50 and len(set(tiles)) > 1
    assert reader.text_spec.positions == "1d"


def test_comparison_detects_different_tile_count(opened, real_data):
    """Check that ids and pixels differ with other settings."""
    reader, processor, _ = opened("internvl")
    other, _, _ = opened("internvl", max_patches=6)
    files = varied_images(real_data / "tuxpaint_stamps", 50)[:8]
    same = 0
    for file in files:
        ids, pixels = ids_and_pixels(other, file)
        their_ids, their_pixels = hf_ids_and_pixels("internvl", processor, [file])
        same += ids == their_ids and np.array_equal(pixels, their_pixels)
        assert np.array_equal(ids_and_pixels(reader, file)[1], their_pixels)
    assert same < 8


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("internvl", {"max_patches": 3, "min_patches": 2}),
        ("smolvlm", {"size": {"longest_edge": 100}}),
        ("idefics3", {"size": {"longest_edge": 500}}),
        ("gemma3", {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 3}),
    ],
)
def test_tile_settings_apply_to_processor(family, recipe, opened):
    reader, processor, _ = opened(family, recipe=recipe)
    for size in ((90, 40), (33, 200), (64, 64), (300, 260)):
        file = png(*size)
        ids, pixels = ids_and_pixels(reader, file)
        their_ids, their_pixels = hf_ids_and_pixels(family, processor, [file], **recipe)
        assert ids == their_ids
        np.testing.assert_array_equal(pixels, their_pixels)


@pytest.mark.parametrize("family", [*SIDES, *LINES])
def test_several_tiled_images_are_consecutive(family, opened):
    recipe = {"pan_and_scan_min_crop_size": 16} if family == "gemma3" else {}
    reader, processor, _ = opened(family, recipe=recipe)
    files = [png(90, 40), png(20, 20), png(20, 70)]
    ids, pixels = ids_and_pixels(reader, *files, prompt=" Look.", text=" a red dog.")
    their_ids, their_pixels = hf_ids_and_pixels(
        family, processor, files, " Look. a red dog.", **recipe
    )
    assert ids == their_ids
    if (
        family in SIDES
    ):  # with AnyRes, the Hugging Face processor pads all images to the same number of tiles
        np.testing.assert_array_equal(pixels, their_pixels)


@pytest.mark.parametrize("family", SIDES)
def test_image_without_tiling_is_one_image(family, opened):
    names = {"internvl": "crop_to_patches", "gemma3": "do_pan_and_scan"}
    reader, _, _ = opened(family, recipe={names.get(family, "do_image_splitting"): False})
    assert not reader.tiled_media
    assert len(ids_and_pixels(reader, png(90, 40))[1]) == 1


def test_tile_size_that_differs_from_encoder_is_rejected(opened):
    with pytest.raises(ConfigError, match=r"max_image_size = .*32.*tiles require .* 64 pixels"):
        opened("smolvlm", max_image_size={"longest_edge": 32})


@pytest.mark.parametrize("family", [*SIDES, *LINES])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_tile_limit_lowers_resolution_of_all_images(family, budget, opened):
    recipe = {"pan_and_scan_min_crop_size": 16} if family == "gemma3" else {}
    unlimited, _, _ = opened(family, recipe=recipe)
    reader, _, _ = opened(family, {"max_tiles_per_sample": budget}, recipe)
    for files in ([png(90, 40)], [png(90, 40), png(64, 64)], [png(30, 90)] * 3):
        text = {"images": [*files, None], "texts": [None] * len(files) + ["red"]}
        sample = reader.read(Record(text))
        unlimited_sample = unlimited.read(Record(text))
        assert len(files) <= len(sample.images) <= max(budget, len(files))
        placeholder = sample.text.ids.count(reader.text_spec.image_token_id)
        features = sum(image.tokens for image in sample.images)
        if family not in LINES:
            assert placeholder == features
        elif budget == 1:  # 64 patches and one line end
            assert placeholder == features == 65 * len(files)
        if len(unlimited_sample.images) <= budget:
            assert sample.text.ids == unlimited_sample.text.ids
        for file, image in zip(sample.files, sample.images, strict=True):
            side = (SIDES | LINES)[family]
            assert reader.pixels(file, image).shape == (3, side, side)
        again = reader.read(Record(text))
        assert (again.text.ids, again.images) == (sample.text.ids, sample.images)


@pytest.mark.parametrize("length", range(20, 140, 7))
def test_image_beyond_sequence_length_is_dropped_completely(length, tmp_path):
    tokenizer = make_tokenizer("smolvlm")
    images = image_processor("smolvlm", 64, size={"longest_edge": 128})
    reader = make_reader("smolvlm", tmp_path, images, tokenizer, 64)
    reader._text.sequence_length = length
    columns = {
        "images": [None, png(90, 40), None, png(40, 90), None],
        "texts": ["red", None, "green", None, "blue"],
    }
    sample = reader.read(Record(columns))
    assert len(sample.text.ids) <= length
    assert len(sample.images) == len(sample.files) in (0, 3, 6)
    image = reader.text_spec.image_token_id
    assert sample.text.ids.count(image) == 16 * len(sample.images)
    starts = [n for n, token in enumerate(sample.text.ids) if token == image][::16]
    assert sample.text.image_starts == starts


def test_separate_modules_tile_images_if_configured(tmp_path):
    """Check tiles without markers, which only checkpoints of multimodal models have."""
    tokenizer = make_tokenizer("internvl")
    config = composite_settings("internvl", 64, tokenizer)
    processor = {"crop_to_patches": True, "max_patches": 4}
    vision = EncoderConfig(config=config["vision_config"], processor=processor)
    llm = LlmConfig(config=config["text_config"])
    settings = ModelConfig(llm=llm, encoders={"vision": vision}, image_token="<IMG_CONTEXT>")
    model = build_model(settings, FreezeConfig())
    specs = model.image_specs()
    reader = SampleReader(DataConfig(), 10_000, model.text_spec(tokenizer), specs, tokenizer)
    sample = reader.read(Record({"image": png(90, 40), "text": "red"}))
    assert len(sample.images) == 3
    assert sample.text.ids.count(reader.text_spec.image_token_id) == 3 * 64
    assert sample.text.image_starts == [1, 65, 129]


def test_truncated_pixels_are_detected_when_decoded(opened):
    reader, _, _ = opened("internvl")
    sample = reader.read(Record({"image": png(200, 90)[:400], "text": "red"}))
    with pytest.raises(CorruptSampleError, match="cannot be decoded"):
        reader.pixels(sample.files[0], sample.images[0])


def test_packs_respect_tile_limit():
    tiles = [4, 4, 2, 0, 9, 1]
    packs = pack_all([10] * 6, 100, 4, tiles, max_tiles=6)
    assert sorted(n for pack in packs for n in pack) == list(range(6))
    for pack in packs:
        tile_counts = [tiles[n] for n in pack if tiles[n]]
        assert sum(tile_counts) <= 6 or tile_counts == [9]


def test_missing_library_of_processor_is_reported(monkeypatch):
    def needs_more(settings):
        raise ImportError("SmolVLMImageProcessorPil requires\n torchvision.")

    monkeypatch.setattr(transformers.SmolVLMImageProcessorPil, "from_dict", needs_more)
    with pytest.raises(ConfigError, match=r"encoder 'eye': .*requires torchvision\. Install it"):
        make_processor("eye", "SmolVLMImageProcessor", {})


def test_adjacent_text_between_tiles_is_joined():
    assert join_markers(("a",), ("b", 1), (), (2, "c"), ("d",)) == ("ab", 1, 2, "cd")


def test_line_feeds_of_gemma_images_join_chat(opened):
    """Check that the newline of a turn and two newlines of an image form one token."""
    reader, processor, tokenizer = opened("gemma3")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    reader._chat = ChatTemplate(tokenizer)
    file = png(64, 64)
    parts = [{"type": "image"}, {"type": "text", "text": "\nLook."}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    sample = reader.read(Record({"messages": turns, "images": [file]}))
    written = "user\n<start_of_image>\nLook.</s>assistant\nred</s>"
    theirs = processor(images=[decode_rgb(file, 10**6)], text=written)["input_ids"][0]
    assert sample.text.ids == theirs
    three = tokenizer.encode("\n\n\n", add_special_tokens=False)
    assert len(three) == 1 and theirs.count(three[0]) == 1


def test_tile_pixels_are_independent_of_read_order(opened):
    reader, _, _ = opened("smolvlm")
    sample = reader.read(Record({"image": png(90, 40), "text": "red"}))
    tiles = list(zip(sample.files, sample.images, strict=True))
    backwards = [reader.pixels(*tile) for tile in reversed(tiles)]
    for ours, again in zip(reversed(backwards), [reader.pixels(*t) for t in tiles], strict=True):
        np.testing.assert_array_equal(ours, again)
    assert len({dataclasses.astuple(image) for _, image in tiles}) == 1
    assert isinstance(sample.files[0].parent.image(), Image.Image)
