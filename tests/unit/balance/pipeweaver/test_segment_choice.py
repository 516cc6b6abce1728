"""What the partitioner decides in a recipe, and what it leaves alone."""

from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from pipeline_cases import LAYERS, Case, step_of

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.forecasts.forecast import Forecaster
from torchmm.balance.pipeweaver import segments
from torchmm.balance.pipeweaver.order_search.best_order import StepSearch
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.partition import partition
from torchmm.balance.pipeweaver.segments import (
    MOST_PARTITIONS,
    STAGES,
    _predicted_ms,
    leaves_segments_open,
    with_segments,
)
from torchmm.balance.run_costs import run_costs, simulated_profile
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import Profile
from torchmm.planning.resolved import resolve
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

CASE = Case("segments in a recipe")
PROFILE = load_profile("cpu")


def chosen(profile: Profile | None = None, **parallel: object) -> ParallelConfig:
    recipe = Recipe.model_validate({"parallel": parallel})
    modules, metas = described()
    ranks = recipe.parallel.pipeline * max(1, recipe.parallel.shard)
    costs = run_costs(resolve(recipe, ranks), modules, PROFILE if profile is None else profile)
    return with_segments(recipe.parallel, modules, metas, costs)


def described() -> tuple:
    modules = [module.describe() for module in CASE.build().modality_modules()]
    return modules, [m.meta for seed in range(4) for m in step_of(CASE, seed)[0]]


def test_everything_is_decided_where_nothing_is_given():
    found = chosen(pipeline=2, schedule="searched")
    _, metas = described()
    assert set(found.modules) == {"vision", "llm"}
    most = max(meta.images_of("vision") for meta in metas)
    assert 1 <= found.sub_microbatch_images("vision") <= most
    assert 1 in (found.segments("vision"), found.segments("llm"))


def test_what_is_given_stays():
    own = {"segments": 2, "sub_microbatch_images": 3}
    found = chosen(pipeline=2, schedule="searched", virtual_stages=2, vision=own, shard=4)
    assert (found.segments("vision"), found.segments("llm")) == (2, 2)
    assert found.sub_microbatch_images("vision") == 3
    assert (found.pipeline, found.shard, found.schedule) == (2, 4, "searched")


@pytest.mark.parametrize(
    "parallel", [{"pipeline": 2}, {"pipeline": 1, "schedule": "searched"}], ids=str
)
def test_other_recipes_leave_nothing_open(parallel):
    assert not leaves_segments_open(ParallelConfig.model_validate(parallel))
    assert leaves_segments_open(ParallelConfig(pipeline=2, schedule="searched"))


def test_too_many_ranks_name_the_schedule():
    with pytest.raises(ConfigError, match=r'schedule = "searched": .* 4 layers for 8 pipeline'):
        chosen(pipeline=8, schedule="searched")


def test_stages_are_those_of_the_fastest_predicted_step():
    modules, metas = described()
    found = chosen(pipeline=2, schedule="searched", search={"stages": "auto"})
    assert found.search.stages in STAGES
    model = CostModel(load_profile("cpu"), "float32")
    predicted = {}
    for stages in STAGES:
        own = chosen(pipeline=2, schedule="searched", search={"stages": stages})
        layout = plan_layout(own, modules, metas)
        longest = max(s.stop - s.start for s in layout.stages if s.module == "vision")
        assert stages == "balanced" or (longest == LAYERS) == (stages == "megatron"), stages
        graph = step_graph(layout, own, metas)
        costs = replace(plan_costs(graph, modules, metas, model), memory_limit_bytes=None)
        predicted[stages] = (
            StepSearch(graph, costs).search(Budget(evaluations=200), Settings()).predicted_ms
        )
    assert predicted[found.search.stages] == min(predicted.values())


@pytest.mark.parametrize(("shard", "fits"), [(1, False), (4, True)])
def test_what_fits_is_judged_as_the_run_shards_it(shard, fits):
    """Optimizer state is divided by `shard`; priced whole, "auto" would rule such stages out."""
    modules, metas = described()
    small = replace(PROFILE, device=replace(PROFILE.device, memory_bytes=1_500_000))
    own = chosen(pipeline=2, schedule="searched", shard=shard, search={"stages": "megatron"})
    costs = run_costs(resolve(Recipe(parallel=own), 2 * shard), modules, small)
    assert isfinite(_predicted_ms(own, modules, metas, costs)) == fits


@pytest.fixture(scope="module")
def paper() -> tuple:
    """PipeWeaver's VLM-M, whose rule gives segments that its own simulator can better."""
    given = ["--parallel.schedule=searched"]
    path = Path(__file__).parents[4] / "recipes/papers/pipeweaver_vlm_m.toml"
    recipe = load_recipe(path, given, None).recipe
    forecaster = Forecaster(recipe, 32, simulated_profile(recipe))
    parallel = recipe.parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    metas = forecaster.workload.microbatches
    return parallel, forecaster.modules, metas, forecaster._costs(parallel)


@pytest.fixture
def ruled(paper, monkeypatch) -> ParallelConfig:
    """The section with the numbers of the rule, which stay if all steps take equally long."""
    with monkeypatch.context() as patched:
        patched.setattr(segments, "_predicted_ms", lambda *given: 1.0)
        return with_segments(*paper)


def test_segments_are_those_of_a_faster_simulated_step(paper, ruled, monkeypatch):
    parallel, modules, metas, costs = paper
    tried = []
    counted = segments._predicted_ms
    monkeypatch.setattr(
        segments, "_predicted_ms", lambda *given: (tried.append(given[0]), counted(*given))[1]
    )
    found = with_segments(*paper)
    assert found != ruled and len(tried) <= MOST_PARTITIONS
    assert counted(found, *paper[1:]) < 0.98 * counted(ruled, *paper[1:])
    assert with_segments(*paper) == found  # as every rank finds for itself
    own = {name: own.model_dump() for name, own in ruled.modules.items()}
    fixed = ParallelConfig.model_validate(parallel.model_dump(exclude_none=True) | own)
    tried.clear()
    kept = with_segments(fixed, modules, metas, costs)
    assert {name: kept.segments(name) for name in own} == {n: ruled.segments(n) for n in own}
    assert tried == []  # nothing is open


def test_slower_neighbours_are_not_taken(paper, ruled, monkeypatch):
    """Where every change costs time, the rule's numbers stay."""
    modules, metas, costs = paper[1:]
    rule = partition(modules, metas, costs, paper[0].pipeline)
    assert {name: ruled.segments(name) for name in rule.segments} == rule.segments
    monkeypatch.setattr(segments, "_predicted_ms", lambda tried, *_: 1.0 + (tried != ruled))
    assert with_segments(*paper) == ruled
