"""The comparison of plans without a pipeline, pipelines and the planner."""

import json

import pytest

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.recipe.read import check_recipe


@pytest.fixture
def benchmark(load):
    return load("plain_alternative")


@pytest.fixture
def methods(load):
    return load("support.cases.plain_methods")


def record(planner_s: float, **steps_s: float) -> dict:
    plans = {name: {"step_s": step_s, "sizes": ""} for name, step_s in steps_s.items()}
    plain = {"FSDP2": plans.pop("fsdp2"), "HSDP": None, "FSDP2 or HSDP, reordered": None}
    return {
        "workload": "model, 8 GPUs",
        "plain": plain,
        "pipelines": {**plans, "disaggregated": {"problem": "no plan fits"}},
        "planner": {"method": "chain", "step_s": planner_s},
        "planner_s": 3.0,
    }


def test_workloads_load_and_have_twenty_rows(load):
    workloads = load("support.workloads").WORKLOADS
    assert len(workloads) >= 20 and len(set(workloads)) == len(workloads)
    assert {8, 3072} <= {workload.gpus for workload in workloads}
    for workload in workloads:
        recipe = workload.load()
        assert recipe.simulation.sequences, workload
        assert recipe.training.global_batch_size == (
            workload.batch or recipe.training.global_batch_size
        )


def test_plain_sizes_use_all_gpus_without_pipeline(load, methods):
    workload = load("support.workloads").Workload("recipes/zoo/qwen3_vl_30b_a3b", 32)
    recipe = workload.load()
    sample = StepSample(recipe)
    actual = {}
    for method in (methods.FSDP2, methods.HSDP):
        sizes = [each.parallel for each in methods.plain_sizes(recipe, 32, method, sample)]
        actual[method] = sizes
        for parallel in sizes:
            assert (
                parallel.pipeline == 1
                and parallel.shard * parallel.replicate * parallel.tensor == 32
            )
            assert parallel.sequence_parallel == (parallel.tensor > 1)
        assert {parallel.expert for parallel in sizes} == {1, 8}
        assert any(not check_recipe(methods.with_values(recipe, "parallel", **{
            name: getattr(parallel, name) for name in ("pipeline", "schedule", "shard", "replicate")
        }), 32) for parallel in sizes)  # fmt: skip
    assert all(parallel.replicate == 1 for parallel in actual[methods.FSDP2])
    assert all(parallel.replicate > 1 for parallel in actual[methods.HSDP])


def test_best_plain_plan_is_forecast_of_its_recipe(load, methods):
    workload = load("support.workloads").Workload("recipes/papers/pipeweaver_vlm_s", 16, 8)
    recipe, profile = workload.load(), load_profile("h800")
    sample = StepSample(recipe)
    best = methods.best_plain(recipe, 16, profile, sample)
    assert set(best) == {methods.FSDP2, methods.HSDP, methods.REORDERED}
    for method, option in best.items():
        assert option is not None and methods.fits(option.report.step), method
        again = StepSimulator(option.recipe, 16, profile, sample=sample)
        forecast = again.simulate_parallel(option.recipe.parallel)
        assert forecast.iteration_ms == pytest.approx(option.step_ms)
    options = methods.plain_options(recipe, 16, profile, sample, methods.FSDP2)
    assert best[methods.FSDP2].step_ms == min(option.step_ms for option in options)
    assert best[methods.REORDERED].recipe.data.reorder == "intra"
    assert best[methods.FSDP2].recipe.data.reorder == "none"


@pytest.mark.slow
def test_manual_pipelines_fit_and_match_forecasts(load):
    workload = load("support.workloads").Workload("recipes/papers/pipeweaver_vlm_s", 16, 4)
    recipe, profile = workload.load(), load_profile("h800")
    sample = StepSample(recipe)
    best, words = load("support.cases.hand_pipelines").hand_pipelines(recipe, 16, profile, sample)
    assert best.recipe.parallel.pipeline > 1 and "pipeline" in words
    assert load("support.cases.plain_methods").fits(best.report.step)
    again = StepSimulator(best.recipe, 16, profile, sample=sample)
    assert again.simulate_parallel(best.recipe.parallel).iteration_ms == pytest.approx(best.step_ms)


def test_planner_row_fails_if_different_method_is_faster(benchmark):
    fine = record(2.0, fsdp2=2.5, chain=2.0)
    assert benchmark.picks_fastest(fine)
    for slower in (record(2.1, fsdp2=2.0, chain=2.1), record(2.1, fsdp2=3.0, separated=2.0)):
        assert not benchmark.picks_fastest(slower)
        assert "**no**" in benchmark.markdown([slower])
    rows = {row.metric: row for row in benchmark.table_rows(fine)}
    assert rows["no pipeline over best pipeline"].ours == pytest.approx(1.25)
    assert rows["planner, chain, over fastest"].met
    assert "**no**" not in benchmark.markdown([fine]) and "1.25" in benchmark.markdown([fine])


def test_finished_rows_are_skipped(load, benchmark, monkeypatch, tmp_path):
    file = tmp_path / "rows.jsonl"
    first, second = benchmark.WORKLOADS[:2]
    harness = load("support.harness")
    harness.append_record(record(2.0, fsdp2=2.5) | {"workload": first.title}, file)
    with file.open("a") as stream:
        stream.write('{"workload": "stopped whi')
    measured = []

    def measure(workload, *_):
        measured.append(workload)
        return record(2.0, fsdp2=2.5) | {"workload": workload.title}

    monkeypatch.setattr(benchmark, "WORKLOADS", (first, second))
    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr("sys.argv", ["plain_alternative.py", "--rows", str(file)])
    benchmark.main()
    assert measured == [second]
    benchmark.main()
    assert measured == [second]
    titles = [each["workload"] for each in harness.read_records(file)]
    assert titles == [first.title, second.title]
    assert json.loads(file.read_text().splitlines()[0])["workload"] == first.title
