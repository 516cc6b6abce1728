"""Data-aware reordering with train.py: other ranks and positions, and equal losses."""

from collections.abc import Callable
from functools import cache

import pytest
from tiny_recipe import arguments, records

pytestmark = pytest.mark.slow
CHANGES = {
    "training__steps": 3,
    "training__global_batch_size": 16,
    "training__sequence_length": 64,
}
DISAGGREGATED = {
    "parallel__placement": "disaggregated",
    "parallel__schedule": "1f1b",
    "parallel__shard": 2,
    "parallel__vision__shard": 1,
}
PACKED = {"data__packing": "balanced"}
RUNS = {
    "alone": (1, {}),
    "shards": (2, {"data__reorder": "intra"}),
    "four-shards": (4, {"data__reorder": "intra", "training__microbatch_size": 2}),
    "replicated-shards": (
        4,
        {"data__reorder": "intra", "parallel__replicate": 2, "parallel__shard": 2},
    ),
    "pipeline": (
        2,
        {"data__reorder": "both", "parallel__pipeline": 2, "parallel__schedule": "1f1b"},
    ),
    "disaggregated": (3, {"data__reorder": "both", **DISAGGREGATED}),
    "searched": (
        4,
        {
            "data__reorder": "intra",
            "parallel__pipeline": 2,
            "parallel__shard": 2,
            "parallel__schedule": "searched",
        },
    ),
    "alone-packed": (1, PACKED),
    "packed-shards": (2, {**PACKED, "data__reorder": "intra", "data__balance": "images"}),
    "packed-chain": (
        2,
        {
            **PACKED,
            "data__reorder": "both",
            "parallel__pipeline": 2,
            "parallel__schedule": "megatron_balanced",
        },
    ),
    "packed-searched": (
        2,
        {
            **PACKED,
            "data__reorder": "both",
            "parallel__pipeline": 2,
            "parallel__schedule": "searched",
        },
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> Callable[[str], list[dict]]:
    """Return a function that returns the records of a run, which starts at the first request."""
    root = tmp_path_factory.mktemp("reordering")

    @cache
    def run(name: str) -> list[dict]:
        ranks, changes = RUNS[name]
        command = arguments(root / name, real_data, **CHANGES, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
        return records(root / name)

    return run


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("alone")])
def test_reordering_keeps_losses_and_gradients(runs, name):
    packed = RUNS[name][1].get("data__packing") is not None
    alone, other = ("alone-packed", "alone") if packed else ("alone", "alone-packed")
    for one, two in zip(runs(alone), runs(name), strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
        counts = [r["tokens_per_s"] * r["step_ms"] for r in (one, two)]
        assert counts[0] == pytest.approx(counts[1])
        next_step = runs(alone)[one["step"] % 3]  # different samples, different loss
        assert two["loss"] != pytest.approx(next_step["loss"], rel=1e-4)
        assert two["loss"] != pytest.approx(runs(other)[one["step"] - 1]["loss"], rel=1e-4)


def test_reordered_run_resumes_on_other_ranks(runs, real_data, train_server, tmp_path):
    saved = {"data__reorder": "intra", "checkpoint__interval": 1, "checkpoint__keep_latest": 9}
    for name, ranks, changes in (
        ("first", 2, {}),
        ("second", 4, {"checkpoint__resume": tmp_path / "first" / "checkpoints" / "step-1"}),
    ):
        command = arguments(tmp_path / name, real_data, **CHANGES, **saved, **changes)
        codes, output = train_server.run(command, tmp_path / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
    resumed = records(tmp_path / "second")
    assert [r["step"] for r in resumed] == [2, 3]
    for one, two in zip(runs("alone")[1:], resumed, strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
