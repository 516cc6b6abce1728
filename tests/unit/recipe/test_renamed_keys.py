"""Tests of former names: errors name the new name, and old runs and checkpoints can be read."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from installed import needs_extension

from torchmm.common.errors import ConfigError
from torchmm.recipe.changes import (
    RENAMED_KEYS,
    RENAMED_METRICS,
    RENAMED_OPTIONS,
    RENAMED_VALUES,
    reject_renamed_options,
    renamed_key,
    with_current_names,
    with_former_names,
)
from torchmm.recipe.explain import type_at
from torchmm.recipe.model_section import ModelConfig
from torchmm.recipe.read import dump_recipe, load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.export import checkpoint
from torchmm.training.metrics import METRICS

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
SET = """
[parallel]
orchestrate = true
preflight = 3.0
[data]
open_packs = 5
stages = [{ weights = { a = 1.0 } }]
sources = [{ path = "a", generate = "image" }]
validation = [{ path = "b", scores = ["cider"] }]
producers.give_up_s = 7.0
[model.llm]
source = "llm"
[model.encoders.vision]
source = "vision"
shuffle = 3
[model.generator]
time_sampling = "uniform"
vae.latents = "sampled"
[validation]
samples = 2
drawings = 3
[checkpoint]
keep = 5
asynchronous = false
upload = "/store"
[optimizer]
schedule = "wsd"
[activation_checkpoint]
mode = "tuned"
modules.vision = "tuned"
[metrics]
log_interval = 2
"""
"""Recipe of an earlier version."""
EXTENSIONS_OF_KEYS = {
    "parallel.search.time_share": "balance",
    "data.storage.give_up_s": "extensions.remote",
    "float8.recipe": "extensions.low_precision",
    "metrics.page": "extensions.reports",
}
"""Extensions that define the section of a key."""


def loc_of(key: str) -> list[str | int]:
    """Return the path of a key, with a name or an index at positions for any name."""
    parts: list[str | int] = []
    for part in key.replace("*", "vision").split("."):
        parts.append(part)
        if parts in (["data", "sources"], ["data", "validation"]):
            parts.append(0)
    return parts


def tables_with(key: str, value: Any) -> dict[str, Any]:
    """Return the tables of a recipe with one more key."""
    tables: Any = value
    for part in reversed(loc_of(key)):
        tables = [{"path": "a"} | tables] if part == 0 else {part: tables}
    return tables


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(
            key,
            marks=[needs_extension(EXTENSIONS_OF_KEYS[key])] if key in EXTENSIONS_OF_KEYS else [],
        )
        for key in RENAMED_KEYS
    ],
)
def test_former_key_raises_error_with_new_key(key: str, tmp_path: Path) -> None:
    file = tmp_path / "former.toml"
    file.write_text(tomli_w.dumps({"base": str(RECIPE), **tables_with(key, 7)}))
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    current = RENAMED_KEYS[key].replace("*", "vision")
    assert any(p.endswith(f"= 7: was renamed to {current}") for p in caught.value.problems)
    assert type_at(loc_of(RENAMED_KEYS[key])) is not None


@pytest.mark.parametrize("key", RENAMED_VALUES)
def test_former_value_raises_error_with_new_value(key: str) -> None:
    plain = key.replace("*", "llm")
    for former, current in RENAMED_VALUES[key].items():
        with pytest.raises(ConfigError) as caught:
            load_recipe(RECIPE, [f"--{plain}={former}"])
        assert caught.value.problems == [
            f'command line: {plain} = "{former}": was renamed to "{current}"'
        ]


def test_new_names_stay() -> None:
    assert all(renamed_key(key) is None for key in RENAMED_KEYS.values())
    tables = Recipe().model_dump(mode="json")
    assert with_current_names(tables) == tables


def test_former_names_become_new_names() -> None:
    tables = tomli.loads(SET)
    expected = tomli.loads(SET)
    recipe = Recipe.model_validate(with_current_names(tables))
    assert tables == expected
    assert recipe.parallel.auto_sizes and recipe.parallel.slow_rank_threshold == 3.0
    assert recipe.data.packing_buffer_size == 5
    assert recipe.data.mixture_schedule[0].weights == {"a": 1.0}
    assert recipe.data.sources[0].target_image_column == "image"
    assert recipe.data.validation[0].metrics == ["cider"]
    assert recipe.data.producers.retry_timeout_s == 7.0
    assert recipe.model.encoders["vision"].pixel_shuffle_factor == 3
    assert recipe.model.generator and recipe.model.generator.vae
    assert recipe.model.generator.timestep_sampling == "uniform"
    assert recipe.model.generator.vae.latent_mode == "sampled"
    assert (recipe.validation.num_samples, recipe.validation.generated_images) == (2, 3)
    saving = recipe.checkpoint
    assert (saving.keep_latest, saving.async_save, saving.remote_dir) == (5, False, "/store")
    assert recipe.optimizer.lr_schedule == "wsd"
    assert recipe.activation_checkpoint.mode == "auto"
    assert recipe.activation_checkpoint.modules == {"vision": "auto"}


def former_tables() -> dict[str, Any]:
    """Return all keys of the quickstart recipe with their former names."""
    tables = tomli.loads(dump_recipe(load_recipe(RECIPE).recipe))
    for key in RENAMED_KEYS:
        *sections, name = RENAMED_KEYS[key].split(".")
        section_: Any = tables
        for section in sections:
            section_ = section_.get(section, {}) if isinstance(section_, dict) else {}
        for entry in section_ if isinstance(section_, list) else [section_]:
            if name in entry:
                entry[key.rpartition(".")[2]] = entry.pop(name)
    return tables


def test_run_directory_with_former_names_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(former_tables()))
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 2: was renamed to"):
        load_recipe(tmp_path / "recipe.toml")
    (tmp_path / "STATUS.json").write_text("{}")
    assert load_recipe(tmp_path / "recipe.toml").recipe == load_recipe(RECIPE).recipe


def test_checkpoint_with_former_names_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "read_manifest", lambda path: {"recipe": former_tables()})
    assert checkpoint.read_checkpoint_recipe(Path("step-1")) == load_recipe(RECIPE).recipe


def test_export_with_former_names_is_read(tmp_path: Path) -> None:
    parts = {"llm": {"source": "llm"}, "encoders": {"vision": {"source": "v", "shuffle": 3}}}
    (tmp_path / "torchmm.json").write_text(json.dumps(parts))
    model = ModelConfig(source=str(tmp_path))
    assert model.encoders["vision"].pixel_shuffle_factor == 3


def test_metrics_have_the_new_names() -> None:
    assert not RENAMED_METRICS.keys() & METRICS.keys()
    assert set(RENAMED_METRICS.values()) <= METRICS.keys()


def test_stored_names_are_the_former_names() -> None:
    values = {"data.packing_buffer_size": 1, "data.shuffle": True}
    stored = {"data.open_packs": 1, "data.shuffle": True}
    assert with_former_names(values) == stored and with_current_names(stored) == values
    assert with_former_names({"target_image_column": "a"}, "data.sources.") == {"generate": "a"}


@pytest.mark.parametrize("command", RENAMED_OPTIONS)
def test_former_option_raises_error_with_new_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    reject_renamed_options(parser, command)
    assert parser.parse_args(["a"]) == argparse.Namespace(model="a")
    for former, current in RENAMED_OPTIONS[command].items():
        assert former not in parser.format_help()
        with pytest.raises(SystemExit):
            parser.parse_args(["a", former, "b"])
        assert f"{former} was renamed to {current}" in capsys.readouterr().err
