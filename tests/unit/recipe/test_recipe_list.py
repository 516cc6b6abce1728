"""Tests of the recipes that `train.py --list-recipes` shows."""

import subprocess
from pathlib import Path

import pytest
from installed import needs_extension

from torchmm.common.errors import ConfigError
from torchmm.recipe.read import find_recipe, list_recipes, load_recipe, recipes_directory

RECIPES = Path(__file__).parents[3] / "recipes"


def test_every_recipe_has_a_description():
    command = ["git", "ls-files", RECIPES]
    tracked = subprocess.run(
        command, capture_output=True, text=True, cwd=RECIPES.parent, check=False
    ).stdout  # empty outside of a Git repository
    files = {RECIPES.parent / name for name in tracked.splitlines()}
    descriptions = {
        file: description
        for file, description in list_recipes(RECIPES)
        if file in files or not files
    }
    assert (
        RECIPES / "quickstart.toml" in descriptions
        and RECIPES / "zoo/base.toml" not in descriptions
    )
    assert {file for file, text in descriptions.items() if len(text) < 40} == set()
    assert all(load_recipe(file, [], None).recipe.name for file in list(descriptions)[:5])


def test_list_recipes_shows_first_paragraphs_of_described_recipes(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/a.toml").write_text('# A paper.\nname = "a"\n')
    (tmp_path / "b.toml").write_text('# One,\n# two.\n#\n# How to start it.\nname = "b"\n')
    (tmp_path / "base.toml").write_text("# A base.\n[model]\n")
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    assert list_recipes(tmp_path) == [
        (tmp_path / "b.toml", "One, two."),
        (tmp_path / "papers/a.toml", "A paper."),
    ]


@pytest.mark.parametrize("name", ["zoo/smolvlm", "zoo/smolvlm.toml", "recipes/zoo/smolvlm.toml"])
def test_packaged_recipe_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipes_directory() == RECIPES
    assert find_recipe(Path(name)) == RECIPES / "zoo/smolvlm.toml"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()
    assert find_recipe(Path(name)) == Path(name), "a file has precedence"


@pytest.mark.parametrize("name", ["", "gone", "recipes", "zoo", "../recipes/quickstart.toml", "/a"])
def test_unknown_recipe_stays_a_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path(name)) == Path(name)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(name)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe("n" * 300)


@needs_extension("balance")
def test_base_is_a_file_or_packaged_recipe(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "zoo/smolvlm"\n')
    assert load_recipe(mine).recipe.name == "smolvlm"
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/smolvlm").write_text('base = "quickstart.toml"\nname = "near"\n')
    loaded = load_recipe(mine)
    assert loaded.recipe.name == "near"
    assert loaded.origins["name"] == str(tmp_path / "zoo/smolvlm")
    assert loaded.origins["training.steps"] == str(RECIPES / "quickstart.toml")
