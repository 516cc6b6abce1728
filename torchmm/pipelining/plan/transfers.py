"""Transfers of a step: forward outputs and gradients with the ranks of both ends.

`StageGraph` lists the inputs and outputs of each task. Lowering and validation need the transfers
between ranks instead. A `Transfer` identifies its tensors by the producing and the consuming task,
for forward outputs as well as for gradients, so that gradients are not a special case.
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
    """Transfer of a message or of its gradient.

    Source and destination are ranks of the plan. If they are equal, the runtime passes the tensors
    from task to task, and the plan has no actions for the transfer.
    """

    message: Message
    backward: bool
    producer: Task
    """Task whose F action produces the message, or whose B or I action produces the gradient."""
    consumer: Task
    """Task whose F action uses the message, or whose B or I action uses the gradient."""
    source: int
    destination: int

    def source_action(self, kind: ActionType) -> Action:
        """Return an action of the source: SEND_F, WAIT_SEND_F, SEND_B or WAIT_SEND_B."""
        return Action(
            kind,
            self.producer.stage,
            self.message.microbatch,
            self.message.sub_microbatch,
            self.consumer.stage,
            self.destination,
        )

    def destination_action(self, kind: ActionType) -> Action:
        """Return an action of the destination: RECV_F, WAIT_F, RECV_B or WAIT_B."""
        return Action(
            kind,
            self.consumer.stage,
            self.message.microbatch,
            self.message.sub_microbatch,
            self.producer.stage,
            self.source,
        )

    def actions(self) -> tuple[Action, Action, Action, Action]:
        """Return the actions SEND and WAIT_SEND of the source, RECV and WAIT of the destination."""
        backward = self.backward
        send = self.source_action(SEND[backward])
        receive = self.destination_action(RECV[backward])
        # A copy is faster than `source_action`, and a step has thousands of transfers.
        wait_send = Action(WAIT_SEND[backward], *send[1:])
        return send, wait_send, receive, Action(WAIT[backward], *receive[1:])


def transfers(graph: StageGraph, training: bool = True) -> Iterator[Transfer]:
    """Yield the transfers of a step. Gradients are included if `training` is True.

    Transfers of one task have the order of `StageGraph.outgoing`, and its gradients the order of
    `StageGraph.incoming`.
    """
    for message in graph.messages():
        first, second = graph.producer(message), graph.consumer(message)
        ranks = graph.rank(first), graph.rank(second)
        yield Transfer(message, False, first, second, *ranks)
        if training and graph.sends_gradient(message):
            yield Transfer(message, True, second, first, *ranks[::-1])


class ActionInput(NamedTuple):
    """Result of a task that an action needs."""

    type: ActionType
    """F, or B for gradients that a B or an I action returns."""
    task: Task
    message: Message | None
    """Message with the result or its gradient. None for a result of the same task."""


def action_inputs(action: Action, graph: StageGraph) -> Iterator[ActionInput]:
    """Yield the results that an F, B, I or W action requires."""
    task = action.task
    if action.type is ActionType.F:
        for message in graph.incoming(task):
            yield ActionInput(ActionType.F, graph.producer(message), message)
    elif action.type is ActionType.W:
        yield ActionInput(ActionType.B, task, None)
    else:
        yield ActionInput(ActionType.F, task, None)
        for message in graph.outgoing(task):
            if graph.sends_gradient(message):
                yield ActionInput(ActionType.B, graph.consumer(message), message)


def tied_stages(graph: StageGraph) -> list[tuple[int, int]]:
    """Return pairs of stages with replicas of a trained tied weight, whose gradients are summed.

    Raises:
        ValueError: Both replicas are on one rank, or the stages have different replica counts.
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
    """Return the REDUCE_TIED actions of a rank, in the same order on both ranks of a pair."""
    actions, stages = [], graph.layout.stages
    for pair in tied_stages(graph):
        for stage, other in (pair, pair[::-1]):
            if rank in stages[stage].ranks:
                replica = stages[stage].ranks.index(rank)
                peer = stages[other].ranks[replica]
                actions.append(Action(ActionType.REDUCE_TIED, stage, other=other, peer=peer))
    return actions
