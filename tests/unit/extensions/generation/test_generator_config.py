"""Wrong values of `[model.generator]` are rejected with the key that must change."""

import pytest
from generator_cases import PIXART, VAE
from model_cases import LLMS, problems_of_model

pytest.importorskip("diffusers")


@pytest.mark.parametrize(
    ("generator", "vae", "key"),
    [
        ({"num_layers": -2}, None, "num_layers"),
        ({"attention_head_dim": None}, None, "attention_head_dim"),
        ({"sample_size": 10**12}, None, "sample_size"),
        ({}, {"block_out_channels": None}, "block_out_channels"),
        ({}, {"norm_num_groups": 0}, "norm_num_groups"),
    ],
)
def test_generator_config_wrong_value_names_key(generator, vae, key):
    sizes = {"sample_size": 8, "patch_size": 2} if vae else {}
    section: dict = {"config": {**PIXART, **sizes, **generator}}
    if vae:
        section["vae"] = {"config": {**VAE, **vae}}
    model = {"llm": {"config": LLMS["llama"]}, "generator": section}
    (problem,) = problems_of_model(model)
    assert key in problem


def test_two_wrong_values_are_both_reported():
    generator = {"config": {**PIXART, "attention_head_dim": {}, "num_attention_heads": "x"}}
    (problem,) = problems_of_model({"llm": {"config": LLMS["llama"]}, "generator": generator})
    assert "attention_head_dim" in problem
    assert "num_attention_heads" in problem
