"""Searched schedules give the loss and gradients of the single process in every batch.

Every batch has different images and is planned with different relative speeds of the modules, so
that schedules differ. Data-parallel replicas plan their own microbatches. Every second plan is
tuned to a memory limit half-way between its bounds.
"""

import random

import pytest
from launch import run_distributed
from microbatches import COMPOSITES, TOLERANCES, towers_of, with_patches
from pipeline_cases import gradient_errors, shared_losses
from searched_cases import CPU, batch_of, build_searched
from tuned_limits import half_way

from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.parallel_section import ParallelConfig

BATCHES = 12
LAYOUTS = {
    2: [{"pipeline": 2, "virtual_stages": 2}],
    4: [{"pipeline": 4}, {"pipeline": 2, "shard": 2}],
}
"""Layouts by number of ranks."""


def compute_order(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


def compare(layout: dict[str, int], composite: str = "") -> tuple[list[str], int, int]:
    """Compare all batches with the single process.

    Returns:
        Problems, the number of schedules that differ from the separated schedule, and the number of
        plans that recompute layers.
    """
    searched_model = build_searched(layout, composite, evaluations=80)
    tolerance = TOLERANCES.get(composite, 1e-5)
    problems, searched, tuned = [], 0, 0
    for seed in range(BATCHES // 2 if composite else BATCHES):
        speed = random.Random(seed)
        batch = batch_of(seed)
        if composite:
            batch = [with_patches(microbatch, composite) for microbatch in batch]
        targets = sum(m.target_count for m in batch)
        factors = {
            (name, kind): speed.choice((0.3, 1.0, 3.0))
            for name in ("llm", *towers_of(composite))
            for kind in (ActionType.F, ActionType.B)
        }
        searched_model.model.zero_grad(set_to_none=True)
        share = searched_model.share(batch)
        tuning = None
        if seed % 2:
            tuning = half_way(searched_model.pipeline, [m.meta for m in share], factors)
        metas = [m.task_meta for m in share]
        plan = plan_pipeline_step(searched_model.pipeline, metas, factors=factors, tuning=tuning)
        outcome = searched_model.step.run(plan, share, targets)
        tuned += bool(outcome.plan.recompute)
        loss = searched_model.mesh.sum_over_data_parallel(
            [outcome.loss.item() * searched_model.mesh.plan_size]
        )[0]
        expected = sum(shared_losses(searched_model.alone, [batch], targets)[0]) / targets
        if abs(loss / expected - 1) > 1e-5:
            problems.append(f"batch {seed}: loss {loss}, expected {expected}")
        errors = gradient_errors(searched_model.model, searched_model.alone)
        problems += [
            f"batch {seed}: {n} off by {e}" for n, e in errors.items() if not e <= tolerance
        ]
        static = [list(row) for row in separated(outcome.plan.graph)]
        searched += compute_order(outcome.plan) != static
    return problems, searched, tuned


def compare_all(
    layouts: list[dict[str, int]], composite: str = ""
) -> list[tuple[list[str], int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    return [compare(layout, composite) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS, ids=["pp2", "pp4 and pp2 x fsdp2"])
def test_searched_plans_equal_single_process(ranks):
    for rank, results in enumerate(run_distributed(compare_all, ranks, LAYOUTS[ranks])):
        assert len(results) == len(LAYOUTS[ranks])
        for layout, (problems, searched, tuned) in zip(LAYOUTS[ranks], results, strict=True):
            assert not problems, (rank, layout, problems)
            assert searched > BATCHES // 3, (rank, layout)
            assert BATCHES // 3 < tuned <= BATCHES // 2, (rank, layout)


@pytest.mark.slow
@pytest.mark.parametrize("composite", COMPOSITES)
def test_searched_multimodal_plans_equal_single_process(composite):
    layout = {"pipeline": 2, "virtual_stages": 2}
    for rank, results in enumerate(run_distributed(compare_all, 2, [layout], composite)):
        ((problems, searched, _),) = results
        assert not problems, (rank, problems)
        assert searched, rank
