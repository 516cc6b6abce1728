"""The head-to-head benchmark: every method on the same step, and which one counts as fastest."""

import importlib
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from torchmm.balance.profiles import load_profile


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("head_to_head")


@pytest.mark.slow
def test_all_methods_run_the_same_microbatches(benchmark, tmp_path):
    case = benchmark.Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=4",))
    every = list(benchmark.results(case, load_profile("h100")))
    methods = [found.method for found in every]
    assert methods == ["Megatron-LM", "Megatron-LM balanced", "Optimus", "PipeWeaver"]
    flops = [found.step.model_flops for found in every]
    assert flops == pytest.approx([flops[0]] * 4, rel=1e-6)
    assert all(0 < found.mfu < 1 and found.peak_gib > 0 for found in every)
    optimus = every[2]
    assert optimus.step.plan.graph.replica and "vision" in optimus.note
    rows = benchmark.case_rows(case, "title", every)
    fastest = [row for row in rows if row.metric.endswith("(fastest)") and "step" in row.metric]
    assert [row.ours for row in fastest] == [min(found.step_s for found in every)]
    costs = replace(optimus.step.costs, memory_limit_bytes=1)
    full = replace(optimus, step=replace(optimus.step, costs=costs))
    assert max([full, every[0]], key=benchmark._key) is full
    ET.parse(benchmark.draw(case, every, tmp_path))
