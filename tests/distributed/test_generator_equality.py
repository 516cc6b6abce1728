"""Models with a generator: every layout gives the losses and gradients of one process.

Text and image losses have different coefficients. Microbatches have no, one or several target
images and videos of different sizes and contexts. In the second step, one data-parallel replica has
no target image. In the third step, no replica has one. The generator predicts pixels, or latents of
an autoencoder (means or samples).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import prod
from typing import NamedTuple

import pytest
import torch
from launch import run_distributed
from microbatches import MODEL, random_microbatch
from shared_reference import on_first_rank
from support.balanced_microbatches import balanced_microbatch
from test_schedule_equality import Reference, _gradient_problems
from torch import Tensor

from torchmm.balance.image_balancing import ImageBalancer
from torchmm.common import sequence_slices
from torchmm.common.batch import Microbatch
from torchmm.common.generated import GeneratedMeta, GeneratorInputs
from torchmm.extensions.evaluation.generated_images import generate_pixels
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.exchange import data_parallel_feature_exchange
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import (
    AutoencoderConfig,
    FreezeConfig,
    GeneratorConfig,
    ModelConfig,
)
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep
from torchmm.training.validation import held_out_losses

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
WEIGHTS = {"llm": 0.7, "generator": 1.9}
STEPS = [[2, 0, 3, 0, 5, 1, 0, 2], [2, 0, 1, 0], [0] * 4]
"""Target images in each sequence of the global batch.

Each of two replicas has every second sequence.
"""
READ = [1, 2, 0, 3, 0, 1, 2, 0]
"""Input images in each sequence."""
GRIDS = [(1, 2, 2), (3, 2, 2), (1, 1, 2)]
PATCH_VALUES = 3 * 4 * 4
LATENT_VALUES = 2 * 2 * 2
NOISE = {"": PATCH_VALUES, "mean": LATENT_VALUES, "sampled": 2 * LATENT_VALUES}
"""Number of random values per patch, by latent mode."""
FREEZES = {
    "nothing": (),
    "encoder": ("vision", "vision.connector"),
    "LLM": ("llm",),
    "encoder and LLM": ("vision", "vision.connector", "llm"),
    "generator": ("generator", "generator.connector"),
    "all but the connectors": ("vision", "llm", "generator"),
    "all but the encoder": ("llm", "generator", "generator.connector"),
}
GENERATOR = {
    "_class_name": "PixArtTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 4,
    "sample_size": 8,
    "patch_size": 4,
}


VAE = {
    "block_out_channels": [4, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 2,
    "latent_channels": 2,
    "scaling_factor": 0.6,
}
"""A latent covers 2 x 2 pixels, and a patch has 2 x 2 latents."""


class Shape(NamedTuple):
    """Model properties that are independent of the frozen modules."""

    deep: bool = False
    tied: bool = True
    """Whether embeddings are tied."""
    latents: str = ""
    scaling: float = 0.6
    """Scaling factor of latents."""


@dataclass(frozen=True)
class Case:
    """A schedule, a layout and frozen modules."""

    schedule: str = "separated"
    freeze: str = "nothing"
    virtual_stages: int = 1
    parallel: dict = field(default_factory=dict)
    recompute: str = "none"
    deep: bool = False
    """Whether each module has enough layers for two stages per rank."""
    latents: str = ""
    """"mean" or "sampled" for latents of an autoencoder. "" means pixels."""
    wrong: bool = False
    """Whether the model differs from the reference, which the test must detect."""
    balance: bool = False
    """Whether data-parallel ranks exchange images to encode and generate."""

    @property
    def shape(self) -> Shape:
        """Model properties. Two stages per rank can put both embeddings on one rank: untied."""
        return Shape(self.deep, self.virtual_stages == 1, self.latents)


def a_generator(layers: dict, latents: str, scaling: float = 0.6) -> GeneratorConfig:
    """Return a generator config with patches of 4 x 4 pixels, as pixels or latents."""
    if not latents:
        return GeneratorConfig(config=layers, frames=3)
    config = {**VAE, "scaling_factor": scaling}
    vae = AutoencoderConfig(config=config, latent_mode=latents, encode_batch_size=2)
    return GeneratorConfig(config={**layers, "sample_size": 4, "patch_size": 2}, frames=3, vae=vae)


def a_model(freeze: str, shape: Shape = Shape()) -> MultimodalModel:  # noqa: B008
    deep, tied, latents, scaling = shape
    config: ModelConfig = MODEL.model_copy(deep=True)
    assert config.llm is not None and config.llm.config is not None
    config.llm.config.update(tie_word_embeddings=tied, num_hidden_layers=5 if deep else 3)
    layers = {**GENERATOR, "num_layers": 4 if deep else 2}
    generator_config = a_generator(layers, latents, scaling)
    config = config.model_copy(update={"generator": generator_config})
    return build_model(config, FreezeConfig(modules=list(FREEZES[freeze])))


def filled(model: MultimodalModel) -> MultimodalModel:
    """Fill all weights with nonzero values.

    An untrained generator has no gradients before its output layer.
    """
    materialize(model, "cpu")
    init_weights(model, seed=1)
    copies = model.tied_replicas()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = copies.get(name, name)
            seed = int.from_bytes(sha256(key.encode()).digest()[:4], "big")
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            copy_slice(parameter, full + 0.05 * noise)
    return model


def a_microbatch(seed: int, read: int, targets: int, tokens: int, latents: str = "") -> Microbatch:
    """Build a packed microbatch and distribute `targets` target images over its samples."""
    batch = random_microbatch(seed, read, tokens)
    if not targets:
        return batch
    generator = torch.Generator().manual_seed(seed)
    samples = list(batch.meta.samples)
    images: list[tuple[int, GeneratedMeta]] = []
    for number in range(targets):
        owner = number % len(samples)
        context = 1 + (seed + 3 * number) % samples[owner].tokens
        images.append((owner, GeneratedMeta(GRIDS[(seed + number) % 3], context)))
    images.sort(key=lambda image: image[0])
    positions = []
    for owner, meta in images:
        end = batch.cu_seqlens[owner + 1]
        positions.append(torch.arange(end - meta.context, end))
        samples[owner] = replace(samples[owner], generated=(*samples[owner].generated, meta))
    patches = sum(meta.patches for _, meta in images)
    inputs = GeneratorInputs(
        patches_PV=torch.rand(patches, PATCH_VALUES, generator=generator) * 2 - 1,
        noise_PV=torch.randn(patches, NOISE[latents], generator=generator),
        times=torch.rand(targets, generator=generator).tolist(),
        grids_thw=[meta.grid_thw for _, meta in images],
        context_positions_K=torch.cat(positions),
        contexts=[meta.context for _, meta in images],
        in_loss=[number != 1 for number in range(targets)],
        latent_values=LATENT_VALUES if latents else 0,
    )
    return replace(batch, generator=inputs, meta=replace(batch.meta, samples=tuple(samples)))


def a_batch(number: int, latents: str = "") -> list[Microbatch]:
    return [
        a_microbatch(10 * number + i, READ[i], targets, (64, 72, 80)[i % 3], latents)
        for i, targets in enumerate(STEPS[number])
    ]


@dataclass
class GeneratorReference(Reference):
    """A step of one process with both losses."""

    images: int = 0
    by_module: dict[str, float] = field(default_factory=dict)


def references(freeze: str, shape: Shape) -> list[GeneratorReference]:
    model = filled(a_model(freeze, shape))
    steps = []
    for number in range(len(STEPS)):
        batch = a_batch(number, shape.latents)
        counts = {
            "llm": sum(m.target_count for m in batch),
            "generator": sum(m.generated_count for m in batch),
        }
        model.zero_grad(set_to_none=True)
        sums = dict.fromkeys(counts, 0.0)
        for microbatch in batch:
            shares = {n: v / max(counts[n], 1) for n, v in model.losses(microbatch).items()}
            loss = sum(WEIGHTS[name] * share for name, share in shares.items())
            if loss.requires_grad:
                loss.backward()
            sums = {name: sums[name] + shares[name].item() for name in sums}
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        loss = sum(WEIGHTS[name] * sums[name] for name in sums)
        steps.append(
            GeneratorReference(batch, counts["llm"], loss, gradients, counts["generator"], sums)
        )
    return steps


def generate_on_one_process(shape: Shape) -> Tensor:
    """Generate images with an independent implementation of Euler's method."""
    model = filled(a_model("nothing", shape))
    batch = a_batch(0, shape.latents)[2]
    inputs = batch.generator
    x = inputs.target_noise_PV
    with torch.no_grad():
        for step in (2, 1):
            times = [step / 2] * len(inputs.times)
            encoded = bool(shape.latents)
            now = replace(inputs, patches_PV=x, noise_PV=x, times=times, is_encoded=encoded)
            _, context = model.llm(batch, model.encode(batch))
            x = x - model.generator.velocity(now, context) / 2
        return model.generator.latent_decoder(x, inputs.grids_thw) if shape.latents else x


LATENT_CASES = [
    Case(latents="mean"),
    Case("zero_bubble", "LLM", latents="sampled"),
    Case("1f1b", "generator", latents="mean"),
]
CASES = {
    "pp2": [
        Case("separated"),
        Case("zero_bubble", "LLM"),
        Case(
            "separated",
            parallel={"generator": {"segments": 2, "sub_microbatch_images": 1}},
            deep=True,
        ),
        Case(latents="mean", wrong=True),
    ],
    "pp2, more": [
        *(Case("separated", f) for f in FREEZES if f != "nothing"),
        *(Case("zero_bubble", f) for f in ("nothing", "generator", "all but the encoder")),
        Case("1f1b"),
        Case("interleaved_1f1b", virtual_stages=2, deep=True, latents="mean"),
        Case("megatron"),
        Case("interleaved_1f1b", virtual_stages=2, deep=True),
        Case("separated", recompute="full"),
        *LATENT_CASES,
    ],
    "fsdp2": [
        *(Case(freeze=f) for f in ("nothing", "all but the connectors")),
        Case(parallel={"reshard_after_forward": "never"}),
        Case(latents="mean"),
        Case(latents="sampled", parallel={"reshard_after_forward": "never"}),
    ],
    "fsdp2, balanced": [
        Case(balance=True),
        Case(balance=True, freeze="LLM", latents="sampled"),
        Case(balance=True, recompute="full", latents="mean"),
    ],
    "fsdp2, balanced, more": [
        *(Case(freeze=f, balance=True) for f in ("encoder", "generator")),
        Case(balance=True, parallel={"reshard_after_forward": "never"}),
        Case(balance=True, parallel={"gradient_reduction": "microbatch"}),
    ],
    "replicate2, balanced": [
        Case(balance=True),
        Case(balance=True, freeze="generator", latents="mean"),
    ],
    "hsdp 2x2, balanced": [Case(balance=True), Case(balance=True, freeze="encoder and LLM")],
    "fsdp2 x tp2, balanced": [
        Case(balance=True),
        Case(balance=True, latents="sampled", parallel={"sequence_parallel": True}),
    ],
    "pp2 x fsdp2": [
        *(Case(freeze=f) for f in ("nothing", "encoder")),
        Case("1f1b", "generator"),
        Case(latents="sampled"),
    ],
    "pp2 x tp2": [
        Case(freeze="LLM", parallel={"sequence_parallel": True}),
        Case("searched", "generator", recompute="full"),
        Case("searched", latents="sampled", parallel={"sequence_parallel": True}),
    ],
}
SIZES = {
    "pp2": {"pipeline": 2, "shard": 1},
    "pp2, more": {"pipeline": 2, "shard": 1},
    "fsdp2": {"shard": 2},
    "fsdp2, balanced": {"shard": 2},
    "fsdp2, balanced, more": {"shard": 2},
    "replicate2, balanced": {"replicate": 2, "shard": 1},
    "hsdp 2x2, balanced": {"replicate": 2, "shard": 2},
    "fsdp2 x tp2, balanced": {"shard": 2, "tensor": 2},
    "pp2 x fsdp2": {"pipeline": 2, "shard": 2},
    "pp2 x tp2": {"pipeline": 2, "tensor": 2, "shard": 1},
}


def test_wrong_contexts_change_loss():
    for problems, moved in run_distributed(_compare_with_wrong_contexts, 2):
        assert any("loss" in problem for problem in problems)
        assert moved


def _compare_with_wrong_contexts() -> tuple[list[str], bool]:
    """Return the problems if tokens arrive in reverse order, and whether ranks exchange any."""
    original, moved = sequence_slices._context_route, []

    def wrong(microbatch, ranks):
        route = original(microbatch, ranks)
        moved.append(sum(microbatch.image_sources["generator"]) not in (0, route.received[0]))
        return route._replace(rows_K=route.rows_K.flip(0))

    sequence_slices._context_route = wrong
    [(_, problems)] = compare_all("fsdp2, balanced", CASES["fsdp2, balanced"][:1])
    return problems, any(moved)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CASES)
def test_generators_equal_one_process(layout):
    ranks = prod(SIZES[layout].values())
    outcomes = run_distributed(compare_all, ranks, layout, CASES[layout])
    for rank, results in enumerate(outcomes):
        assert len(results) == len(CASES[layout])
        for case, problems in results:
            if case.wrong:
                assert any("loss" in problem for problem in problems), (rank, case)
                assert any("generated image" in problem for problem in problems), (rank, case)
                continue
            assert not problems, (rank, case, problems)


def compare_all(layout: str, cases: list[Case]) -> list[tuple[Case, list[str]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    mesh = build_mesh(ParallelConfig.model_validate(SIZES[layout]), CPU)
    expected: dict[tuple[str, Shape], list[GeneratorReference]] = {}
    images: dict[Shape, Tensor] = {}
    results = []
    for case in cases:
        key = case.freeze, case.shape
        if key not in expected:
            expected[key] = on_first_rank(partial(references, *key))
        if case.shape not in images:
            generate = partial(generate_on_one_process, case.shape)
            images[case.shape] = on_first_rank(generate)
        results.append((case, compare(case, layout, mesh, expected[key], images[case.shape])))
    return results


def compare(
    case: Case,
    layout: str,
    mesh: ParallelMesh,
    steps: list[GeneratorReference],
    image: Tensor,
) -> list[str]:
    settings = {
        "schedule": case.schedule,
        "virtual_stages": case.virtual_stages,
        "vision": {"sub_microbatch_images": 2},
        "generator": {"sub_microbatch_images": 2},
    }
    config = ParallelConfig.model_validate({**SIZES[layout], **settings, **case.parallel})
    shape = case.shape._replace(scaling=0.61) if case.wrong else case.shape
    model = a_model(case.freeze, shape)
    descriptions = [module.describe() for module in model.modality_modules()]
    stage_layout = plan_layout(config, descriptions, [m.meta for m in steps[0].batch])
    stages = split_model_for_rank(model, stage_layout, mesh.plan_rank)
    recompute = ActivationCheckpointConfig.model_validate({"mode": case.recompute})
    parallelize(model, mesh, config, recompute, CompileConfig(), torch.float32)
    filled(model)
    exchange = data_parallel_feature_exchange(mesh) if case.balance else None
    pipeline = Pipeline(
        model, stages, stage_layout, descriptions, config, mesh, torch.float32, exchange
    )
    step = TrainStep(pipeline, mesh, WEIGHTS)
    problems = []
    for number, reference in enumerate(steps):
        model.zero_grad(set_to_none=True)
        rank, ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        share = reference.batch[rank::ranks]
        if case.balance:
            balance = ImageBalancer(tuple(m for m in descriptions if m.kind != "llm"))
            share = [
                balanced_microbatch(reference.batch[first : first + ranks], balance, rank)
                for first in range(0, len(reference.batch), ranks)
            ]
        outcome = step.run(
            pipeline.plan_training(share), share, reference.targets, reference.images
        )
        losses = [outcome.loss, *(outcome.losses[name] for name in WEIGHTS)]
        local = [loss.item() * mesh.plan_size for loss in losses]
        expected = [reference.loss, *(reference.by_module[name] for name in WEIGHTS)]
        for actual, loss in zip(mesh.sum_over_data_parallel(local), expected, strict=True):
            if abs(actual - loss) > 1e-5 * max(abs(loss), 1e-3):
                problems.append(f"step {number}: loss {actual}, expected {loss}")
        problems += _gradient_problems(number, model, reference, mesh)
    return problems + compare_without_gradients(pipeline, mesh, steps[0], image)


def compare_without_gradients(
    pipeline: Pipeline, mesh: ParallelMesh, expected: GeneratorReference, image: Tensor
) -> list[str]:
    """Compare validation losses, text and images, which all ranks generate together."""
    problems = []
    share = expected.batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
    with torch.no_grad():
        step = type("Step", (), {"microbatches": share})
        losses = held_out_losses(pipeline, [step], mesh)
        generated = generate_pixels(pipeline, expected.batch[2], mesh, steps=2)
        logits = pipeline.next_token_logits(expected.batch[2])
    for name, loss in losses.items():
        if abs(loss / expected.by_module[name] - 1) > 1e-5:
            problems.append(f"held-out {name} loss {loss}, expected {expected.by_module[name]}")
    if (error := (generated - image).norm() / image.norm()) > 1e-5:
        problems.append(f"the generated image differs by {error}")
    if mesh.plan_rank == pipeline.last_rank("llm") and logits is None:
        problems.append("no logits")
    return problems
