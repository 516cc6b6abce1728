"""Tiled images from files to gradients, compared with Hugging Face processors and models."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from data_cases import data_config, png, training, write_parquet
from likeliest_text import written, written_by
from model_cases import COMPOSITES, build, relative_error, worst_gradient
from proofs import proves
from test_multimodal import hf_model, hf_weight_name
from tile_cases import (
    SWITCHES,
    WRITTEN,
    composite_settings,
    hf_processor,
    image_processor,
    make_tokenizer,
)
from torch.nn import functional
from transformers import AutoConfig

from torchmm.common.batch import IGNORE_TARGET
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import decode_rgb
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf.export import export_hf
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.model_section import ModelConfig

SIDE = 32
IMAGE_SIZES = [(100, 40), (40, 120), (64, 64), (20, 20), (200, 30), (50, 45)]
SETTINGS = {"gemma3": {"pan_and_scan_min_crop_size": 16}, "internvl": {"max_patches": 4}}
"""Settings with which small images have some tiles, and few of them."""
CAPTIONS = [" a red dog", " two", " the small green cats", " in the sun", " blue", " square"]


def fail_to_decode(*_: object) -> None:
    raise CorruptSampleError("damaged")


@pytest.fixture
def open_run(tmp_path):
    """Return a function that opens (model, microbatches, processor, settings) of a family."""

    def opened(family, corrupt=False, **changes):
        tokenizer = make_tokenizer(family)
        settings = {**SWITCHES.get(family, {}), **SETTINGS.get(family, {})}
        images = image_processor(family, SIDE)
        config = composite_settings(family, SIDE, tokenizer) | changes
        AutoConfig.for_model(**config).save_pretrained(tmp_path / "hf")
        images.save_pretrained(tmp_path / "hf")
        model = build(ModelConfig(source=str(tmp_path / "hf"), processor=settings))
        rows = [
            {"image": {"bytes": png(*size, seed), "path": None}, "text": CAPTIONS[seed]}
            for seed, size in enumerate(IMAGE_SIZES)
        ]
        path = write_parquet(tmp_path / "images", rows)
        loader = build_loader(
            data_config(tmp_path, SourceConfig(path=str(path), name="images"), shuffle=False),
            training(global_batch_size=2, sequence_length=1024),
            text_spec=model.text_spec(tokenizer),
            image_specs=model.image_specs(),
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )
        (batch,) = islice(loader, 1)
        assert bool(batch.skipped) == corrupt
        opened.decoder = loader._decoder
        processor = hf_processor(family, images, tokenizer)
        processor.vision_aspect_ratio = config.get("vision_aspect_ratio", "anyres_max_9")
        return model, batch.microbatches, processor, settings

    return opened


def processed(family, processor, settings, number):
    """Return the Hugging Face processor output of one image with its caption."""
    image = decode_rgb(png(*IMAGE_SIZES[number], number), 10**6)
    text = "<s>" + WRITTEN.get(family, "<image>") + CAPTIONS[number] + "</s>"
    inputs = processor(images=[image], text=text, return_tensors="pt", **settings)
    retained = ("input_ids", "pixel_values", "token_type_ids", "image_sizes")
    return {name: value for name, value in inputs.items() if name in retained}


SHRUNK = {"vision_aspect_ratio": "anyres_max_1"}
"""OneVision with this setting shrinks the features of nearly all images."""
TILED = [
    ("internvl", {}),
    ("idefics3", {}),
    ("smolvlm", {}),
    ("gemma3", {}),
    ("llava_next", {}),
    ("llava_onevision", {}),
    ("llava_onevision", SHRUNK),
]


@proves("tiles", COMPOSITES)
@proves("images", COMPOSITES)
@proves("equal", COMPOSITES)
@proves("packed", COMPOSITES)
@pytest.mark.parametrize(("family", "changes"), TILED)
def test_tiles_match_hugging_face_loss_and_gradients(family, changes, open_run) -> None:
    model, microbatches, processor, settings = open_run(family, **changes)
    plain = hf_model(model)
    losses, tiles, packed = [], 0, 0
    for microbatch in microbatches:
        packed += len(microbatch.meta.samples) > 1
        ours = model.llm.logits(
            microbatch, model.encode(microbatch), torch.arange(microbatch.cu_seqlens[-1])
        )
        for position, meta in enumerate(microbatch.meta.samples):
            start, stop = microbatch.cu_seqlens[position : position + 2]
            sample = processed(family, processor, settings, meta.index)
            ids = sample["input_ids"][0]
            logits = plain(**sample, use_cache=False).logits[0]
            assert torch.equal(microbatch.input_ids_T[start:stop], ids)
            assert torch.equal(microbatch.position_ids[start:stop], torch.arange(len(ids)))
            assert relative_error(ours[start:stop], logits) < 1e-5
            targets = microbatch.targets_T[start:stop]
            assert (targets != IGNORE_TARGET).any()
            losses.append(functional.cross_entropy(logits, targets, reduction="sum"))
            tiles += len(meta.images)
    assert packed and tiles > 2 * len(losses)
    expected = torch.stack(losses).sum()
    loss = torch.stack([model(microbatch) for microbatch in microbatches]).sum()
    assert relative_error(loss, expected) < 1e-5
    loss.backward()
    expected.backward()
    assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_exported_model_generates_same_from_tiles(family, open_run, tmp_path) -> None:
    model, microbatches, processor, settings = open_run(family)
    model_class = FAMILIES[family].kind
    model_class._from_config(model.composite).save_pretrained(
        tmp_path / "hf"
    )  # includes weights that torchmm does not use
    export_hf(model, tmp_path / "export", make_tokenizer(family))
    plain = model_class.from_pretrained(tmp_path / "export", attn_implementation="eager")
    microbatch = microbatches[0]
    images = range(len(microbatch.meta.samples[0].images))
    assert len(images) > 1
    length = microbatch.cu_seqlens[1]
    prompt = replace(
        microbatch,
        input_ids_T=microbatch.input_ids_T[:length],
        targets_T=torch.full((length,), IGNORE_TARGET),
        target_positions_L=None,
        position_ids=microbatch.position_ids[:length],
        cu_seqlens=[0, length],
        encoders={"vision": microbatch.encoders["vision"].select(images)},
    )
    sample = processed(family, processor, settings, microbatch.meta.samples[0].index)
    unwritten = model.text_spec(make_tokenizer(family)).image_token_id
    assert written(model, prompt, unwritten) == written_by(plain, sample, unwritten)


def test_reordered_tiles_change_loss(open_run) -> None:
    model, microbatches, _, _ = open_run("internvl")
    microbatch = next(m for m in microbatches if len(m.meta.samples[0].images) > 2)
    loss = model(microbatch)
    inputs = microbatch.encoders["vision"]
    inputs.pixels = torch.cat([inputs.pixels[1:2], inputs.pixels[:1], inputs.pixels[2:]])
    assert relative_error(model(microbatch), loss) > 1e-5


@pytest.mark.parametrize(
    ("family", "changes"), [("internvl", {}), ("llava_next", {}), ("llava_onevision", SHRUNK)]
)
def test_tiles_can_be_in_different_sub_microbatches(family, changes, open_run) -> None:
    model, microbatches, _, _ = open_run(family, **changes)
    for microbatch in microbatches:
        inputs = microbatch.encoders["vision"].values()
        if changes:
            assert inputs.tile_regions is not None and any(
                retained.downsample for retained in inputs.tile_regions
            )
        encoder = model.encoders["vision"]
        features = encoder(inputs)
        each = range(len(inputs.grids_thw))
        parts = [encoder(inputs.select(range(image, image + 1))) for image in each]
        sizes = [image.tokens for image in microbatch.meta.images_of_encoder("vision")]
        assert [len(part) for part in parts] == sizes
        assert relative_error(torch.cat(parts), features) < 1e-6


@pytest.mark.parametrize("family", ["internvl", "llava_next", "llava_onevision"])
def test_corrupt_image_keeps_its_tiles(family, open_run, monkeypatch) -> None:
    changes = SHRUNK if family == "llava_onevision" else {}
    model, (intact, *_), _, _ = open_run(family, **changes)

    monkeypatch.setattr("torchmm.data.media.tiles.decode_rgb", fail_to_decode)
    _, (blank, *_), _, _ = open_run(family, corrupt=True, **changes)
    assert blank.meta == intact.meta
    ours, theirs = blank.encoders["vision"], intact.encoders["vision"]
    assert ours.pixels.shape == theirs.pixels.shape and not ours.values().pixels.any()
    assert len(ours.positions_K) == len(theirs.positions_K)
    starts = torch.tensor(intact.cu_seqlens)
    segments = [torch.bucketize(i.positions_K, starts, right=True) for i in (ours, theirs)]
    assert segments[0].tolist() == segments[1].tolist()
    assert (blank.targets_T == IGNORE_TARGET).all()
    assert model(blank) == 0
