"""The head-to-head benchmark: every method on the same step, and which one counts as fastest."""

import importlib
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmm.balance.costs.profiles import load_profile
from torchmm.common.errors import ConfigError
from torchmm.planning.search.encoder_sizes import with_pipelines


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("head_to_head")


@pytest.fixture
def methods(benchmark):
    return importlib.import_module("support.cases.head_to_head_methods")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100")


@pytest.mark.campaign
def test_all_methods_run_the_same_microbatches(benchmark, profile, tmp_path):
    case = benchmark.Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=4",))
    every, starts, _ = benchmark.printed(case, profile)
    assert [found.method for found in every] == list(benchmark.METHODS[:5])
    flops = [found.step.model_flops for found in every]
    assert flops == pytest.approx([flops[0]] * 5, rel=1e-6)
    assert all(0 < found.mfu < 1 and found.peak_gib > 0 for found in every)
    whole, optimus = every[2:4]
    assert all(found.step.plan.graph.replica and "vision" in found.note for found in every[2:4])
    assert all(0 < found.idle < 1 for found in every) and optimus.step_s < whole.step_s
    assert starts and all(start.recipe.parallel.placement == "colocated" for start in starts)
    rows = benchmark.case_rows(case, "title", every)
    fastest = [row for row in rows if row.metric.endswith("(fastest)") and "step" in row.metric]
    best = min(found.step_s for found in every if found.step.fits)
    assert [row.ours for row in fastest] == [best]
    costs = replace(optimus.step.costs, memory_limit_bytes=1)
    full = optimus._replace(step=replace(optimus.step, costs=costs))
    assert max([full, every[0]], key=benchmark.key) is full
    ET.parse(benchmark.draw(case, every, tmp_path))


@pytest.mark.slow
def test_layers_are_tuned_for_the_order_that_is_kept(benchmark, methods):
    case = benchmark.Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=4",))
    recipe = with_pipelines(benchmark.loaded(case), {"vision": 2})
    forecaster = methods.Forecaster(recipe, case.gpus, load_profile(recipe.simulation.device))
    step, hidden = methods.Colocated.of(forecaster, recipe).kernels(recipe, "interleaved_1f1b")
    assert step.fits and 0 < hidden < step.timeline.bubble_fraction
    lean = methods.tuned(recipe)
    tuned, _ = methods.Colocated.of(forecaster, lean).kernels(lean, "interleaved_1f1b")
    assert tuned.fits and tuned.plan.recompute and tuned.makespan_ms < step.makespan_ms


@pytest.mark.slow
def test_best_combination_is_at_least_as_fast_as_searched(benchmark, methods, profile):
    case = benchmark.Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=4",))
    recipe = benchmark.loaded(case)
    searched = benchmark.forecast("PipeWeaver", recipe, case.gpus, profile, "searched")
    starts = methods.whole_actions(recipe, case.gpus, profile).starts[:1]
    found = benchmark.combined(recipe, case.gpus, profile, starts, [searched, None])
    assert found.method == "best combination" and found.note
    assert benchmark.key(found) <= benchmark.key(searched)
    assert found.step.model_flops == pytest.approx(searched.step.model_flops, rel=1e-6)
    instant = searched._replace(step=replace(searched.step, records=[]), method="instant")
    again = benchmark.combined(recipe, case.gpus, profile, starts, [instant])
    assert again.note.startswith("instant") and again.step_s == instant.step_s


def test_every_method_chooses_from_the_same_sizes(benchmark):
    case = next(case for case in benchmark.CASES if case.recipe == "optimus_model_a")
    sizes = {
        (own.parallel.tensor, own.parallel.pipeline, own.parallel.virtual_stages)
        for own in benchmark.sizes_to_choose_from(case)
    }
    # The recipe's own 6 too, and no 16 x 6 stages of 80 layers.
    assert {(8, 4, 6), (8, 4, 1), (4, 8, 2), (1, 16, 4)} <= sizes
    assert {stages for *_, stages in sizes} == {1, 2, 4, 6}


def test_sizes_are_tried_until_what_was_found_is_faster_than_what_is_promised(
    benchmark, methods, monkeypatch
):
    """Whole actions of the fourth promise cannot be the fastest, but kernels of it could; those of
    the fifth could neither."""
    promises_ms = {1: 90.0, 2: 100.0, 4: 110.0, 8: 118.0, 16: 150.0, 32: 80.0}
    takes_s = {1: (0.2, 0.19), 2: (0.112, 0.112), 4: (0.115, 0.109), 8: (0.13, 0.107)}
    recipe = benchmark.loaded(benchmark.Case("pipeweaver_vlm_s", 16))
    tried = []

    def sized(stages: int):
        section = recipe.parallel.model_copy(update={"virtual_stages": stages})
        return recipe.model_copy(update={"parallel": section})

    def step(stages: int, kind: int):
        own = SimpleNamespace(makespan_ms=takes_s[stages][kind] * 1e3, fits=stages != 1)
        return methods.Result("any", own, 0.5, "layers tuned")

    def whole_actions(own, *_):
        stages = own.parallel.virtual_stages
        tried.append(stages)
        return methods.Filled(step(stages, 0), (methods.Start(own, str(stages)),))

    def promise(own):
        if own.parallel.virtual_stages == 32:
            raise ConfigError("its states do not fit")
        return promises_ms[own.parallel.virtual_stages]

    monkeypatch.setattr(methods, "Forecaster", lambda own, *_: own)
    monkeypatch.setattr(methods, "least_promise_ms", promise)
    monkeypatch.setattr(methods, "whole_actions", whole_actions)
    monkeypatch.setattr(
        methods, "kernels_in_bubbles", lambda starts, *_: step(int(starts[0].note), 1)
    )
    found = methods.in_bubbles([sized(stages) for stages in (32, 16, 8, 4, 2, 1)], 16, None)
    assert tried == [1, 2, 4, 8]
    assert (
        found.whole.step_s == pytest.approx(0.112)
        and "2 stages per rank; layers tuned" in found.whole.note
    )
    assert (
        found.kernels.step_s == pytest.approx(0.107) and "8 stages per rank" in found.kernels.note
    )
    assert [start.note for start in found.starts] == ["8"]
    only = methods.in_bubbles([sized(2)], 16, None)
    assert only.whole.note == only.kernels.note == "layers tuned"


def test_spreads_are_of_the_seeds_that_a_method_runs_with(benchmark):
    def found(method: str, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(method=method, step_s=seconds)

    chain = benchmark.BASELINE
    by_seed = [
        [found(chain, 4.0), found("Optimus", 2.0)],
        [found(chain, 6.0)],
        [found(chain, 9.0), found("Optimus", 3.0)],
    ]
    rows = {row.metric: row.ours for row in benchmark.spread_rows("case", by_seed)}
    assert rows[f"least step of 3 seeds, {chain}"] == 4.0
    assert rows[f"longest step of 3 seeds, {chain}"] == 9.0
    assert rows["least step of 2 seeds, Optimus"] == 2.0
    assert rows["longest step of 2 seeds, Optimus"] == 3.0
    assert rows["median x balanced of 2 seeds, Optimus"] == 2.5


def test_rows_of_earlier_cases_are_in_the_file_when_a_later_one_fails(
    benchmark, monkeypatch, tmp_path
):
    file = tmp_path / "rows.json"
    kept = benchmark.Row("of another run", "step", "s", 1.0)
    benchmark.write_rows([kept], file)

    def run_case(case, *_: object):
        yield [benchmark.Row(f"{case.title}, printed sizes", "step", "s", 2.0)]
        if case.gpus == 32:
            raise RuntimeError("out of patience")

    monkeypatch.setattr(benchmark, "run_case", run_case)
    monkeypatch.setattr("sys.argv", ["head_to_head.py", "--gpus", "16", "32", "--json", str(file)])
    with pytest.raises(RuntimeError, match="patience"):
        benchmark.main()
    cases = [row["case"] for row in json.loads(file.read_text())]
    assert cases[0] == "of another run" and len(cases) == 3
