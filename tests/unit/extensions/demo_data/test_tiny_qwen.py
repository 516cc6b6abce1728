"""The prepared tiny Qwen2.5-VL: files of the Hugging Face class that load completely."""

import pytest
import torch
from test_specs import word_tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration

from torchmm.common.errors import DataError
from torchmm.extensions.demo_data import manifest, tiny_qwen
from torchmm.models.build import build_model
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import materialize
from torchmm.recipe.model_section import FreezeConfig, ModelConfig


def test_tiny_qwen_loads_every_weight(tmp_path) -> None:
    special = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    word_tokenizer(50, **special).save_pretrained(tmp_path / "tokenizer")
    tiny_qwen.prepare(tmp_path, tmp_path, {"tokenizer": "abc"})
    assert manifest.is_current(tmp_path, tiny_qwen.NAME, {"tokenizer": "abc"})
    source = str(tmp_path / tiny_qwen.NAME)
    model = build_model(ModelConfig(source=source), FreezeConfig())
    materialize(model, "cpu")
    assert load_weights(model) >= {name for name, _ in model.named_parameters()}
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(source).model.visual
    for name, value in model.encoders["vision"].tower.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    spec = model.image_specs()["vision"]
    assert spec.processor["size"]["longest_edge"] == tiny_qwen.MAX_PIXELS


def test_tiny_qwen_requires_tokenizer(tmp_path) -> None:
    with pytest.raises(DataError, match="prepare tuxpaint_stamps first"):
        tiny_qwen.prepare(tmp_path, tmp_path, {})
