"""Videos in a pipeline with a searched schedule: the loss and gradients of the single process.

Samples have videos of different lengths, an image, both or neither. Some microbatches and one batch
have neither.
"""

import random
from math import prod

import numpy as np
import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from pipeline_cases import gradient_errors, shared_losses
from searched_cases import CPU, Searched, filled

from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.models.build import build_model
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

MODEL = ModelConfig(
    config={
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "text_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    }
)
VIDEOS = ((2, 4, 4), (4, 4, 2), (3, 2, 6))
IMAGES = ((1, 4, 4), (1, 2, 6))
BATCHES = 12


def microbatch(rng: random.Random, shown: bool) -> Microbatch:
    """Build samples and padding. With `shown`, all but the last have videos or images."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    kinds = [rng.choice(("video", "image", "both")) for _ in range(rng.choice((1, 2, 3)))]
    ids, targets, starts, samples, positions = [], [], [0], [], []
    visual_positions, grids = [], []
    for number, kind in enumerate([*kinds, "text"] if shown else ["text", "text"]):
        sample_grids = [rng.choice(VIDEOS)] * (kind in ("video", "both"))
        sample_grids += [rng.choice(IMAGES)] * (kind in ("image", "both"))
        at, blocks, images = 1, [], []
        for grid in sample_grids:
            tokens, is_video = prod(grid) // 4, grid[0] > 1
            step = 4 * 0.75 if is_video else 1.0
            blocks.append(VisionBlock(at, grid[0], grid[1] // 2, grid[2] // 2, step))
            visual_positions += range(starts[-1] + at, starts[-1] + at + tokens)
            duration_ms = 750 * grid[0] * is_video
            images.append(ImageMeta(16, 16, prod(grid), tokens, grid[0], duration_ms=duration_ms))
            at += tokens + 1
        length = at + rng.randrange(4, 9)
        tokens_L = torch.randint(1, 60, (length,), generator=generator)
        targets_L = torch.roll(tokens_L, -1)
        targets_L[: at - 1] = targets_L[-1] = IGNORE_TARGET
        ids.append(tokens_L)
        targets.append(targets_L)
        positions.append(mrope_positions(length, blocks))
        starts.append(starts[-1] + length)
        encoder = "vision" if images else None
        samples.append(SampleMeta("random", number, length, tuple(images), encoder))
        grids += sample_grids
    padding = 128 - starts[-1]
    assert padding > 0
    ids.append(torch.zeros(padding, dtype=torch.int64))
    targets.append(torch.full((padding,), IGNORE_TARGET))
    positions.append(mrope_positions(padding, []))
    encoders = {}
    if grids:
        pixels = torch.randn(sum(map(prod, grids)), 3 * 2 * 16, generator=generator)
        encoders["vision"] = EncoderInputs(pixels, grids, torch.tensor(visual_positions))
    return Microbatch(
        torch.cat(ids),
        torch.cat(targets),
        torch.from_numpy(np.concatenate(positions, axis=1)),
        [*starts, 128],
        encoders,
        MicrobatchMeta(tuple(samples), 128),
    )


def batch_of(seed: int) -> list[Microbatch]:
    """Return six microbatches, about two of them without images. Every sixth batch has none."""
    rng = random.Random(seed)
    return [microbatch(rng, seed % 6 != 5 and rng.random() < 0.7) for _ in range(6)]


def build(schedule: str) -> Searched:
    """Build the model and pipeline of two ranks. Collective."""
    settings = {"shard": 1, "pipeline": 2, "schedule": schedule, "search": {"evaluations": 60}}
    config = ParallelConfig.model_validate({**settings, "vision": {"sub_microbatch_images": 2}})
    mesh = mesh_for(config)
    model = build_model(MODEL, FreezeConfig())
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in batch_of(0)])
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    recompute = ActivationCheckpointConfig()
    parallelize(model, mesh, config, recompute, CompileConfig(), torch.float32)
    filled(model)
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    alone = filled(build_model(MODEL, FreezeConfig()))
    return Searched(mesh, model, alone, descriptions, pipeline, TrainStep(pipeline, mesh))


def compare() -> list[str]:
    """Compare all batches with the single process and return the problems."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    problems = []
    for schedule in ("searched", "separated"):
        searched_model = build(schedule)
        for seed in range(BATCHES if schedule == "searched" else 3):
            batch, speed = batch_of(seed), random.Random(seed)
            targets = sum(m.target_count for m in batch)
            factors = {
                (name, kind): speed.choice((0.3, 1.0, 3.0))
                for name in ("llm", "vision")
                for kind in (ActionType.F, ActionType.B)
            }
            searched_model.model.zero_grad(set_to_none=True)
            plan = plan_pipeline_step(
                searched_model.pipeline, [m.task_meta for m in batch], factors=factors
            )
            outcome = searched_model.step.run(plan, batch, targets)
            loss = searched_model.mesh.sum_over_data_parallel(
                [outcome.loss.item() * searched_model.mesh.plan_size]
            )[0]
            expected = sum(shared_losses(searched_model.alone, [batch], targets)[0]) / targets
            if abs(loss / expected - 1) > 1e-5:
                problems.append(f"{schedule} {seed}: loss {loss}, expected {expected}")
            errors = gradient_errors(searched_model.model, searched_model.alone)
            problems += [
                f"{schedule} {seed}: {n} off by {e}" for n, e in errors.items() if e > 1e-5
            ]
    return problems


def test_batches_have_videos_images_and_neither() -> None:
    microbatches = [m for seed in range(BATCHES) for m in batch_of(seed)]
    without = [m for m in microbatches if not m.encoders]
    images = [i for m in microbatches for i in m.meta.images_of_encoder("vision")]
    assert 12 <= len(without) < len(microbatches)
    assert {image.frames for image in images} == {1, 2, 3, 4}
    assert not any(m.encoders for m in batch_of(5))


@pytest.mark.slow
def test_searched_video_plans_equal_single_process() -> None:
    for rank, problems in enumerate(run_distributed(compare, 2)):
        assert not problems, (rank, problems)
