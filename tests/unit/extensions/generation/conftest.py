"""Fixtures of tests of generators."""

from pathlib import Path

import pytest
from data_fixtures import quiet_datasets, text_spec, tokenizer

__all__ = ["quiet_datasets", "text_spec", "tokenizer"]


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the file of a recipe with the `MODEL` of the test module."""
    file = tmp_path / "recipe.toml"
    file.write_text(request.module.MODEL)
    return file
