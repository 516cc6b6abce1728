"""Which tensors travel in a step: every message and every gradient, with both ends.

`StageGraph` says what a task consumes and produces; lowering and validation need the same seen
from the messages, with the ranks of both ends, for forward outputs and gradients alike. A
`Transfer` names the tensor by the task that makes it and the task that uses it, whichever
direction it takes, so that neither of them treats gradients as a special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, Task

SEND = (ActionType.SEND_F, ActionType.SEND_B)  # each indexed by Transfer.backward
RECV = (ActionType.RECV_F, ActionType.RECV_B)
WAIT = (ActionType.WAIT_F, ActionType.WAIT_B)
WAIT_SEND = (ActionType.WAIT_SEND_F, ActionType.WAIT_SEND_B)


class Transfer(NamedTuple):
    """A message, or the gradient of one, on its way.

    Source and destination are ranks of the plan; where they are equal, the runtime hands the
    tensors over and the plan has no actions for it.
    """

    message: Message
    backward: bool
    producer: Task
    """Its F makes the message, or its B or I the gradient."""
    consumer: Task
    """Its F uses the message, or its B or I the gradient."""
    source: int
    destination: int

    def sending(self, kind: ActionType) -> Action:
        """The SEND_F, WAIT_SEND_F, SEND_B or WAIT_SEND_B of the source."""
        return Action(
            kind,
            self.producer.stage,
            self.message.microbatch,
            self.message.sub_microbatch,
            self.consumer.stage,
            self.destination,
        )

    def receiving(self, kind: ActionType) -> Action:
        """The RECV_F, WAIT_F, RECV_B or WAIT_B of the destination."""
        return Action(
            kind,
            self.consumer.stage,
            self.message.microbatch,
            self.message.sub_microbatch,
            self.producer.stage,
            self.source,
        )

    def actions(self) -> tuple[Action, Action, Action, Action]:
        """Send and its wait, of the source; receive and its wait, of the destination."""
        backward = self.backward
        send = self.sending(SEND[backward])
        receive = self.receiving(RECV[backward])
        # Not by `sending` again: a step has thousands of them.
        wait_send = Action(WAIT_SEND[backward], *send[1:])
        return send, wait_send, receive, Action(WAIT[backward], *receive[1:])


def transfers(graph: StageGraph, training: bool = True) -> Iterator[Transfer]:
    """All transfers of a step; no gradients unless training.

    Those that one task makes come in the order of `StageGraph.outgoing`, or for gradients of
    `StageGraph.incoming`.
    """
    for message in graph.messages():
        first, second = graph.producer(message), graph.consumer(message)
        ranks = graph.rank(first), graph.rank(second)
        yield Transfer(message, False, first, second, *ranks)
        if training and graph.carries_gradient(message):
            yield Transfer(message, True, second, first, *ranks[::-1])


class Input(NamedTuple):
    """Result of a task that an action needs."""

    type: ActionType
    """F, or B for the gradients that a B or an I returns."""
    task: Task
    message: Message | None
    """Message that has the result or its gradient; None for a result of the same task."""


def action_inputs(action: Action, graph: StageGraph) -> Iterator[Input]:
    """Yield the results that an F, B, I or W needs."""
    task = action.task
    if action.type is ActionType.F:
        for message in graph.incoming(task):
            yield Input(ActionType.F, graph.producer(message), message)
    elif action.type is ActionType.W:
        yield Input(ActionType.B, task, None)
    else:
        yield Input(ActionType.F, task, None)
        for message in graph.outgoing(task):
            if graph.carries_gradient(message):
                yield Input(ActionType.B, graph.consumer(message), message)


def tied_stages(graph: StageGraph) -> list[tuple[int, int]]:
    """Pairs of stages whose copies of a trained weight need the sum of both gradients, in order.

    Raises:
        ValueError: two copies are on one rank, or cannot be paired replica by replica.
    """
    stages = graph.layout.stages
    pairs = {(min(s.index, s.tied_to), max(s.index, s.tied_to)) for s in stages if s.tied_to >= 0}
    for a, b in sorted(pairs):
        if b >= len(stages) or len(stages[a].ranks) != len(stages[b].ranks):
            raise ValueError(
                f"stages {a} and {b} are tied, but one does not exist or has more replicas "
                "than the other; use the same number of replicas or untie the weight"
            )
        if set(stages[a].ranks) & set(stages[b].ranks):
            raise ValueError(
                f"stages {a} and {b} are tied and share rank(s) "
                f"{sorted(set(stages[a].ranks) & set(stages[b].ranks))}; use one parameter on "
                "these ranks instead of two replicas"
            )
    return sorted(p for p in pairs if all(stages[stage].trainable for stage in p))


def tied_reductions(graph: StageGraph, rank: int) -> list[Action]:
    """The REDUCE_TIED of a rank, ordered alike on both ranks of each pair."""
    found, stages = [], graph.layout.stages
    for pair in tied_stages(graph):
        for stage, other in (pair, pair[::-1]):
            if rank in stages[stage].ranks:
                replica = stages[stage].ranks.index(rank)
                peer = stages[other].ranks[replica]
                found.append(Action(ActionType.REDUCE_TIED, stage, other=other, peer=peer))
    return found
