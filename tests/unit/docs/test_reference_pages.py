"""Tests of generated pages of docs/reference, which must be up to date."""

import runpy
from pathlib import Path

import pytest

from torchmm.training.metrics import METRICS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "run_reference.py"))


@pytest.mark.parametrize("name", ["metrics", "exit_codes"])
def test_generated_reference_page_is_up_to_date(script, name):
    text = (script["REFERENCE"] / f"{name}.md").read_text()
    assert text == script[f"{name}_page"](), "run python scripts/run_reference.py"


def test_every_metric_has_a_row(script):
    page = script["metrics_page"]()
    rows = [f"| `{name}` | " for name in METRICS]
    assert all(page.count(row) == 1 for row in rows)
    assert "| `validation_loss` | number or null | nats | validation |" in page


def test_recipe_tables_are_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_tables.py"))
    for name, text in script["pages"]().items():
        assert (script["TARGET"] / name).read_text() == text, "run python scripts/recipe_tables.py"


def test_recipe_summary_omits_verb_and_hardware():
    summary = runpy.run_path(str(ROOT / "scripts" / "recipe_tables.py"))["summary"]
    assert summary("Train Qwen2.5-7B on v3.1 data. Hardware: 8 GPUs.") == "Qwen2.5-7B on v3.1 data"
    assert summary("Train a model.") == "A model"
