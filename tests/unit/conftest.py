"""What unit tests share."""

import importlib
from pathlib import Path

import pytest
from checkpoint_runs import make_manager


@pytest.fixture
def manager(tmp_path):
    """Factory of managers of one run directory; closes them."""
    made = []

    def make(**config):
        made.append(make_manager(tmp_path, **config))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a recipe file with the constant `MODEL` of the test module."""
    file = tmp_path / "recipe.toml"
    file.write_text(request.module.MODEL)
    return file
