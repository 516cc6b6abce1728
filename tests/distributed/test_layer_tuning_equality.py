"""Plans that are tuned to a memory limit give the loss and gradients of the single process.

The limit is half-way between the lowest and highest memory use of a plan. Some tasks recompute all
layers and some none. Each rank and each replica selects separately. Without sharding, which uses
additional memory, no rank exceeds the limit, including optimizer states.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from microbatches import MODEL, random_microbatch
from pipeline_cases import gradient_errors, shared_losses
from support.allocations import CountPeak, held_in_a_step
from tuned_limits import half_way

from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.common.batch import Microbatch
from torchmm.common.dtypes import ByteValues
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

CPU = torch.device("cpu")
STEPS = 4
VALUES = ByteValues(np.linspace(-1, 1, 256, dtype=np.float32)[None])
LAYOUTS = {
    2: [
        {"pipeline": 2, "schedule": "separated", "virtual_stages": 2},
        {"pipeline": 2, "schedule": "1f1b"},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"shard": 2, "schedule": "separated"},
    ],
    4: [
        {"pipeline": 4, "schedule": "searched"},
        {"pipeline": 2, "shard": 2, "schedule": "searched"},
        {"pipeline": 2, "shard": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    ],
}
"""Layouts by number of ranks."""


def batch_of(seed: int) -> list[Microbatch]:
    """Return four microbatches for each of two replicas, with pixels as bytes like a loader."""
    rng = random.Random(seed)
    counts = [rng.choice((0, 1, 2, 5)) for _ in range(8)]
    return [
        with_bytes(random_microbatch(100 * seed + i, count, rng.choice((72, 80))), seed)
        for i, count in enumerate(counts)
    ]


def with_bytes(microbatch: Microbatch, seed: int) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    encoders = {
        name: replace(
            inputs,
            pixels=torch.randint(256, inputs.pixels.shape, generator=generator, dtype=torch.uint8),
            byte_values=VALUES,
        )
        for name, inputs in microbatch.encoders.items()
    }
    return replace(microbatch, encoders=encoders)


def unsharded_model() -> MultimodalModel:
    config = MODEL.model_copy(deep=True)
    config.llm.config.update(num_hidden_layers=5, tie_word_embeddings=False)
    config.encoders["vision"].config["num_hidden_layers"] = 4
    return build_model(config, FreezeConfig())


def filled(model: MultimodalModel) -> MultimodalModel:
    materialize(model, CPU)
    init_weights(model, seed=1)
    return model


def compare(layout: dict) -> tuple[list[str], list[int]]:
    """Return the problems, and the number of layers that the plan of each step recomputes."""
    config = ParallelConfig(shard=1).model_copy(update=layout)
    mesh = mesh_for(config)
    model = unsharded_model()
    descriptions = [module.describe() for module in model.modality_modules()]
    stage_layout = plan_layout(config, descriptions, [m.meta for m in batch_of(0)])
    stages = split_model_for_rank(model, stage_layout, mesh.plan_rank)
    tuned = ActivationCheckpointConfig(mode="auto")
    parallelize(model, mesh, config, tuned, CompileConfig(), torch.float32)
    filled(model)
    pipeline = Pipeline(model, stages, stage_layout, descriptions, config, mesh, torch.float32)
    step, reference = TrainStep(pipeline, mesh), filled(unsharded_model())
    problems: list[str] = []
    recomputed = []
    for seed in range(STEPS):
        batch = batch_of(seed)
        targets = sum(m.target_count for m in batch)
        share = batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
        tuning = half_way(pipeline, [m.meta for m in share])
        model.zero_grad(set_to_none=True)
        with CountPeak(held_in_a_step(model, share)) as counter:
            plan = plan_pipeline_step(pipeline, [m.task_meta for m in share], tuning=tuning)
        outcome = step.run(plan, share, targets)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        peak, limit = counter.peak_bytes + 8 * trained, tuning.memory_limit_bytes
        if pipeline.sharding == "none" and peak > limit:
            problems.append(f"batch {seed}: {peak} bytes of {limit}")
        modes_of_layers = [mode for modes in outcome.plan.recompute.values() for mode in modes]
        recomputed.append(len(modes_of_layers) - modes_of_layers.count("none"))
        loss = mesh.sum_over_data_parallel([outcome.loss.item() * mesh.plan_size])[0]
        expected = sum(shared_losses(reference, [batch], targets)[0]) / targets
        if abs(loss / expected - 1) > 1e-5:
            problems.append(f"batch {seed}: loss {loss}, expected {expected}")
        errors = gradient_errors(model, reference)
        problems += [f"batch {seed}: {n} off by {e}" for n, e in errors.items() if not e <= 1e-5]
    return problems, recomputed


def compare_all(layouts: list[dict]) -> list[tuple[list[str], list[int]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    return [compare(layout) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_tuned_plans_equal_single_process(ranks):
    for rank, results in enumerate(run_distributed(compare_all, ranks, LAYOUTS[ranks])):
        assert len(results) == len(LAYOUTS[ranks])
        for layout, (problems, recomputed) in zip(LAYOUTS[ranks], results, strict=True):
            assert not problems, (rank, layout, problems)
            assert min(recomputed) > 0, (rank, layout, recomputed)
