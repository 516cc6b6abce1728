"""Mistral 3 and Pixtral: a token at the end of every row of patches, as in Hugging Face.

The Hugging Face processor and model on the same images are the reference.
"""

from itertools import islice

import numpy as np
import pytest
import torch
from data_cases import data_config, png, training, write_parquet
from model_cases import COMPOSITES, build, relative_error, worst_gradient
from proofs import proves
from test_multimodal import hf_model, hf_weight_name
from tile_cases import make_tokenizer
from torch.nn import functional
from transformers import PixtralImageProcessorPil

from torchmm.common.errors import ConfigError
from torchmm.data.build import build_loader
from torchmm.data.media.images import decode_rgb
from torchmm.data.media.text import placeholder_offsets
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.model_section import ModelConfig

IMAGE_SIZES = [(100, 40), (40, 120), (64, 64), (20, 20)]
MERGED = {"mistral3": 2, "pixtral_llava": 1}
"""Rows and columns of patches per token."""
CAPTIONS = [" a red dog", " two", " the small green cats", " in the sun"]


@pytest.fixture
def tokenizer():
    return make_tokenizer("mistral3")


@pytest.fixture(params=list(MERGED))
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name, tokenizer):
    vision = {**COMPOSITES[name]["vision_config"], "image_size": 64}
    text = {**COMPOSITES[name]["text_config"], "vocab_size": 1024}
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    config = {**COMPOSITES[name], "vision_config": vision, "text_config": text}
    processor = {"size": {"longest_edge": 48}}
    return build(ModelConfig(config={**config, "image_token_index": image}, processor=processor))


@pytest.fixture
def microbatches(model, tokenizer, tmp_path):
    rows = [
        {"image": {"bytes": png(*size, seed), "path": None}, "text": CAPTIONS[seed]}
        for seed, size in enumerate(IMAGE_SIZES)
    ]
    path = write_parquet(tmp_path / "images", rows)
    loader = build_loader(
        data_config(tmp_path, SourceConfig(path=str(path), name="images"), shuffle=False),
        training(global_batch_size=1, sequence_length=1024),
        text_spec=model.text_spec(tokenizer),
        image_specs=model.image_specs(),
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )
    (batch,) = islice(loader, 1)
    assert not batch.skipped
    return batch.microbatches


def test_row_placeholders_skip_row_ends() -> None:
    assert placeholder_offsets(6, 3).tolist() == [0, 1, 2, 4, 5, 6]
    assert placeholder_offsets(3, 1).tolist() == [0, 2, 4]


def processed(number: int, side: int, tokenizer) -> dict[str, torch.Tensor]:
    """Return an image and its text, prepared as by Hugging Face `PixtralProcessor`.

    The image is from the Hugging Face image processor. `PixtralProcessor` requires torchvision, so
    that this function writes its text. Tokens are `side` patches wide.
    """
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4})
    image = decode_rgb(png(*IMAGE_SIZES[number], number), 10**6)
    token = {"height": 4 * side, "width": 4 * side}
    images = processor(image, patch_size=token, size={"longest_edge": 48}, return_tensors="pt")
    height, width = (length // (4 * side) for length in images["image_sizes"][0].tolist())
    written = "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"
    ids = tokenizer(f"<s>{written}{CAPTIONS[number]}</s>", return_tensors="pt")["input_ids"]
    return {"input_ids": ids, **images}


@proves("images", COMPOSITES)
@pytest.mark.parametrize("name", list(MERGED), indirect=True)
def test_row_end_model_matches_hugging_face(name, model, microbatches, tokenizer) -> None:
    plain = hf_model(model)
    losses = []
    for microbatch in microbatches:
        for position, meta in enumerate(microbatch.meta.samples):
            start, stop = microbatch.cu_seqlens[position : position + 2]
            sample = processed(meta.index, MERGED[name], tokenizer)
            ids = sample["input_ids"][0]
            assert torch.equal(microbatch.input_ids_T[start:stop], ids)
            rows = len(np.flatnonzero(ids == tokenizer.convert_tokens_to_ids("[IMG_BREAK]"))) + 1
            assert rows > 1 or meta.images[0].height_px < 40
            logits = plain(**sample, use_cache=False).logits[0]
            targets = microbatch.targets_T[start:stop]
            losses.append(functional.cross_entropy(logits, targets, reduction="sum"))
    assert len(losses) >= len(IMAGE_SIZES)
    expected = torch.stack(losses).sum()
    loss = torch.stack([model(microbatch) for microbatch in microbatches]).sum()
    assert relative_error(loss, expected) < 1e-5
    loss.backward()
    expected.backward()
    assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5


def test_features_at_row_end_positions_change_loss(model, microbatches) -> None:
    loss = model(microbatches[0])
    inputs = microbatches[0].encoders["vision"]
    inputs.positions_K = inputs.positions_K[0] + torch.arange(len(inputs.positions_K))
    assert relative_error(model(microbatches[0]), loss) > 1e-5


def test_tokenizer_without_row_end_is_rejected(model) -> None:
    with pytest.raises(ConfigError, match=r"has no token '\[IMG_BREAK\]'"):
        model.text_spec(make_tokenizer("llava_next"))
