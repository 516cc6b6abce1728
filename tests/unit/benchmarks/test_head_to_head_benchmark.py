"""The head-to-head benchmark: methods on the same step, and the fastest method."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from torchmm.balance.costs.profiles import load_profile


@pytest.fixture
def benchmark(load):
    return load("head_to_head")


@pytest.fixture
def methods(load):
    return load("support.cases.head_to_head_methods")


@pytest.fixture
def comparison(load, methods):
    """Return a comparison of VLM-S with four sequences. The planner tries one plan per method."""
    workload = load("support.workloads").Workload("recipes/papers/pipeweaver_vlm_s", 16, 4)
    return methods.Comparison(workload.load(), 16, load_profile("h800"), budget_s=0.0)


def method(step_s: float, fits: bool = True) -> dict:
    figures = {"mfu": 0.4, "idle": 0.2, "memory_gib": 60.0, "note": "pipeline 4"}
    return {"step_s": step_s, "fits": fits, **figures}


def record(**steps) -> dict:
    names = {"fsdp2": "FSDP2", "chain": "Megatron-LM balanced", "kernels": "Optimus, kernels"}
    return {"workload": "model, 8 GPUs", "methods": {names[k]: v for k, v in steps.items()}}


@pytest.mark.slow
def test_all_methods_run_the_same_batch(benchmark, comparison, tmp_path):
    results = list(comparison.results())
    names = [each.method for each in results]
    assert names == [name for name in benchmark.METHODS if name in names]
    assert {"FSDP2", "Megatron-LM balanced", "static plan (nnScaler*)", "PipeWeaver"} <= set(names)
    by_name = {each.method: each for each in results}
    chain = by_name["Megatron-LM balanced"]
    for name in ("Megatron-LM", "static plan (nnScaler*)", "PipeWeaver", "Optimus, kernels"):
        if (
            by_name[name].step.plan.graph.layout.rank_count
            == chain.step.plan.graph.layout.rank_count
        ):
            assert by_name[name].step.model_flops == pytest.approx(chain.step.model_flops, rel=1e-6)
    assert all(0 < each.report.mfu < 1 and each.peak_gib > 0 for each in results)
    assert by_name["static plan (nnScaler*)"].step_s >= 0.999 * chain.step_s
    workload = benchmark.QUICK[0]
    ET.parse(benchmark.draw(workload, results, tmp_path))


def test_static_plan_uses_stages_of_representative_batch(comparison, methods):
    chain = comparison.printed
    static = comparison._static([chain])
    seed = chain.simulation.seed + 1
    other_recipe = methods.with_values(chain, "simulation", seed=seed)
    forecaster = methods.StepSimulator(other_recipe, 16, comparison.profile)
    parallel = methods.with_values(chain, "parallel", schedule="megatron_balanced").parallel
    expected = forecaster.layout(parallel).stages
    assert static.step.plan.graph.layout.stages == expected
    original = methods.StepSimulator(chain, 16, comparison.profile, sample=comparison.sample)
    assert original.layout(parallel).stages != expected  # the comparison depends on the batch
    modes = {"none", "selective", "full"}
    assert static.note.split()[-1] in modes


@pytest.mark.slow
def test_layers_are_tuned_for_fixed_schedule(load, methods):
    workload = load("support.workloads").Workload("recipes/papers/pipeweaver_vlm_s", 16, 4)
    recipe = methods.colocated(workload.load())
    forecaster = methods.StepSimulator(recipe, 16, load_profile("h800"))
    step, hidden = methods.Colocated.of(forecaster, recipe).kernels(recipe, "interleaved_1f1b")
    assert step.fits and 0 < hidden < step.timeline.bubble_fraction
    recomputing = methods.recomputing(recipe, "auto")
    tuned, _ = methods.Colocated.of(forecaster, recomputing).kernels(
        recomputing, "interleaved_1f1b"
    )
    assert tuned.fits and tuned.plan.recompute and tuned.makespan_ms < step.makespan_ms


def test_fastest_method_fits_and_is_executed(benchmark):
    actual = record(fsdp2=method(1.0, fits=False), chain=method(3.0), kernels=method(2.0))
    assert benchmark.fastest_method(actual) == "Megatron-LM balanced"
    table = benchmark.summary([actual])
    assert "**3**" in table and "1 †" in table and "| 2 |" in table
    rows = {row.metric: row for row in benchmark.record_rows(actual)}
    assert rows["step, Megatron-LM balanced (fastest)"].ours == 3.0
    assert rows["step, FSDP2 (does not fit)"].baseline is None
    fine = benchmark.record_rows(record(fsdp2=method(1.0), chain=method(3.0)))
    assert {row.baseline for row in fine if row.metric.startswith("step")} == {1.0}


def test_finished_workloads_are_skipped(benchmark, monkeypatch, tmp_path):
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    page.write_text("# Title\n\nConclusion.\n\n| old |\n|---|\n")
    first, second = benchmark.COMPARED[:2]
    measured = []

    def measure(workload, _):
        measured.append(workload)
        if workload == second:
            raise RuntimeError("stopped")
        return record(chain=method(3.0)) | {"workload": workload.title}, []

    monkeypatch.setattr(benchmark, "COMPARED", (first, second))
    monkeypatch.setattr(benchmark, "measure", measure)
    arguments = ["head_to_head.py", "--rows", str(rows), "--page", str(page)]
    monkeypatch.setattr("sys.argv", arguments)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped"):
            benchmark.main()
    assert measured == [first, second, second]
    monkeypatch.setattr("sys.argv", [*arguments, "--report"])
    benchmark.main()
    assert page.read_text().startswith("# Title\n\nConclusion.\n\n| workload |")
    assert first.title in page.read_text() and second.title not in page.read_text()


@pytest.mark.parametrize("name", ["head_to_head", "plain_alternative"])
def test_results_page_has_rows_of_its_file(load, name):
    module = load(name)
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    harness = load("support.harness")
    records = harness.read_records(results / f"{name}.jsonl")
    titles = [
        each.title
        for each in (module.WORKLOADS if name == "plain_alternative" else module.COMPARED)
    ]
    records.sort(key=lambda record: titles.index(record["workload"]))
    table = module.summary if name == "head_to_head" else module.markdown
    assert (results / f"{name}.md").read_text().endswith(f"\n\n{table(records)}\n")
