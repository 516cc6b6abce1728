"""Dry runs of all recipes and losses of the quickstarts equal the stored ones.

After a change that may alter results, run `python tests/goldens/record.py` and explain every
difference in the commit message.
"""

import copy
from pathlib import Path
from typing import Any

import golden
import pytest
from train_server import TrainServer

pytestmark = pytest.mark.slow
PLANNED = sorted(golden.recipe_names().keys() - golden.NOT_PLANNED)
SLOW = ("papers/disttrain", "papers/optimus", "papers/pipeweaver_t2v", "zoo/qwen3_5", "zoo/siglip2")
"""Prefixes of recipes whose dry runs take up to a minute."""
SHORT = [name for name in PLANNED if not name.startswith(SLOW)][::3]
"""A third of the other recipes, which take less than about 3 s each."""
SHORT_RUNS = ("quickstart",)
LOSS_TOLERANCE = 1e-6
"""Relative difference between processors or versions of torch."""
VARYING = ("quickstart_colocated",)
"""Quickstarts whose losses differ in the last bit from run to run on the same machine."""


def _cases(names: Any, short: Any) -> list[Any]:
    """Return names as test parameters, with the campaign mark unless they are in `short`."""
    mark = pytest.mark.campaign
    return [pytest.param(name, marks=() if name in short else mark) for name in names]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", _cases(PLANNED, SHORT))
def test_dry_run_equals_golden(name: str, real_data: Path) -> None:
    stored = golden.read_goldens(golden.DRY_RUNS)[name]
    found = golden.plan_recipe(golden.recipe_names()[name])
    assert golden.differences(stored, found) == []


def test_goldens_exist_for_all_recipes() -> None:
    assert sorted(golden.read_goldens(golden.DRY_RUNS)) == PLANNED
    assert golden.NOT_PLANNED.keys() <= golden.recipe_names().keys()
    assert golden.read_goldens(golden.LOSSES).keys() == golden.QUICKSTARTS.keys()


@pytest.mark.parametrize("name", _cases(golden.QUICKSTARTS, SHORT_RUNS))
def test_quickstart_losses_equal_golden(
    name: str, train_server: TrainServer, tmp_path: Path, real_data: Path
) -> None:
    stored = golden.read_goldens(golden.LOSSES)[name]
    found = golden.train_quickstart(name, train_server, tmp_path)
    if found["machine"] == stored["machine"] and name not in VARYING:
        assert found == stored
    for key in ("loss", "grad_norm"):
        values = [[float.fromhex(text) for text in line[key]] for line in (found, stored)]
        assert values[0] == pytest.approx(values[1], rel=LOSS_TOLERANCE), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step_ms", 1.0001),
        ("peak_memory_bytes", 1.0001),
        ("order", "0"),
        ("stages", []),
        ("schedule", "other"),
    ],
)
def test_differences_report_changed_values(key: str, value: Any) -> None:
    stored = golden.read_goldens(golden.DRY_RUNS)["zoo/smolvlm"]
    changed = copy.deepcopy(stored)
    changed[key] = stored[key] * value if isinstance(value, float) else value
    assert [line.partition(":")[0] for line in golden.differences(stored, changed)] == [key]
    assert golden.differences(stored, stored) == []


def test_differences_compare_numbers_in_texts() -> None:
    def differ(stored: str, found: str) -> bool:
        return bool(golden.differences({"line": stored}, {"line": found}))

    assert not differ("1,234.5 ms", "1,234.6 ms")
    assert differ("1,234.5 ms", "1,235.0 ms")
    assert differ("pipeline 2", "pipeline 3")
    assert differ("16.0 ms, fits", "16.0 ms, does not fit")
