"""All that is wrong with a recipe."""

from pathlib import Path

import pytest

from torchmm.common.errors import ConfigError
from torchmm.recipe.read import load_recipe


def problems_of(path: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    """What `load_recipe` finds; fails where it finds nothing."""
    with pytest.raises(ConfigError) as error:
        load_recipe(path, list(overrides), world_size)
    return error.value.problems
