"""Every recipe key has an example: a recipe sets it, or a page shows it with a value."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_key_has_an_example() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "structure_report.py"))
    keys, set_by_recipes, shown = script["recipe_keys"]()
    assert set_by_recipes | shown <= keys
    missing = sorted(keys - set_by_recipes - shown)
    assert missing == [], "show these keys in a recipe or on a page of docs/"
