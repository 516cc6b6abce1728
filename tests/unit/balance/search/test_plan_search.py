"""The orchestrator's search against all plans, each simulated: the fastest that fits, bounds."""

import math
from dataclasses import replace
from itertools import product

import pytest
import tomli
from support.papers.baselines import sized_recipe
from test_orchestration import PROFILE, RECIPE

from torchmm.balance.disttrain.orchestration.search import UnitSizes, orchestrate
from torchmm.balance.disttrain.orchestration.space import PlanSpace
from torchmm.balance.forecasts.forecast import Forecaster, StepSample
from torchmm.balance.search import disaggregated
from torchmm.balance.search.disaggregated import plan_variants
from torchmm.balance.search.report import result_tables
from torchmm.balance.search.result import fits
from torchmm.balance.search.search import search_plans
from torchmm.common.errors import ConfigError
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe

TRIED = {
    ("1f1b", 1, "full"), ("1f1b", 1, "none"), ("1f1b", 1, "auto"),
    ("interleaved_1f1b", 2, "none"), ("zero_bubble", 1, "none"), ("gpipe", 1, "full"),
}  # fmt: skip
FORMULA = ("1f1b", "full")
"""Schedule and recomputation that the formula was for."""
DEVICES = 4


def small(batch=4, memory_gib=None, images=(0, 8), layers=4):
    """A recipe, and a device of so much memory."""
    table = tomli.loads(RECIPE)
    table["model"]["llm"]["config"]["num_hidden_layers"] = layers
    table["model"]["encoders"]["vision"]["config"]["num_hidden_layers"] = 2
    table["model"]["llm"]["config"]["num_key_value_heads"] = 2
    table["model"]["llm"]["config"]["num_attention_heads"] = 2
    table["model"]["encoders"]["vision"]["config"]["num_attention_heads"] = 2
    table["training"]["global_batch_size"] = batch
    table["simulation"]["sequences"][0]["images"] = list(images)
    table["parallel"] = {"sequence_parallel": True}
    table["activation_checkpoint"] = {"mode": "full"}
    profile = PROFILE
    if memory_gib:
        device = replace(PROFILE.device, memory_bytes=memory_gib * 2**30)
        profile = replace(PROFILE, device=device)
    return Recipe.model_validate(table), profile


CASES = {
    "roomy": {},
    "tight": {"memory_gib": 4.0},
    "many images": {"images": (6, 8), "batch": 6},
}


def search(case, monkeypatch, **limits):
    """The result of a search over the variants of a case."""
    recipe, profile, sample, variants, _ = case
    monkeypatch.setattr(disaggregated, "plan_variants", lambda *_: variants)
    limits = {"budget_s": math.inf, **limits}
    methods = ("disaggregated",)
    return search_plans(recipe, DEVICES, profile, methods=methods, sample=sample, **limits)


def every_plan(recipe, devices):
    """All sizes of both modules, by a definition of its own: none is left out for being bad."""
    batch = recipe.training.global_batch_size
    layers = {"vision": 2, "llm": recipe.model.llm.config["num_hidden_layers"]}
    numbers = range(1, devices + 1)
    for llm, vision in product(product((1, 2), numbers, numbers), repeat=2):
        total = math.prod(llm) + math.prod(vision)
        divides = batch % llm[1] == 0 and llm[1] % vision[1] == 0
        if total <= devices and divides and llm[2] <= layers["llm"] and vision[2] <= 2:
            yield {"vision": UnitSizes(*vision), "llm": UnitSizes(*llm)}


def simulated(recipe, profile, sample, sizes, variant):
    """Seconds and whether it fits; None where it cannot be run."""
    schedule, stages, mode = variant
    own = sized_recipe(recipe, sizes, schedule=schedule, stages=stages, recompute=mode)
    devices = sum(size.devices for size in sizes.values())
    if find_problems(own, devices):
        return None
    try:
        made = Forecaster(own, devices, profile, sample=sample).forecast_parallel(own.parallel)
    except ConfigError:
        return None
    return None if made.step is None else (made.iteration_ms / 1e3, fits(made.step))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.campaign] * (name != "tight")) for name in CASES],
)
def case(request):
    """A recipe with all its plans, simulated."""
    recipe, profile = small(**CASES[request.param])
    sample = StepSample(recipe)
    variants = [
        variant
        for variant in plan_variants(recipe, DEVICES, profile, sample)
        if (variant.schedule, variant.stages, variant.recompute) in TRIED
    ]
    assert len(variants) == len(TRIED)
    every = {}
    for sizes in every_plan(recipe, DEVICES):
        for index, variant in enumerate(variants):
            key = variant.schedule, variant.stages, variant.recompute
            found = simulated(recipe, profile, sample, sizes, key)
            if found is not None:
                every[index, tuple(sizes.values())] = found
    return recipe, profile, sample, variants, every


def test_search_finds_best_of_all_plans(case, monkeypatch):
    *_, every = case
    found = search(case, monkeypatch)
    fitting = [seconds for seconds, fine in every.values() if fine]
    assert len(fitting) > 10
    assert found.complete and found.bound_ms == found.best.step_ms
    assert found.best.step_ms / 1e3 <= min(fitting) * (1 + 1e-12)
    assert found.simulated["disaggregated"] < len(every), "bounds exclude plans"


def test_exact_search_uses_all_devices(case, monkeypatch):
    *_, every = case
    found = search(case, monkeypatch, exact=True)
    fitting = [
        seconds
        for (_, sizes), (seconds, fine) in every.items()
        if fine and sum(size.devices for size in sizes) == DEVICES
    ]
    assert found.best.step_ms / 1e3 <= min(fitting) * (1 + 1e-12)
    assert found.best.devices == DEVICES


def test_no_step_is_shorter_than_its_bound_and_none_that_fits_is_ruled_out(case):
    *_, variants, every = case
    space = PlanSpace(variants)
    assert sum(fine for _, fine in every.values()) > 10
    for (index, sizes), (seconds, fine) in every.items():
        plan = space.plan(index, sizes)
        if fine:
            assert plan is not None, f"{variants[index].schedule} {sizes} fits"
        if plan is not None:
            assert plan.bound_s <= seconds * (1 + 1e-9)


def test_module_table_shows_sizes_and_use_of_each_module(case, monkeypatch):
    best = search(case, monkeypatch).best
    _, table = result_tables(search(case, monkeypatch), "")
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[0] for row in rows] == ["vision", "llm"]
    step = best.forecast.step
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
    *_, every = case
    found = search(case, monkeypatch, effort=1)
    assert not found.complete and found.simulated["disaggregated"] <= 2
    best = min(seconds for seconds, fine in every.values() if fine)
    assert found.bound_ms / 1e3 <= best


def test_the_formula_alone_would_have_chosen_a_worse_plan(case):
    """The control: its favourite is slower in simulation, or does not fit."""
    *_, variants, every = case
    index = next(i for i, v in enumerate(variants) if (v.schedule, v.recompute) == FORMULA)
    favourite = orchestrate(variants[index].problem)[0]
    seconds, fine = every[index, tuple(unit.sizes for unit in favourite.units)]
    best = min(seconds for seconds, fine in every.values() if fine)
    assert not fine or seconds > 1.01 * best
