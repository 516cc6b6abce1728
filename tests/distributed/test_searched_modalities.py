"""Searched schedules with audio, two vision encoders, or images and audio in one sample.

Samples have random modalities, including none. Two ranks give the loss and gradients of the single
process in every batch.
"""

import random
from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from pipeline_cases import (
    CPU,
    KINDS,
    LAYERS,
    LLM,
    SIZES,
    VOCAB,
    Kind,
    gradient_errors,
    shared_losses,
)
from searched_cases import filled

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

BATCHES = 6
WAV2VEC2 = {
    "model_type": "wav2vec2",
    "apply_spec_augment": False,
    **SIZES,
    "num_hidden_layers": LAYERS,
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout"), 0.0),
    "layerdrop": 0.0,
}
WAV2VEC2_KIND = Kind(
    {"modality": "audio", "config": WAV2VEC2}, [(1, 1, n) for n in (1, 5, 12)], (10,)
)
MODELS = {
    "audio": {"speech": KINDS["whisper"]},
    "two vision encoders": {"vision": KINDS["clip"], "glance": KINDS["siglip2"]},
    "images and audio": {"vision": KINDS["siglip2"], "speech": WAV2VEC2_KIND},
}


def batch_of(kinds: dict[str, Kind], seed: int) -> list[Microbatch]:
    """Return four microbatches. In every fifth batch, no sample uses the last encoder."""
    rng = random.Random(seed)
    names = list(kinds)[: -1 if seed % 5 == 4 else None]
    return [_microbatch({n: kinds[n] for n in names}, rng, 10 * seed + i) for i in range(4)]


def _microbatch(kinds: dict[str, Kind], rng: random.Random, seed: int) -> Microbatch:
    """Build samples with random modalities, whose tokens precede the text."""
    generator = torch.Generator().manual_seed(seed)
    samples, shares = [], {name: ([], []) for name in kinds}
    begin, unseen = 0, []
    for index in range(rng.randint(2, 5)):
        start, shown = begin, []
        for name, kind in kinds.items():
            for _ in range(rng.choice((0, 0, 1, 2))):
                grid = rng.choice(kind.grids)
                tokens = prod(grid) // kind.merge**2
                shown.append(ImageMeta(8, 8, prod(grid), tokens, encoder=name))
                shares[name][0].append(grid)
                shares[name][1].extend(range(begin, begin + tokens))
                begin += tokens
        unseen += range(start, begin)  # neither these nor the first text token are targets
        begin += rng.randint(3, 8)
        samples.append(SampleMeta("random", index, begin - start, tuple(shown)))
    starts = [0, *accumulate(sample.tokens for sample in samples)]
    ids = torch.randint(5, VOCAB, (begin,), generator=generator)
    targets = torch.roll(ids, -1)
    targets[torch.tensor([*unseen, *(stop - 1 for stop in starts[1:])])] = IGNORE_TARGET
    inputs = {}
    for name, (grids, positions_of) in shares.items():
        if grids:
            shape = kinds[name].pixels
            count = len(grids) if len(shape) == 3 else sum(map(prod, grids))
            pixels = torch.randn((count, *shape), generator=generator)
            inputs[name] = EncoderInputs(pixels, grids, torch.tensor(positions_of))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
    meta = MicrobatchMeta(tuple(samples), begin)
    return Microbatch(ids, targets, positions, starts, inputs, meta)


def _unsharded_model(kinds: dict[str, Kind]) -> MultimodalModel:
    """Build the unsharded model on the meta device."""
    config = {
        "llm": {"config": {**LLM, "tie_word_embeddings": False}},
        "encoders": {name: kind.section for name, kind in kinds.items()},
    }
    return build_model(ModelConfig.model_validate(config), FreezeConfig())


def compare(kinds: dict[str, Kind]) -> tuple[list[str], int, int]:
    """Compare all batches with the single process.

    Returns:
        Problems, the number of schedules that differ from the separated schedule, and the number of
        samples without a modality that the batch contains.
    """
    search = {"evaluations": 60}
    config = ParallelConfig.model_validate(
        {"shard": 1, "schedule": "searched", "pipeline": 2, "virtual_stages": 2, "search": search}
    )
    mesh = mesh_for(config)
    model = _unsharded_model(kinds)
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in batch_of(kinds, 0)])
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    no_recomputation = ActivationCheckpointConfig(mode="none")
    parallelize(model, mesh, config, no_recomputation, CompileConfig(), torch.float32)
    filled(model)
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    step = TrainStep(pipeline, mesh)
    reference, problems, searched, incomplete = filled(_unsharded_model(kinds)), [], 0, 0
    for seed in range(BATCHES):
        batch = batch_of(kinds, seed)
        targets = sum(m.target_count for m in batch)
        model.zero_grad(set_to_none=True)
        outcome = step.run(pipeline.plan_training(batch), batch, targets)
        loss = mesh.sum_over_data_parallel([outcome.loss.item() * mesh.plan_size])[0]
        expected = sum(shared_losses(reference, [batch], targets)[0]) / targets
        if abs(loss / expected - 1) > 1e-5:
            problems.append(f"batch {seed}: loss {loss}, expected {expected}")
        errors = gradient_errors(model, reference)
        problems += [f"batch {seed}: {n} off by {e}" for n, e in errors.items() if not e <= 1e-5]
        order = [[a for a in row if a.type in COMPUTE] for row in outcome.plan.actions]
        searched += order != [list(row) for row in separated(outcome.plan.graph)]
        modalities = [{i.encoder for i in s.images} for m in batch for s in m.meta.samples]
        incomplete += sum(present < set().union(*modalities) for present in modalities)
    return problems, searched, incomplete


def compare_all() -> dict[str, tuple[list[str], int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    return {name: compare(kinds) for name, kinds in MODELS.items()}


@pytest.mark.slow
def test_searched_plans_of_all_modalities_equal_process():
    for results in run_distributed(compare_all, 2):
        for name, (problems, searched, incomplete) in results.items():
            assert not problems, (name, problems)
            assert searched >= BATCHES // 3, name
            assert incomplete > BATCHES, name
