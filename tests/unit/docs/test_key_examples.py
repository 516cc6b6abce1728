"""Tests that every recipe key has an example in a recipe or on a page."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_recipe_key_has_an_example() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "structure_report.py"))
    keys, set_by_recipes, shown_on_pages = script["recipe_keys"]()
    assert set_by_recipes | shown_on_pages <= keys
    missing = sorted(keys - set_by_recipes - shown_on_pages)
    assert missing == [], "show these keys in a recipe or on a page of docs/"
