"""Encoders in pipelines of their own on the LLM's ranks give the gradients of the single process.

Everything follows from the `[parallel]` section of a recipe; every one of a world is run in one
launch. Encoder tasks are dealt to replicas on other ranks,
whose gradients are added up by FSDP2 over all ranks with the same encoder stage.
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

from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
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
from torchmm.pipelining.run.cut import cut_for_rank
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
"""In each sequence of the global batch."""
FREEZES = {
    "nothing": (),
    "tower": ("vision",),
    "llm": ("llm",),
    "all but connector": ("vision", "llm"),
}


@dataclass(frozen=True)
class Case:
    """Sizes: pipeline ranks of the LLM and of an encoder's pipelines, slices of encoder stages
    (None: one for each layer), copies of the sharded encoder and tensor-parallel ranks of the
    encoder (None: as many as of the LLM), and of the second one (None: as many as of the first)."""

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
    """Whether memory is so short that some encoder tasks have to recompute."""
    composite: str = ""
    """Its model_type; "": an LLM and `encoders` by hand."""

    @property
    def parallel(self) -> ParallelConfig:
        """The recipe's section."""
        own = {"pipeline": self.encoder, "segments": self.slices, "replicate": self.copies}
        own["tensor"] = self.split
        second = {**own, "tensor": self.second_split or self.split}
        return ParallelConfig(
            placement="colocated",
            schedule="optimus",
            **{name: getattr(self, name) for name in SIZES},
            virtual_stages=self.virtual,
            bubble_granularity=self.bubbles,
            llm_schedule=self.llm_schedule,
            sequence_parallel=self.sequence_parallel,
            llm={"context": self.context},
            **dict.fromkeys(towers_of(self.composite), own),
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
        *(Case(2, 2, slices=2, composite=name, llm_schedule="zero_bubble") for name in COMPOSITES),
    ],
    4: [
        Case(4, 1, slices=None),
        Case(4, 1, bubbles="coarse", freeze="all but connector"),
        Case(2, 2, shard=2, slices=2, bubbles="coarse", encoders=2, freeze="all but connector"),
        Case(4, 2, slices=None, encoders=2),
        Case(4, 2, bubbles="coarse", freeze="tower"),
        Case(4, 4),
        Case(2, 1, shard=2, slices=2),
        Case(2, 2, shard=2),
        # Ranks that share rows.
        Case(2, 1, shard=2, slices=2, context=2, encoders=2),
        Case(2, 2, shard=2, context=2, llm_schedule="zero_bubble"),
        Case(2, 1, shard=2, context=2, copies=4, freeze="llm"),
        Case(1, 1, shard=2, tensor=2, context=2, sequence_parallel=True),
        Case(2, 1, replicate=2, encoders=2),
        # Reductions of a stage below backwards of the LLM's other one, and of encoders.
        Case(2, 1, shard=2, slices=2, virtual=2),
        Case(2, 2, shard=2, slices=2, virtual=2, encoders=2),
        Case(2, 1, replicate=2, slices=2, virtual=2, copies=1),
        Case(2, 2, shard=2, slices=2, llm_schedule="zero_bubble"),
        # Copies of the encoder, with and without data parallelism of the LLM: fewer and more.
        Case(2, 1, shard=2, slices=None, copies=4),
        Case(2, 1, replicate=2, copies=1),
        Case(2, 1, replicate=2, copies=4),
        Case(4, 2, copies=2),
        Case(1, 1, replicate=2, tensor=2, split=1, copies=1),
        Case(2, 1, tensor=2),
        # Encoders split over fewer ranks than the LLM.
        Case(2, 1, tensor=2, split=1, slices=None),
        Case(2, 2, tensor=2, split=1, slices=2, bubbles="coarse"),
        Case(2, 1, tensor=2, split=1, encoders=2, virtual=2, sequence_parallel=True),
        Case(2, 1, tensor=2, split=1, freeze="all but connector", llm_schedule="zero_bubble"),
        Case(2, 2, tensor=2, split=1, freeze="tower", copies=2),
        Case(1, 1, tensor=4, split=2, slices=2, freeze="llm"),
        Case(1, 1, shard=2, tensor=2, split=1),
        # Two encoders over different numbers of ranks: as many as the LLM and fewer, both fewer.
        Case(2, 1, slices=2, encoders=2, tensor=2, second_split=1),
        Case(2, 2, slices=2, encoders=2, tensor=2, split=1, second_split=2, virtual=2, tight=True),
        Case(1, 1, slices=None, encoders=2, tensor=4, split=2, second_split=1),
        Case(1, 1, slices=2, encoders=2, tensor=4, split=1, second_split=2, copies=1,
             freeze="tower"),
        Case(1, 1, encoders=2, tensor=4, second_split=2, bubbles="coarse", freeze="llm"),
        Case(1, 1, shard=2, slices=2, encoders=2, tensor=2, split=1, second_split=2),
        Case(2, 1, slices=2, encoders=2, tensor=2, second_split=1, llm_schedule="zero_bubble",
             freeze="all but connector"),
        # Encoder tasks recompute.
        Case(4, 2, slices=None, encoders=2, tight=True),
        Case(2, 1, shard=2, slices=2, virtual=2, tight=True),
        Case(2, 1, replicate=2, slices=2, copies=1, tight=True),
        Case(2, 2, tensor=2, slices=2, tight=True),
        Case(2, 1, tensor=2, split=1, slices=None, tight=True),
        Case(2, 1, shard=2, context=2, slices=2, tight=True),
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (2, 0),
        *(pytest.param(2, part, marks=pytest.mark.campaign) for part in (1, 2)),
        *(pytest.param(4, part, marks=pytest.mark.campaign) for part in range(3)),
    ],
)
def test_colocated_encoders_equal_one_process(ranks, part):
    cases = CASES[ranks][part::3]  # a test has limited time
    outcomes = run_distributed(_compare_all, ranks, cases)
    for rank, found in enumerate(outcomes):
        assert len(found) == len(cases)
        for case, problems, _, _ in found:
            assert not problems, (rank, case, problems)
    for index, case in enumerate(cases):
        ran = [found[index][2] for found in outcomes]
        if case.encoder == 1:
            assert all(ran), f"{case}: encoder tasks on each rank: {ran}"
        beside = [found[index][3] for found in outcomes]
        if case.shard * case.replicate > 1 and case.pipeline > 1 and case.freeze == "nothing":
            assert any(beside), f"{case}: nothing runs beside reductions"


@pytest.mark.slow
def test_a_reduction_in_front_of_its_last_backward_is_refused():
    """By validation, and by the runtime where nobody has validated the plan: the first rank to
    notice stops, and others lose it."""
    found = run_distributed(_reduce_too_early, 4)
    assert any("REDUCE_GRAD runs before the backward of Task" in each for each in found), found
    assert all(found)


@pytest.mark.slow
def test_what_other_mirrors_are_handed_is_noticed():
    """With two encoders over different numbers of ranks, each of whose groups feeds several of the
    LLM's mirrors: something else for those that give no gradient back changes the loss."""
    for found in run_distributed(_hand_over_wrongly, 4):
        assert any(problem.startswith("loss") for problem in found), found


@pytest.mark.slow
def test_recomputing_from_something_else_is_noticed():
    """The comparison sees what recomputed encoder tasks do, and only those."""
    for found in run_distributed(_recompute_wrongly, 2):
        assert any("vision" in each for each in found), found
        assert not any("llm" in each for each in found), found


def model_config(encoders: int, composite: str = "") -> ModelConfig:
    if composite:
        return composite_model(composite, llm_layers=4, tower_layers=4)
    config = MODEL.model_copy(deep=True)
    assert config.llm is not None and config.llm.config is not None
    config.llm.config.update(tie_word_embeddings=False, num_hidden_layers=4)
    vision = config.encoders["vision"]
    assert vision.config is not None
    vision.config["num_hidden_layers"] = 5  # its last is not used
    if encoders == 2:
        config.encoders["second"] = vision.model_copy(deep=True)
    return config


def global_batch(encoders: int, composite: str = "") -> list[Microbatch]:
    """Every other sequence's images are the second encoder's."""
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
    """Computed once for all ranks."""
    return on_first_rank(partial(reference, case))


def reference(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the single process."""
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
    found = []
    for case in cases:
        key = (*(getattr(case, name) for name in SIZES), case.parallel.mirrors, case.context)
        meshes[key] = meshes.get(key) or build_mesh(case.parallel, CPU)
        found.append((case, *_compare(case, case.parallel, meshes[key])))
    return found


def _reduce_too_early() -> str:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = Case(2, 1, shard=2, slices=2)
    try:
        _compare(case, case.parallel, build_mesh(case.parallel, CPU), _too_early)
    except (ValueError, PeerError) as error:
        return str(error)
    return ""


def _hand_over_wrongly() -> list[str]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = Case(1, 1, slices=None, encoders=2, tensor=4, split=2, second_split=1)
    to_all = stage._to_all

    def wrong(output: Any, task: Task, graph: StageGraph) -> StageOutput:
        made = to_all(output, task, graph)
        carried = map(graph.carries_gradient, graph.outgoing(task))
        both = zip(made.messages, carried, strict=True)
        return StageOutput([m if gives else tuple(1.5 * t for t in m) for m, gives in both])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "_to_all", wrong)
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
    """Runs again from a larger input."""
    runs = count()

    def forward_of(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        return forward(hidden if next(runs) == 0 else 1.1 * hidden, *more, **named)

    return checkpoint(forward_of, *args, **settings)


def _too_early(plan: PipelinePlan) -> PipelinePlan:
    """The plan with each rank's first reduction in front of the last backward of its stage."""
    programs = []
    for program in plan.actions:
        reduction = next(a for a in program if a.type is ActionType.REDUCE_GRAD)
        rest = [a for a in program if a is not reduction]
        last = max(i for i, a in enumerate(rest) if a.type is ActionType.B and a[1] == reduction[1])
        programs.append((*rest[:last], reduction, *rest[last:]))
    found = replace(plan, actions=tuple(programs))
    assert "dependency" in {problem.kind for problem in validate_plan(found).problems}
    return found


def _compare(
    case: Case,
    config: ParallelConfig,
    mesh: ParallelMesh,
    change: Callable[[PipelinePlan], PipelinePlan] = lambda plan: plan,
) -> tuple[list[str], int, int]:
    """What differs from the single process; how many encoder forwards this rank ran, and how many
    backwards after its first reduction."""
    model = build(case)
    batch = global_batch(case.encoders, case.composite)
    descriptions = [module.describe() for module in model.modality_modules()]
    encoders = [d.name for d in descriptions if d.kind == "encoder"]
    layout = plan_layout(config, descriptions, [m.meta for m in batch])
    stages = cut_for_rank(model, layout, mesh.pipeline_rank)
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
    alone = Case(1, 1, freeze=case.freeze, encoders=case.encoders, composite=case.composite)
    loss, gradients = shared_reference(alone)
    here = result.losses if mesh.own.mesh.get_local_rank("tensor") == 0 else {}
    problems = _loss_problems(here, targets, loss)
    problems += _gradient_problems(model, gradients, mesh, TOLERANCES.get(case.composite, 1e-5))
    problems += _losses_problems(pipeline, share, loss * targets, mesh)
    build_optimizer(model, module_of, OptimizerConfig()).step()
    # The limit counts pixels as bytes, which is what loaders give.
    pixels = sum(e.pixels.nbytes - e.pixels.numel() for m in share for e in m.encoders.values())
    problems += _memory_problems(model, plan, tuning, counter.peak_bytes - pixels)
    forwards = [
        a for a in plan.actions[mesh.pipeline_rank]
        if a.type is ActionType.F and layout.stages[a.stage].module in encoders
    ]  # fmt: skip
    program = plan.actions[mesh.pipeline_rank]
    kinds = [a.type for a in program]
    reduced = kinds.index(ActionType.REDUCE_GRAD) if ActionType.REDUCE_GRAD in kinds else len(kinds)
    return problems, len(forwards), kinds[reduced:].count(ActionType.B)


def _memory_problems(
    model: MultimodalModel, plan: PipelinePlan, tuning: LayerTuning | None, peak_bytes: int
) -> list[str]:
    """What is wrong with a plan for short memory, and with what its step has used."""
    if tuning is None:
        return ["recomputes"] if plan.recompute else []
    modules = {plan.graph.layout.stages[task.stage].module for task in plan.recompute}
    if not modules or not modules <= tuning.names:
        return [f"recomputes in {modules}"]
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return []  # shards have memory of their own
    needed = peak_bytes + sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
    limit = tuning.memory_limit_bytes
    return [f"{needed} bytes of {limit}"] if needed > limit else []


def _loss_problems(losses: dict[int, torch.Tensor], targets: int, wanted: float) -> list[str]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sum(float(loss) for loss in losses.values()))
    loss = sum(by_rank) / targets
    return [] if abs(loss / wanted - 1) <= 1e-5 else [f"loss {loss}, expected {wanted}"]


def _losses_problems(
    pipeline: Pipeline, share: list[Microbatch], wanted: float, mesh: ParallelMesh
) -> list[str]:
    """Of a step of forwards only, as validation runs it."""
    losses = pipeline.losses(share)
    here = sum(float(loss) for own in losses.values() for loss in own) / mesh.own.sizes.tensor
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, here)
    found = sum(by_rank)
    return [] if abs(found / wanted - 1) <= 1e-5 else [f"validation: {found}, expected {wanted}"]


def _gradient_problems(
    model: MultimodalModel, wanted: dict[str, torch.Tensor], mesh: ParallelMesh, tolerance: float
) -> list[str]:
    whole = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        found = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = wanted[name].norm().item()
        # Zero but for rounding (a key bias cannot change attention): against the whole gradient.
        scale = size if size > 1e-6 * whole else whole
        error = (found - wanted[name]).norm().item() / scale
        if not error <= tolerance:
            problems.append(f"{name} is off by {error}")
    norm = global_grad_norm(group_by_replicas(model), mesh).item()
    if abs(norm / whole - 1) > 1e-5:
        problems.append(f"gradient norm {norm}, expected {whole}")
    return problems
