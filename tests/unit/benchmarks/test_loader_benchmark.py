"""The benchmark of data loaders: equal tensors from all loaders, and detection of differences."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("loader")


def test_loaders_yield_same_tensors(benchmark, tmp_path):
    sides = importlib.import_module("support.cases.loader_sides").SIDES
    captions = importlib.import_module("support.captions").load_captions(0)
    task = benchmark.make_task(tmp_path, captions, samples=5)
    actual = {}
    for name in ("torchmm", "torchmm, tar files", "datasets + DataLoader"):
        side = sides[name](task)
        side.prepare()
        actual[name] = benchmark.fingerprints(side)
    assert all(each == actual["torchmm"] for each in actual.values())
    assert len(actual["torchmm"]) == 5
    other = replace(task, directory=tmp_path / "other", captions=["another", *task.captions[1:]])
    side = sides["datasets + DataLoader"](other)
    side.prepare()
    assert len(set(benchmark.fingerprints(side)) & set(actual["torchmm"])) == 4


def test_torchmm_is_compared_with_fastest_loader(benchmark):
    def costs(*cpu_us):
        return [benchmark.Cost(cpu, 1.0, 1.0, 1.0, 1.0) for cpu in cpu_us]

    costs_by_loader = {
        "torchmm": costs(90, 110),
        "torchmm, tar files": costs(1, 1),
        "slow": costs(200, 200),
    }
    *_, last = benchmark.rows_of({**costs_by_loader, "fast": costs(95, 95)}, 2)
    assert last.case == "2 ranks: fast, the fastest"
    assert last.ours == pytest.approx((95 / 90 + 95 / 110) / 2) and not last.met
