"""A pipeline plan as a graph of operators: what `PipelineRuntime` does, as queues and edges.

- Every rank has a queue for what its program computes or waits for, in the program's order.
- Every channel (ordered pair of ranks) is a queue, for the runtime has one communicator for each
  direction: a transfer starts when its send and its receive are posted and the one before it is
  through, and never waits for another channel.
- Gathers of parameters run on a queue of their own; the first action of a stage waits for its
  gather.
- A reduction begins when all ranks with its stage have come to it; those of other replicas are
  taken to come as this plan's do. Where the device can (`PlanCosts.runs_beside`), a rank's
  reductions have a queue of their own and nothing but the end of the step waits for them; elsewhere
  the rank waits.
- Mirrors communicate inside of their actions: these begin when all of them have come to it.
- What LLM actions launch takes time from encoder actions in their own places (`launched`).

Posting takes no time, so SEND and RECV are no operators: they happen when the action before them
ends. Rejected: one queue for all transfers of a rank. The order in which they reach the wire
depends on other ranks, and a fixed one could make a plan that runs wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.launched import launch_times
from torchmm.balance.simulation.operator_graph import CompiledGraph, OperatorGraph
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, SEND, WAIT, WAIT_SEND

NONE = -1
TransferKey = tuple[Message, bool]
"""A message, and whether it is its gradient that travels."""

_POSTS = (*SEND, *RECV)
_WAITS = (*WAIT, *WAIT_SEND)
_BACKWARD = (SEND[1], RECV[1], WAIT[1], WAIT_SEND[1])
_AT_SOURCE = (SEND[0], WAIT_SEND[0], RECV[1], WAIT[1])
"""Transfers seen from the stage that makes the message, which is where its gradient goes."""


def transfer_key(action: Action) -> TransferKey:
    """What a SEND, RECV or wait is about."""
    ends = (action.stage, action.other)
    source, destination = ends if action.type in _AT_SOURCE else ends[::-1]
    message = Message(source, destination, action.microbatch, action.sub_microbatch)
    return message, action.type in _BACKWARD


class PlanAction(NamedTuple):
    """How the record of an action follows from the times of operators."""

    rank: int
    action: Action
    node: int
    """The operator whose end is the action's end; NONE for the begin of the step."""
    before: int
    """The operator whose end is the action's start, if it is a post, a wait or a reduction; NONE
    for the begin of the step. Other actions start with their operator."""
    instant: bool
    """Whether `before` says when it starts."""


@dataclass(frozen=True)
class PlanGraph:
    """A plan's operators.

    Attributes:
        graph: the operators.
        actions: of all ranks, rank by rank in the order of the programs.
        compute: the operator of each F, B, I and W.
        transfers: the operator of each transfer.
    """

    graph: CompiledGraph
    actions: list[PlanAction]
    compute: dict[Action, int]
    transfers: dict[TransferKey, int]


def build_plan_graph(plan: PipelinePlan, costs: PlanCosts) -> PlanGraph:
    """The graph of a valid plan.

    Raises:
        SimulationError: a cost is missing, negative or no number, or ranks wait for each other or
            for what nobody sends. All problems are listed.
    """
    builder = _Builder(plan, costs)
    builder.add_transfers()
    for rank in range(len(plan.actions)):
        builder.add_program(rank)
    return builder.finish()


@dataclass
class _Builder:
    plan: PipelinePlan
    costs: PlanCosts
    graph: OperatorGraph = field(default_factory=OperatorGraph)
    compute: dict[Action, int] = field(default_factory=dict)
    transfers: dict[TransferKey, int] = field(default_factory=dict)
    gathers: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and stage, until an action waits for it."""
    meetings: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By tied pair of (stage, rank)s, or stage on several ranks: the operator at which all who
    reduce it are there; by action of the first of mirrors: at which all of them are."""
    actions: list[PlanAction] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reductions: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and stage."""
    shift_ms: Mapping[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shift_ms = launch_times(self.plan, self.costs).shift_ms

    def add_transfers(self) -> None:
        """First of all, since receives may stand before their sends; in the order of sending."""
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
        """The actions of one rank."""
        previous = NONE  # the last operator of the program
        for action in self.plan.actions[rank]:
            kind = action.type
            if kind in _POSTS:
                for transfer in self._transfer(rank, action) if previous != NONE else ():
                    self.graph.add_edge(previous, transfer)
                self.actions.append(PlanAction(rank, action, previous, previous, True))
                continue
            if kind is ActionType.UNSHARD:
                after = [] if previous == NONE else [previous]
                gather_ms = self.costs.gather_ms.get(action.stage, 0.0)
                name = f"{action} on rank {rank}"
                node = self.graph.add(("gather", rank), gather_ms, after, name)
                self.gathers[rank, action.stage] = node
                self.actions.append(PlanAction(rank, action, node, NONE, False))
                continue
            if kind is ActionType.REDUCE_GRAD:
                node = self._add_reduction(rank, action, previous)
                self.actions.append(PlanAction(rank, action, node, previous, True))
                previous = previous if self.costs.runs_beside else node
                continue
            node = self._add_action(rank, action, previous)
            waits = kind in _WAITS or kind is ActionType.REDUCE_TIED
            self.actions.append(PlanAction(rank, action, node, previous, waits))
            previous = node

    def _add_action(self, rank: int, action: Action, previous: int) -> int:
        """The operator of a computation or a wait."""
        after = self._needs(rank, action, previous)
        if action.type is not ActionType.REDUCE_TIED and action.type not in _WAITS:
            gather = self.gathers.pop((rank, action.stage), NONE)
            after += [gather] if gather != NONE else []
        alike = self.plan.graph.layout.mirrored[action.stage]
        meets = action.type in COMPUTE and len(alike) > 1
        if meets and previous != NONE:
            after.append(previous)
        if meets:
            key = action._replace(stage=alike[0])
            after = [self._meet(key, after, f"all replicas of {action}")]
        name = f"{action} on rank {rank}"
        node = self.graph.add(("rank", rank), self._duration_ms(rank, action), after, name)
        if action.type in COMPUTE:
            self.compute[action] = node
        return node

    def _add_reduction(self, rank: int, action: Action, previous: int) -> int:
        """The operator of a reduction, which begins at all ranks of its stage together."""
        gather = self.gathers.pop((rank, action.stage), NONE)
        after = [node for node in (previous, gather) if node != NONE]
        if len(self.plan.graph.layout.stages[action.stage].ranks) > 1:
            after = [self._meet((action.stage,), after, f"all ranks of {action}")]
        queue = ("reduce" if self.costs.runs_beside else "rank", rank)
        duration_ms = self.costs.reduce_ms.get(action.stage, 0.0)
        node = self.graph.add(queue, duration_ms, after, f"{action} on rank {rank}")
        self.reductions[rank, action.stage] = node
        return node

    def _needs(self, rank: int, action: Action, previous: int) -> list[int]:
        """What an action waits for besides the one before it."""
        if action.type in _WAITS:
            return self._transfer(rank, action)
        if action.type is ActionType.REDUCE_TIED:
            ends = sorted([(action.stage, rank), (action.other, action.peer)])
            reduced = self.reductions.get((rank, action.stage), NONE)
            nodes = [node for node in (previous, reduced) if node != NONE]
            return [self._meet((*ends[0], *ends[1]), nodes, f"both ends of {action}")]
        return []

    def _meet(self, key: tuple[object, ...], nodes: list[int], name: str) -> int:
        """An operator that ranks wait for together, each behind its own."""
        if key not in self.meetings:
            self.meetings[key] = self.graph.add(None, 0.0, name=name)
        for node in nodes:
            self.graph.add_edge(node, self.meetings[key])
        return self.meetings[key]

    def _transfer(self, rank: int, action: Action) -> list[int]:
        found = self.transfers.get(transfer_key(action))
        if found is None:
            self.problems.append(
                f"{action} on rank {rank}: no rank sends this message; validate the plan"
            )
            return []
        return [found]

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
