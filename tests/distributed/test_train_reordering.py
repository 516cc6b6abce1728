"""Data-aware reordering through train.py: other ranks, other places, the same losses."""

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
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reordering")
    for name, (ranks, changes) in RUNS.items():
        command = arguments(root / name, real_data, **CHANGES, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name in RUNS}


@pytest.mark.parametrize("name", ["shards", "pipeline", "apart"])
def test_losses_and_gradients_are_those_of_one_process_in_natural_order(runs, name):
    for one, two in zip(records(runs["alone"]), records(runs[name]), strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
        counts = [r["tokens_per_s"] * r["step_ms"] for r in (one, two)]
        assert counts[0] == pytest.approx(counts[1])
