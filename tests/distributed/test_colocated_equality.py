"""Encoders in separate pipelines on the LLM ranks give the gradients of a single process.

Each case is a `[parallel]` section of a recipe. All cases of a world size share one launch. Encoder
tasks are assigned to replicas on other ranks, and FSDP2 sums their gradients over all ranks with
the same encoder stage.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
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
from support.allocations import CountPeak, held_in_a_step
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tuned_limits import half_way

from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import PeerError
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.parallel import activation
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, encoder_meshes, start_process_group
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run import stage
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import StageOutput
from torchmm.planning.step import plan_layout
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CompileConfig,
    OptimizerConfig,
)
from torchmm.training.optim import build_optimizer, global_grad_norm, group_by_replicas
from torchmm.training.pipeline import Pipeline

CPU = torch.device("cpu")
IMAGES = [2, 2, 3, 0, 5, 1]
"""Images in each sequence of the global batch."""
FREEZES = {
    "nothing": (),
    "tower": ("vision",),
    "llm": ("llm",),
    "all but connector": ("vision", "llm"),
}


@dataclass(frozen=True)
class Case:
    """Parallelism degrees and options of a colocated configuration.

    Attributes:
        pipeline: Pipeline ranks of the LLM.
        encoder: Pipeline ranks of each encoder pipeline.
        slices: Segments of encoder stages. If None, one per layer.
        copies: Replicas of the sharded encoder.
        split: Tensor-parallel ranks of the first encoder. If None, as for the LLM.
        second_split: Tensor-parallel ranks of the second encoder. If None, as for the first.
    """

    pipeline: int
    encoder: int
    slices: int | None = 1
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    virtual: int = 1
    freeze: str = "nothing"
    bubbles: str = "fine"
    encoders: int = 1
    copies: int | None = None
    llm_schedule: str = "interleaved_1f1b"
    split: int | None = None
    second_split: int | None = None
    sequence_parallel: bool = False
    context: int = 1
    tight: bool = False
    """Whether the memory limit requires some encoder tasks to recompute."""
    composite: str = ""
    """model_type of a multimodal model. "" means a custom LLM with `encoders` encoders."""

    @property
    def parallel(self) -> ParallelConfig:
        """`[parallel]` section of the recipe."""
        first = {"pipeline": self.encoder, "segments": self.slices, "replicate": self.copies}
        first["tensor"] = self.split
        second = {**first, "tensor": self.second_split or self.split}
        return ParallelConfig(
            placement="colocated",
            schedule="optimus",
            **{name: getattr(self, name) for name in SIZES},
            virtual_stages=self.virtual,
            bubble_granularity=self.bubbles,
            llm_schedule=self.llm_schedule,
            sequence_parallel=self.sequence_parallel,
            llm={"context": self.context},
            **dict.fromkeys(towers_of(self.composite), first),
            **({"second": second} if self.encoders == 2 else {}),
        )


SIZES = ("pipeline", "shard", "replicate", "tensor")


CASES = {
    2: [
        Case(2, 1, bubbles="coarse"),
        Case(2, 2, bubbles="coarse"),
        Case(2, 1, slices=2, virtual=2),
        Case(2, 2, slices=2),
        Case(2, 1, slices=2, virtual=2, llm_schedule="searched"),
        Case(2, 1, slices=None, freeze="tower"),
        Case(2, 1, freeze="llm"),
        Case(2, 1, slices=2, freeze="all but connector"),
        Case(2, 1, slices=2, encoders=2),
        Case(1, 1, shard=2, slices=None, context=2),
        Case(2, 1, slices=2, copies=2, llm_schedule="zero_bubble"),
        Case(1, 1, slices=None, tensor=2, split=1),
        Case(2, 1, slices=2, virtual=2, tight=True),
        Case(2, 2, slices=None, tight=True),
        Case(2, 1, encoders=2, llm_schedule="zero_bubble", freeze="llm", tight=True),
        Case(1, 1, slices=None, tensor=2, split=1, tight=True),
        *(Case(2, 1, slices=2, composite=name) for name in COMPOSITES),
        *(
            Case(2, 2, slices=2, composite=name, llm_schedule="zero_bubble")
            for name in list(COMPOSITES)[::3]
        ),
    ],
    4: [
        Case(4, 1, slices=None),
        Case(4, 1, bubbles="coarse", freeze="all but connector"),
        Case(2, 2, shard=2, slices=2, bubbles="coarse", encoders=2, freeze="all but connector"),
        Case(4, 2, slices=None, encoders=2),
        Case(4, 4),
        Case(2, 2, shard=2),
        # Context-parallel ranks.
        Case(2, 1, shard=2, slices=2, context=2, encoders=2),
        Case(2, 2, shard=2, context=2, llm_schedule="zero_bubble"),
        Case(2, 1, shard=2, context=2, copies=4, freeze="llm"),
        Case(1, 1, shard=2, tensor=2, context=2, sequence_parallel=True),
        Case(2, 1, replicate=2, encoders=2),
        # Reductions of a stage overlap with backwards of the other LLM stage and of encoders.
        Case(2, 1, shard=2, slices=2, virtual=2),
        Case(2, 1, replicate=2, slices=2, virtual=2, copies=1),
        Case(2, 2, shard=2, slices=2, llm_schedule="zero_bubble"),
        # Fewer or more encoder replicas than LLM replicas, with and without data parallelism.
        Case(2, 1, shard=2, slices=None, copies=4),
        Case(2, 1, replicate=2, copies=4),
        Case(4, 2, copies=2),
        Case(1, 1, replicate=2, tensor=2, split=1, copies=1),
        Case(2, 1, tensor=2),
        # Encoders with fewer tensor-parallel ranks than the LLM.
        Case(2, 2, tensor=2, split=1, slices=2, bubbles="coarse"),
        Case(2, 1, tensor=2, split=1, encoders=2, virtual=2, sequence_parallel=True),
        Case(2, 1, tensor=2, split=1, freeze="all but connector", llm_schedule="zero_bubble"),
        Case(2, 2, tensor=2, split=1, freeze="tower", copies=2),
        Case(1, 1, shard=2, tensor=2, split=1),
        # Two encoders with different tensor-parallel sizes, at most the size of the LLM.
        Case(2, 2, slices=2, encoders=2, tensor=2, split=1, second_split=2, virtual=2, tight=True),
        Case(1, 1, slices=None, encoders=2, tensor=4, split=2, second_split=1),
        Case(1, 1, encoders=2, tensor=4, second_split=2, bubbles="coarse", freeze="llm"),
        Case(1, 1, shard=2, slices=2, encoders=2, tensor=2, split=1, second_split=2),
        Case(2, 1, slices=2, encoders=2, tensor=2, second_split=1, llm_schedule="zero_bubble",
             freeze="all but connector"),
        # Encoder tasks recompute.
        Case(4, 2, slices=None, encoders=2, tight=True),
        Case(2, 1, shard=2, slices=2, virtual=2, tight=True),
        Case(2, 1, replicate=2, slices=2, copies=1, tight=True),
        Case(2, 1, tensor=2, split=1, slices=None, tight=True),
        Case(2, 1, shard=2, context=2, slices=2, tight=True),
    ],
}  # fmt: skip
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (2, 0),
        *(pytest.param(2, part, marks=pytest.mark.campaign) for part in range(1, PARTS)),
        *(pytest.param(4, part, marks=pytest.mark.campaign) for part in range(PARTS)),
    ],
)
def test_colocated_encoders_equal_one_process(ranks, part):
    cases = CASES[ranks][part::PARTS]  # each test has a time limit
    outcomes = run_distributed(_compare_all, ranks, cases)
    for rank, results in enumerate(outcomes):
        assert len(results) == len(cases)
        for case, problems, _, _ in results:
            assert not problems, (rank, case, problems)
    for index, case in enumerate(cases):
        forwards = [results[index][2] for results in outcomes]
        if case.encoder == 1:
            assert all(forwards), f"{case}: encoder tasks on each rank: {forwards}"
        overlapped = [results[index][3] for results in outcomes]
        if case.shard * case.replicate > 1 and case.pipeline > 1 and case.freeze == "nothing":
            assert any(overlapped), f"{case}: no backward runs after the first reduction"


@pytest.mark.slow
def test_premature_gradient_reduction_is_rejected():
    """Validation rejects the plan. Without validation, the runtime does.

    The first rank to detect the error stops, and the other ranks lose the connection to it.
    """
    results = run_distributed(_run_premature_reduction, 4)
    assert any("REDUCE_GRAD runs before the backward of Task" in each for each in results), results
    assert all(results)


@pytest.mark.slow
def test_wrong_features_of_mirrors_change_loss():
    """Change features that have no gradient message, between two encoders and the LLM mirrors.

    The encoders have different numbers of ranks, and each group feeds several mirrors of the LLM.
    """
    for results in run_distributed(_send_wrong_features, 4):
        assert any(problem.startswith("loss") for problem in results), results


@pytest.mark.slow
def test_wrong_recomputation_changes_encoder_gradients():
    """Wrong inputs of recomputed encoder tasks change the gradients of encoders only."""
    for results in run_distributed(_recompute_wrongly, 2):
        assert any("vision" in each for each in results), results
        assert not any("llm" in each for each in results), results


def model_config(encoders: int, composite: str = "") -> ModelConfig:
    if composite:
        return composite_model(composite, llm_layers=4, tower_layers=4)
    config = MODEL.model_copy(deep=True)
    assert config.llm is not None and config.llm.config is not None
    config.llm.config.update(tie_word_embeddings=False, num_hidden_layers=4)
    vision = config.encoders["vision"]
    assert vision.config is not None
    vision.config["num_hidden_layers"] = 5  # the last layer is not used
    if encoders == 2:
        config.encoders["second"] = vision.model_copy(deep=True)
    return config


def global_batch(encoders: int, composite: str = "") -> list[Microbatch]:
    """Return the global batch. Every second sequence has images for the second encoder."""
    batch = [random_microbatch(seed, n) for seed, n in enumerate(IMAGES)]
    if composite:
        return [with_patches(microbatch, composite) for microbatch in batch]
    for index, microbatch in enumerate(batch):
        if encoders == 2 and index % 2 and microbatch.encoders:
            microbatch.encoders["second"] = microbatch.encoders.pop("vision")
            samples = tuple(
                replace(s, encoder="second" if s.images else None) for s in microbatch.meta.samples
            )
            microbatch.meta = MicrobatchMeta(samples, microbatch.meta.tokens)
    return batch


def build(case: Case) -> MultimodalModel:
    freeze = FreezeConfig(modules=list(FREEZES[case.freeze]))
    return build_model(model_config(case.encoders, case.composite), freeze)


@cache
def shared_reference(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute the reference once for all ranks."""
    return on_first_rank(partial(reference, case))


def reference(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of a single process."""
    model = build(case)
    materialize(model, "cpu")
    init_weights(model, seed=1)
    batch = global_batch(case.encoders, case.composite)
    targets = sum(m.target_count for m in batch)
    total = 0.0
    for microbatch in batch:
        loss = model(microbatch) / targets
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}


def _compare_all(cases: list[Case]) -> list[tuple[Case, list[str], int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    meshes: dict[tuple, ParallelMesh] = {}
    results = []
    for case in cases:
        key = (*(getattr(case, name) for name in SIZES), case.parallel.mirrors, case.context)
        meshes[key] = meshes.get(key) or build_mesh(case.parallel, CPU)
        results.append((case, *_compare(case, case.parallel, meshes[key])))
    return results


def _run_premature_reduction() -> str:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = Case(2, 1, shard=2, slices=2)
    try:
        _compare(case, case.parallel, build_mesh(case.parallel, CPU), _move_reduction)
    except (ValueError, PeerError) as error:
        return str(error)
    return ""


def _send_wrong_features() -> list[str]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = Case(1, 1, slices=None, encoders=2, tensor=4, split=2, second_split=1)
    to_all = stage._send_to_all

    def wrong(output: Any, task: Task, graph: StageGraph) -> StageOutput:
        original = to_all(output, task, graph)
        has_gradient = map(graph.sends_gradient, graph.outgoing(task))
        pairs = zip(original.messages, has_gradient, strict=True)
        return StageOutput([m if sends else tuple(1.5 * t for t in m) for m, sends in pairs])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "_send_to_all", wrong)
        problems, *_ = _compare(case, case.parallel, build_mesh(case.parallel, CPU))
    return problems


def _recompute_wrongly() -> list[str]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = Case(2, 1, slices=2, tight=True)
    mesh = build_mesh(case.parallel, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "checkpoint", _wrong_checkpoint)
        problems, *_ = _compare(case, case.parallel, mesh)
    return problems


def _wrong_checkpoint(forward: Callable, *args: Any, **settings: Any) -> Any:
    """Recompute with a scaled input."""
    runs = count()

    def forward_of(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        return forward(hidden if next(runs) == 0 else 1.1 * hidden, *more, **named)

    return checkpoint(forward_of, *args, **settings)


def _move_reduction(plan: PipelinePlan) -> PipelinePlan:
    """Move the first reduction of each rank in front of the last backward of its stage."""
    programs = []
    for program in plan.actions:
        reduction = next(a for a in program if a.type is ActionType.REDUCE_GRAD)
        rest = [a for a in program if a is not reduction]
        last = max(i for i, a in enumerate(rest) if a.type is ActionType.B and a[1] == reduction[1])
        programs.append((*rest[:last], reduction, *rest[last:]))
    moved = replace(plan, actions=tuple(programs))
    assert "dependency" in {problem.kind for problem in validate_plan(moved).problems}
    return moved


def _compare(
    case: Case,
    config: ParallelConfig,
    mesh: ParallelMesh,
    change: Callable[[PipelinePlan], PipelinePlan] = lambda plan: plan,
) -> tuple[list[str], int, int]:
    """Compare a step with the single process.

    Returns:
        Problems, the number of encoder forwards on this rank, and the number of backwards after the
        first reduction.
    """
    model = build(case)
    batch = global_batch(case.encoders, case.composite)
    descriptions = [module.describe() for module in model.modality_modules()]
    encoders = [d.name for d in descriptions if d.kind == "encoder"]
    layout = plan_layout(config, descriptions, [m.meta for m in batch])
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    plain = (ActivationCheckpointConfig(), CompileConfig(), torch.float32)
    parallelize(model, mesh, config, *plain, meshes=encoder_meshes(config, mesh, encoders))
    materialize(model, "cpu")
    init_weights(model, seed=1)
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    share = batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
    targets = sum(m.target_count for m in batch)
    tuning = half_way(pipeline, [m.meta for m in share], kinds=["encoder"]) if case.tight else None
    metas = [m.task_meta for m in share]
    plan = plan_pipeline_step(pipeline, metas, reduces_early=True, tuning=tuning)  # as on CUDA
    plan = change(plan)
    counter = CountPeak(held_in_a_step(model, share))
    with counter if case.tight else nullcontext():
        result = pipeline.run(plan, share, loss_scale=1 / targets)
    single_case = Case(1, 1, freeze=case.freeze, encoders=case.encoders, composite=case.composite)
    loss, gradients = shared_reference(single_case)
    local_losses = result.losses if mesh.module_mesh.mesh.get_local_rank("tensor") == 0 else {}
    problems = _loss_problems(local_losses, targets, loss)
    problems += _gradient_problems(model, gradients, mesh, TOLERANCES.get(case.composite, 1e-5))
    problems += _validation_problems(pipeline, share, loss * targets, mesh)
    build_optimizer(model, module_of, OptimizerConfig()).step()
    # The limit assumes that pixels are bytes, as in batches of the data loader.
    pixels = sum(e.pixels.nbytes - e.pixels.numel() for m in share for e in m.encoders.values())
    problems += _memory_problems(model, plan, tuning, counter.peak_bytes - pixels)
    forwards = [
        a for a in plan.actions[mesh.plan_rank]
        if a.type is ActionType.F and layout.stages[a.stage].module in encoders
    ]  # fmt: skip
    program = plan.actions[mesh.plan_rank]
    kinds = [a.type for a in program]
    reduced = kinds.index(ActionType.REDUCE_GRAD) if ActionType.REDUCE_GRAD in kinds else len(kinds)
    return problems, len(forwards), kinds[reduced:].count(ActionType.B)


def _memory_problems(
    model: MultimodalModel, plan: PipelinePlan, tuning: LayerTuning | None, peak_bytes: int
) -> list[str]:
    """Return errors in the recomputation of a plan and in the memory use of its step."""
    if tuning is None:
        return ["recomputes"] if plan.recompute else []
    modules = {plan.graph.layout.stages[task.stage].module for task in plan.recompute}
    if not modules or not modules <= tuning.names:
        return [f"recomputes in {modules}"]
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return []  # shards use additional memory
    needed = peak_bytes + sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
    limit = tuning.memory_limit_bytes
    return [f"{needed} bytes of {limit}"] if needed > limit else []


def _loss_problems(losses: dict[int, torch.Tensor], targets: int, expected: float) -> list[str]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sum(float(loss) for loss in losses.values()))
    loss = sum(by_rank) / targets
    return [] if abs(loss / expected - 1) <= 1e-5 else [f"loss {loss}, expected {expected}"]


def _validation_problems(
    pipeline: Pipeline, share: list[Microbatch], expected: float, mesh: ParallelMesh
) -> list[str]:
    """Return the problems of a forward-only step, as in validation."""
    losses = pipeline.losses(share)
    local = (
        sum(float(loss) for of_microbatch in losses.values() for loss in of_microbatch)
        / mesh.module_mesh.sizes.tensor
    )
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, local)
    total = sum(by_rank)
    return (
        [] if abs(total / expected - 1) <= 1e-5 else [f"validation: {total}, expected {expected}"]
    )


def _gradient_problems(
    model: MultimodalModel, expected: dict[str, torch.Tensor], mesh: ParallelMesh, tolerance: float
) -> list[str]:
    total_norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        actual = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = expected[name].norm().item()
        # Gradients of key biases are zero except for rounding: use the norm of all gradients.
        scale = size if size > 1e-6 * total_norm else total_norm
        error = (actual - expected[name]).norm().item() / scale
        if not error <= tolerance:
            problems.append(f"{name} is off by {error}")
    norm = global_grad_norm(group_by_replicas(model), mesh).item()
    if abs(norm / total_norm - 1) > 1e-5:
        problems.append(f"gradient norm {norm}, expected {total_norm}")
    return problems
