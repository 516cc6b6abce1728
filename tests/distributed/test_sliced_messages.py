"""Under sequence parallelism ranks send each other slices, and what is computed stays the same.

Cases of other tests of equality run here with `sequence_parallel`: chains of stages, encoders in
bubbles, also over fewer tensor-parallel ranks than the LLM, modules apart over other numbers of
them. Meanwhile every byte that is sent is counted. As a control each rank of a group gets another
one's slice.
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
from test_disaggregated_equality import Case as Apart
from test_disaggregated_equality import compare as compare_apart
from test_disaggregated_equality import unit
from test_schedule_equality import Case as Chain
from test_schedule_equality import Reference, _references
from test_schedule_equality import _compare as compare_chain
from torch import Tensor

from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.parallel.p2p import P2PChannels
from torchmm.parallel.tensor.sequence import MeshRows
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime, StepResult
from torchmm.recipe.parallel_section import ParallelConfig

CPU = torch.device("cpu")
SLICED = {"sequence_parallel": True}
PP2_TP2 = (("pipeline", 2), ("tensor", 2))
ONE, TP2 = unit(), unit(tensor=2)
CASES: dict[int, list[Chain | Colocated | Apart]] = {
    3: [
        Apart(ONE, TP2, parallel=SLICED),
        Apart(TP2, ONE, parallel=SLICED),
        Apart(ONE, TP2, schedule="zero_bubble", parallel=SLICED),
        Apart(TP2, ONE, freeze="tower", parallel=SLICED),
        Apart(ONE, TP2, freeze="all but the encoder", parallel=SLICED),
    ],
    4: [
        Chain("1f1b", "nothing", PP2_TP2),
        Chain("interleaved_1f1b", "nothing", PP2_TP2, 2),
        Chain("zero_bubble", "nothing", PP2_TP2),
        Chain("separated", "nothing", PP2_TP2, 2),
        Chain("searched", "nothing", PP2_TP2),
        Chain("separated", "encoder", PP2_TP2),
        Colocated(2, 1, tensor=2, sequence_parallel=True),
        Colocated(2, 2, tensor=2, slices=2, sequence_parallel=True, llm_schedule="zero_bubble"),
        Colocated(2, 2, tensor=2, split=1, slices=2, sequence_parallel=True),
        Colocated(2, 1, tensor=2, split=1, slices=None, encoders=2, virtual=2,
                  sequence_parallel=True, llm_schedule="searched"),
        Colocated(2, 1, tensor=2, split=1, freeze="all but connector", sequence_parallel=True,
                  llm_schedule="zero_bubble"),
        Colocated(1, 1, tensor=4, split=2, slices=2, sequence_parallel=True),
        # Encoders over different numbers of ranks.
        Colocated(1, 1, tensor=4, split=2, second_split=1, slices=None, encoders=2,
                  sequence_parallel=True),
        Colocated(1, 1, tensor=4, second_split=2, slices=2, encoders=2, freeze="tower",
                  sequence_parallel=True),
        Colocated(2, 1, tensor=2, second_split=1, slices=2, encoders=2, virtual=2,
                  sequence_parallel=True, llm_schedule="searched"),
        Colocated(2, 2, tensor=2, split=1, second_split=2, slices=2, encoders=2,
                  sequence_parallel=True, llm_schedule="zero_bubble"),
        Apart(TP2, TP2, parallel=SLICED),
        Apart(ONE, TP2, ONE, parallel=SLICED),
        Apart(ONE, unit(pipeline=3), parallel=SLICED),
    ],
    8: [  # parameters of a stage are gathered by its first layer, which slices reach first
        Chain("1f1b", "nothing", (*PP2_TP2, ("shard", 2))),
        Chain("interleaved_1f1b", "nothing", (*PP2_TP2, ("shard", 2)), 2),
        Chain("separated", "encoder", (*PP2_TP2, ("shard", 2)), 2),
    ],
}  # fmt: skip
"""By number of ranks."""


@dataclass
class Traffic:
    """What this rank sent in training steps, in bytes."""

    sent: int = 0
    """Counted."""
    planned: int = 0
    """As its plans say."""
    whole: int = 0
    """Had it sent all of each tensor."""
    slices: int = 0
    """Tensors of which it sent a slice."""
    tensors: int = 0


@dataclass
class Found:
    """Of a case, on one rank."""

    problems: list[str]
    wrong_slices: list[str]
    """Problems where ranks get each other's slices."""
    traffic: Traffic = field(default_factory=Traffic)


@pytest.fixture(scope="module", params=CASES)
def outcomes(request) -> list[list[Found]]:
    """By rank and case, of a world."""
    pytest.importorskip("diffusers")
    return run_distributed(_run_all, request.param, request.param)


def _cases(outcomes: list[list[Found]]) -> Iterator[tuple[Any, list[Found]]]:
    """Cases, with what all ranks found."""
    cases = CASES[len(outcomes)]
    assert all(len(found) == len(cases) for found in outcomes)
    yield from zip(cases, map(list, zip(*outcomes, strict=True)), strict=True)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process(outcomes):
    for case, ranks in _cases(outcomes):
        assert not any(found.problems for found in ranks), (case, ranks)


@pytest.mark.slow
def test_slices_of_other_ranks_are_noticed(outcomes):
    """The control."""
    for case, ranks in _cases(outcomes):
        assert any(found.wrong_slices for found in ranks) == _is_split(case), case


@pytest.mark.slow
def test_what_is_sent_is_what_the_plan_says_and_a_share_of_the_whole(outcomes):
    for case, ranks in _cases(outcomes):
        for rank, found in enumerate(ranks):
            traffic = found.traffic
            assert traffic.sent == traffic.planned, (case, rank)
            if not _is_split(case):
                assert traffic.slices == 0
                assert traffic.sent == traffic.whole
        every = [found.traffic for found in ranks if found.traffic.slices]
        assert bool(every) == _is_split(case)
        for traffic in every if _alike(case) else ():  # else some are between single ranks
            assert traffic.slices == traffic.tensors, case
        if _alike(case) and every:
            sent, whole = sum(t.sent for t in every), sum(t.whole for t in every)
            assert 1 / 2 <= sent / whole < 0.55, (case, sent / whole)  # the rest is padding


def _is_split(case: Any) -> bool:
    sizes = case.units.values() if isinstance(case, Apart) else ()
    return not isinstance(case, Apart) or any(size.tensor > 1 for size in sizes)


def _alike(case: Any) -> bool:
    """Whether all modules are split over two ranks."""
    if isinstance(case, Apart):
        return all(size.tensor == 2 for size in case.units.values())
    return isinstance(case, Chain) or (case.tensor == 2 and not _has_mirrors(case))


def _has_mirrors(case: Any) -> bool:
    """Whether the LLM's groups are several ranks of the plan."""
    return isinstance(case, Colocated) and case.parallel.mirrors > 1


def _run_all(ranks: int) -> list[Found]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    meshes: dict[tuple, Any] = {}
    references: dict[tuple, list[Reference]] = {}
    found = []
    for case in CASES[ranks]:
        run = _run_of(case, meshes, references)
        with _counted() as traffic:
            problems = run()
        with _swapped(case):
            wrong = run()
        found.append(Found(problems, wrong, traffic))
    return found


def _run_of(
    case: Any, meshes: dict[tuple, Any], references: dict[tuple, list[Reference]]
) -> Callable[[], list[str]]:
    """Compares a case with a single process."""
    if isinstance(case, Apart):
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
def _counted() -> Iterator[Traffic]:
    """Counts what training steps send."""
    traffic = Traffic()
    step, post = PipelineRuntime.step, P2PChannels._post
    training = False

    def counted_step(self: PipelineRuntime, plan: PipelinePlan, *args: Any, **kw: Any) -> Any:
        nonlocal training
        training = plan.training
        if training:
            _add_planned(traffic, plan, self.plan_rank)
        found: StepResult = step(self, plan, *args, **kw)
        training = False
        return found

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
        specs = [s for m, found in plan.specs.items() if m == key for s in found]
        moved: list[TensorSpec] = [s for s in specs if s.requires_grad or not backward]
        traffic.tensors += len(moved)
        traffic.slices += sum(s.slices is not None for s in moved)
        traffic.whole += sum(s.nbytes for s in moved)
        traffic.planned += sum(s.on_rank(source=not backward).nbytes for s in moved)


@contextmanager
def _swapped(case: Any) -> Iterator[None]:
    """Lets ranks get each other's slices: over the wire, or, where groups are several ranks of a
    plan, as they gather."""
    parts, all_gather_rows = P2PChannels._parts, MeshRows.all_gather_rows

    def swapped_parts(
        self: P2PChannels, tensor: Tensor, cut: Any, peers: Sequence[int], *, sends: bool
    ) -> Any:
        others = peers if cut == (1, 1) else peers[::-1]  # whole ones have one way to go
        return parts(self, tensor, cut, others, sends=sends)

    def swapped_rows(self: MeshRows, own: Tensor) -> Tensor:
        slices = all_gather_rows(self, own).split(own.shape[-2], -2)
        return torch.cat(slices[::-1], -2)

    if _has_mirrors(case):
        MeshRows.all_gather_rows = swapped_rows  # type: ignore[method-assign]
    else:
        P2PChannels._parts = swapped_parts  # type: ignore[method-assign]
    try:
        yield
    finally:
        P2PChannels._parts, MeshRows.all_gather_rows = parts, all_gather_rows  # type: ignore[method-assign]
