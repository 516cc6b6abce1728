"""Tests of removed keys: errors name the replacement, and recipes of old runs can be read."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from installed import needs_extension

from torchmm.common.errors import ConfigError
from torchmm.recipe.explain import FORMER_DEFAULTS, REMOVED_KEYS
from torchmm.recipe.read import changed_values, dump_recipe, load_recipe
from torchmm.training.export import checkpoint

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
KEYS = [key for key in REMOVED_KEYS if not key.startswith("model.generator.")]
DEFAULTS = {key: value for key, value in FORMER_DEFAULTS.items() if key in KEYS}
"""Keys of sections that the recipe has."""


def old_tables(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of `recipe.toml` with removed keys."""
    tables = tomli.loads(dump_recipe(load_recipe(RECIPE).recipe))
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table[section]
        table[name] = value
    return tables


def test_removed_keys_have_former_defaults() -> None:
    assert FORMER_DEFAULTS.keys() < REMOVED_KEYS.keys()


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=needs_extension("balance") if "simulation" in key else ())
        for key in KEYS
    ],
)
def test_removed_key_raises_error_with_replacement(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(RECIPE, [f"--{key}=7"])
    assert caught.value.problems == [f"command line: {key} = 7: {REMOVED_KEYS[key]}"]


@needs_extension("balance")
def test_stored_recipe_with_removed_keys_loads_equal(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(old_tables(DEFAULTS)))
    assert load_recipe(file).recipe == load_recipe(RECIPE).recipe


@needs_extension("balance")
def test_checkpoint_with_removed_keys_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = old_tables(dict.fromkeys(KEYS, "other"))
    expected = copy.deepcopy(tables)
    monkeypatch.setattr(checkpoint, "read_manifest", lambda path: {"recipe": tables})
    assert checkpoint.read_checkpoint_recipe(Path("step-1")) == load_recipe(RECIPE).recipe
    assert tables == expected


@needs_extension("balance")
def test_run_report_hides_removed_keys() -> None:
    tables = old_tables(DEFAULTS)
    changes = changed_values(tables)
    assert changes and not REMOVED_KEYS.keys() & changes.keys()
    assert changes == changed_values(old_tables({}))
