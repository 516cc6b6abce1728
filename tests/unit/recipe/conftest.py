"""The recipe that a module's tests change."""

from pathlib import Path

import pytest


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with the module's `MODEL`."""
    file = tmp_path / "recipe.toml"
    file.write_text(request.module.MODEL)
    return file
