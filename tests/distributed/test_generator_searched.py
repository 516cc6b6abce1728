"""Searched schedules of models with a generator give the losses and gradients of one process.

Sub-microbatches have images and videos of different sizes. Every batch is planned with several
relative speeds of the modules. Every second plan is tuned to a memory limit half-way between its
bounds.
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
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
SHAPE = Shape(deep=True, tied=False)
"""Deep model with untied embeddings."""
SPEEDS = 4
"""Number of speed combinations of the modules, each of which has a plan."""
FREEZES = ("nothing", "LLM", "generator")
PARALLEL = {
    "pipeline": 2,
    "shard": 1,
    "schedule": "searched",
    "vision": {"sub_microbatch_images": 2},
    "generator": {"sub_microbatch_images": 2, "segments": 2},
    "search": {"evaluations": 80},
}


def has_different_sizes(batch: list[Microbatch], images: int) -> bool:
    """Return True if adjacent images of a sub-microbatch have different patch counts."""
    patches_per_microbatch = [[image.patches for image in m.meta.generated] for m in batch]
    return any(len(set(patches[:images])) > 1 for patches in patches_per_microbatch)


def order_of(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


class SearchedRun:
    """A rank of a two-stage pipeline with a searched schedule. Construction is collective."""

    def __init__(self, freeze: str, mesh: ParallelMesh, expected: list[GeneratorReference]) -> None:
        config = ParallelConfig.model_validate(PARALLEL)
        self.mesh, self.expected, self.model = mesh, expected, a_model(freeze, SHAPE)
        descriptions = [module.describe() for module in self.model.modality_modules()]
        layout = plan_layout(config, descriptions, [m.meta for m in expected[0].batch])
        stages = split_model_for_rank(self.model, layout, mesh.plan_rank)
        tuned = ActivationCheckpointConfig(mode="auto")
        parallelize(self.model, mesh, config, tuned, CompileConfig(), torch.float32)
        filled(self.model)
        self.pipeline = Pipeline(
            self.model, stages, layout, descriptions, config, mesh, torch.float32
        )

    def problems(
        self, number: int, seed: int, weights: dict[str, float]
    ) -> tuple[list[str], PipelinePlan]:
        """Run a step that is planned with speeds of this seed. Return its problems and plan."""
        reference, speed = self.expected[number], random.Random(f"{number} {seed}")
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
        loss = self.mesh.sum_over_data_parallel([outcome.loss.item() * self.mesh.plan_size])[0]
        problems = (
            [] if abs(loss / reference.loss - 1) <= 1e-5 else [f"{loss}, not {reference.loss}"]
        )
        return problems + _gradient_problems(number, self.model, reference, self.mesh), outcome.plan


def search_all() -> list[tuple[list[str], int, int, int]]:
    """Run all steps for each set of frozen modules.

    Returns:
        Per set: problems, the number of plans that differ from the separated schedule, the number
        of plans that recompute, and the problems with a wrong coefficient of the image loss.
    """
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    mesh = build_mesh(ParallelConfig.model_validate({"pipeline": 2, "shard": 1}), CPU)
    results = []
    for freeze in FREEZES:
        expected = on_first_rank(lambda freeze=freeze: references(freeze, SHAPE))
        assert has_different_sizes(expected[0].batch, 2)
        run = SearchedRun(freeze, mesh, expected)
        problems, searched, tuned = [], 0, 0
        for number in range(len(expected)):
            for seed in range(SPEEDS):
                step_problems, plan = run.problems(number, seed, WEIGHTS)
                problems += step_problems
                searched += order_of(plan) != [list(row) for row in separated(plan.graph)]
                tuned += bool(plan.recompute)
        step_problems, _ = run.problems(0, 0, {**WEIGHTS, "generator": 1.01 * WEIGHTS["generator"]})
        results.append((problems, searched, tuned, len(step_problems)))
    return results


@pytest.mark.campaign
def test_searched_generator_schedules_equal_one_process():
    for rank, results in enumerate(run_distributed(search_all, 2)):
        assert len(results) == len(FREEZES)
        for freeze, (problems, searched, tuned, control_problems) in zip(
            FREEZES, results, strict=True
        ):
            assert not problems, (rank, freeze, problems)
            assert searched >= SPEEDS, (rank, freeze, searched)
            assert tuned >= SPEEDS, (rank, freeze, tuned)
            assert control_problems, (rank, freeze, "a wrong loss coefficient was not detected")
