"""What Hugging Face's classes write from an export is what the trained model writes.

Token by token, the likeliest each time: Hugging Face with caches of keys, states and windows, ours
from the whole text again. LLaVA-NeXT and LLaVA-OneVision are in `test_tile_model`, Omni models in
`test_omni`, those that hear in `test_speech`.
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

HEARING = {name for name in COMPOSITES if "omni" in name} | set(SPEECH)
ALONE = [name for name in COMPOSITES if not name.startswith("llava_") and name not in HEARING]


@proves("generation", LLMS)
@pytest.mark.parametrize("family", list(LLMS))
def test_exports_of_llms_write_what_was_trained(family: str, tmp_path: Path, tokenizer) -> None:
    model = text_model(family)
    export_hf(model, tmp_path, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = as_prompt(microbatch([11]))
    assert written(model, prompt) == written_by(plain, {"input_ids": prompt.input_ids_T[None]})


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("name", ALONE)
def test_exports_of_composites_write_what_was_trained(name: str, tmp_path: Path, tokenizer) -> None:
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
        sample["token_type_ids"] = torch.zeros_like(sample["input_ids"])  # all of it is the prompt
    ours = written(model, as_prompt(first_sample(batch)))
    assert ours == written_by(plain, sample)


def test_an_export_with_other_weights_writes_something_else(tmp_path: Path, tokenizer) -> None:
    model = text_model("qwen3_5")
    export_hf(model, tmp_path, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    mixer = next(p for name, p in plain.named_parameters() if name.endswith("dt_bias"))
    mixer.data += 2.0
    prompt = as_prompt(microbatch([11]))
    assert written(model, prompt) != written_by(plain, {"input_ids": prompt.input_ids_T[None]})
