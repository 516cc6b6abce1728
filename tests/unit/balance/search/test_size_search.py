"""Tests of the search for parallelism degrees: brute force, bounds, order and script."""

import re
import runpy
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import tomli
from test_orchestration import PROFILE, RECIPE

import torchmm
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.step_simulator import (
    SimulatedStepReport,
    StepSample,
    StepSimulator,
)
from torchmm.balance.search import plan_search as searches
from torchmm.balance.search.bounds import PlanBound, PlanBounds
from torchmm.balance.search.method_search import LOWEST_RATIO, MethodSearch, PlanDraft
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.plan_space import (
    METHODS,
    CandidatePlan,
    apply_plan,
    neighbors,
    root_plans,
    strip_parallelism,
)
from torchmm.balance.search.report import describe_optimality, recipe_text, why_slower
from torchmm.balance.search.result import find_best, fits
from torchmm.common.errors import ConfigError
from torchmm.recipe.check import find_problems
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parents[4]
PLAN = runpy.run_path(str(ROOT / "scripts/plan.py"))["main"]
SHARED = ("fsdp", "chain", "separated")
SEARCHED = ("fsdp", "chain")
FLAGS = (("step", "microbatch"), ("none", "intra"), ("none", "images"))
"""Values of parallel.gradient_reduction, data.reorder and data.balance without a pipeline."""
PIPED_FLAGS = (("step",), ("none", "intra", "both"), ("none",))


def random_recipe(seed: int) -> tuple[Recipe, int, object]:
    """Return a small recipe, a number of devices, and a profile with little memory."""
    random = Random(seed)
    content = tomli.loads(RECIPE)
    llm = content["model"]["llm"]["config"]
    vision = content["model"]["encoders"]["vision"]["config"]
    llm["num_hidden_layers"] = random.choice((4, 6, 8))
    llm["num_key_value_heads"] = llm["num_attention_heads"] = random.choice((2, 4))
    vision["num_hidden_layers"] = random.choice((2, 4, 8))
    vision["num_attention_heads"] = random.choice((2, 4))
    content["training"]["global_batch_size"] = random.choice((8, 16, 24))
    content["simulation"]["sequences"][0]["images"] = random.choice(([0, 4], [0, 8], [6, 8]))
    content["parallel"] = {}
    devices = random.choice((4, 6, 8, 16))
    memory = random.choice((3, 6, 80)) * 2**30
    content["data"] = {"reorder": random.choice(("auto", "none", "intra", "both"))}
    profile = replace(PROFILE, device=replace(PROFILE.device, memory_bytes=memory))
    return Recipe.model_validate(content), devices, profile


def brute_force(recipe, devices, profile, sample, seed):
    """Return the simulated steps of all degrees that fit, enumerated without the search.

    Every combination of degrees is tested without recomputation, and with two random combinations
    of recomputation, gradient reduction, reordering and balanced images.
    """
    batch = recipe.training.global_batch_size
    plain = strip_parallelism(recipe)
    random = Random(seed)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    steps_ms = {}
    for tensor, pipeline, size, shard in product((1, 2), sizes, (1, 2), sizes):
        ranks = tensor * pipeline * shard
        if devices % ranks or batch % (devices // (tensor * pipeline) * size):
            continue
        schedules = (("1f1b", 1), ("interleaved_1f1b", 2)) if pipeline > 1 else (("1f1b", 1),)
        options = list(
            product(("none", "full", "auto"), *(FLAGS if pipeline == 1 else PIPED_FLAGS))
        )
        chosen_options = [options[0], random.choice(options), random.choice(options)]
        for (schedule, stages), values in product(schedules, chosen_options):
            mode, reduction, reorder, balance = values
            changes = {
                "parallel.tensor": tensor,
                "parallel.pipeline": pipeline,
                "parallel.shard": shard,
                "parallel.replicate": devices // ranks,
                "parallel.schedule": schedule,
                "parallel.virtual_stages": stages,
                "parallel.sequence_parallel": tensor > 1,
                "parallel.gradient_reduction": reduction,
                "data.reorder": reorder,
                "data.balance": balance,
                "training.microbatch_size": size,
                "activation_checkpoint.mode": mode,
            }
            planned = apply_plan(plain, CandidatePlan("chain", devices, changes))
            if find_problems(planned, devices):
                continue
            try:
                forecaster = StepSimulator(planned, devices, profile, sample=sample)
            except ConfigError:
                continue
            simulated_step = forecaster.simulate_parallel(planned.parallel)
            if simulated_step.step is not None and fits(simulated_step.step):
                steps_ms[tensor, pipeline, size, shard, schedule, values] = (
                    simulated_step.iteration_ms
                )
    return steps_ms


@pytest.mark.parametrize("seed", range(4))
def test_search_is_never_slower_than_brute_force(seed):
    recipe, devices, profile = random_recipe(seed)
    sample = StepSample(recipe)
    steps_ms = brute_force(recipe, devices, profile, sample, seed)
    result = search_plans(
        recipe, devices, profile, methods=("fsdp", "chain"), budget_s=inf, sample=sample
    )
    assert result.complete
    if steps_ms:
        assert result.best.step_ms <= min(steps_ms.values()) * (1 + 1e-9), min(
            steps_ms, key=steps_ms.get
        )
        assert result.bound_ms <= result.best.step_ms


def test_search_without_pipelines_loses_to_brute_force():
    """Check that the comparison detects a search that omits a method."""
    recipe, devices, profile = random_recipe(0)
    sample = StepSample(recipe)
    steps_ms = brute_force(recipe, devices, profile, sample, 0)
    result = search_plans(recipe, devices, profile, methods=("fsdp",), budget_s=inf, sample=sample)
    assert result.best.step_ms > min(steps_ms.values()) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_do_not_exceed_simulations(seed):
    recipe, devices, profile = random_recipe(seed)
    sample = StepSample(recipe)
    plain = strip_parallelism(recipe)
    bounds = PlanBounds(plain, profile, sample)
    random, checked = Random(seed), 0
    for method in SHARED:
        plans = list(root_plans(method, plain, devices, profile, sample))
        plans += [other for plan in plans[:4] for other in neighbors(plan, plain, sample)]
        for plan in random.sample(plans, min(12, len(plans))):
            planned = apply_plan(plain, plan)
            if plan.schedule == "searched" or find_problems(planned, devices):
                continue
            forecaster = StepSimulator(planned, plan.devices, profile, sample=sample)
            simulated_step = forecaster.simulate_parallel(planned.parallel)
            if simulated_step.step is None:
                continue
            bound = bounds.bound(plan)
            assert bound.step_ms <= simulated_step.iteration_ms, plan.text
            assert bound.memory_bytes <= max(simulated_step.step.peak_bytes), plan.text
            checked += 1
    assert checked > 10


def test_wrong_bounds_exclude_the_best_plan(monkeypatch):
    """Check that bounds which are too high exclude the best plan."""
    recipe, devices, profile = random_recipe(0)
    sample = StepSample(recipe)
    best = search_plans(
        recipe, devices, profile, methods=SEARCHED, budget_s=inf, sample=sample
    ).best
    real = PlanBounds.bound

    def doubled(self, plan):
        bound = real(self, plan)
        factor = 4.0 if plan.data_parallel > 2 else 1.0
        return PlanBound(factor * bound.step_ms, factor * bound.estimate_ms, bound.memory_bytes)

    monkeypatch.setattr(PlanBounds, "bound", doubled)
    wrong = search_plans(
        recipe, devices, profile, methods=SEARCHED, budget_s=inf, sample=sample
    ).best
    assert wrong.step_ms > best.step_ms


def test_search_is_deterministic():
    recipe, devices, profile = random_recipe(1)
    first, second = (
        search_plans(recipe, devices, profile, budget_s=inf, max_actions=2_000) for _ in range(2)
    )
    assert first.simulated == second.simulated and first.best.step_ms == second.best.step_ms
    assert first.best.recipe == second.best.recipe
    assert set(first.best_by_method) == set(METHODS)


def test_interrupted_search_reports_no_plan():
    recipe, devices, profile = random_recipe(2)
    messages = []
    result = search_plans(
        recipe, devices, profile, methods=("chain",), budget_s=0.0, report=messages.append
    )
    assert not result.complete and result.best is None
    assert all(isinstance(reason, str) for reason in result.best_by_method.values())
    with pytest.raises(ConfigError, match="found no plan for 8 devices within") as raised:
        find_best(result, devices)
    assert "no plan fits" not in str(raised.value)
    assert "chain: no plan was simulated in time" in str(raised.value)


def test_invalid_arguments_raise_config_errors():
    recipe, devices, profile = random_recipe(0)
    training = recipe.training.model_copy(update={"microbatch_size": 5})
    with pytest.raises(ConfigError, match="microbatch_size"):
        search_plans(recipe.model_copy(update={"training": training}), devices, profile)
    with pytest.raises(ConfigError, match="unknown method 'pipeline'"):
        search_plans(recipe, devices, profile, methods=("pipeline",))


def test_planned_recipe_has_the_reported_step(tmp_path):
    recipe, devices, _ = random_recipe(3)
    result = search_plans(recipe, devices, PROFILE, methods=SEARCHED, budget_s=inf)
    path = tmp_path / "planned.toml"
    path.write_text(recipe_text(result.best, "tiny.toml", "a800"))
    planned = load_recipe(path, (), result.best.devices).recipe
    text = re.sub(" +", " ", describe_run(planned, result.best.devices))
    assert f"first step {result.best.step_ms:,.1f} ms on a800" in text
    for other in result.ranked[1:]:
        assert re.match(r"\+[\d.]+%", why_slower(other, result.best))
    assert "remaining plans have higher bounds" in describe_optimality(result)


def test_plan_script_prints_methods_and_writes_recipe(tmp_path, capsys):
    recipe, out = tmp_path / "tiny.toml", tmp_path / "out" / "planned.toml"
    recipe.write_text(RECIPE)
    command = ["--config", recipe, "--gpus", "4", "--global-batch-size", "8", "--out", out]
    command += ["--budget-s", "4", "--training.steps", "7"]
    assert PLAN([str(argument) for argument in command]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for word in (*METHODS, "best", "MFU %", "tokens/s", "plans simulated", str(out)):
        assert word in printed
    loaded = load_recipe(out, (), 4).recipe
    assert loaded.training.steps == 7 and loaded.training.global_batch_size == 8
    assert describe_run(loaded, loaded.simulation.gpus)
    best = torchmm.plan(
        torchmm.load_recipe(recipe), gpus=4, device="a800", placement=["fsdp"], budget_s=1
    )
    assert best.method == "fsdp" and best.devices == 4
    assert best.recipe.simulation.device == "a800" and best.step_ms < inf


def test_plain_recipe_drops_recomputation_of_modules():
    recipe = random_recipe(0)[0]
    section = recipe.activation_checkpoint.model_copy(update={"modules": {"vision": "full"}})
    recipe = recipe.model_copy(update={"activation_checkpoint": section})
    assert strip_parallelism(recipe).activation_checkpoint.modules == {}


def test_plans_with_lowest_estimate_come_first():
    """Check that hopeless rough drafts follow the neighbors of the best plan."""
    method = MethodSearch("separated", best=SimpleNamespace(step_ms=100.0))
    slow, near = 101.0 / LOWEST_RATIO, 99.0 / LOWEST_RATIO

    def draft(text, estimate_ms, *, is_rough):
        return PlanDraft(estimate_ms, text, CandidatePlan("separated", 8, {}), 1.0, is_rough)

    for name in ("first", "second"):
        method.push(draft(name, 100.0, is_rough=False))
    method.push(draft("slow", slow, is_rough=True))
    assert [method.pop().text for _ in range(3)] == ["first", "second", "slow"]
    method.push(draft("first", 100.0, is_rough=False))
    method.push(draft("near", near, is_rough=True))
    assert method.pop().text == "near"
    method = MethodSearch("separated", best=SimpleNamespace(step_ms=100.0), simulated=1)
    method.push(draft("neighbor that is not expected to be the best", 120.0, is_rough=False))
    method.push(draft("sizes", 110.0, is_rough=True))
    assert method.pop().text == "sizes"
    # Schedules of the best degrees halved the step, and could do so for other degrees.
    method.schedule_ms = {"separated": 200.0, "searched": 100.0}
    method.push(draft("neighbor", 99.0, is_rough=False))
    method.push(draft("more sizes", 210.0, is_rough=True))
    method.simulated = 2
    assert method.pop().text == "more sizes"


def test_method_with_less_effort_is_next():
    """Include the time to prepare a simulation, so that few actions do not mean little effort."""
    best = SimpleNamespace(step_ms=100.0)
    short = MethodSearch(
        "fsdp", started=True, best=best, simulated=20, simulated_actions=400, open_ms=90.0
    )
    long = MethodSearch(
        "separated", started=True, best=best, simulated=1, simulated_actions=1_000, open_ms=95.0
    )
    search = SimpleNamespace(_turns=1, _methods={"fsdp": short, "separated": long}, best_ms=100.0)
    assert searches._PlanSearch._next_method(search) is long


@pytest.mark.parametrize("has_first", [True, False])
def test_search_after_deadline_simulates_every_method(monkeypatch, has_first):
    """Use a clock that exceeds the budget at every call. The control omits the rule."""
    seconds = iter(range(0, 10**6, 20))
    monkeypatch.setattr(searches, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    if not has_first:
        monkeypatch.setattr(searches._PlanSearch, "_first_method", lambda _: None)
    recipe, devices, profile = random_recipe(0)
    result = search_plans(recipe, devices, profile, budget_s=10.0)
    assert not result.complete
    assert (min(result.simulated.values()) == 1) is has_first
    assert max(result.simulated.values()) <= 2  # including the unchanged recipe


def test_search_skips_plans_that_take_too_long(monkeypatch):
    monkeypatch.setattr(searches._PlanSearch, "_is_too_long", lambda *_: True)
    recipe, devices, profile = random_recipe(1)
    result = search_plans(recipe, devices, profile, methods=SEARCHED, budget_s=1_000.0)
    assert not result.complete and result.best is not None
    assert max(result.simulated.values()) <= 2  # including the unchanged recipe


def test_every_method_simulates_a_plan():
    """Check that a method continues if listing its plans exceeds its first time budget."""
    search = SimpleNamespace(_budget_s=10.0)
    for simulated in (0, 1):
        method = MethodSearch("fsdp", seconds=9.0, simulated=simulated)
        assert searches._PlanSearch._has_tried(search, method) is bool(simulated)


def test_plans_without_pipeline_shard_across_nodes():
    recipe, _, profile = random_recipe(0)
    training = recipe.training.model_copy(update={"global_batch_size": 256})
    recipe = recipe.model_copy(update={"training": training})
    plans = root_plans("fsdp", recipe, 256, profile, StepSample(recipe))
    shards = {plan.size("shard") for plan in plans if plan.size("tensor") == 1}
    assert shards >= {1, 8, 16, 32, 64, 128, 256}


@pytest.mark.parametrize("reorder", ["none", "intra"])
def test_search_varies_reordering_of_recipe(reorder):
    recipe, devices, profile = random_recipe(0)
    data = recipe.data.model_copy(update={"reorder": reorder})
    recipe = recipe.model_copy(update={"data": data})
    sample = StepSample(recipe)
    for method, expected in (("fsdp", {"none", "intra"}), ("chain", {"none", "intra", "both"})):
        plans = root_plans(method, recipe, devices, profile, sample)
        plan = next(plan for plan in plans if plan.data_parallel > 1)
        values = {plan.changes["data.reorder"]}
        values |= {other.changes["data.reorder"] for other in neighbors(plan, recipe, sample)}
        assert values == expected
        assert apply_plan(recipe, plan).data.reorder == plan.changes["data.reorder"]


def test_recipe_with_open_segments_is_simulated_late(monkeypatch):
    """Check the order. Choosing segments takes seconds, and each method needs a first plan."""
    recipe, devices, profile = random_recipe(0)
    changes = {"pipeline": 2, "schedule": "searched"}
    open_recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})
    order = []
    simulate = searches._PlanSearch._simulate

    def recorded(self, method, plan, **options):
        order.append(method.name)
        return simulate(self, method, plan, **options)

    monkeypatch.setattr(searches._PlanSearch, "_simulate", recorded)
    monkeypatch.setattr(searches, "recipe_candidate", lambda *_: order.append("recipe"))
    for tried, first in ((open_recipe, "fsdp"), (recipe, "recipe")):
        order.clear()
        search_plans(tried, devices, profile, methods=("fsdp",), budget_s=inf, max_actions=1_000)
        assert order[0] == first and order.count("recipe") == 1


def test_plans_without_a_step_count_as_effort(monkeypatch):
    recipe, devices, profile = random_recipe(0)
    failed = SimulatedStepReport("1f1b", problem="no schedule of the step fits")
    monkeypatch.setattr(StepSimulator, "simulate_parallel", lambda *_: failed)
    result = search_plans(recipe, devices, profile, methods=("chain",), budget_s=inf, max_actions=1)
    assert not result.complete and result.simulated["chain"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_search_without_time_returns_recipe_sizes(seed):
    """Check that the plan of the recipe is a candidate, so that no result is slower."""
    recipe, devices, profile = random_recipe(seed)
    sample = StepSample(recipe)
    plan = next(iter(root_plans("fsdp", recipe, devices, profile, sample)))
    planned = apply_plan(strip_parallelism(recipe), plan)
    expected = StepSimulator(planned, plan.devices, profile, sample=sample).simulate_schedule()
    result = search_plans(planned, plan.devices, profile, budget_s=0.0, sample=sample)
    if expected.step is None or not fits(expected.step):
        assert result.best is None
        return
    assert result.best.method == "fsdp" and result.best.recipe is planned
    assert result.best.step_ms == expected.iteration_ms
