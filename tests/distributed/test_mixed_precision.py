"""Mixed precision without FSDP2 gives bitwise the same results as FSDP2 on one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from pipeline_parts import manager
from test_layouts import Case
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchmm.models.hf.load import copy_slice, local_tensor
from torchmm.models.initialize import init_weights
from torchmm.models.layers import loss as loss_in_chunks
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.parallel import fsdp, precision
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CompileConfig,
    OptimizerConfig,
)
from torchmm.training.checkpoint.state import model_tensors
from torchmm.training.optim import build_optimizer, global_grad_norm
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

STEPS = 3
ADAPTERS = ("llm", "vision.connector")


@dataclass(frozen=True)
class Run:
    """A case and its training options."""

    case: Case
    narrow: bool = False
    """Whether parameters are bfloat16 and optimizer states have 8 bits."""
    compiles: bool = False
    microbatches: int = 4
    parallel: dict = field(default_factory=dict)
    """Keys of [parallel]."""
    small: int = 2**18
    """Elements of the largest gradient that is kept until the end of a backward pass."""


RUNS = [
    Run(Case("dense")),
    Run(Case("gradients added one by one"), small=0),
    Run(Case("some gradients added one by one, 8-bit states"), narrow=True, small=200),
    Run(Case("one microbatch"), microbatches=1),
    Run(Case("groups of images"), parallel={"vision": {"sub_microbatch_images": 1}}),
    Run(Case("full recomputation", recompute="full")),
    Run(Case("selective recomputation", recompute="selective")),
    Run(Case("compiled"), compiles=True),
    Run(Case("encoder frozen", freeze=("vision",))),
    Run(Case("loss in chunks", chunked_loss=True)),
    Run(Case("adapters", adapters=ADAPTERS)),
    Run(Case("experts", llm="qwen3_moe")),
    Run(Case("delta nets", llm="qwen3_5_text")),
    Run(Case("8-bit states"), narrow=True),
    Run(Case("8-bit states, one microbatch"), narrow=True, microbatches=1),
    Run(Case("8-bit states, adapters", adapters=ADAPTERS), narrow=True),
    Run(Case("8-bit states, compiled, recomputed", recompute="full"), narrow=True, compiles=True),
]


PIPELINES = [
    Run(Case("pp2"), parallel={"pipeline": 2, "schedule": "1f1b"}),
    Run(Case("zero bubble"), parallel={"pipeline": 2, "schedule": "zero_bubble"}),
    Run(
        Case("zero bubble, some gradients added one by one"),
        parallel={"pipeline": 2, "schedule": "zero_bubble"},
        small=200,
    ),
    Run(
        Case("zero bubble, 8-bit states"),
        narrow=True,
        parallel={"pipeline": 2, "schedule": "zero_bubble"},
    ),
]


@dataclass
class TrainingResult:
    """Results of a few training steps.

    Attributes:
        losses: Loss of each step.
        norms: Gradient norm of each step.
        gradients: Gradients of all steps, by step and name.
        parameters: Parameters after the last step.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@contextmanager
def sharding(shards: bool) -> Iterator[None]:
    """Choose whether a single rank uses FSDP2."""
    with mock.patch.object(fsdp, "needs_fsdp", lambda sizes: shards):
        yield


def build(run: Run, seed: int) -> tuple[MultimodalModel, Pipeline]:
    config = ParallelConfig.model_validate(run.parallel)
    mesh = mesh_for(config)
    model = run.case.model()
    if run.narrow:
        model.to(torch.bfloat16)
    descriptions = [module.describe() for module in model.modality_modules()]
    batch = run.case.batch[: run.microbatches]
    layout = plan_layout(config, descriptions, [m.meta for m in batch])
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    recompute = ActivationCheckpointConfig(mode=run.case.recompute)
    compiled = CompileConfig(enabled=run.compiles, backend="aot_eager")
    parallelize(model, mesh, config, recompute, compiled, torch.bfloat16)
    materialize(model, "cpu")
    init_weights(model, seed=seed)
    randomize_adapters(model)
    return model, Pipeline(model, stages, layout, descriptions, config, mesh, torch.bfloat16)


@torch.no_grad()
def randomize_adapters(model: MultimodalModel) -> None:
    """Set the second factors of adapters, which are initially zero, to random values."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora.up"):
            generator = torch.Generator().manual_seed(len(name))
            copy_slice(parameter, 0.01 * torch.randn(parameter.shape, generator=generator))


class Training:
    """A model that trains with or without FSDP2."""

    def __init__(self, run: Run, shards: bool, seed: int = 1) -> None:
        with sharding(shards):
            self.model, self.pipeline = build(run, seed)
        assert any(isinstance(m, FSDPModule) for m in self.model.modules()) == shards
        states = "int8" if run.narrow else "float32"
        config = OptimizerConfig(lr=1e-2, lr_schedule="constant", state_dtype=states)
        self.optimizer = build_optimizer(self.model, module_of, config)
        mesh = mesh_for(ParallelConfig.model_validate(run.parallel))
        batch = run.case.batch[: run.microbatches]
        self._batch = batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
        self._targets = sum(m.target_count for m in batch)
        self._step = TrainStep(self.pipeline, mesh)

    def gradients(self) -> float:
        """Compute the gradients of a step and return the loss."""
        plan = self.pipeline.plan_training(self._batch)
        return self._step.run(plan, self._batch, self._targets).loss.item()

    def update(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Train one step; return its loss."""
        loss = self.gradients()
        self.update()
        return loss


def train(run: Run, shards: bool) -> TrainingResult:
    precision.SMALL_GRADIENT_ELEMENTS = run.small
    precision.BATCHED_ELEMENTS = 5_000  # several chunks
    training = Training(run, shards)
    model = training.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    result = TrainingResult([], [], {}, {})
    for step in range(STEPS):
        result.losses.append(training.gradients())
        result.norms.append(global_grad_norm({1: parameters}).item())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                result.gradients[f"{step} {name}"] = local_tensor(parameter.grad).clone()
            else:
                assert parameter.grad is None, name
        training.update()
    result.parameters = {n: local_tensor(p.detach()) for n, p in model.named_parameters()}
    return result


def differences(actual: TrainingResult, expected: TrainingResult) -> list[str]:
    """Return the names of all numbers that are not equal."""
    losses = zip(actual.losses, expected.losses, strict=True)
    unequal = [f"loss {step}" for step, (a, b) in enumerate(losses) if a != b]
    unequal += [] if actual.norms == expected.norms else ["norms"]
    for actual_tensors, expected_tensors in (
        (actual.gradients, expected.gradients),
        (actual.parameters, expected.parameters),
    ):
        assert actual_tensors.keys() == expected_tensors.keys()
        unequal += [
            name
            for name in actual_tensors
            if not torch.equal(actual_tensors[name], expected_tensors[name])
        ]
    return unequal


def start() -> None:
    torch.manual_seed(0)
    loss_in_chunks._ROWS = 7  # several chunks
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))


def compare_all(runs: list[Run]) -> dict[str, list[str]]:
    start()
    return {run.case.name: differences(train(run, False), train(run, True)) for run in runs}


@pytest.mark.slow
def test_one_rank_equals_fsdp_on_one_rank() -> None:
    [unequal] = run_distributed(compare_all, 1, RUNS)
    assert unequal == {run.case.name: [] for run in RUNS}


@pytest.mark.slow
def test_pipeline_ranks_equal_fsdp_on_one_rank() -> None:
    for unequal in run_distributed(compare_all, 2, PIPELINES):
        assert unequal == {run.case.name: [] for run in PIPELINES}


def compare_defects() -> list[list[str]]:
    """Return the differences of a run without float32 sums, and of one with stale weights."""
    start()
    narrow = next(run for run in RUNS if run.case.name == "8-bit states")
    with mock.patch.object(precision._Weight, "has_new_gradient", lambda self: False):
        rounded = train(narrow, False)
    with mock.patch.object(precision._Weight, "needs_copy", needs_first_copy):
        old = train(RUNS[0], False)
    return [differences(rounded, train(narrow, True)), differences(old, train(RUNS[0], True))]


def needs_first_copy(weight: precision._Weight) -> bool:
    is_first, weight._version = weight._version < 0, 0
    return is_first and weight.compute is not weight.master


def test_comparison_detects_bfloat16_sums_and_stale_copies() -> None:
    [[rounded, old]] = run_distributed(compare_defects, 1)
    assert any(name.startswith("0 ") for name in rounded)
    assert "loss 0" not in rounded + old
    assert "loss 1" in old


def save_and_resume(directory: Path) -> dict[str, list[str]]:
    """Save after one step on one rank, resume with and without FSDP2, and train another step.

    Returns:
        Differences from saving and resuming with FSDP2.
    """
    start()
    results: dict[str, dict[str, Tensor]] = {}
    for saves in (False, True):
        saved = Training(RUNS[0], saves)
        saved.step()
        checkpoints = manager(directory / str(saves), {"shard": 1})
        checkpoints.save(1, saved.model, saved.optimizer, {})
        for loads in (False, True):
            resumed = Training(RUNS[0], loads, seed=2)
            assert checkpoints.resume(resumed.model, resumed.optimizer) is not None
            resumed.step()
            tensors = model_tensors(resumed.model).items()
            results[f"{saves} {loads}"] = {n: local_tensor(t.detach()) for n, t in tensors}
    expected = results["True True"]
    return {
        pair: [n for n in values | expected if not torch.equal(values[n], expected[n])]
        for pair, values in results.items()
    }


@pytest.mark.slow
def test_checkpoints_resume_with_and_without_fsdp(tmp_path) -> None:
    [differences_by_pair] = run_distributed(save_and_resume, 1, tmp_path)
    assert len(differences_by_pair) == 4
    assert not any(differences_by_pair.values()), differences_by_pair
    for without, with_fsdp in run_distributed(resume_on_two_ranks, 2, tmp_path):
        assert without == with_fsdp


def resume_on_two_ranks(directory: Path) -> tuple[float, float]:
    """Return the losses after resuming checkpoints that were saved without and with FSDP2."""
    start()
    losses = []
    for saves in (False, True):
        resumed = Training(Run(Case("dense"), parallel={"shard": 2}), True, seed=3)
        checkpoints = manager(directory / str(saves), {"shard": 2})
        assert checkpoints.resume(resumed.model, resumed.optimizer) is not None
        losses.append(resumed.step())
    return losses[0], losses[1]
