"""What `train.py --list-recipes` shows."""

import subprocess
from pathlib import Path

from torchmm.recipe.read import list_recipes, load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def test_every_recipe_says_what_it_is_for():
    tracked = subprocess.check_output(["git", "ls-files", RECIPES], text=True, cwd=RECIPES.parent)
    files = {RECIPES.parent / name for name in tracked.splitlines()}
    found = {file: told for file, told in list_recipes(RECIPES) if file in files or not files}
    assert RECIPES / "quickstart.toml" in found and RECIPES / "zoo/base.toml" not in found
    assert {file for file, told in found.items() if len(told) < 40} == set()
    assert all(load_recipe(file, [], None).recipe.name for file in list(found)[:5])


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
