"""Disaggregated modules give the losses and gradients of a single process.

The data-, tensor- and pipeline-parallel degrees of encoder, LLM and generator differ and need not
divide each other. Microbatches have no, one or several images.
"""

from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest
import torch
from launch import run_distributed
from meshes import units_for
from microbatches import (
    COMPOSITES,
    MODEL,
    TOLERANCES,
    composite_model,
    random_microbatch,
    towers_of,
    with_patches,
)
from shared_reference import on_first_rank
from test_generator_equality import GENERATOR, a_generator, a_microbatch, filled
from torch.distributed.tensor import DTensor

from torchmm.common.batch import Microbatch
from torchmm.extensions.evaluation.generated_images import generate_pixels
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh, start_process_group
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CompileConfig,
    OptimizerConfig,
)
from torchmm.training.optim import build_optimizer, global_grad_norm, group_by_replicas
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep
from torchmm.training.validation import held_out_losses

CPU = torch.device("cpu")
WEIGHTS = {"llm": 0.7, "generator": 1.9}
IMAGES = [2, 0, 3, 0, 5, 1, 1, 4]
"""Input images in each sequence of the global batch."""
TARGET_IMAGES = [0, 2, 1, 0, 3, 0, 1, 1]
CONNECTORS = ("vision", "llm", "generator")
FREEZES = {
    "nothing": (),
    "tower": ("vision",),
    "all but connectors": CONNECTORS,
    "all but the encoder": ("llm", "generator", "generator.connector"),
    "all but the LLM": ("vision", "vision.connector", "generator", "generator.connector"),
    "all but the generator": ("vision", "vision.connector", "llm"),
}
PASSES = {"nothing": 3, "tower": 3, "all but connectors": 3, "all but the encoder": 3,
          "all but the LLM": 2, "all but the generator": 1}  # fmt: skip
"""Number of modules with backward passes, counted from the last module.

Modules before the first trained module have no backward pass.
"""


def unit(pipeline: int = 1, shard: int = 1, tensor: int = 1, replicate: int = 1) -> MeshSizes:
    return MeshSizes(pipeline, replicate, shard, tensor)


@dataclass(frozen=True)
class Case:
    """Parallelism degrees of the modules, and other options."""

    encoder: MeshSizes
    """Degrees of the first encoder."""
    llm: MeshSizes
    generator: MeshSizes | None = None
    schedule: str = "1f1b"
    freeze: str = "nothing"
    parallel: dict = field(default_factory=dict, hash=False)
    composite: str = ""
    """model_type of a multimodal model. "" means an LLM with CLIP."""
    audio: MeshSizes | None = None
    """Degrees of the audio encoder."""
    latents: str = ""
    """"mean" or "sampled" for latents of an autoencoder. "" means pixels."""

    @property
    def generates(self) -> str:
        """Kind of the generated values. "" means that the model has no generator."""
        return (self.latents or "pixels") if self.generator is not None else ""

    @property
    def units(self) -> dict[str, MeshSizes]:
        towers = zip(towers_of(self.composite), (self.encoder, self.audio), strict=False)
        named = {**dict(towers), "llm": self.llm, "generator": self.generator}
        return {name: layout for name, layout in named.items() if layout is not None}


SINGLE = [name for name in COMPOSITES if len(towers_of(name)) == 1]
SEEING = [name for name in SINGLE if towers_of(name) == ("vision",)]
OMNI = [name for name in COMPOSITES if len(towers_of(name)) == 2]
ONE, TP2, DP2, PP2 = unit(), unit(tensor=2), unit(shard=2), unit(pipeline=2)
CASES = {
    "2": [
        *(Case(ONE, ONE, freeze=f) for f in FREEZES if f != "all but the generator"),
        Case(ONE, ONE, schedule="separated"),
        Case(ONE, ONE, schedule="zero_bubble", parallel={"vision": {"sub_microbatch_images": 2}}),
    ],
    "3": [
        Case(ONE, PP2, composite=SEEING[0]),
        *(Case(encoder, ONE) for encoder in (DP2, TP2, PP2, unit(replicate=2))),
        *(Case(ONE, llm) for llm in (DP2, TP2, PP2)),
        Case(ONE, TP2, freeze="tower", parallel={"sequence_parallel": True}),
        Case(ONE, PP2, schedule="interleaved_1f1b", parallel={"virtual_stages": 2}),
        Case(DP2, ONE, freeze="all but connectors", schedule="separated"),
        Case(ONE, DP2, freeze="all but the encoder"),
        *(Case(ONE, ONE, ONE, freeze=f) for f in FREEZES),
        Case(ONE, ONE, ONE, latents="mean"),
        Case(ONE, ONE, ONE, freeze="all but the LLM", latents="sampled"),
    ],
    "3, all composites": [
        *(Case(ONE, PP2, composite=name) for name in SINGLE),
        *(Case(ONE, ONE, audio=ONE, composite=name) for name in OMNI),
    ],
    "3, towers on two": [
        *(
            Case(PP2, ONE, composite=name, schedule="zero_bubble")
            for name in (*SEEING, "qwen2_audio")
        ),
        *(Case(DP2, ONE, composite=name) for name in SINGLE[::2]),
    ],
    "4": [
        Case(DP2, DP2),  # two replica groups, as in the next case
        Case(DP2, unit(replicate=2), schedule="separated", freeze="tower"),
        *(Case(ONE, PP2, audio=ONE, composite=name) for name in OMNI),
        *(Case(ONE, ONE, audio=DP2, composite=name, schedule="zero_bubble") for name in OMNI),
        Case(ONE, PP2, ONE, schedule="interleaved_1f1b", parallel={"virtual_stages": 2}),
        Case(ONE, ONE, PP2, latents="mean"),
        Case(ONE, ONE, DP2, latents="sampled"),
    ],
    "5": [
        Case(unit(shard=3), DP2),
        Case(unit(shard=3), DP2, schedule="separated", freeze="tower"),
        Case(unit(shard=3), TP2),
        Case(unit(replicate=3), PP2, schedule="gpipe"),
        Case(DP2, unit(shard=3), freeze="all but connectors"),
        Case(DP2, DP2, ONE),
        Case(TP2, ONE, DP2, freeze="all but connectors"),
        Case(DP2, TP2, ONE, schedule="separated"),
        Case(PP2, DP2, ONE, freeze="all but the generator"),
        Case(ONE, DP2, TP2, freeze="all but the LLM"),
    ],
}
"""Cases by number of ranks, with an optional suffix."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_disaggregation_equals_one_process(ranks):
    pytest.importorskip("diffusers")
    outcomes = run_distributed(compare_all, int(ranks[0]), ranks)
    for rank, results in enumerate(outcomes):
        assert len(results) == len(CASES[ranks])
        for case, problems in results:
            assert not problems, (rank, case, problems)


def a_model(generates: str, freeze: str, composite: str = "") -> MultimodalModel:
    config = MODEL.model_copy(deep=True)
    assert config.llm is not None and config.llm.config is not None
    config.llm.config.update(num_hidden_layers=4)
    if composite:
        return build_model(composite_model(composite, 4, 4, tied=True), FreezeConfig())
    frozen = [n for n in FREEZES[freeze] if generates or not n.startswith("generator")]
    if generates:
        generator_config = a_generator(GENERATOR, latents_of(generates))
        config = config.model_copy(update={"generator": generator_config})
    return build_model(config, FreezeConfig(modules=frozen))


def latents_of(generates: str) -> str:
    return "" if generates == "pixels" else generates


def a_batch(generates: str, composite: str = "") -> list[Microbatch]:
    lengths = (64, 72, 80)
    if composite:
        return [with_patches(microbatch, composite) for microbatch in a_batch(generates)]
    if not generates:
        return [random_microbatch(seed, n, lengths[seed % 3]) for seed, n in enumerate(IMAGES)]
    pairs = zip(IMAGES, TARGET_IMAGES, strict=True)
    return [
        a_microbatch(i, read, generated, lengths[i % 3], latents_of(generates))
        for i, (read, generated) in enumerate(pairs)
    ]


@dataclass(frozen=True)
class Reference:
    """Losses, gradients and a generated image of the single process."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    image: torch.Tensor | None

    @property
    def loss(self) -> float:
        return sum(WEIGHTS[name] * loss for name, loss in self.losses.items())

    @property
    def norm(self) -> float:
        return torch.stack([g.norm() for g in self.gradients.values()]).norm().item()


@cache
def shared_reference(generates: str, freeze: str, composite: str) -> Reference:
    """Compute the reference once for all ranks."""
    return on_first_rank(partial(reference, generates, freeze, composite))


def reference(generates: str, freeze: str, composite: str) -> Reference:
    model = filled(a_model(generates, freeze, composite))
    batch = a_batch(generates, composite)
    counts = _counts(batch)
    losses = dict.fromkeys(("llm", "generator") if generates else ("llm",), 0.0)
    for microbatch in batch:
        sums = model.losses(microbatch)
        shares = {name: sums[name] / counts[name] for name in losses}
        loss = sum(WEIGHTS[name] * share for name, share in shares.items())
        if loss.requires_grad:
            loss.backward()
        losses = {name: losses[name] + shares[name].item() for name in losses}
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return Reference(losses, gradients, _generated_image(model, batch) if generates else None)


def _counts(batch: list[Microbatch]) -> dict[str, int]:
    return {
        "llm": sum(m.target_count for m in batch),
        "generator": sum(m.generated_count for m in batch),
    }


@torch.no_grad()
def _generated_image(model: MultimodalModel, batch: list[Microbatch]) -> torch.Tensor:
    """Generate an image in one step from noise."""
    inputs, generator = batch[2].generator, model.generator
    assert inputs is not None and generator is not None
    x = inputs.target_noise_PV
    encoded = inputs.latent_values > 0
    times = [1.0] * len(inputs.times)
    inputs = replace(inputs, patches_PV=x, noise_PV=x, times=times, is_encoded=encoded)
    _, context = model.llm(batch[2], model.encode(batch[2]))
    end = x - generator.velocity(inputs, context)
    return generator.latent_decoder(end, inputs.grids_thw) if encoded else end


def compare_all(ranks: str) -> list[tuple[Case, list[str]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    return [(case, compare(case)) for case in CASES[ranks]]


def compare(case: Case) -> list[str]:
    """Compare a step of this rank with the single process and return the problems."""
    mesh, generates = units_for(case.units), case.generates
    model = a_model(generates, case.freeze, case.composite)
    batch = a_batch(generates, case.composite)
    settings = {"placement": "disaggregated", "schedule": case.schedule, **case.parallel}
    config = ParallelConfig.model_validate(settings)
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in batch], mesh.units)
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    (module,) = {layout.stages[index].module for index in stages}
    assert mesh.module_mesh.sizes == case.units[module]
    plain = (ActivationCheckpointConfig(), CompileConfig(), torch.float32)
    parallelize(model, mesh, config, *plain)
    filled(model)
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    expected = shared_reference(generates, case.freeze, case.composite)
    share = batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
    counts = _counts(batch)
    step = TrainStep(pipeline, mesh, WEIGHTS)
    outcome = step.run(pipeline.plan_training(share), share, counts["llm"], counts["generator"])
    problems = _loss_problems({**outcome.losses, "": outcome.loss}, expected, mesh)
    problems += _gradient_problems(model, expected, mesh, TOLERANCES.get(case.composite, 1e-5))
    problems += _traffic_problems(outcome.plan, layout, case)
    problems += _problems_without_gradients(pipeline, share, batch[2], expected, mesh)
    build_optimizer(model, module_of, OptimizerConfig(), model.tied_replica_parameters()).step()
    return problems


def _loss_problems(
    actual: dict[str, torch.Tensor], expected: Reference, mesh: ParallelMesh
) -> list[str]:
    share = mesh.ranks_per_sample / mesh.module_mesh.sizes.tensor
    problems = []
    for name, loss in {**expected.losses, "": expected.loss}.items():
        (total,) = mesh.sum_over_data_parallel([actual[name].item() * share])
        if abs(total - loss) > 1e-5 * abs(loss):
            problems.append(f"loss {name} {total}, expected {loss}")
    return problems


def _gradient_problems(
    model: MultimodalModel, reference_step: Reference, mesh: ParallelMesh, tolerance: float
) -> list[str]:
    problems, copies = [], model.tied_replicas()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        expected, grad = reference_step.gradients[copies.get(name, name)], parameter.grad
        actual = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = expected.norm().item()
        # Gradients of key biases are zero except for rounding: use the norm of all gradients.
        scale = size if size > 1e-6 * reference_step.norm else reference_step.norm
        error = (actual - expected).norm().item() / scale
        if not error <= tolerance:
            problems.append(f"{name} is off by {error}")
    norm = global_grad_norm(group_by_replicas(model), mesh).item()
    if abs(norm / reference_step.norm - 1) > 1e-5:
        problems.append(f"gradient norm {norm}, expected {reference_step.norm}")
    return problems


def _traffic_problems(plan: PipelinePlan, layout: StageLayout, case: Case) -> list[str]:
    """Find backward passes and gradient messages before the first trained module."""
    with_backward = list(case.units)[-PASSES[case.freeze] :]
    if case.generator is None and case.freeze == "all but the LLM":
        with_backward = ["llm"]
    problems = []
    for action in (action for row in plan.actions for action in row):
        ends = [layout.stages[i].module for i in (action.stage, action.other) if i >= 0]
        backward = action.type in (ActionType.B, ActionType.I, ActionType.W)
        if (backward or action.type is ActionType.SEND_B) and not set(ends) <= set(with_backward):
            problems.append(f"{action} of {ends}, although this module and earlier ones are frozen")
    return problems


def _problems_without_gradients(
    pipeline: Pipeline,
    share: list[Microbatch],
    microbatch: Microbatch,
    expected: Reference,
    mesh: ParallelMesh,
) -> list[str]:
    """Compare validation losses, text and images, which all replica groups compute."""
    problems = []
    step = type("Step", (), {"microbatches": share})
    losses = held_out_losses(pipeline, [step], mesh)  # type: ignore[list-item]
    for name, loss in expected.losses.items():
        if abs(losses[name] / loss - 1) > 1e-5:
            problems.append(f"held-out {name} loss {losses[name]}, expected {loss}")
    logits = pipeline.next_token_logits(microbatch)
    if (mesh.rank == mesh.first_global_rank(pipeline.last_rank("llm"))) and logits is None:
        problems.append("no logits")
    if expected.image is not None:
        generated = generate_pixels(pipeline, microbatch, mesh, steps=1)
        error = (generated - expected.image).norm() / expected.image.norm()
        if not error <= 1e-5:
            problems.append(f"the generated image differs by {error}")
    return problems
