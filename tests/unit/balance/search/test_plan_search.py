"""Tests of the plan search against exhaustive simulation: fastest plan, memory and bounds."""

import math
from dataclasses import replace
from itertools import product

import pytest
import tomli
from support.papers.baselines import sized_recipe
from test_orchestration import PROFILE, RECIPE

from torchmm.balance.disttrain.orchestration.plan_space import PlanSpace
from torchmm.balance.disttrain.orchestration.search import UnitSizes, orchestrate
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.search import disaggregated
from torchmm.balance.search.disaggregated import plan_variants
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.plan_space import _shard_sizes as shard_sizes
from torchmm.balance.search.report import result_tables
from torchmm.balance.search.result import fits
from torchmm.common.errors import ConfigError
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe

VARIANTS = {
    ("1f1b", 1, "full"), ("1f1b", 1, "none"), ("1f1b", 1, "auto"),
    ("interleaved_1f1b", 2, "none"), ("zero_bubble", 1, "none"), ("gpipe", 1, "full"),
}  # fmt: skip
FORMULA = ("1f1b", "full")
"""Schedule and recomputation that the formula assumes."""
DEVICES = 4


def small(batch=4, memory_gib=None, images=(0, 8), layers=4):
    """Return a recipe and the profile of a device with the specified memory."""
    content = tomli.loads(RECIPE)
    content["model"]["llm"]["config"]["num_hidden_layers"] = layers
    content["model"]["encoders"]["vision"]["config"]["num_hidden_layers"] = 2
    content["model"]["llm"]["config"]["num_key_value_heads"] = 2
    content["model"]["llm"]["config"]["num_attention_heads"] = 2
    content["model"]["encoders"]["vision"]["config"]["num_attention_heads"] = 2
    content["training"]["global_batch_size"] = batch
    content["simulation"]["sequences"][0]["images"] = list(images)
    content["parallel"] = {"sequence_parallel": True}
    content["activation_checkpoint"] = {"mode": "full"}
    profile = PROFILE
    if memory_gib:
        device = replace(PROFILE.device, memory_bytes=memory_gib * 2**30)
        profile = replace(PROFILE, device=device)
    return Recipe.model_validate(content), profile


CASES = {
    "ample memory": {},
    "little memory": {"memory_gib": 4.0},
    "many images": {"images": (6, 8), "batch": 6},
}


def search(case, monkeypatch, **limits):
    """Run the search over the variants of a case."""
    recipe, profile, sample, variants, _ = case
    monkeypatch.setattr(disaggregated, "plan_variants", lambda *_: variants)
    limits = {"budget_s": math.inf, **limits}
    methods = ("disaggregated",)
    return search_plans(recipe, DEVICES, profile, methods=methods, sample=sample, **limits)


def all_sizes(recipe, devices):
    """Yield all degrees of both modules, with an independent enumeration."""
    batch = recipe.training.global_batch_size
    layers = {"vision": 2, "llm": recipe.model.llm.config["num_hidden_layers"]}
    numbers = range(1, devices + 1)
    for llm, vision in product(product((1, 2), numbers, numbers), repeat=2):
        total = math.prod(llm) + math.prod(vision)
        divides = batch % llm[1] == 0 and llm[1] % vision[1] == 0
        if total <= devices and divides and llm[2] <= layers["llm"] and vision[2] <= 2:
            yield {"vision": UnitSizes(*vision), "llm": UnitSizes(*llm)}


def simulated(recipe, profile, sample, sizes, variant):
    """Return seconds and whether the plan fits into memory, or None if it cannot run."""
    schedule, stages, mode = variant
    planned = sized_recipe(recipe, sizes, schedule=schedule, stages=stages, recompute=mode)
    devices = sum(size.devices for size in sizes.values())
    if find_problems(planned, devices):
        return None
    try:
        simulated_step = StepSimulator(planned, devices, profile, sample=sample).simulate_parallel(
            planned.parallel
        )
    except ConfigError:
        return None
    return (
        None
        if simulated_step.step is None
        else (simulated_step.iteration_ms / 1e3, fits(simulated_step.step))
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.campaign] * (name != "little memory"))
        for name in CASES
    ],
)
def case(request):
    """Return a recipe with all its plans, simulated."""
    recipe, profile = small(**CASES[request.param])
    sample = StepSample(recipe)
    variants = [
        variant
        for variant in plan_variants(recipe, DEVICES, profile, sample)
        if (variant.schedule, variant.stages, variant.recompute) in VARIANTS
    ]
    assert len(variants) == len(VARIANTS)
    plans = {}
    for sizes in all_sizes(recipe, DEVICES):
        for index, variant in enumerate(variants):
            key = variant.schedule, variant.stages, variant.recompute
            step_ = simulated(recipe, profile, sample, sizes, key)
            if step_ is not None:
                plans[index, tuple(sizes.values())] = step_
    return recipe, profile, sample, variants, plans


def test_search_finds_best_of_all_plans(case, monkeypatch):
    *_, plans = case
    result = search(case, monkeypatch)
    fitting = [seconds for seconds, fine in plans.values() if fine]
    assert len(fitting) > 10
    assert result.complete and result.bound_ms == result.best.step_ms
    assert result.best.step_ms / 1e3 <= min(fitting) * (1 + 1e-12)
    assert result.simulated["disaggregated"] < len(plans), "bounds exclude plans"


def test_exact_search_uses_all_devices(case, monkeypatch):
    *_, plans = case
    result = search(case, monkeypatch, exact=True)
    fitting = [
        seconds
        for (_, sizes), (seconds, fine) in plans.items()
        if fine and sum(size.devices for size in sizes) == DEVICES
    ]
    assert result.best.step_ms / 1e3 <= min(fitting) * (1 + 1e-12)
    assert result.best.devices == DEVICES


def test_bounds_hold_for_all_plans(case):
    *_, variants, plans = case
    space = PlanSpace(variants)
    assert sum(fine for _, fine in plans.values()) > 10
    for (index, sizes), (seconds, fine) in plans.items():
        plan = space.estimate_plan(index, sizes)
        if fine:
            assert plan is not None, f"{variants[index].schedule} {sizes} fits"
        if plan is not None:
            assert plan.bound_s <= seconds * (1 + 1e-9)


def test_module_table_shows_sizes_and_use(case, monkeypatch):
    best = search(case, monkeypatch).best
    _, table = result_tables(search(case, monkeypatch), "")
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[0] for row in rows] == ["vision", "llm"]
    step = best.report.step
    busy = {rank: ms / step.makespan_ms for rank, ms in enumerate(step.timeline.busy_ms)}
    for name, *numbers, percent, gib in rows:
        devices, tensor, data, pipeline = map(int, numbers)
        assert devices == tensor * data * pipeline
        ranks = {
            rank
            for stage in step.plan.graph.layout.stages
            for rank in stage.ranks
            if stage.module == name
        }
        assert float(percent) == round(100 * max(busy[rank] for rank in ranks))
        assert float(gib) == round(max(step.peak_bytes[rank] for rank in ranks) / 2**30, 1)
    assert sum(int(row[1]) for row in rows) == best.devices


def test_interrupted_search_has_valid_bound(case, monkeypatch):
    *_, plans = case
    result = search(case, monkeypatch, max_actions=1)
    assert not result.complete and result.simulated["disaggregated"] <= 2
    best = min(seconds for seconds, fine in plans.values() if fine)
    assert result.bound_ms / 1e3 <= best


def test_formula_alone_chooses_worse_plan(case):
    """Check that the plan of the formula is slower in simulation, or does not fit."""
    *_, variants, plans = case
    index = next(i for i, v in enumerate(variants) if (v.schedule, v.recompute) == FORMULA)
    formula_plan = orchestrate(variants[index].problem)[0]
    seconds, fine = plans[index, tuple(unit.sizes for unit in formula_plan.units)]
    best = min(seconds for seconds, fine in plans.values() if fine)
    assert not fine or seconds > 1.01 * best


@pytest.mark.parametrize(
    ("method", "data", "tensor", "expected"),
    [
        ("fsdp", 16, 1, [8, 16, 1]),
        ("fsdp", 16, 4, [2, 4, 8, 16, 1]),
        ("fsdp", 12, 1, [6, 12, 1]),
        ("pipeline", 16, 4, [2, 4, 16, 1]),
        ("pipeline", 1, 8, [1]),
    ],
)
def test_shard_groups_start_within_a_node(method, data, tensor, expected):
    assert shard_sizes(method, data, tensor, per_node=8) == expected
