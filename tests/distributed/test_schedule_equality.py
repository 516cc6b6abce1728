"""Every schedule gives the loss and the gradients of the single process, whatever is frozen.

Each case runs three steps with other images: skewed, none on one data-parallel replica, and none at
all. The sums over all steps' gradients are not compared, but each step's own. Models have no more
layers, and steps no more microbatches, than it takes to give every stage its share.
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
from torchmm.pipelining.run.cut import cut_for_rank
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
"""Images in each sequence of the global batch; of two replicas, each has every other sequence."""
Shape = tuple[int, bool]
"""Stages of each module, and whether embeddings are tied."""


@dataclass(frozen=True)
class Case:
    """A schedule in a layout."""

    schedule: str
    freeze: str
    sizes: tuple[tuple[str, int], ...]
    virtual_stages: int = 1

    @property
    def shape(self) -> Shape:
        """Not tied where chains of two stages per rank may put both embeddings on one rank."""
        return dict(self.sizes)["pipeline"] * self.virtual_stages, self.virtual_stages == 1


def deep_model(shape: Shape) -> ModelConfig:
    """The tiny model with a layer for every stage, and one more in the LLM."""
    stages, tied = shape
    config = MODEL.model_copy(deep=True)
    config.llm.config["tie_word_embeddings"] = tied
    config.llm.config["num_hidden_layers"] = stages + 1
    config.encoders["vision"].config["num_hidden_layers"] = stages
    return config


def cases(**sizes: int) -> list[Case]:
    names = schedules_for("interleaved")
    found = [Case(s, f, tuple(sizes.items())) for s in names for f in FREEZES]
    if "tensor" in sizes:  # slow, and what is frozen is the same to all schedules there
        found = [c for c in found if c.freeze == "nothing" or c.schedule == "separated"]
    if sizes == {"pipeline": 2}:
        interleaved = ("interleaved_1f1b", "megatron", "megatron_balanced", "separated")
        found += [Case(s, f, tuple(sizes.items()), 2) for s in interleaved for f in FREEZES]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        ({"pipeline": 2}, 3),
        ({"pipeline": 2}, 1),
        ({"pipeline": 4}, 1),
        ({"pipeline": 2, "shard": 2}, 1),
        ({"pipeline": 2, "tensor": 2}, 1),
    ],
    ids=["pp2, every third", "pp2", "pp4", "pp2 x fsdp2", "pp2 x tp2"],
)
def test_schedules_equal_single_process(sizes, every):
    ranks = 4 if sum(sizes.values()) == 4 else 2
    wanted = cases(**sizes)[::every]
    outcomes = run_distributed(_compare_all, ranks, wanted)
    for rank, found in enumerate(outcomes):
        assert len(found) == len(wanted)
        for case, problems in found:
            assert not problems, (rank, case, problems)


def _compare_all(every: list[Case]) -> list[tuple[Case, list[str]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    config = ParallelConfig(shard=1, **{k: v for k, v in every[0].sizes if k != "shard"})
    config = config.model_copy(update=dict(every[0].sizes))
    mesh = build_mesh(config, CPU)
    keys = dict.fromkeys((case.freeze, case.shape) for case in every)
    references = on_first_rank(lambda: {key: _references(*key) for key in keys})
    parts: Parts = {}
    return [
        (case, _compare(case, config, mesh, references[case.freeze, case.shape], parts))
        for case in every
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
    found = []
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
        found.append(Reference(batch, targets, total, gradients))
    return found


def _filled(model: MultimodalModel) -> MultimodalModel:
    materialize(model, "cpu")
    init_weights(model, seed=1)
    return model


Parts = dict[tuple[str, StageLayout], tuple[MultimodalModel, dict[int, LayeredModule]]]
"""A rank's model and its stages, which schedules with the same layout and freezing share."""


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
        stages = cut_for_rank(model, layout, mesh.pipeline_rank)
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
        loss = mesh.sum_over_data([outcome.loss.item() * mesh.pipeline_size])[0]
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
        wanted = reference.gradients[copies.get(name, name)]
        grad = parameter.grad
        found = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = wanted.norm().item()
        # Zero but for rounding (a key bias cannot change attention): against the whole gradient.
        scale = size if size > 1e-6 * reference.norm else max(reference.norm, 1e-6)
        error = (found - wanted).norm().item() / scale
        if error > 1e-5:
            problems.append(f"step {number}: {name} is off by {error}")
    norm = global_grad_norm(group_by_replicas(model), mesh).item()
    if abs(norm - reference.norm) > 1e-5 * max(reference.norm, 1e-6):
        problems.append(f"step {number}: gradient norm {norm}, expected {reference.norm}")
    return problems
