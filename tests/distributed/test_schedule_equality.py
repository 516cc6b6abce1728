"""Every schedule gives the loss and gradients of the single process, for all frozen modules.

Each case runs three steps with different images: an uneven distribution, no images on one
data-parallel replica, and no images. Gradients are compared after each step. Models and steps have
the minimum number of layers and microbatches that give work to every stage.
"""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from launch import run_distributed
from microbatches import MODEL, random_microbatch
from shared_reference import on_first_rank
from torch.distributed.tensor import DTensor

from torchmm.common.batch import Microbatch
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.schedules import schedules_for
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.optim import global_grad_norm, group_by_replicas
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

CPU = torch.device("cpu")
FREEZES = {
    "nothing": (),
    "encoder": ("vision",),
    "llm": ("llm",),
    "all but the connector": ("vision", "llm"),
}
STEPS = [[2, 0, 3, 0, 5, 1], [2, 0, 1, 0], [0, 0, 0, 0]]
"""Images in each sequence of the global batch.

Each of two replicas has every second sequence.
"""
Shape = tuple[int, bool]
"""Number of stages of each module, and whether embeddings are tied."""


@dataclass(frozen=True)
class Case:
    """A schedule with a layout and frozen modules."""

    schedule: str
    freeze: str
    sizes: tuple[tuple[str, int], ...]
    virtual_stages: int = 1

    @property
    def shape(self) -> Shape:
        """Model properties. Two stages per rank can put both embeddings on one rank: untied."""
        return dict(self.sizes)["pipeline"] * self.virtual_stages, self.virtual_stages == 1


def deep_model(shape: Shape) -> ModelConfig:
    """Return a config with one layer per stage and one additional layer in the LLM."""
    stages, tied = shape
    config = MODEL.model_copy(deep=True)
    config.llm.config["tie_word_embeddings"] = tied
    config.llm.config["num_hidden_layers"] = stages + 1
    config.encoders["vision"].config["num_hidden_layers"] = stages
    return config


def cases(**sizes: int) -> list[Case]:
    names = schedules_for("interleaved")
    selected = [Case(s, f, tuple(sizes.items())) for s in names for f in FREEZES]
    if "tensor" in sizes:  # slow, and frozen modules have the same effect in all schedules
        selected = [c for c in selected if c.freeze == "nothing" or c.schedule == "separated"]
    if sizes == {"pipeline": 2}:
        interleaved = ("interleaved_1f1b", "megatron", "megatron_balanced", "separated")
        selected += [Case(s, f, tuple(sizes.items()), 2) for s in interleaved for f in FREEZES]
    return selected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        ({"pipeline": 2}, 5),
        ({"pipeline": 2}, 3),
        ({"pipeline": 4}, 3),
        ({"pipeline": 2, "shard": 2}, 1),
        ({"pipeline": 2, "tensor": 2}, 1),
    ],
    ids=["pp2, every fifth", "pp2", "pp4", "pp2 x fsdp2", "pp2 x tp2"],
)
def test_schedules_equal_single_process(sizes, every):
    ranks = 4 if sum(sizes.values()) == 4 else 2
    selected = cases(**sizes)[::every]
    outcomes = run_distributed(_compare_all, ranks, selected)
    for rank, results in enumerate(outcomes):
        assert len(results) == len(selected)
        for case, problems in results:
            assert not problems, (rank, case, problems)


def _compare_all(selected: list[Case]) -> list[tuple[Case, list[str]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    config = ParallelConfig(shard=1, **{k: v for k, v in selected[0].sizes if k != "shard"})
    config = config.model_copy(update=dict(selected[0].sizes))
    mesh = build_mesh(config, CPU)
    keys = dict.fromkeys((case.freeze, case.shape) for case in selected)
    references = on_first_rank(lambda: {key: _references(*key) for key in keys})
    parts: Parts = {}
    return [
        (case, _compare(case, config, mesh, references[case.freeze, case.shape], parts))
        for case in selected
    ]


@dataclass
class Reference:
    """A step of the single process."""

    batch: list[Microbatch]
    targets: int
    loss: float
    gradients: dict[str, torch.Tensor]

    @cached_property
    def norm(self) -> float:
        return torch.stack([g.norm() for g in self.gradients.values()]).norm().item()


def _references(freeze: str, shape: Shape) -> list[Reference]:
    model = _filled(build_model(deep_model(shape), FreezeConfig(modules=list(FREEZES[freeze]))))
    steps = []
    for number, images in enumerate(STEPS):
        lengths = (64, 72, 56)
        batch = [
            random_microbatch(10 * number + i, n, lengths[i % 3]) for i, n in enumerate(images)
        ]
        targets = sum(m.target_count for m in batch)
        model.zero_grad(set_to_none=True)
        total = 0.0
        for microbatch in batch:
            loss = model(microbatch) / targets
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        steps.append(Reference(batch, targets, total, gradients))
    return steps


def _filled(model: MultimodalModel) -> MultimodalModel:
    materialize(model, "cpu")
    init_weights(model, seed=1)
    return model


Parts = dict[tuple[str, StageLayout], tuple[MultimodalModel, dict[int, LayeredModule]]]
"""Model and stages of a rank, shared by schedules with equal layout and frozen modules."""


def _compare(
    case: Case,
    config: ParallelConfig,
    mesh: ParallelMesh,
    references: list[Reference],
    parts: Parts,
) -> list[str]:
    config = config.model_copy(
        update={"schedule": case.schedule, "virtual_stages": case.virtual_stages}
    )
    model = build_model(deep_model(case.shape), FreezeConfig(modules=list(FREEZES[case.freeze])))
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in references[0].batch])
    if (case.freeze, layout) not in parts:
        stages = split_model_for_rank(model, layout, mesh.plan_rank)
        plain = (ActivationCheckpointConfig(), CompileConfig(), torch.float32)
        parallelize(model, mesh, config, *plain)
        parts[case.freeze, layout] = _filled(model), stages
    model, stages = parts[case.freeze, layout]
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    step = TrainStep(pipeline, mesh)
    problems = []
    for number, reference in enumerate(references):
        model.zero_grad(set_to_none=True)
        share = reference.batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
        outcome = step.run(pipeline.plan_training(share), share, reference.targets)
        loss = mesh.sum_over_data_parallel([outcome.loss.item() * mesh.plan_size])[0]
        if abs(loss / reference.loss - 1) > 1e-5:
            problems.append(f"step {number}: loss {loss}, expected {reference.loss}")
        problems += _gradient_problems(number, model, reference, mesh)
    return problems


def _gradient_problems(
    number: int, model: MultimodalModel, reference: Reference, mesh: ParallelMesh
) -> list[str]:
    problems = []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copies = model.tied_replicas()
    for name, parameter in trained.items():
        expected = reference.gradients[copies.get(name, name)]
        grad = parameter.grad
        actual = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = expected.norm().item()
        # Gradients of key biases are zero except for rounding: use the norm of all gradients.
        scale = size if size > 1e-6 * reference.norm else max(reference.norm, 1e-6)
        error = (actual - expected).norm().item() / scale
        if error > 1e-5:
            problems.append(f"step {number}: {name} is off by {error}")
    norm = global_grad_norm(group_by_replicas(model), mesh).item()
    if abs(norm - reference.norm) > 1e-5 * max(reference.norm, 1e-6):
        problems.append(f"step {number}: gradient norm {norm}, expected {reference.norm}")
    return problems
