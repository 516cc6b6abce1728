"""Encoders in bubbles recompute where a step would not fit into memory, and only there."""

from dataclasses import replace
from functools import cache

import tomli
from simulated_parts import ENCODER, LLM

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.forecasts import forecast as forecasts
from torchmm.balance.forecasts.forecast import Forecast, Forecaster, StepSample
from torchmm.balance.pipeweaver.recomputation.costs import costs_of_plan
from torchmm.balance.run_costs import run_costs
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.recipe.recipe import Recipe

RECIPE = f"""
name = "tiny"
{LLM}{ENCODER.format(name="vision")}
[parallel]
pipeline = 4
virtual_stages = 2
placement = "colocated"
schedule = "optimus"
shard = 1
[parallel.vision]
segments = 2
[training]
sequence_length = 512
global_batch_size = 16
steps = 10
dtype = "bfloat16"
[simulation]
device = "a100"
gpus = 4
"""
RANKS = 4
PROFILE = load_profile("a100")
MUCH = 40 << 30
SHARES = (0.7, 0.5, 0.3, 0.1)
"""Of the way from the leanest step that can be planned to what keeps everything."""


def recipe(limit: int, mode: str = "none") -> Recipe:
    content = tomli.loads(RECIPE)
    content["activation_checkpoint"] = {
        "memory_limit": f"{limit / 2**20:.6f} MiB",
        "modules": {"vision": mode},
    }
    return Recipe.model_validate(content)


@cache
def sample() -> StepSample:
    return StepSample(recipe(MUCH))


def forecaster(limit: int, mode: str = "none") -> Forecaster:
    return Forecaster(recipe(limit, mode), RANKS, PROFILE, sample=sample())


@cache
def forecast(limit: int, mode: str = "none") -> Forecast:
    return forecaster(limit, mode).forecast()


def step(limit: int, mode: str = "none") -> SimulatedStep:
    found = forecast(limit, mode).step
    assert found is not None, forecast(limit, mode).problem
    return found


def limits() -> list[int]:
    most = max(step(MUCH).peak_bytes)
    least = max(step(1 << 20).peak_bytes)  # nothing can be that lean: everything is recomputed
    assert least < 0.9 * most
    return [round(least + share * (most - least)) for share in SHARES]


def vision_tasks(found: SimulatedStep) -> set:
    stages = found.plan.graph.layout.stages
    return {task for task in found.plan.graph.tasks() if stages[task.stage].module == "vision"}


def test_a_step_that_fits_is_planned_as_if_there_were_no_bound(monkeypatch):
    bounded = [step(MUCH), step(max(step(MUCH).peak_bytes))]
    with monkeypatch.context() as patch:
        patch.setattr(forecasts, "layer_tuning", lambda *_, **__: None)
        free = forecaster(1).forecast().step
    assert free is not None
    for found in bounded:
        assert not found.plan.recompute
        assert found.plan.actions == free.plan.actions
        assert found.makespan_ms == free.makespan_ms


def test_where_memory_is_short_some_encoder_tasks_recompute_and_it_suffices():
    free, full = step(MUCH), step(MUCH, "full")
    counts = []
    for limit in limits():
        found = step(limit)
        assert max(free.peak_bytes) > limit, "or the bound has nothing to do"
        assert max(found.peak_bytes) <= limit
        assert set(found.plan.recompute) <= vision_tasks(found)
        assert free.makespan_ms <= found.makespan_ms + 1e-9
        assert found.makespan_ms <= full.makespan_ms, "no more than recomputing all of it"
        counts.append(len(found.plan.recompute))
    assert any(0 < count < len(vision_tasks(free)) for count in counts), counts
    assert counts[-1] >= counts[0]


def test_no_task_recomputes_in_vain():
    for limit in limits():
        found = step(limit)
        made = forecaster(limit)
        model = run_costs(made.run, made.modules, PROFILE)
        for task in found.plan.recompute:
            rest = {key: modes for key, modes in found.plan.recompute.items() if key != task}
            plan = replace(found.plan, recompute=rest)
            costs = costs_of_plan(plan, made.modules, made.workload.microbatches, model)
            assert max(simulate(plan, costs).peak_bytes) > limit, task


def test_what_cannot_fit_recomputes_all_and_is_refused_only_if_that_was_asked_for():
    least = step(1 << 20)
    trained = [t for t in vision_tasks(least) if least.plan.graph.needs_backward(t.stage, t[1])]
    assert set(least.plan.recompute) == set(trained)
    assert {mode for modes in least.plan.recompute.values() for mode in modes} == {"full"}
    refused = forecast(1 << 20, "auto")
    assert refused.step is None and "even with full recomputation of all layers" in refused.problem


def test_other_modes_and_schedules_are_as_the_recipe_says():
    limit = limits()[-1]
    assert not step(limit, "full").plan.recompute
    other = forecaster(limit).forecast("1f1b").step
    assert other is not None and not other.plan.recompute
