"""Lowering: add communication to the compute order of each rank.

`lower_plan` inserts transfers and collectives between the F, B, I and W actions of a schedule:

- A channel is an ordered pair of ranks. It transfers outputs and gradients of all stages in FIFO
  order. RECV actions of a channel have the order of the SEND actions of the peer.
- A SEND directly follows the action that produces the tensor. A WAIT directly precedes the action
  that uses it. Lowering therefore adds no dependency to the schedule, and every valid order runs
  without deadlock, even if sends block until they are received.
- A RECV is posted ahead of its WAIT: `receives_ahead` limits the number of later waits of the
  channel whose receives, and all receives before them, are already posted. Without this, the
  transfer of the next LLM input would start too late if encoder outputs for later microbatches
  were sent before it. A posted receive occupies its buffer and a waiting CUDA kernel.
- A WAIT_SEND frees the sent tensors and must not block. It is inserted after a WAIT that proves
  that the receiver has passed its WAIT. The proof can include other ranks, because each send
  carries a vector clock (`_ProgramBuilder.clock`).
- UNSHARD and REDUCE_GRAD are collectives among data-parallel replicas with different plans.
  UNSHARD actions precede all computation in stage order. REDUCE_GRAD follows the last backward
  pass of the stage, with the delay that a common order requires (`reductions`).

Example with two stages on two ranks and one microbatch:

    rank 0   RECV_B   F   SEND_F                       WAIT_B   WAIT_SEND_F   B
    rank 1   RECV_F            WAIT_F   F   B   SEND_B          WAIT_SEND_B
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, MessageSpecs, PipelinePlan, UnshardMode
from torchmm.pipelining.plan.reductions import ActionIndex, reduction_positions, reduction_turns
from torchmm.pipelining.plan.transfers import (
    RECV,
    SEND,
    WAIT,
    WAIT_SEND,
    Transfer,
    tied_reductions,
    transfers,
)

VectorClock = NDArray[np.int64]
"""Vector clock: the number of compute actions of each rank that have started."""


def lower_plan(
    order: ComputeOrder,
    graph: StageGraph,
    specs: MessageSpecs,
    sharding: UnshardMode = "none",
    training: bool = True,
    *,
    receives_ahead: int = 2,
    reduces_early: bool = True,
) -> PipelinePlan:
    """Lower a compute order to a plan.

    Invalid orders are lowered as far as possible. `validate_plan` reports their problems.

    Args:
        order: F, B, I and W actions of each rank.
        graph: Tasks of the step.
        specs: Tensors of each message, stored in the plan.
        sharding: If "step", each stage unshards its parameters before all computation and reduces
            its gradients after its last backward pass. For "layer", FSDP2 unshards without actions.
        training: Whether the order has backward passes.
        receives_ahead: Number of waits of a channel whose receives are posted ahead. More receives
            are posted if the peer sends in a different order.
        reduces_early: Whether to reduce gradients before the end of all computation. Use False if
            ranks would block in reductions, or if actions contain collectives among replicas.

    Raises:
        ValueError: The order and the graph have different numbers of ranks, `receives_ahead` is
            negative, or the replicas of a tied weight cannot be paired.
    """
    if len(order) != graph.layout.rank_count:
        raise ValueError(
            f"the order has {len(order)} ranks, but the stages are on "
            f"{graph.layout.rank_count}; build the order from the same layout"
        )
    if receives_ahead < 0:
        raise ValueError(f"receives_ahead = {receives_ahead}: must be 0 or more")
    network = _Transfers(order, graph, training)
    reductions: list[dict[int, list[int]]] = [{} for _ in order]
    if sharding == "step" and training:
        reductions = (
            network.reductions() if reduces_early else _reductions_after_compute(order, graph)
        )
    programs = [
        _ProgramBuilder(rank, network, receives_ahead, reductions[rank])
        for rank in range(len(order))
    ]
    # A list, because every program has to advance.
    while any([program.advance() for program in programs]):
        pass
    for program in programs:
        program.finish()
    actions = []
    for rank, program in enumerate(programs):
        before, after = _collectives(graph, rank, sharding, training)
        actions.append((*before, *program.actions, *after))
    return PipelinePlan(graph, tuple(actions), specs, training)


class _Transfers:
    """Transfers between ranks, by the compute actions at both ends, and their progress."""

    def __init__(self, order: ComputeOrder, graph: StageGraph, training: bool) -> None:
        self.order, self.graph = order, graph
        self.received: dict[tuple[bool, Task], list[Transfer]] = defaultdict(list)
        self.sent: dict[tuple[bool, Task], list[Transfer]] = defaultdict(list)
        for transfer in transfers(graph, training):
            if transfer.source != transfer.destination:
                self.received[transfer.backward, transfer.consumer].append(transfer)
                self.sent[transfer.backward, transfer.producer].append(transfer)
        self.channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self.compute_index: dict[tuple[bool, Task], int] = {}
        for rank, program in enumerate(order):
            for position, action in enumerate(program):
                if (key := transfer_key(action)) is not None:
                    self.compute_index[key] = position
                    for transfer in self.sent.get(key, ()):
                        self.channels[rank, transfer.destination].append(transfer)
        self.position = {t: i for channel in self.channels.values() for i, t in enumerate(channel)}
        self.needed = self._needed()
        self.sources: list[list[int]] = [[] for _ in order]
        """Ranks that each rank receives from."""
        for source, destination in sorted(self.channels):
            self.sources[destination].append(source)
        self.send_clocks: dict[Transfer, VectorClock] = {}
        """Clock of the source when it sent a transfer that is in flight."""

    def reductions(self) -> list[dict[int, list[int]]]:
        """Return the result of `reduction_positions` for the order."""

        def needs(action: Action) -> Iterator[ActionIndex]:
            key = transfer_key(action)
            for transfer in self.received.get(key, ()) if key else ():
                position = self.compute_index.get((transfer.backward, transfer.producer))
                if position is not None:
                    yield transfer.source, position

        return reduction_positions(self.order, self.graph, needs)

    def _needed(self) -> dict[tuple[int, int], list[int]]:
        """Return the number of receives that each wait of a channel requires, by channel."""
        receives: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, program in enumerate(self.order):
            for action in program:
                key = transfer_key(action)
                for transfer in self.received.get(key, ()) if key else ():
                    needed = receives[transfer.source, rank]
                    sent = self.position.get(transfer, -1) + 1
                    needed.append(max(sent, needed[-1] if needed else 0))
        return receives


def transfer_key(action: Action) -> tuple[bool, Task] | None:
    """Return the key (is gradient, task) of the transfers of an action. None for W actions."""
    if action.type is ActionType.W:
        return None
    return action.type is not ActionType.F, action.task


class _ProgramBuilder:
    """Generates the actions of a rank, in step with the ranks that it receives from."""

    def __init__(
        self,
        rank: int,
        network: _Transfers,
        receives_ahead: int,
        reduced: Mapping[int, Sequence[int]],
    ) -> None:
        self.rank, self.network, self.receives_ahead = rank, network, receives_ahead
        self.reduced = reduced
        self.actions: list[Action] = []
        self.next = 0
        # Vector clock: a lower bound of the number of compute actions that each rank has started.
        # A send carries the clock of the sender, and a wait takes the elementwise maximum. It is an
        # array, because with hundreds of ranks comparisons in Python would dominate lowering.
        self.clock: VectorClock = np.zeros(len(network.order), np.int64)
        # By receiver: (index of the compute action that uses the transfer, send index, transfer).
        self.unfreed: dict[int, list[tuple[int, int, Transfer]]] = defaultdict(list)
        self.sends = 0
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.waited: dict[tuple[int, int], int] = defaultdict(int)
        for source in network.sources[rank]:
            self._post_next_receives((source, rank))
        self._reduce()

    def advance(self, force: bool = False) -> bool:
        """Generate actions up to the next wait for a transfer that has not been sent.

        Args:
            force: Whether to continue although transfers are never sent, as in an invalid order.

        Returns:
            Whether any action was generated.
        """
        begin, program, send_clocks = (
            self.next,
            self.network.order[self.rank],
            self.network.send_clocks,
        )
        while self.next < len(program):
            action = program[self.next]
            key = transfer_key(action)
            received = self.network.received.get(key, ()) if key else ()
            if not force and not all(transfer in send_clocks for transfer in received):
                break  # The clock of the sender is unknown until its program has advanced.
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
        """Generate the remaining actions, and wait for sends without a proof of completion."""
        self.advance(force=True)
        remaining = (entry for entries in self.unfreed.values() for entry in entries)
        for _, _, transfer in sorted(remaining, key=lambda entry: entry[1]):
            self.actions.append(transfer.source_action(WAIT_SEND[transfer.backward]))

    def _reduce(self) -> None:
        """Append the reductions that follow the current number of compute actions."""
        for stage in self.reduced.get(self.next, ()):
            self.actions.append(Action(ActionType.REDUCE_GRAD, stage))

    def _send(self, transfer: Transfer) -> None:
        self.actions.append(transfer.source_action(SEND[transfer.backward]))
        self.network.send_clocks[transfer] = self.clock.copy()
        # If the consumer is missing, the clock of the receiver never exceeds this value.
        never = len(self.network.order[transfer.destination])
        compute_index = self.network.compute_index.get(
            (transfer.backward, transfer.consumer), never
        )
        entry = (compute_index, self.sends, transfer)
        heapq.heappush(self.unfreed[transfer.destination], entry)
        self.sends += 1

    def _wait(self, transfer: Transfer) -> None:
        channel = (transfer.source, self.rank)
        self._post(channel, self.network.position.get(transfer, -1) + 1)
        self.actions.append(transfer.destination_action(WAIT[transfer.backward]))
        self.waited[channel] += 1
        self._post_next_receives(channel)
        send_clock = self.network.send_clocks.pop(transfer, None)
        if send_clock is not None:
            self._free_received(send_clock)

    def _post_next_receives(self, channel: tuple[int, int]) -> None:
        """Post the receives of the next waits of a channel."""
        waits = self.waited[channel] + self.receives_ahead
        needed = self.network.needed.get(channel)
        required = needed[min(waits, len(needed)) - 1] if waits and needed else 0
        self._post(channel, max(waits, required))

    def _post(self, channel: tuple[int, int], count: int) -> None:
        """Post receives until the channel has `count` of them, including completed receives."""
        sequence = self.network.channels.get(channel, [])
        for transfer in sequence[self.posted[channel] : count]:
            self.actions.append(transfer.destination_action(RECV[transfer.backward]))
            self.posted[channel] += 1

    def _free_received(self, send_clock: VectorClock) -> None:
        """Update the clock from a received stamp, and free tensors that peers have received."""
        np.maximum(self.clock, send_clock, out=self.clock)
        for rank in sorted(rank for rank, entries in self.unfreed.items() if entries):
            entries, started = self.unfreed[rank], self.clock[rank]
            # The inputs of a compute action have arrived when the action has started.
            while entries and entries[0][0] < started:
                transfer = heapq.heappop(entries)[2]
                self.actions.append(transfer.source_action(WAIT_SEND[transfer.backward]))


def _reductions_after_compute(order: ComputeOrder, graph: StageGraph) -> list[dict[int, list[int]]]:
    """Return the positions of reductions that follow all computation."""
    stages = graph.layout.stages
    trained = [s for s in map(stages.__getitem__, reduction_turns(graph.layout)) if s.trainable]
    return [
        {len(row): [stage.index for stage in trained if rank in stage.ranks]}
        for rank, row in enumerate(order)
    ]


def _collectives(
    graph: StageGraph, rank: int, sharding: UnshardMode, training: bool
) -> tuple[list[Action], list[Action]]:
    """Return the collectives before and after the computation of a rank."""
    before, after = [], []
    stages = graph.layout.stages_on_rank(rank)
    if sharding == "step":
        before = [Action(ActionType.UNSHARD, stage) for stage in stages]
        unreduced = [s for s in stages if not (training and graph.layout.stages[s].trainable)]
        after = [Action(ActionType.RESHARD, stage) for stage in unreduced]
    return before, after + (tied_reductions(graph, rank) if training else [])
