"""A recipe that scripts/plan.py has written trains with the losses of one process."""

import runpy

import pytest
import tomli
from tiny_recipe import QUICKSTART, ROOT, arguments, overrides, records

pytestmark = pytest.mark.slow
CHANGES = {"training__steps": 2, "training__global_batch_size": 4}


@pytest.mark.campaign
def test_planned_recipe_trains_unchanged(tmp_path, real_data, train_server):
    plan = runpy.run_path(str(ROOT / "scripts/plan.py"))["main"]
    out = tmp_path / "planned.toml"
    options = ["--config", str(QUICKSTART), "--gpus", "3", "--device", "cpu", "--out", str(out)]
    assert plan([*options, *overrides(tmp_path / "planned", real_data, **CHANGES)]) == 0
    recipe = tomli.loads(out.read_text())
    assert recipe["parallel"]["placement"] == "disaggregated"
    ranks = recipe["simulation"]["gpus"]
    assert 2 <= ranks <= 3
    command = arguments(tmp_path / "alone", real_data, **CHANGES)
    for name, arguments_of, count in (
        ("alone", command, 1),
        ("planned", ["--config", str(out)], ranks),
    ):
        codes, output = train_server.run(arguments_of, tmp_path / f"log-{name}", count)
        assert codes == [0] * count, output
    alone, planned = (records(tmp_path / name) for name in ("alone", "planned"))
    for one, two in zip(alone, planned, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
