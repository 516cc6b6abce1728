"""Forecasts of ranks that run layers in lockstep, compared with ranks played one by one."""

import random
from pathlib import Path

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.forecasts.dry_run import describe_run
from torchmm.balance.forecasts.forecast import Forecaster
from torchmm.balance.run_costs import run_costs
from torchmm.common.errors import ConfigError
from torchmm.recipe.recipe import Recipe

RECIPE = (Path(__file__).parent / "test_forecast.py").read_text().split('"""')[3]
PROFILE = load_profile("h100")
LAYERS = 4
"""Barriers of an action in the played step."""


def draw_recipe(seed: int, **parallel: object) -> Recipe:
    rng = random.Random(seed)
    table = tomli.loads(RECIPE)
    table["parallel"] = {"schedule": "1f1b", **parallel}
    table["activation_checkpoint"] = {"mode": rng.choice(("none", "full"))}
    table["training"] |= {"global_batch_size": 8 * rng.randint(2, 4), "sequence_length": 8192}
    wide = {"hidden_size": 2048, "intermediate_size": 8192}
    table["model"]["llm"]["config"] |= wide
    table["model"]["encoders"]["vision"]["config"] |= wide | {"image_size": 256}
    images = {"vision": {"patches": 256, "tokens": 256}}
    kinds = [{"images": [0, 30]}]
    table["simulation"] |= {"seed": seed, "sequences": kinds, "images": images}
    table["data"] = {"reorder": "none", "balance": "none"}
    return Recipe.model_validate(table)


def rank_costs(made: Forecaster) -> list[dict]:
    """Times of every rank, as if it were alone, by action; all ranks have the same actions."""
    step = made.forecast().step
    model = run_costs(made.run, made.modules, PROFILE)
    by_layer = made.run.gathers_by_layer
    return [
        plan_costs(step.plan.graph, made.modules, share, model, layerwise=by_layer).compute_ms
        for share in made.shares
    ]


def play(times: list[dict], program: list, group: int) -> float:
    """End of a step in which the ranks of each group wait for each other in every layer."""
    clocks_ms = [0.0] * len(times)
    for action in program:
        for _ in range(LAYERS):
            for rank, own in enumerate(times):
                clocks_ms[rank] += own[action] / LAYERS
            for first in range(0, len(times), group):
                members = slice(first, first + group)
                clocks_ms[members] = [max(clocks_ms[members])] * group
    return max(clocks_ms)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shard", [8, 4, 2])
def test_forecast_of_lockstep_ranks_equals_played_step(seed, shard):
    made = Forecaster(draw_recipe(seed, shard=shard, replicate=8 // shard), 8, PROFILE)
    assert made.run.lockstep_shares == shard
    times = rank_costs(made)
    step = made.forecast().step
    program = [a for a in step.plan.actions[0] if a in times[0]]
    assert step.makespan_ms == pytest.approx(play(times, program, shard), rel=1e-6)
    if seed == 3:
        assert step.makespan_ms > 1.02 * play(times, program, 1), "ranks are equal"


def test_forecast_of_sorted_shares_is_shorter():
    """Negative control: the same microbatches take longer if unequal ones meet."""
    made = Forecaster(draw_recipe(3, shard=8), 8, PROFILE)
    made.shares = [sorted(own, key=lambda meta: meta.image_count) for own in made.shares]
    shuffled = made.forecast().step.makespan_ms
    costs = run_costs(made.run, made.modules, PROFILE)
    made.workload = made._slowest(8, costs)
    assert made.forecast().step.makespan_ms < 0.98 * shuffled


@pytest.mark.parametrize("reshard", ["default", "never"])
def test_mfu_counts_mean_flops_of_ranks(reshard):
    recipe = draw_recipe(5, shard=8, reshard_after_forward=reshard)
    made = Forecaster(recipe, 8, PROFILE)
    found = made.forecast()
    peak = 8 * PROFILE.device.peak_flops["bfloat16"]
    flops = found.mfu * peak * found.iteration_ms / 1e3
    assert flops == pytest.approx(made.sample.flops, rel=0.02)  # dummy images, image positions
    assert len(made.workload.peers) == (8 if reshard == "default" else 0)


def test_recomputation_is_tuned_for_slowest_ranks():
    recipe = draw_recipe(2, shard=8)

    def forecast(mode: str, limit: str = "100%"):
        section = recipe.activation_checkpoint.model_copy(
            update={"mode": mode, "memory_limit": limit}
        )
        changed = recipe.model_copy(update={"activation_checkpoint": section})
        return Forecaster(changed, 8, PROFILE).forecast().step

    none, full = forecast("none"), forecast("full")
    least, most = max(full.peak_bytes), max(none.peak_bytes)
    limit = least + (most - least) // 2
    tuned = forecast("auto", f"{limit / 2**20:.3f} MiB")
    assert least < max(tuned.peak_bytes) <= limit + 2**11
    assert none.makespan_ms < tuned.makespan_ms < full.makespan_ms


def test_expert_ranks_of_pipeline_share_llm_times_only():
    made = Forecaster(draw_recipe(1, shard=4, pipeline=2), 8, PROFILE)
    graph = made.forecast().step.plan.graph
    assert made.run.lockstep_shares == 1
    parallel = made.recipe.parallel.model_copy(update={"expert": 4})
    model = run_costs(made.run.with_parallel(parallel), made.modules, PROFILE)
    assert made.run.with_parallel(parallel).lockstep_shares == 4
    alone = [plan_costs(graph, made.modules, own, model).compute_ms for own in made.shares]
    costs = plan_costs(graph, made.modules, made.shares[0], model, peers=made.shares)
    for action, ms in costs.compute_ms.items():
        is_llm = graph.layout.stages[action.stage].module == "llm"
        times = [own[action] for own in (alone if is_llm else alone[:1])]
        assert ms == pytest.approx(max(times))


def test_dry_run_shows_both_gradient_reductions():
    recipe = draw_recipe(0, shard=8)
    lines = dict(line.split("  ", 1) for line in describe_run(recipe, 8).splitlines())
    once, each = (
        Forecaster(own, 8, load_profile("a100")).forecast()
        for own in (recipe, reduced_each(recipe))
    )
    assert f"{each.iteration_ms:,.1f} ms" in lines["gradients"]
    assert f"{max(each.step.peak_bytes) / 2**30:.2f} GiB" in lines["gradients"]
    assert max(each.step.peak_bytes) < max(once.step.peak_bytes)
    assert "gradient_reduction" not in describe_run(draw_recipe(0, shard=4, pipeline=2), 8)


def test_dry_run_names_reduction_that_fits(tmp_path):
    recipe = draw_recipe(0, shard=8)
    peaks = [
        max(Forecaster(own, 8, load_profile("a100")).forecast().step.peak_bytes)
        for own in (recipe, reduced_each(recipe))
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
