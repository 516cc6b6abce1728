"""Tests of open recipe values without extensions that choose them."""

import pytest

from torchmm.common import extensions
from torchmm.planning.choices import choose_data_balancing, choose_segments, choose_sizes
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe

MISSING = 'the extension "balance" is not installed'


@pytest.fixture
def no_extensions(monkeypatch):
    functions = (extensions.extension_names, extensions.find_entries)
    for function in functions:
        function.cache_clear()
    monkeypatch.setattr(extensions, "FOLDERS", ())
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.usefixtures("no_extensions")
def test_auto_without_extension_is_none():
    run = choose_data_balancing(resolve_recipe(Recipe(), 1), None)
    assert (run.recipe.data.reorder, run.recipe.data.balance) == ("none", "none")
    reason = f"none ({MISSING})"
    assert run.choices == {"data.reorder": reason, "data.balance": reason}
    assert choose_data_balancing(run, None) is run
    assert choose_sizes(run.recipe, 1) is run.recipe
    assert choose_segments(run, None, None, [], None) is run.recipe.parallel


@pytest.mark.usefixtures("no_extensions")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.reorder", "intra"),
        ("data.balance", "images"),
        ("parallel.auto_sizes", True),
        ("parallel.tp_comm_fraction", 0.2),
    ],
)
def test_value_without_extension_is_rejected(key, value):
    section, name = key.split(".")
    assert [p for p in find_problems(Recipe(), 1) if MISSING in p.text] == []
    recipe = Recipe.model_validate({section: {name: value}})
    (problem,) = [p for p in find_problems(recipe, 1) if MISSING in p.text]
    assert (problem.key, problem.value) == (key, value)
