"""Searched orders with a generator give the losses and gradients of one process.

Sub-microbatches hold images and clips of different sizes. Every batch is planned with several
speeds of modules, and every other plan is tuned to half-way the memory it could use.
"""

import random

import pytest
import torch
from launch import run_distributed
from shared_reference import on_first_rank
from test_generator_equality import WEIGHTS, GeneratorReference, Shape, a_model, filled, references
from test_schedule_equality import _gradient_problems
from tuned_limits import half_way

from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.common.batch import Microbatch
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.cut import cut_for_rank
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
SHAPE = Shape(deep=True, tied=False)
"""Deep, and not tied."""
SPEEDS = 4
"""Of modules, with which each step is planned."""
FREEZES = ("nothing", "LLM", "generator")
PARALLEL = {
    "pipeline": 2,
    "shard": 1,
    "schedule": "searched",
    "vision": {"sub_microbatch_images": 2},
    "generator": {"sub_microbatch_images": 2, "segments": 2},
    "search": {"evaluations": 80},
}


def draws_different_sizes(batch: list[Microbatch], images: int) -> bool:
    """Whether images that are next to each other in a sub-microbatch differ in patches."""
    drawn = [[image.patches for image in m.meta.generated] for m in batch]
    return any(len(set(own[:images])) > 1 for own in drawn)


def order_of(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


class Searching:
    """One rank of a pipeline of two that searches its orders. Creating it is collective."""

    def __init__(self, freeze: str, mesh: ParallelMesh, wanted: list[GeneratorReference]) -> None:
        config = ParallelConfig.model_validate(PARALLEL)
        self.mesh, self.wanted, self.model = mesh, wanted, a_model(freeze, SHAPE)
        descriptions = [module.describe() for module in self.model.modality_modules()]
        layout = plan_layout(config, descriptions, [m.meta for m in wanted[0].batch])
        stages = cut_for_rank(self.model, layout, mesh.pipeline_rank)
        tuned = ActivationCheckpointConfig(mode="auto")
        parallelize(self.model, mesh, config, tuned, CompileConfig(), torch.float32)
        filled(self.model)
        self.pipeline = Pipeline(
            self.model, stages, layout, descriptions, config, mesh, torch.float32
        )

    def problems(
        self, number: int, seed: int, weights: dict[str, float]
    ) -> tuple[list[str], PipelinePlan]:
        """Of a step, planned with speeds that follow the seed; and its plan."""
        reference, speed = self.wanted[number], random.Random(f"{number} {seed}")
        batch = reference.batch
        factors = {
            (name, kind): speed.choice((0.3, 1.0, 3.0))
            for name in ("vision", "llm", "generator")
            for kind in (ActionType.F, ActionType.B)
        }
        tuning = half_way(self.pipeline, [m.meta for m in batch], factors) if seed % 2 else None
        metas = [m.task_meta for m in batch]
        plan = plan_pipeline_step(self.pipeline, metas, factors=factors, tuning=tuning)
        self.model.zero_grad(set_to_none=True)
        step = TrainStep(self.pipeline, self.mesh, weights)
        outcome = step.run(plan, batch, reference.targets, reference.images)
        loss = self.mesh.sum_over_data([outcome.loss.item() * self.mesh.pipeline_size])[0]
        found = [] if abs(loss / reference.loss - 1) <= 1e-5 else [f"{loss}, not {reference.loss}"]
        return found + _gradient_problems(number, self.model, reference, self.mesh), outcome.plan


def search_all() -> list[tuple[list[str], int, int, int]]:
    """By what is frozen: problems; orders other than the separated one, plans that recompute, and
    problems with a wrong weight of the drawings' loss."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    mesh = build_mesh(ParallelConfig.model_validate({"pipeline": 2, "shard": 1}), CPU)
    found = []
    for freeze in FREEZES:
        wanted = on_first_rank(lambda freeze=freeze: references(freeze, SHAPE))
        assert draws_different_sizes(wanted[0].batch, 2)
        run = Searching(freeze, mesh, wanted)
        problems, others, tuned = [], 0, 0
        for number in range(len(wanted)):
            for seed in range(SPEEDS):
                wrong, plan = run.problems(number, seed, WEIGHTS)
                problems += wrong
                others += order_of(plan) != [list(row) for row in separated(plan.graph)]
                tuned += bool(plan.recompute)
        wrong, _ = run.problems(0, 0, {**WEIGHTS, "generator": 1.01 * WEIGHTS["generator"]})
        found.append((problems, others, tuned, len(wrong)))
    return found


@pytest.mark.campaign
def test_searched_orders_with_a_generator_equal_one_process():
    for rank, found in enumerate(run_distributed(search_all, 2)):
        assert len(found) == len(FREEZES)
        for freeze, (problems, others, tuned, wrong) in zip(FREEZES, found, strict=True):
            assert not problems, (rank, freeze, problems)
            assert others >= SPEEDS, (rank, freeze, others)
            assert tuned >= SPEEDS, (rank, freeze, tuned)
            assert wrong, (rank, freeze, "a wrong weight went unnoticed")
