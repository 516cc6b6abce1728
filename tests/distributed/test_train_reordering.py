"""Data-aware reordering through train.py: other ranks, other places, the same losses; windows."""

from pathlib import Path

import pytest
from tiny_recipe import arguments, records

pytestmark = pytest.mark.slow
CHANGES = {
    "training__steps": 3,
    "training__global_batch_size": 16,
    "training__sequence_length": 64,
}
APART = {
    "parallel__placement": "disaggregated",
    "parallel__schedule": "1f1b",
    "parallel__shard": 2,
    "parallel__vision__shard": 1,
}
RUNS = {
    "alone": (1, {}),
    "shards": (2, {"data__reorder": "intra"}),
    "pipeline": (
        2,
        {"data__reorder": "both", "parallel__pipeline": 2, "parallel__schedule": "1f1b"},
    ),
    "apart": (3, {"data__reorder": "both", **APART}),
    "searched": (
        4,
        {
            "data__reorder": "intra",
            "parallel__pipeline": 2,
            "parallel__shard": 2,
            "parallel__schedule": "searched",
        },
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reordering")
    for name, (ranks, changes) in RUNS.items():
        command = arguments(root / name, real_data, **CHANGES, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name in RUNS}


@pytest.mark.parametrize("name", ["shards", "pipeline", "apart", "searched"])
def test_losses_and_gradients_are_those_of_one_process_in_natural_order(runs, name):
    for one, two in zip(records(runs["alone"]), records(runs[name]), strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
        counts = [r["tokens_per_s"] * r["step_ms"] for r in (one, two)]
        assert counts[0] == pytest.approx(counts[1])
        next_step = records(runs["alone"])[one["step"] % 3]  # has other samples, and another loss
        assert two["loss"] != pytest.approx(next_step["loss"], rel=1e-4)


WINDOW = {
    **CHANGES,
    "training__global_batch_size": 2,
    "data__reorder": "intra",
    "checkpoint__interval": 1,
    "checkpoint__keep": 9,
}
"""A sequence for each rank and step: only other steps have something to balance them with."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """Two ranks step by step, and in a window of all steps; the latter from its first step on, on
    one rank and, in two stages, on two."""
    root = tmp_path_factory.mktemp("windows")

    def run(name: str, ranks: int, **changes: object) -> None:
        command = arguments(root / name, real_data, **WINDOW, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output

    run("natural", 2)
    run("window", 2, data__reorder_window=3)
    first = root / "window" / "checkpoints" / "step-1"
    run("one-rank", 1, data__reorder_window=3, checkpoint__resume=first)
    staged = {"parallel__pipeline": 2, "parallel__schedule": "1f1b"}
    run("stages", 2, data__reorder_window=3, checkpoint__resume=first, **staged)
    return {name: root / name for name in ("natural", "window", "one-rank", "stages")}


def test_a_window_is_gone_on_with_in_the_recorded_order_on_other_ranks(windows):
    natural, window = records(windows["natural"]), records(windows["window"])
    assert [r["step"] for r in window] == [1, 2, 3]
    others = [one["loss"] != pytest.approx(two["loss"], rel=1e-4)
              for one, two in zip(natural, window, strict=True)]  # fmt: skip
    assert any(others), "no step has other samples"
    for name in ("one-rank", "stages"):
        resumed = records(windows[name])
        assert [r["step"] for r in resumed] == [2, 3]
        for one, two in zip(window[1:], resumed, strict=True):
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), (name, key)
