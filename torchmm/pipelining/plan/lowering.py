"""From the compute order of every rank to a complete plan.

`lower_plan` puts the communication between the F, B, I and W of a schedule:

- A channel is an ordered pair of ranks. It carries outputs and gradients of all stages, first in
  first out, so every RECV of a channel is posted in the order of the peer's SENDs.
- A SEND stands directly after the action that makes the tensor, a WAIT directly before the one
  that uses it. Then no wait is added that the schedule's own dependencies do not have, and any
  legal order runs without deadlock, also where sends block until they are received.
- A RECV is posted as early as a bound on the outstanding ones of its channel allows: those that
  the next waits need are there, and those that were sent before them. Encoders' outputs for later
  microbatches may be sent long before; posting them when the LLM's next tensor is waited for would
  begin its transfer only then. A posted receive holds its buffer, and a CUDA kernel that waits.
- A WAIT_SEND frees what was sent, and may not cost time: it stands where something this rank has
  waited for proves that the receiver is past its WAIT. The proof may go by other ranks: forward
  outputs that come round from the last to the first rank show that all have taken theirs.
- Gathering of parameters and reduction of gradients are collectives among data-parallel replicas
  whose plans differ. Gathers stand at the begin, in the order of the stages; a stage's reduction
  stands behind its last backward, or as far behind as one order of all reductions takes
  (`reductions`).

Rejected: posting every receive at the place of its send in one global order, which needs no
channel per direction but makes fast ranks wait; and freeing sent tensors at the end of the step
only, which keeps all of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering, MessageSpecs, PipelinePlan
from torchmm.pipelining.plan.reductions import Place, reduction_places, reduction_turns
from torchmm.pipelining.plan.transfers import (
    RECV,
    SEND,
    WAIT,
    WAIT_SEND,
    Transfer,
    tied_reductions,
    transfers,
)

Clock = NDArray[np.int64]
"""By rank: a number of its compute actions."""


def lower_plan(
    order: ComputeOrder,
    graph: StageGraph,
    specs: MessageSpecs,
    sharding: Gathering = "none",
    training: bool = True,
    *,
    receives_ahead: int = 2,
    reduces_early: bool = True,
) -> PipelinePlan:
    """The plan that executes a compute order.

    An order that is not legal is lowered as far as it makes sense; `validate_plan` says what is
    wrong with it.

    Args:
        order: F, B, I and W of every rank.
        graph: the tasks of the step.
        specs: tensors of every message; only carried along.
        sharding: "step" gathers the parameters of each stage before all computation, and reduces
            its gradients after its last backward; FSDP2 gathers "layer" by layer without actions.
        training: False for an order of forwards only: no gradients are sent or reduced.
        receives_ahead: for how many waits of a channel receives are posted ahead; there are more
            of them where the peer sends in another order.
        reduces_early: False for reductions behind all computation: where ranks would wait in them,
            or replicas communicate in their actions too.

    Raises:
        ValueError: the order has another number of ranks than the graph, `receives_ahead` is
            negative, or copies of a tied weight cannot be paired.
    """
    if len(order) != graph.layout.rank_count:
        raise ValueError(
            f"the order has {len(order)} ranks, but the stages are on "
            f"{graph.layout.rank_count}; build the order from the same layout"
        )
    if receives_ahead < 0:
        raise ValueError(f"receives_ahead = {receives_ahead}: must be 0 or more")
    network = _Network(order, graph, training)
    reduced: list[dict[int, list[int]]] = [{} for _ in order]
    if sharding == "step" and training:
        reduced = network.reductions() if reduces_early else _last(order, graph)
    programs = [
        _Program(rank, network, receives_ahead, reduced[rank]) for rank in range(len(order))
    ]
    while any([program.advance() for program in programs]):  # a list: advance all, then ask
        pass
    for program in programs:
        program.finish()
    actions = []
    for rank, program in enumerate(programs):
        before, after = _collectives(graph, rank, sharding, training)
        actions.append((*before, *program.actions, *after))
    return PipelinePlan(graph, tuple(actions), specs, training)


class _Network:
    """What travels between ranks, by the compute action at each end, and how far it has come."""

    def __init__(self, order: ComputeOrder, graph: StageGraph, training: bool) -> None:
        self.order, self.graph = order, graph
        self.received: dict[tuple[bool, Task], list[Transfer]] = defaultdict(list)
        self.sent: dict[tuple[bool, Task], list[Transfer]] = defaultdict(list)
        for transfer in transfers(graph, training):
            if transfer.source != transfer.destination:
                self.received[transfer.backward, transfer.consumer].append(transfer)
                self.sent[transfer.backward, transfer.producer].append(transfer)
        self.channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self.used_at: dict[tuple[bool, Task], int] = {}
        for rank, program in enumerate(order):
            for position, action in enumerate(program):
                if (key := key_of(action)) is not None:
                    self.used_at[key] = position
                    for transfer in self.sent.get(key, ()):
                        self.channels[rank, transfer.destination].append(transfer)
        self.position = {t: i for channel in self.channels.values() for i, t in enumerate(channel)}
        self.needed = self._needed()
        self.sources: list[list[int]] = [[] for _ in order]
        """By rank: those that it receives from."""
        for source, destination in sorted(self.channels):
            self.sources[destination].append(source)
        self.stamps: dict[Transfer, Clock] = {}
        """By transfer under way: the source's clock when it was sent (`_Program.clock`)."""

    def reductions(self) -> list[dict[int, list[int]]]:
        """`reduction_places` of the order."""

        def needs(action: Action) -> Iterator[Place]:
            key = key_of(action)
            for transfer in self.received.get(key, ()) if key else ():
                made = self.used_at.get((transfer.backward, transfer.producer))
                if made is not None:
                    yield transfer.source, made

        return reduction_places(self.order, self.graph, needs)

    def _needed(self) -> dict[tuple[int, int], list[int]]:
        """By channel: receives that each wait and all before it take, in the order of waits."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, program in enumerate(self.order):
            for action in program:
                key = key_of(action)
                for transfer in self.received.get(key, ()) if key else ():
                    needed = found[transfer.source, rank]
                    sent = self.position.get(transfer, -1) + 1
                    needed.append(max(sent, needed[-1] if needed else 0))
        return found


def key_of(action: Action) -> tuple[bool, Task] | None:
    """(is a gradient, task) of the transfers that an action uses and makes; None for W."""
    if action.type is ActionType.W:
        return None
    return action.type is not ActionType.F, action.task


class _Program:
    """Writes the actions of one rank, in step with the ranks it waits for."""

    def __init__(
        self,
        rank: int,
        network: _Network,
        receives_ahead: int,
        reduced: Mapping[int, Sequence[int]],
    ) -> None:
        self.rank, self.network, self.receives_ahead = rank, network, receives_ahead
        self.reduced = reduced
        self.actions: list[Action] = []
        self.next = 0
        # A vector clock: how many compute actions of every rank have certainly begun. Each send
        # carries the sender's, each wait takes the larger numbers over, so it also knows what other
        # ranks had learnt by then. An array: with hundreds of ranks, comparing clocks one by one
        # would take longer than all else.
        self.clock: Clock = np.zeros(len(network.order), np.int64)
        # By receiver: (its compute action that waits for the transfer, order of sending, transfer)
        self.unreleased: dict[int, list[tuple[int, int, Transfer]]] = defaultdict(list)
        self.sends = 0
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.waited: dict[tuple[int, int], int] = defaultdict(int)
        for source in network.sources[rank]:
            self._post_ahead((source, rank))
        self._reduce()

    def advance(self, force: bool = False) -> bool:
        """Writes on until something must be waited for that nobody has sent yet.

        Args:
            force: write the rest, although an illegal order keeps it from ever being sent.

        Returns:
            Whether anything was written.
        """
        begin, program, stamps = self.next, self.network.order[self.rank], self.network.stamps
        while self.next < len(program):
            action = program[self.next]
            key = key_of(action)
            received = self.network.received.get(key, ()) if key else ()
            if not force and not all(transfer in stamps for transfer in received):
                break  # the sender's clock is not known yet; its program is to be written first
            for transfer in received:
                self._wait(transfer)
            self.next += 1
            self.clock[self.rank] = self.next
            self.actions.append(action)
            for transfer in self.network.sent.get(key, ()) if key else ():
                self._send(transfer)
            self._reduce()
        return self.next > begin

    def finish(self) -> None:
        """Writes what is left, and waits for the sends that nothing proved complete."""
        self.advance(force=True)
        left = (entry for entries in self.unreleased.values() for entry in entries)
        for _, _, transfer in sorted(left, key=lambda entry: entry[1]):
            self.actions.append(transfer.sending(WAIT_SEND[transfer.backward]))

    def _reduce(self) -> None:
        """The reductions that come after as many compute actions as are written."""
        for stage in self.reduced.get(self.next, ()):
            self.actions.append(Action(ActionType.REDUCE_GRAD, stage))

    def _send(self, transfer: Transfer) -> None:
        self.actions.append(transfer.sending(SEND[transfer.backward]))
        self.network.stamps[transfer] = self.clock.copy()
        # If the consumer is missing, no clock of the receiver ever gets past this.
        never = len(self.network.order[transfer.destination])
        used_at = self.network.used_at.get((transfer.backward, transfer.consumer), never)
        entry = (used_at, self.sends, transfer)
        heapq.heappush(self.unreleased[transfer.destination], entry)
        self.sends += 1

    def _wait(self, transfer: Transfer) -> None:
        channel = (transfer.source, self.rank)
        self._post(channel, self.network.position.get(transfer, -1) + 1)
        self.actions.append(transfer.receiving(WAIT[transfer.backward]))
        self.waited[channel] += 1
        self._post_ahead(channel)
        stamp = self.network.stamps.pop(transfer, None)
        if stamp is not None:
            self._release(stamp)

    def _post_ahead(self, channel: tuple[int, int]) -> None:
        """Posts what the next waits take."""
        waits = self.waited[channel] + self.receives_ahead
        needed = self.network.needed.get(channel)
        most = needed[min(waits, len(needed)) - 1] if waits and needed else 0
        self._post(channel, max(waits, most))

    def _post(self, channel: tuple[int, int], count: int) -> None:
        """Posts receives until there are `count` of the channel, waited for or not."""
        sequence = self.network.channels.get(channel, [])
        for transfer in sequence[self.posted[channel] : count]:
            self.actions.append(transfer.receiving(RECV[transfer.backward]))
            self.posted[channel] += 1

    def _release(self, stamp: Clock) -> None:
        """Learns from the clock that came with a tensor, and releases what was received."""
        np.maximum(self.clock, stamp, out=self.clock)
        for rank in sorted(rank for rank, entries in self.unreleased.items() if entries):
            entries, begun = self.unreleased[rank], self.clock[rank]
            # A compute action that has begun has finished waiting for its inputs.
            while entries and entries[0][0] < begun:
                transfer = heapq.heappop(entries)[2]
                self.actions.append(transfer.sending(WAIT_SEND[transfer.backward]))


def _last(order: ComputeOrder, graph: StageGraph) -> list[dict[int, list[int]]]:
    """Places of reductions behind all computation."""
    stages = graph.layout.stages
    trained = [s for s in map(stages.__getitem__, reduction_turns(graph.layout)) if s.trainable]
    return [
        {len(row): [stage.index for stage in trained if rank in stage.ranks]}
        for rank, row in enumerate(order)
    ]


def _collectives(
    graph: StageGraph, rank: int, sharding: Gathering, training: bool
) -> tuple[list[Action], list[Action]]:
    """What comes before and after the computation of a rank."""
    before, after = [], []
    stages = graph.layout.stages_of(rank)
    if sharding == "step":
        before = [Action(ActionType.UNSHARD, stage) for stage in stages]
        whole = [s for s in stages if not (training and graph.layout.stages[s].trainable)]
        after = [Action(ActionType.RESHARD, stage) for stage in whole]
    return before, after + (tied_reductions(graph, rank) if training else [])
