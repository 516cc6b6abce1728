"""Checks of preference tuning run before any process group."""

import pytest
from recipe_problems import problems_of

from torchmm.extensions.preferences.section import PreferenceConfig
from torchmm.recipe.read import load_recipe

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 2
num_attention_heads = 4
hidden_size = 64
intermediate_size = 64
[[data.sources]]
path = "pairs.jsonl"
"""
USED = "--training.loss=preference"
REJECTED = [
    ("--preference.beta=0.5", "preference.beta = 0.5: requires training.loss"),
    (f"{USED} --preference.simpo_gamma=1.0", "simpo_gamma = 1.0: requires loss_type"),
    (f"{USED} --model.chunked_loss=true", "model.chunked_loss = true: is not supported"),
    (f"{USED} --data.producers.plan=true", "data.producers: is not supported"),
    (f"{USED} --training.label_smoothing=0.1", "label_smoothing = 0.1: is not supported"),
    (f"{USED} --training.z_loss=0.1", "training.z_loss = 0.1: is not supported"),
    (f"{USED} --preference.beta=0.0", "preference.beta"),
    (f"{USED} --preference.loss_type=kto", "preference.loss_type"),
    (
        f'{USED} --data.validation=[{{path="v.jsonl"}}] --validation.num_samples=4',
        "validation.num_samples = 4: is not supported",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), REJECTED)
def test_unsupported_keys_are_rejected(recipe, arguments, expected):
    problems = problems_of(recipe, *arguments.split(), world_size=4)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "llm.context", "shard", "replicate"])
def test_layouts_are_accepted(recipe, tmp_path, monkeypatch, layout):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    arguments = [USED, f"--parallel.{layout}=2", "--preference.loss_type=simpo"]
    loaded = load_recipe(recipe, arguments, 2).recipe
    assert not PreferenceConfig.from_parent(loaded).uses_reference
