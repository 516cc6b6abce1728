"""Conversion of a pipeline plan to a graph of operators on queues, as `PipelineRuntime` runs it.

    queue "rank" 0        | F0 | F1 | WAIT_B0 | B0 |
    queue "channel" 0->1       |~F0~|                        starts when SEND and RECV are posted
    queue "rank" 1             | WAIT_F0 | F0 | B0 |
    queue "channel" 1->0                           |~B0~|
    queue "gather" 0      |~UNSHARD~|                        first action of the stage waits
    queue "reduce" 0                               |~REDUCE_GRAD~|

- Each rank has a queue for computation and waits, in program order.
- Each channel (ordered pair of ranks) is a queue, because the runtime has one communicator per
  direction. A transfer starts when its send and receive are posted and the preceding transfer has
  ended. It never waits for another channel.
- All-gathers of parameters have a separate queue. The first action of a stage waits for its
  all-gather.
- A reduction starts when all ranks of the stage have reached it. Other data-parallel replicas are
  assumed to have the same times. On GPUs (`PlanCosts.overlaps_communication`), reductions of a rank
  have a separate queue, and only the end of the step waits for them. Otherwise, the rank waits.
- Mirrors communicate in their actions, so an action starts when all mirrors have reached it.
- Pieces that LLM actions launch shorten their encoder actions (`launch_effects`).

Posting requires no time, so SEND and RECV are not operators. Their time is the end of the preceding
action. All transfers of a rank in one queue would be wrong: their order depends on other ranks, and
a constant order could cause a deadlock in a valid plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.launch_effects import compute_launch_effects
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph, OperatorGraph
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, SEND, WAIT, WAIT_SEND

NO_OPERATOR = -1
"""Missing operator, which stands for the start of the step."""
TransferKey = tuple[Message, bool]
"""Message, and whether its gradient is transferred instead."""

_POSTS = (*SEND, *RECV)
_WAITS = (*WAIT, *WAIT_SEND)
_BACKWARD = (SEND[1], RECV[1], WAIT[1], WAIT_SEND[1])
_AT_SOURCE = (SEND[0], WAIT_SEND[0], RECV[1], WAIT[1])
"""Actions of the stage that produces the message and receives its gradient."""


def transfer_key(action: Action) -> TransferKey:
    """Return the message of a SEND, RECV or wait action."""
    ends = (action.stage, action.other)
    source, destination = ends if action.type in _AT_SOURCE else ends[::-1]
    message = Message(source, destination, action.microbatch, action.sub_microbatch)
    return message, action.type in _BACKWARD


class PlanAction(NamedTuple):
    """Mapping of an action to the operators that define its start and end."""

    rank: int
    action: Action
    node: int
    """Operator whose end is the end of the action. NONE is the start of the step."""
    before: int
    """Operator whose end is the start of a post, wait or reduction. NONE is the start of the step.

    Other actions start with their operator."""
    starts_with_before: bool
    """Whether `before` defines the start of the action."""


@dataclass(frozen=True)
class PlanGraph:
    """Operators of a plan.

    Attributes:
        graph: Graph of all operators.
        actions: Actions of all ranks, rank by rank in program order.
        compute: Operator of each F, B, I and W.
        transfers: Operator of each transfer.
    """

    graph: CompiledOperatorGraph
    actions: list[PlanAction]
    compute: dict[Action, int]
    transfers: dict[TransferKey, int]


def build_plan_graph(plan: PipelinePlan, costs: PlanCosts) -> PlanGraph:
    """Build the graph of operators of a valid plan.

    Args:
        plan: Valid plan.
        costs: Costs of the task graph of the plan.

    Raises:
        SimulationError: A cost is missing, negative or not a number, the plan has a deadlock, or a
            message is never sent. The error message lists all problems.
    """
    builder = _PlanGraphBuilder(plan, costs)
    builder.add_transfers()
    for rank in range(len(plan.actions)):
        builder.add_program(rank)
    return builder.finish()


@dataclass
class _PlanGraphBuilder:
    """Graph under construction, and the problems of plan and costs."""

    plan: PipelinePlan
    costs: PlanCosts
    graph: OperatorGraph = field(default_factory=OperatorGraph)
    compute: dict[Action, int] = field(default_factory=dict)
    transfers: dict[TransferKey, int] = field(default_factory=dict)
    gathers: dict[tuple[int, int], int] = field(default_factory=dict)
    """All-gather operators by (rank, stage), until an action waits for them."""
    barriers: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Synchronization operators of tied weights, of reductions over ranks, and of mirrored actions.

    Keys are a pair of (stage, rank), a stage, and the action of the first mirror."""
    actions: list[PlanAction] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reductions: dict[tuple[int, int], int] = field(default_factory=dict)
    """Reduction operators by (rank, stage)."""
    shift_ms: Mapping[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shift_ms = compute_launch_effects(self.plan, self.costs).shift_ms

    def add_transfers(self) -> None:
        """Add all transfers in the order of sends, because receives can precede their sends."""
        for rank, program in enumerate(self.plan.actions):
            for action in program:
                if action.type in SEND:
                    key = transfer_key(action)
                    self.transfers[key] = self.graph.add(
                        ("channel", rank, action.peer),
                        self.costs.transfer_ms.get(key, 0.0),
                        name=f"transfer of {action} from rank {rank}",
                    )

    def add_program(self, rank: int) -> None:
        """Add the actions of one rank."""
        previous = NO_OPERATOR  # the last operator of the program
        for action in self.plan.actions[rank]:
            kind = action.type
            if kind in _POSTS:
                for transfer in self._transfer(rank, action) if previous != NO_OPERATOR else ():
                    self.graph.add_edge(previous, transfer)
                self.actions.append(PlanAction(rank, action, previous, previous, True))
                continue
            if kind is ActionType.UNSHARD:
                after = [] if previous == NO_OPERATOR else [previous]
                gather_ms = self.costs.gather_ms.get(action.stage, 0.0)
                name = f"{action} on rank {rank}"
                node = self.graph.add(("gather", rank), gather_ms, after, name)
                self.gathers[rank, action.stage] = node
                self.actions.append(PlanAction(rank, action, node, NO_OPERATOR, False))
                continue
            if kind is ActionType.REDUCE_GRAD:
                node = self._add_reduction(rank, action, previous)
                self.actions.append(PlanAction(rank, action, node, previous, True))
                previous = previous if self.costs.overlaps_communication else node
                continue
            node = self._add_action(rank, action, previous)
            waits = kind in _WAITS or kind is ActionType.REDUCE_TIED
            self.actions.append(PlanAction(rank, action, node, previous, waits))
            previous = node

    def _add_action(self, rank: int, action: Action, previous: int) -> int:
        """Add the operator of a computation or a wait, and return its number."""
        after = self._needs(rank, action, previous)
        if action.type is not ActionType.REDUCE_TIED and action.type not in _WAITS:
            gather = self.gathers.pop((rank, action.stage), NO_OPERATOR)
            after += [gather] if gather != NO_OPERATOR else []
        mirrors = self.plan.graph.layout.mirror_stages[action.stage]
        synchronizes = action.type in COMPUTE and len(mirrors) > 1
        if synchronizes and previous != NO_OPERATOR:
            after.append(previous)
        if synchronizes:
            key = action._replace(stage=mirrors[0])
            after = [self._synchronize(key, after, f"all replicas of {action}")]
        name = f"{action} on rank {rank}"
        node = self.graph.add(("rank", rank), self._duration_ms(rank, action), after, name)
        if action.type in COMPUTE:
            self.compute[action] = node
        return node

    def _add_reduction(self, rank: int, action: Action, previous: int) -> int:
        """Add the operator of a reduction, which starts on all ranks of the stage together."""
        gather = self.gathers.pop((rank, action.stage), NO_OPERATOR)
        after = [node for node in (previous, gather) if node != NO_OPERATOR]
        if len(self.plan.graph.layout.stages[action.stage].ranks) > 1:
            after = [self._synchronize((action.stage,), after, f"all ranks of {action}")]
        queue = ("reduce" if self.costs.overlaps_communication else "rank", rank)
        duration_ms = self.costs.reduce_ms.get(action.stage, 0.0)
        node = self.graph.add(queue, duration_ms, after, f"{action} on rank {rank}")
        self.reductions[rank, action.stage] = node
        return node

    def _needs(self, rank: int, action: Action, previous: int) -> list[int]:
        """Return the dependencies of an action other than the preceding action."""
        if action.type in _WAITS:
            return self._transfer(rank, action)
        if action.type is ActionType.REDUCE_TIED:
            ends = sorted([(action.stage, rank), (action.other, action.peer)])
            reduced = self.reductions.get((rank, action.stage), NO_OPERATOR)
            nodes = [node for node in (previous, reduced) if node != NO_OPERATOR]
            return [self._synchronize((*ends[0], *ends[1]), nodes, f"both ends of {action}")]
        return []

    def _synchronize(self, key: tuple[object, ...], nodes: list[int], name: str) -> int:
        """Return the synchronization operator of a key, and make it wait for `nodes`."""
        if key not in self.barriers:
            self.barriers[key] = self.graph.add(None, 0.0, name=name)
        for node in nodes:
            self.graph.add_edge(node, self.barriers[key])
        return self.barriers[key]

    def _transfer(self, rank: int, action: Action) -> list[int]:
        transfer = self.transfers.get(transfer_key(action))
        if transfer is None:
            self.problems.append(
                f"{action} on rank {rank}: no rank sends this message; validate the plan"
            )
            return []
        return [transfer]

    def _duration_ms(self, rank: int, action: Action) -> float:
        if action.type in COMPUTE:
            duration_ms = self.costs.compute_ms.get(action)
            if duration_ms is None:
                self.problems.append(
                    f"{action} on rank {rank} has no duration; compute the costs from the graph "
                    "of this plan"
                )
            own_ms = duration_ms or 0.0
            return max(0.0, own_ms + self.shift_ms[action]) if action in self.shift_ms else own_ms
        if action.type is ActionType.REDUCE_TIED:
            return self.costs.tied_ms.get(action.stage, 0.0)
        return 0.0

    def finish(self) -> PlanGraph:
        try:
            graph = self.graph.compile()
        except SimulationError as error:
            raise SimulationError([*self.problems, *error.problems]) from None
        if self.problems:
            raise SimulationError(self.problems)
        return PlanGraph(graph, self.actions, self.compute, self.transfers)
