"""Hugging Face classes generate the same tokens from an export as the trained model.

Both use greedy decoding. Hugging Face uses caches of keys, states and windows, and torchmm
recomputes the full text. `test_tile_model` tests LLaVA-NeXT and LLaVA-OneVision, `test_omni` tests
Omni models, and `test_speech` tests speech models.
"""

from pathlib import Path

import pytest
import torch
from likeliest_text import as_prompt, written, written_by
from model_cases import (
    COMPOSITES,
    LLMS,
    SPEECH,
    build,
    composite_config,
    microbatch,
    text_model,
)
from proofs import proves
from test_multimodal import first_sample, mrope_positions, two_samples_with_images
from transformers import AutoModelForCausalLM

from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf.export import export_hf

WITH_AUDIO = {name for name in COMPOSITES if "omni" in name} | set(SPEECH)
IMAGE_MODELS = [
    name for name in COMPOSITES if not name.startswith("llava_") and name not in WITH_AUDIO
]


@proves("generation", LLMS)
@pytest.mark.parametrize("family", list(LLMS))
def test_exported_llm_generates_same_tokens(family: str, tmp_path: Path, tokenizer) -> None:
    model = text_model(family)
    export_hf(model, tmp_path, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = as_prompt(microbatch([11]))
    assert written(model, prompt) == written_by(plain, {"input_ids": prompt.input_ids_T[None]})


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_exported_multimodal_model_generates_same_tokens(
    name: str, tmp_path: Path, tokenizer
) -> None:
    model = build(composite_config(name))
    export_hf(model, tmp_path, tokenizer)
    plain = FAMILIES[COMPOSITES[name]["model_type"]].kind.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    batch, samples = two_samples_with_images(name)
    if model.text.mrope:
        batch.position_ids = mrope_positions(plain, samples)
    sample = {key: value for key, value in samples[0].items() if key != "use_cache"}
    if name.startswith("paligemma"):
        sample["token_type_ids"] = torch.zeros_like(
            sample["input_ids"]
        )  # all tokens are the prompt
    ours = written(model, as_prompt(first_sample(batch)))
    assert ours == written_by(plain, sample)


def test_changed_export_generates_different_tokens(tmp_path: Path, tokenizer) -> None:
    model = text_model("qwen3_5")
    export_hf(model, tmp_path, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    mixer = next(p for name, p in plain.named_parameters() if name.endswith("dt_bias"))
    mixer.data += 2.0
    prompt = as_prompt(microbatch([11]))
    assert written(model, prompt) != written_by(plain, {"input_ids": prompt.input_ids_T[None]})
