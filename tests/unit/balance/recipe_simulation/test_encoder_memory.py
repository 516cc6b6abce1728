"""Tests of encoder recomputation in bubbles: only if a step exceeds the memory limit."""

from dataclasses import replace
from functools import cache

import tomli
from simulated_parts import ENCODER, LLM

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.recipe_simulation import step_simulator as forecasts
from torchmm.balance.recipe_simulation.step_simulator import (
    SimulatedStepReport,
    StepSample,
    StepSimulator,
)
from torchmm.balance.run_costs import build_cost_model
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
UNLIMITED = 40 << 30
SHARES = (0.7, 0.5, 0.3, 0.1)
"""Fractions between the lowest possible peak memory and the peak without recomputation."""


def recipe(limit: int, mode: str = "none") -> Recipe:
    content = tomli.loads(RECIPE)
    content["activation_checkpoint"] = {
        "memory_limit": f"{limit / 2**20:.6f} MiB",
        "modules": {"vision": mode},
    }
    return Recipe.model_validate(content)


@cache
def sample() -> StepSample:
    return StepSample(recipe(UNLIMITED))


def forecaster(limit: int, mode: str = "none") -> StepSimulator:
    return StepSimulator(recipe(limit, mode), RANKS, PROFILE, sample=sample())


@cache
def forecast(limit: int, mode: str = "none") -> SimulatedStepReport:
    return forecaster(limit, mode).simulate_schedule()


def step(limit: int, mode: str = "none") -> SimulatedStep:
    simulated = forecast(limit, mode).step
    assert simulated is not None, forecast(limit, mode).problem
    return simulated


def limits() -> list[int]:
    maximum = max(step(UNLIMITED).peak_bytes)
    minimum = max(step(1 << 20).peak_bytes)  # no step satisfies this limit: all tasks recompute
    assert minimum < 0.9 * maximum
    return [round(minimum + share * (maximum - minimum)) for share in SHARES]


def vision_tasks(simulated: SimulatedStep) -> set:
    stages = simulated.plan.graph.layout.stages
    return {task for task in simulated.plan.graph.tasks() if stages[task.stage].module == "vision"}


def test_ample_memory_keeps_plan_unchanged(monkeypatch):
    bounded = [step(UNLIMITED), step(max(step(UNLIMITED).peak_bytes))]
    with monkeypatch.context() as patch:
        patch.setattr(forecasts, "build_layer_tuning", lambda *_, **__: None)
        free = forecaster(1).simulate_schedule().step
    assert free is not None
    for simulated in bounded:
        assert not simulated.plan.recompute
        assert simulated.plan.actions == free.plan.actions
        assert simulated.makespan_ms == free.makespan_ms


def test_encoder_tasks_recompute_to_satisfy_limit():
    free, full = step(UNLIMITED), step(UNLIMITED, "full")
    counts = []
    for limit in limits():
        simulated = step(limit)
        assert max(free.peak_bytes) > limit, "the limit has no effect"
        assert max(simulated.peak_bytes) <= limit
        assert set(simulated.plan.recompute) <= vision_tasks(simulated)
        assert free.makespan_ms <= simulated.makespan_ms + 1e-9
        assert simulated.makespan_ms <= full.makespan_ms, "slower than full recomputation"
        counts.append(len(simulated.plan.recompute))
    assert any(0 < count < len(vision_tasks(free)) for count in counts), counts
    assert counts[-1] >= counts[0]


def test_every_recomputed_task_is_necessary():
    for limit in limits():
        simulated = step(limit)
        simulator = forecaster(limit)
        model = build_cost_model(simulator.run, simulator.modules, PROFILE)
        for task in simulated.plan.recompute:
            others_modes = {
                key: modes for key, modes in simulated.plan.recompute.items() if key != task
            }
            plan = replace(simulated.plan, recompute=others_modes)
            costs = compute_plan_costs_with_recompute(
                plan, simulator.modules, simulator.workload.microbatches, model
            )
            assert max(simulate(plan, costs).peak_bytes) > limit, task


def test_unsatisfiable_limit_recomputes_all():
    minimal = step(1 << 20)
    trained = [t for t in vision_tasks(minimal) if minimal.plan.graph.needs_backward(t.stage, t[1])]
    assert set(minimal.plan.recompute) == set(trained)
    assert {mode for modes in minimal.plan.recompute.values() for mode in modes} == {"full"}
    rejected = forecast(1 << 20, "auto")
    assert (
        rejected.step is None and "even with full recomputation of all layers" in rejected.problem
    )


def test_explicit_modes_ignore_memory_limit():
    limit = limits()[-1]
    assert not step(limit, "full").plan.recompute
    other = forecaster(limit).simulate_schedule("1f1b").step
    assert other is not None and not other.plan.recompute
