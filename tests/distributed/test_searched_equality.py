"""Searched schedules give the loss and the gradients of the single process, batch after batch.

Every batch has other images, and is planned with other speeds of modules, so that orders differ;
data-parallel replicas plan for their own microbatches.
"""

import random

import pytest
import torch
from launch import run_distributed
from microbatches import MODEL, random_microbatch
from pipeline_cases import gradient_errors, reference_losses

from torchmm.batch import Microbatch
from torchmm.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    FreezeConfig,
    ModelConfig,
    ParallelConfig,
)
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.pipeline import Pipeline, plan_layout
from torchmm.pipelining.actions import COMPUTE, ActionType
from torchmm.pipelining.cut import cut_for_rank
from torchmm.pipelining.plan import PipelinePlan
from torchmm.pipelining.separated import separated
from torchmm.step import TrainStep

CPU = torch.device("cpu")
BATCHES = 52
LAYOUTS = {
    2: [{"pipeline": 2, "virtual_stages": 2}],
    4: [{"pipeline": 4}, {"pipeline": 2, "shard": 2}],
}
"""By number of ranks."""


def batch_of(seed: int) -> list[Microbatch]:
    """Six microbatches; in every tenth batch none has images."""
    rng = random.Random(seed)
    counts = [0] * 6 if seed % 10 == 9 else [rng.choice((0, 0, 1, 2, 5)) for _ in range(6)]
    return [
        random_microbatch(100 * seed + i, count, rng.choice((72, 80)))
        for i, count in enumerate(counts)
    ]


def whole_model(layers: int, tied: bool) -> MultimodalModel:
    config: ModelConfig = MODEL.model_copy(deep=True)
    config.llm.config.update(num_hidden_layers=layers + 1, tie_word_embeddings=tied)
    config.encoders["vision"].config["num_hidden_layers"] = layers
    return build_model(config, FreezeConfig())


def filled(model: MultimodalModel) -> MultimodalModel:
    materialize(model, CPU)
    init_weights(model, seed=1)
    return model


def compute_order(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


def compare(layout: dict[str, int]) -> tuple[list[str], int]:
    """What is wrong, and how many batches ran in another order than the separated schedule's."""
    config = ParallelConfig(shard=1, schedule="searched").model_copy(update=layout)
    config = config.model_copy(update={
        "search": config.search.model_copy(update={"evaluations": 80})
    })  # fmt: skip
    mesh = build_mesh(config, CPU)
    layers, tied = config.pipeline * config.virtual_stages, config.virtual_stages == 1
    model = whole_model(layers, tied)
    descriptions = [module.describe() for module in model.modality_modules()]
    stage_layout = plan_layout(config, descriptions, [m.meta for m in batch_of(0)])
    stages = cut_for_rank(model, stage_layout, mesh.pipeline_rank)
    parallelize(model, mesh, config, ActivationCheckpointConfig(), CompileConfig(), torch.float32)
    filled(model)
    pipeline = Pipeline(model, stages, stage_layout, descriptions, config, mesh, torch.float32)
    step, alone = TrainStep(pipeline, mesh), filled(whole_model(layers, tied))
    problems, searched = [], 0
    for seed in range(BATCHES):
        batch, speed = batch_of(seed), random.Random(seed)
        targets = sum(m.target_count for m in batch)
        pipeline.factors = {
            (name, kind): speed.choice((0.3, 1.0, 3.0))
            for name in ("llm", "vision")
            for kind in (ActionType.F, ActionType.B)
        }
        model.zero_grad(set_to_none=True)
        share = batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
        outcome = step.run(share, targets)
        loss = mesh.sum_over_data([outcome.loss.item() * mesh.pipeline_size])[0]
        wanted = sum(reference_losses(alone, [batch], targets)[0]) / targets
        if abs(loss / wanted - 1) > 1e-5:
            problems.append(f"batch {seed}: loss {loss}, expected {wanted}")
        errors = gradient_errors(model, alone)
        problems += [f"batch {seed}: {n} off by {e}" for n, e in errors.items() if not e <= 1e-5]
        static = [list(row) for row in separated(outcome.plan.graph)]
        searched += compute_order(outcome.plan) != static
    return problems, searched


def compare_all(layouts: list[dict[str, int]]) -> list[tuple[list[str], int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    return [compare(layout) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS, ids=["pp2", "pp4 and pp2 x fsdp2"])
def test_searched_plans_equal_the_single_process(ranks):
    for rank, found in enumerate(run_distributed(compare_all, ranks, LAYOUTS[ranks])):
        assert len(found) == len(LAYOUTS[ranks])
        for layout, (problems, searched) in zip(LAYOUTS[ranks], found, strict=True):
            assert not problems, (rank, layout, problems)
            assert searched > BATCHES // 3, (rank, layout)
