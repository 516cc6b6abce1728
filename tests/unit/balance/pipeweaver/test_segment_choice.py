"""Tests of the choice of segments: open values of a recipe are chosen, other values are kept."""

from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from pipeline_cases import LAYERS, Case, step_of

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver import segment_search
from torchmm.balance.pipeweaver.partitioner import partition_modules
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import StepSearch
from torchmm.balance.pipeweaver.segment_search import (
    AUTO_STAGES,
    MAX_PARTITIONS,
    _predicted_ms,
    needs_partitioner,
    search_segments,
)
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import build_cost_model, load_simulated_profile
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import DeviceProfile
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

CASE = Case("segments in a recipe")
PROFILE = load_profile("cpu")


def chosen_parallel(profile: DeviceProfile | None = None, **parallel: object) -> ParallelConfig:
    recipe = Recipe.model_validate({"parallel": parallel})
    modules, metas = described()
    ranks = recipe.parallel.pipeline * max(1, recipe.parallel.shard)
    costs = build_cost_model(
        resolve_recipe(recipe, ranks), modules, PROFILE if profile is None else profile
    )
    return search_segments(recipe.parallel, modules, metas, costs)


def described() -> tuple:
    modules = [module.describe() for module in CASE.build().modality_modules()]
    return modules, [m.meta for seed in range(4) for m in step_of(CASE, seed)[0]]


def test_open_segments_are_chosen():
    parallel = chosen_parallel(pipeline=2, schedule="searched")
    _, metas = described()
    assert set(parallel.modules) == {"vision", "llm"}
    max_images = max(meta.module_image_count("vision") for meta in metas)
    assert 1 <= parallel.sub_microbatch_images("vision") <= max_images
    assert 1 in (parallel.segments("vision"), parallel.segments("llm"))


def test_specified_segments_are_kept():
    vision = {"segments": 2, "sub_microbatch_images": 3}
    parallel = chosen_parallel(
        pipeline=2, schedule="searched", virtual_stages=2, vision=vision, shard=4
    )
    assert (parallel.segments("vision"), parallel.segments("llm")) == (2, 2)
    assert parallel.sub_microbatch_images("vision") == 3
    assert (parallel.pipeline, parallel.shard, parallel.schedule) == (2, 4, "searched")


@pytest.mark.parametrize(
    "parallel", [{"pipeline": 2}, {"pipeline": 1, "schedule": "searched"}], ids=str
)
def test_other_schedules_have_no_open_segments(parallel):
    assert not needs_partitioner(ParallelConfig.model_validate(parallel))
    assert needs_partitioner(ParallelConfig(pipeline=2, schedule="searched"))


def test_too_few_layers_name_the_schedule():
    with pytest.raises(ConfigError, match=r'schedule = "searched": .* 4 layers for 8 pipeline'):
        chosen_parallel(pipeline=8, schedule="searched")


def test_stages_minimize_predicted_step_time():
    modules, metas = described()
    parallel = chosen_parallel(pipeline=2, schedule="searched", search={"stages": "auto"})
    assert parallel.search.stages in AUTO_STAGES
    model = CostModel(load_profile("cpu"), "float32")
    predicted = {}
    for stages in AUTO_STAGES:
        candidate = chosen_parallel(pipeline=2, schedule="searched", search={"stages": stages})
        layout = plan_layout(candidate, modules, metas)
        longest = max(s.stop - s.start for s in layout.stages if s.module == "vision")
        assert stages == "balanced" or (longest == LAYERS) == (stages == "megatron"), stages
        graph = step_graph(layout, candidate, metas)
        costs = replace(compute_plan_costs(graph, modules, metas, model), memory_limit_bytes=None)
        predicted[stages] = (
            StepSearch(graph, costs)
            .search(SearchBudget(evaluations=200), SearchSettings())
            .predicted_ms
        )
    assert predicted[parallel.search.stages] == min(predicted.values())


@pytest.mark.parametrize(("shard", "fits"), [(1, False), (4, True)])
def test_memory_check_includes_optimizer_sharding(shard, fits):
    """Check that optimizer states are divided by `shard` if stages are compared."""
    modules, metas = described()
    small = replace(PROFILE, device=replace(PROFILE.device, memory_bytes=1_500_000))
    parallel = chosen_parallel(
        pipeline=2, schedule="searched", shard=shard, search={"stages": "megatron"}
    )
    costs = build_cost_model(resolve_recipe(Recipe(parallel=parallel), 2 * shard), modules, small)
    assert isfinite(_predicted_ms(parallel, modules, metas, costs)) == fits


@pytest.fixture(scope="module")
def paper() -> tuple:
    """Return the PipeWeaver VLM-M setup, for which simulation beats the rule for segments."""
    overrides = ["--parallel.schedule=searched"]
    path = Path(__file__).parents[4] / "recipes/papers/pipeweaver_vlm_m.toml"
    recipe = load_recipe(path, overrides, None).recipe
    forecaster = StepSimulator(recipe, 32, load_simulated_profile(recipe))
    parallel = recipe.parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    metas = forecaster.workload.microbatches
    return parallel, forecaster.modules, metas, forecaster._costs(parallel)


@pytest.fixture
def ruled(paper, monkeypatch) -> ParallelConfig:
    """Return the section with the values of the rule, which apply if all steps are equally fast."""
    with monkeypatch.context() as patched:
        patched.setattr(segment_search, "_predicted_ms", lambda *arguments: 1.0)
        return search_segments(*paper)


def test_segments_minimize_simulated_step_time(paper, ruled, monkeypatch):
    parallel, modules, metas, costs = paper
    candidates = []
    predict_ms = segment_search._predicted_ms
    monkeypatch.setattr(
        segment_search,
        "_predicted_ms",
        lambda *given: (candidates.append(given[0]), predict_ms(*given))[1],
    )
    parallel_ = search_segments(*paper)
    assert parallel_ != ruled and len(candidates) <= MAX_PARTITIONS
    assert predict_ms(parallel_, *paper[1:]) < 0.98 * predict_ms(ruled, *paper[1:])
    assert search_segments(*paper) == parallel_  # as on every rank
    sections = {name: sections.model_dump() for name, sections in ruled.modules.items()}
    fixed = ParallelConfig.model_validate(parallel.model_dump(exclude_none=True) | sections)
    candidates.clear()
    fixed_choice = search_segments(fixed, modules, metas, costs)
    assert {name: fixed_choice.segments(name) for name in sections} == {
        n: ruled.segments(n) for n in sections
    }
    assert candidates == []  # no value is open


def test_slower_segments_are_not_chosen(paper, ruled, monkeypatch):
    """Check that the values of the rule are kept if every change is slower."""
    modules, metas, costs = paper[1:]
    rule = partition_modules(modules, metas, costs, paper[0].pipeline)
    assert {name: ruled.segments(name) for name in rule.segments} == rule.segments
    monkeypatch.setattr(
        segment_search, "_predicted_ms", lambda candidate, *_: 1.0 + (candidate != ruled)
    )
    assert search_segments(*paper) == ruled
