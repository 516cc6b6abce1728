"""With sequence parallelism, pipeline messages are slices, and results are unchanged.

Cases of other equality tests run with `sequence_parallel`: single pipelines, and encoders in
bubbles, also with fewer tensor-parallel ranks than the LLM. Disaggregated modules have different
numbers of tensor-parallel ranks. All sent bytes are counted. As a negative control, ranks of a
group receive swapped slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from shared_reference import on_first_rank
from test_colocated_equality import SIZES as COLOCATED_SIZES
from test_colocated_equality import Case as Colocated
from test_colocated_equality import _compare as compare_colocated
from test_disaggregated_equality import Case as Disaggregated
from test_disaggregated_equality import compare as compare_apart
from test_disaggregated_equality import unit
from test_schedule_equality import Case as SinglePipeline
from test_schedule_equality import Reference, _references
from test_schedule_equality import _compare as compare_chain
from torch import Tensor

from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.parallel.p2p import P2PChannels
from torchmm.parallel.tensor.sequence import TensorParallelRows
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime, StepResult
from torchmm.recipe.parallel_section import ParallelConfig

CPU = torch.device("cpu")
SLICED = {"sequence_parallel": True}
PP2_TP2 = (("pipeline", 2), ("tensor", 2))
ONE, TP2 = unit(), unit(tensor=2)
CASES: dict[int, list[SinglePipeline | Colocated | Disaggregated]] = {
    3: [
        Disaggregated(ONE, TP2, parallel=SLICED),
        Disaggregated(TP2, ONE, parallel=SLICED),
        Disaggregated(ONE, TP2, schedule="zero_bubble", parallel=SLICED),
    ],
    4: [
        SinglePipeline("interleaved_1f1b", "nothing", PP2_TP2, 2),
        SinglePipeline("zero_bubble", "nothing", PP2_TP2),
        SinglePipeline("searched", "nothing", PP2_TP2),
        SinglePipeline("separated", "encoder", PP2_TP2),
        Colocated(2, 1, tensor=2, sequence_parallel=True),
        Colocated(2, 2, tensor=2, slices=2, sequence_parallel=True, llm_schedule="zero_bubble"),
        Colocated(2, 1, tensor=2, split=1, freeze="all but connector", sequence_parallel=True,
                  llm_schedule="zero_bubble"),
        Colocated(1, 1, tensor=4, split=2, slices=2, sequence_parallel=True),
        # Encoders with different tensor-parallel sizes.
        Colocated(1, 1, tensor=4, split=2, second_split=1, slices=None, encoders=2,
                  sequence_parallel=True),
        Colocated(2, 1, tensor=2, second_split=1, slices=2, encoders=2, virtual=2,
                  sequence_parallel=True, llm_schedule="searched"),
        Disaggregated(TP2, TP2, parallel=SLICED),
        Disaggregated(ONE, TP2, ONE, parallel=SLICED),
        Disaggregated(ONE, unit(pipeline=3), parallel=SLICED),
    ],
    8: [  # the first layer of a stage gathers parameters and receives slices
        SinglePipeline("interleaved_1f1b", "nothing", (*PP2_TP2, ("shard", 2)), 2),
    ],
}  # fmt: skip
"""Cases by number of ranks."""


@dataclass
class Traffic:
    """Bytes that this rank sent in training steps."""

    sent: int = 0
    """Counted bytes."""
    planned: int = 0
    """Bytes according to the plans."""
    unsliced: int = 0
    """Bytes of the unsliced tensors."""
    slices: int = 0
    """Number of tensors of which a slice was sent."""
    tensors: int = 0


@dataclass
class CaseResult:
    """Results of a case on one rank."""

    problems: list[str]
    wrong_slices: list[str]
    """Problems if ranks receive swapped slices."""
    traffic: Traffic = field(default_factory=Traffic)


@pytest.fixture(scope="module", params=CASES)
def outcomes(request) -> list[list[CaseResult]]:
    """Return the results of a world by rank and case."""
    pytest.importorskip("diffusers")
    return run_distributed(_run_all, request.param, request.param)


def _cases(outcomes: list[list[CaseResult]]) -> Iterator[tuple[Any, list[CaseResult]]]:
    """Yield cases with the results of all ranks."""
    cases = CASES[len(outcomes)]
    assert all(len(results) == len(cases) for results in outcomes)
    yield from zip(cases, map(list, zip(*outcomes, strict=True)), strict=True)


@pytest.mark.slow
def test_sliced_messages_keep_losses_and_gradients(outcomes):
    for case, ranks in _cases(outcomes):
        assert not any(result.problems for result in ranks), (case, ranks)


@pytest.mark.slow
def test_swapped_slices_change_results(outcomes):
    """Negative control."""
    for case, ranks in _cases(outcomes):
        assert any(result.wrong_slices for result in ranks) == _is_split(case), case


@pytest.mark.slow
def test_sent_bytes_match_plan_and_slices(outcomes):
    for case, ranks in _cases(outcomes):
        for rank, result in enumerate(ranks):
            traffic = result.traffic
            assert traffic.sent == traffic.planned, (case, rank)
            if not _is_split(case):
                assert traffic.slices == 0
                assert traffic.sent == traffic.unsliced
        sliced = [result.traffic for result in ranks if result.traffic.slices]
        assert bool(sliced) == _is_split(case)
        for traffic in (
            sliced if _is_uniform(case) else ()
        ):  # otherwise, some messages are between single ranks
            assert traffic.slices == traffic.tensors, case
        if _is_uniform(case) and sliced:
            sent, unsliced = sum(t.sent for t in sliced), sum(t.unsliced for t in sliced)
            assert 1 / 2 <= sent / unsliced < 0.55, (
                case,
                sent / unsliced,
            )  # the remainder is padding


def _is_split(case: Any) -> bool:
    sizes = case.units.values() if isinstance(case, Disaggregated) else ()
    return not isinstance(case, Disaggregated) or any(size.tensor > 1 for size in sizes)


def _is_uniform(case: Any) -> bool:
    """Return True if all modules have two tensor-parallel ranks."""
    if isinstance(case, Disaggregated):
        return all(size.tensor == 2 for size in case.units.values())
    return isinstance(case, SinglePipeline) or (case.tensor == 2 and not _has_mirrors(case))


def _has_mirrors(case: Any) -> bool:
    """Return True if the LLM has several ranks of the plan per tensor-parallel group."""
    return isinstance(case, Colocated) and case.parallel.mirrors > 1


def _run_all(ranks: int) -> list[CaseResult]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    meshes: dict[tuple, Any] = {}
    references: dict[tuple, list[Reference]] = {}
    results = []
    for case in CASES[ranks]:
        run = _run_of(case, meshes, references)
        with _count_traffic() as traffic:
            problems = run()
        with _swap_slices(case):
            wrong = run()
        results.append(CaseResult(problems, wrong, traffic))
    return results


def _run_of(
    case: Any, meshes: dict[tuple, Any], references: dict[tuple, list[Reference]]
) -> Callable[[], list[str]]:
    """Return a function that compares a case with a single process."""
    if isinstance(case, Disaggregated):
        return lambda: compare_apart(case)
    if isinstance(case, Colocated):
        config = case.parallel
        key = (*(getattr(case, name) for name in COLOCATED_SIZES), config.mirrors)
        meshes[key] = mesh = meshes.get(key) or build_mesh(config, CPU)
        return lambda: compare_colocated(case, config, mesh)[0]
    config = ParallelConfig(**{"shard": 1, **dict(case.sizes)}, sequence_parallel=True)
    meshes["chain",] = mesh = meshes.get(("chain",)) or build_mesh(config, CPU)
    shape = case.freeze, case.shape
    if shape not in references:
        references[shape] = on_first_rank(lambda: _references(*shape))
    return lambda: compare_chain(case, config, mesh, references[shape], {})


@contextmanager
def _count_traffic() -> Iterator[Traffic]:
    """Count the bytes that training steps send."""
    traffic = Traffic()
    step, post = PipelineRuntime.step, P2PChannels._post
    training = False

    def counted_step(self: PipelineRuntime, plan: PipelinePlan, *args: Any, **kw: Any) -> Any:
        nonlocal training
        training = plan.training
        if training:
            _add_planned(traffic, plan, self.plan_rank)
        result: StepResult = step(self, plan, *args, **kw)
        training = False
        return result

    def counted_post(
        self: P2PChannels, operation: Any, tensors: Any, parts: Any, action: Any
    ) -> Any:
        parts = list(parts)
        if training and operation is dist.isend and action.type in SENDS:
            traffic.sent += sum(part.nbytes for part, _ in parts)
        return post(self, operation, tensors, parts, action)

    PipelineRuntime.step, P2PChannels._post = counted_step, counted_post  # type: ignore[method-assign]
    try:
        yield traffic
    finally:
        PipelineRuntime.step, P2PChannels._post = step, post  # type: ignore[method-assign]


SENDS = (ActionType.SEND_F, ActionType.SEND_B)


def _add_planned(traffic: Traffic, plan: PipelinePlan, rank: int) -> None:
    for action in plan.actions[rank]:
        if action.type not in SENDS:
            continue
        backward = action.type is ActionType.SEND_B
        ends = (action.stage, action.other)
        source, destination = ends[::-1] if backward else ends
        key = source, destination, action.microbatch, action.sub_microbatch
        specs = [s for m, message_specs in plan.specs.items() if m == key for s in message_specs]
        moved: list[TensorSpec] = [s for s in specs if s.requires_grad or not backward]
        traffic.tensors += len(moved)
        traffic.slices += sum(s.slices is not None for s in moved)
        traffic.unsliced += sum(s.nbytes for s in moved)
        traffic.planned += sum(s.local_spec(source=not backward).nbytes for s in moved)


@contextmanager
def _swap_slices(case: Any) -> Iterator[None]:
    """Swap the slices of ranks: in messages, or in all-gathers if the LLM has mirrors."""
    parts, all_gather_rows = P2PChannels._transfer_parts, TensorParallelRows.all_gather_rows

    def swapped_parts(
        self: P2PChannels, tensor: Tensor, cut: Any, peers: Sequence[int], *, sends: bool
    ) -> Any:
        others = peers if cut == (1, 1) else peers[::-1]  # unsliced tensors have one peer
        return parts(self, tensor, cut, others, sends=sends)

    def swapped_rows(self: TensorParallelRows, local: Tensor) -> Tensor:
        slices = all_gather_rows(self, local).split(local.shape[-2], -2)
        return torch.cat(slices[::-1], -2)

    if _has_mirrors(case):
        TensorParallelRows.all_gather_rows = swapped_rows  # type: ignore[method-assign]
    else:
        P2PChannels._transfer_parts = swapped_parts  # type: ignore[method-assign]
    try:
        yield
    finally:
        P2PChannels._transfer_parts, TensorParallelRows.all_gather_rows = parts, all_gather_rows  # type: ignore[method-assign]
