"""Models that cannot be split as the recipe requires are rejected before initialization."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
import torch
from fuzz.data import make_data
from fuzz.draw import Table, merged
from fuzz.recipes import complete
from installed import needs_extension
from small_parts import LLM, VISION

import torchmm.training.run
from torchmm.common.errors import ConfigError
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.build import _log_resume
from torchmm.training.model_build import build_meta_model, choose_model_stages

EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_data(directory)
    return directory


def read(data: Path, run_dir: Path, world_size: int, llm: Table, parallel: Table) -> Recipe:
    """Return a recipe with this LLM and an encoder."""
    model = {
        "llm": {"config": LLM | llm},
        "encoders": {"vision": {"config": VISION, "connector": "mlp"}},
    }
    table = {"model": model, "training": {"sequence_length": 64}, "parallel": parallel}
    full = merged(complete(table, "images", data, run_dir, steps=1), {})
    (run_dir / "recipe.toml").write_text(tomli_w.dumps(full))
    return load_recipe(run_dir / "recipe.toml", [], world_size).recipe


def check(data: Path, run_dir: Path, world_size: int, llm: Table, parallel: Table) -> None:
    """Check a recipe like train.py."""
    run = resolve_recipe(read(data, run_dir, world_size, llm, parallel), world_size)
    choose_model_stages(run, *build_meta_model(run), torch.device("cpu"))


@pytest.mark.parametrize(
    ("world_size", "llm", "parallel", "message"),
    [
        (2, {"tie_word_embeddings": True}, {"pipeline": 2}, None),
        (2, EXPERTS, {"tensor": 2}, "tensor = 2 must divide the 3 experts"),
        pytest.param(
            2,
            EXPERTS | {"num_experts": 4},
            {"tensor": 2, "sequence_parallel": True, "async_tensor_parallel": True},
            "async_tensor_parallel is not supported for the experts",
            marks=needs_extension("extensions.async_tp"),
        ),
        (4, {"model_type": "olmo2"}, {"tensor": 4}, "above the 2 key and value heads"),
        (4, {}, {"shard": 4, "llm": {"context": 4}}, None),
        (8, {}, {"shard": 8, "llm": {"context": 8}}, "context = 8 is above the 4 attention heads"),
        (
            4,
            {
                "model_type": "qwen3_5_text",
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
            },
            {"shard": 4, "llm": {"context": 4}},
            "context = 4 is above the 2 value heads of delta nets of 'llm'",
        ),
        (
            2,
            {"tie_word_embeddings": True},
            {"pipeline": 2, "virtual_stages": 2, "schedule": "megatron_balanced"},
            "its input and output embeddings are tied",
        ),
    ],
)
def test_model_that_cannot_be_split_is_rejected(data, tmp_path, world_size, llm, parallel, message):
    if message is None:
        check(data, tmp_path, world_size, llm, parallel)
        return
    with pytest.raises(ConfigError) as raised:
        check(data, tmp_path, world_size, llm, parallel)
    assert message in str(raised.value)


def test_training_checks_before_initialization(data, tmp_path, monkeypatch):
    def start(*_: object) -> None:
        pytest.fail("the process group was started")

    monkeypatch.setattr(torchmm.training.run, "start_process_group", start)
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="must divide the 3 experts"):
        torchmm.training.run.train(read(data, tmp_path, 2, EXPERTS, {"tensor": 2}))


@pytest.mark.parametrize(("saved", "warns"), [("images", True), ("none", False), (None, False)])
def test_resume_warns_about_different_choice(saved, warns, caplog):
    recipe = Recipe.model_validate({"model": {"llm": {"config": LLM}}})
    data = recipe.data.model_copy(update={"reorder": "none", "balance": "none"})
    run = resolve_recipe(recipe.model_copy(update={"data": data}), 2)
    run = replace(run, choices={"data.balance": "none (one data-parallel rank)"})
    stored = {"data": {} if saved is None else {"balance": saved, "reorder": "intra"}}
    restored = SimpleNamespace(path="step-3", step=3, recipe=stored, rng={})
    with caplog.at_level(logging.WARNING):
        actual = _log_resume(restored, run, SimpleNamespace(rank=0), logging.getLogger("test"))
    assert actual == 3
    assert [('data.balance = "auto" selects "none"' in text) for text in caplog.messages] == [
        True
    ] * warns
