"""Tests of simulated ranks that run layers in lockstep, against a naive simulation of all ranks."""

import random
from pathlib import Path

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import build_cost_model
from torchmm.common.errors import ConfigError
from torchmm.recipe.recipe import Recipe

RECIPE = (Path(__file__).parent / "test_forecast.py").read_text().split('"""')[3]
PROFILE = load_profile("h100")
LAYERS = 4
"""Number of barriers per action in the naive simulation."""


def random_recipe(seed: int, **parallel: object) -> Recipe:
    rng = random.Random(seed)
    content = tomli.loads(RECIPE)
    content["parallel"] = {"schedule": "1f1b", **parallel}
    content["activation_checkpoint"] = {"mode": rng.choice(("none", "full"))}
    content["training"] |= {"global_batch_size": 8 * rng.randint(2, 4), "sequence_length": 8192}
    wide = {"hidden_size": 2048, "intermediate_size": 8192}
    content["model"]["llm"]["config"] |= wide
    content["model"]["encoders"]["vision"]["config"] |= wide | {"image_size": 256}
    images = {"vision": {"patches": 256, "tokens": 256}}
    kinds = [{"images": [0, 30]}]
    content["simulation"] |= {"seed": seed, "sequences": kinds, "images": images}
    content["data"] = {"reorder": "none", "balance": "none"}
    return Recipe.model_validate(content)


def rank_costs(simulator: StepSimulator) -> list[dict]:
    """Return the times of every rank without synchronization, by action."""
    step = simulator.simulate_schedule().step
    model = build_cost_model(simulator.run, simulator.modules, PROFILE)
    by_layer = simulator.run.unshards_per_layer
    return [
        compute_plan_costs(
            step.plan.graph, simulator.modules, share, model, layerwise=by_layer
        ).compute_ms
        for share in simulator.shares
    ]


def naive_step_ms(times: list[dict], program: list, group: int) -> float:
    """Return the step time if the ranks of each group synchronize in every layer."""
    clocks_ms = [0.0] * len(times)
    for action in program:
        for _ in range(LAYERS):
            for rank, actions_ms in enumerate(times):
                clocks_ms[rank] += actions_ms[action] / LAYERS
            for first in range(0, len(times), group):
                members = slice(first, first + group)
                clocks_ms[members] = [max(clocks_ms[members])] * group
    return max(clocks_ms)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shard", [8, 4, 2])
def test_lockstep_simulation_matches_naive_simulation(seed, shard):
    simulator = StepSimulator(random_recipe(seed, shard=shard, replicate=8 // shard), 8, PROFILE)
    assert simulator.run.lockstep_size == shard
    times = rank_costs(simulator)
    step = simulator.simulate_schedule().step
    program = [a for a in step.plan.actions[0] if a in times[0]]
    assert step.makespan_ms == pytest.approx(naive_step_ms(times, program, shard), rel=1e-6)
    if seed == 3:
        assert step.makespan_ms > 1.02 * naive_step_ms(times, program, 1), "ranks are equal"


def test_sorted_microbatches_shorten_lockstep_step():
    """Check that the same microbatches take longer if unequal microbatches are synchronized."""
    simulator = StepSimulator(random_recipe(3, shard=8), 8, PROFILE)
    simulator.shares = [
        sorted(share, key=lambda meta: meta.image_count) for share in simulator.shares
    ]
    shuffled = simulator.simulate_schedule().step.makespan_ms
    costs = build_cost_model(simulator.run, simulator.modules, PROFILE)
    simulator.workload = simulator._slowest(8, costs)
    assert simulator.simulate_schedule().step.makespan_ms < 0.98 * shuffled


@pytest.mark.parametrize("reshard", ["default", "never"])
def test_mfu_uses_mean_flops_of_ranks(reshard):
    recipe = random_recipe(5, shard=8, reshard_after_forward=reshard)
    simulator = StepSimulator(recipe, 8, PROFILE)
    simulated = simulator.simulate_schedule()
    peak = 8 * PROFILE.device.peak_flops["bfloat16"]
    flops = simulated.mfu * peak * simulated.iteration_ms / 1e3
    assert flops == pytest.approx(
        simulator.sample.flops, rel=0.02
    )  # except dummy images and positions
    assert len(simulator.workload.peers) == (8 if reshard == "default" else 0)


def test_auto_checkpointing_is_limited_by_slowest_ranks():
    recipe = random_recipe(2, shard=8)

    def forecast(mode: str, limit: str = "100%"):
        section = recipe.activation_checkpoint.model_copy(
            update={"mode": mode, "memory_limit": limit}
        )
        changed = recipe.model_copy(update={"activation_checkpoint": section})
        return StepSimulator(changed, 8, PROFILE).simulate_schedule().step

    none, full = forecast("none"), forecast("full")
    minimum, maximum = max(full.peak_bytes), max(none.peak_bytes)
    limit = minimum + (maximum - minimum) // 2
    tuned = forecast("auto", f"{limit / 2**20:.3f} MiB")
    assert minimum < max(tuned.peak_bytes) <= limit + 2**11
    assert none.makespan_ms < tuned.makespan_ms < full.makespan_ms


def test_expert_ranks_synchronize_llm_times_only():
    simulator = StepSimulator(random_recipe(1, shard=4, pipeline=2), 8, PROFILE)
    graph = simulator.simulate_schedule().step.plan.graph
    assert simulator.run.lockstep_size == 1
    parallel = simulator.recipe.parallel.model_copy(update={"expert": 4})
    model = build_cost_model(simulator.run.with_parallel(parallel), simulator.modules, PROFILE)
    assert simulator.run.with_parallel(parallel).lockstep_size == 4
    alone = [
        compute_plan_costs(graph, simulator.modules, share, model).compute_ms
        for share in simulator.shares
    ]
    costs = compute_plan_costs(
        graph, simulator.modules, simulator.shares[0], model, peers=simulator.shares
    )
    for action, ms in costs.compute_ms.items():
        is_llm = graph.layout.stages[action.stage].module == "llm"
        times = [share[action] for share in (alone if is_llm else alone[:1])]
        assert ms == pytest.approx(max(times))


def test_dry_run_shows_both_gradient_reductions():
    recipe = random_recipe(0, shard=8)
    lines = dict(line.split("  ", 1) for line in describe_run(recipe, 8).splitlines())
    once, each = (
        StepSimulator(variant, 8, load_profile("a100")).simulate_schedule()
        for variant in (recipe, reduced_each(recipe))
    )
    assert f"{each.iteration_ms:,.1f} ms" in lines["gradients"]
    assert f"{max(each.step.peak_bytes) / 2**30:.2f} GiB" in lines["gradients"]
    assert max(each.step.peak_bytes) < max(once.step.peak_bytes)
    assert "gradient_reduction" not in describe_run(random_recipe(0, shard=4, pipeline=2), 8)


def test_dry_run_names_reduction_that_fits(tmp_path):
    recipe = random_recipe(0, shard=8)
    peaks = [
        max(StepSimulator(variant, 8, load_profile("a100")).simulate_schedule().step.peak_bytes)
        for variant in (recipe, reduced_each(recipe))
    ]
    small = tmp_path / "small.toml"
    small.write_text(f'base = "a100"\n[device]\nmemory_bytes = {sum(peaks) / 2}\n')
    recipe.simulation.__dict__["device"] = str(small)
    with pytest.raises(ConfigError, match=r'use parallel\.gradient_reduction = "microbatch"'):
        describe_run(recipe, 8)
    assert "does not fit" in describe_run(reduced_each(recipe), 8)


def reduced_each(recipe: Recipe) -> Recipe:
    each = recipe.parallel.model_copy(update={"gradient_reduction": "microbatch"})
    return recipe.model_copy(update={"parallel": each})
