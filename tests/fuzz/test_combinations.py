"""docs/reference/supported_combinations.md matches the checks of recipes."""

import pytest

from fuzz.combinations import FEATURES, PAGE, PIPELINES, page, pairs, problems, read_cells
from fuzz.wording import names_a_key

SEED = 1


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    cells = read_cells(text)
    assert cells.keys() == set(pairs())
    assert page(cells) == text, "run tests/fuzz/run.py --combinations"


@pytest.mark.parametrize("row", [*PIPELINES, *FEATURES])
def test_cells_match_checks_of_recipes(row: str) -> None:
    for (name, column), is_supported in read_cells(PAGE.read_text()).items():
        if name != row:
            continue
        errors = problems((row, column), SEED)
        assert bool(errors) != is_supported, (row, column, errors)
        assert all(map(names_a_key, errors)), errors
