"""Compiled event loop of the dispatcher over flat arrays. `dispatcher` describes the rules.

Measures that reduced the time per action from 80 to 27 ns: no reference counting (`cached_njit`),
unsigned indices without a check for negative values, and queue heads that are updated when a queue
changes. Packing an action into one cache line had no effect.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import (
    Int32s,
    Int64s,
    Uint32s,
    Uint64s,
    cached_njit,
    internal_njit,
    nogil_njit,
    trailing_zeros,
)

IDLE = 1 << 62
"""`ends_ps` of an idle rank without an incoming message."""
SELECTING = IDLE + 1
"""`ends_ps` of a rank in `selecting`."""
EMPTY = 1 << 62
"""Head of an empty queue."""

# [Note: the event loop]
#
# Time advances from one event to the next: the end of an action, or an arrival at an idle rank.
# Each rank has one time, `ends_ps`, and one of four states:
#
#     ends_ps            running   state of the rank
#     end of the action  action    runs an action
#     next arrival       -1        idle, with an incoming message
#     IDLE               -1        idle, without an incoming message
#     SELECTING          -1        in `selecting`: selects an action before time advances
#
# One round of `_run_events`:
#
#     1. Each rank of `selecting` receives the messages that have arrived on its channels. It then
#        starts the head of one of its two queues (`_start_next`), or becomes idle again.
#     2. Time advances to the smallest `ends_ps`. If this is IDLE, the step is finished, or no rank
#        has memory for its next forward action.
#     3. Each rank with this time frees the memory of its action and enters `selecting`
#        (`_end_action`). Edges of the action:
#            without a channel  The target waits for one input less. If this was the last input and
#                               its rank is idle, the rank enters `selecting` too.
#            with a channel     The edge is appended to the queue of the channel. An idle receiver
#                               wakes up at the arrival. A busy receiver admits it at its next pick.
#
# All arrivals at a time are known before any rank picks at this time, and actions take at least one
# picosecond. The pick of a rank therefore cannot affect another rank at the same time, and the
# result is independent of the order in which ranks are processed.
#
# Invariants between rounds:
#
# - A rank is in `selecting` at most once.
# - `pending_inputs` of an action reaches 0 once, and the action is then inserted into its queue.
# - Messages of a channel arrive in the order of `in_flight_targets[first : last]`, which never
#   exceeds the section of the channel (`channel_offsets`).
#
# A ready queue is a row of `ready`, a bit set of U priorities with two levels:
#
#     columns 0 .. S - 1, S = 1 + (U >> 12)   bit w (counted through them): word w is not 0
#     columns S .. S + (U >> 6)               bit p (counted through them): priority p is ready
#
# `head` stores the first priority of each queue, so that `_start_next` does not search for it.


class DispatchTables(NamedTuple):
    """Numbered actions of a step. *Edges* lead to the actions that wait for them.

    Queue 2 * rank has forward actions, and queue 2 * rank + 1 has backward actions. Channels are
    sorted by receiving rank.
    """

    queue: Uint32s
    """Queue of each action."""
    segment: Uint32s
    """Segment of each action: one priority on all ranks, at most one action per queue."""
    duration_ps: Int64s
    """Duration of each action, at least 1."""
    allocated_bytes: Int64s
    """Memory that each action allocates on its rank when it starts."""
    freed_bytes: Int64s
    """Memory that each action frees when it ends."""
    pending_inputs: Int32s
    """Number of incoming edges of each action."""
    pointers: Uint32s
    """Offsets of the edges of each action: `pointers[a]` to `pointers[a + 1]`."""
    target: Uint32s
    """Action at the end of each edge."""
    channel: Int32s
    """Channel that carries each edge to another rank. -1 if it takes no time."""
    wire_ps: Int64s
    """Transfer time of each edge."""
    channel_offsets: Uint32s
    """Offsets of the section of each channel in `in_flight_targets`, shape (channels + 1,)."""
    inbound_offsets: Uint32s
    """Offsets of the incoming channels of each rank. Rank r has channels `inbound_offsets[r]` to
    `inbound_offsets[r + 1]`."""
    action_at: Uint32s
    """Action of each segment and queue (two dimensions), if it exists."""
    limit_bytes: Int64s
    """Memory limit of each rank."""


class _State(NamedTuple):
    """Mutable state of a simulated step."""

    pending_inputs: Int32s
    """Number of inputs that each action still waits for."""
    priority: Int32s
    """Priority of each segment, 0 for the first."""
    ready: Uint64s
    """Bit sets by queue and column."""
    head: Int64s
    """First priority of each queue, or NOTHING."""
    ends_ps: Int64s
    """End time of the action of each rank. Without an action: next arrival, IDLE or SELECTING."""
    running: Int64s
    """Action of each rank, or -1."""
    after_forward: Int64s
    """1 for each rank whose last action was a forward action."""
    selecting: Int64s
    """Ranks that select their next action."""
    used_bytes: Int64s
    """Used memory of each rank."""
    peak_bytes: Int64s
    """Maximum memory of each rank."""
    first: Uint32s
    """Index in `in_flight_targets` of the next arrival of each channel."""
    last: Uint32s
    """Index in `in_flight_targets` after the last arrival of each channel."""
    free_ps: Int64s
    """Time at which each channel has carried all of its messages."""
    in_flight_targets: Uint32s
    """Target actions of messages in flight. See `channel_offsets`."""
    arrives_ps: Int64s
    """Arrival times of these messages."""


@internal_njit
def _insert(queue: int, priority: int, state: _State) -> None:
    """Insert a priority into a queue."""
    word = priority >> 6
    begin = 1 + (len(state.priority) >> 12)
    state.ready[queue, word >> 6] |= np.uint64(1) << np.uint64(word & 63)
    state.ready[queue, begin + word] |= np.uint64(1) << np.uint64(priority & 63)
    state.head[queue] = min(state.head[queue], priority)


@internal_njit
def _remove_head(queue: int, state: _State) -> None:
    """Remove the first priority of a queue and find the next."""
    word = state.head[queue] >> 6
    begin = 1 + (len(state.priority) >> 12)
    # Subtracting 1 clears the lowest set bit and sets all bits below it. The `and` clears these.
    remaining = state.ready[queue, begin + word] & (state.ready[queue, begin + word] - np.uint64(1))
    state.ready[queue, begin + word] = remaining
    if remaining != 0:
        state.head[queue] = (word << 6) + np.int64(trailing_zeros(remaining))
        return
    state.head[queue] = EMPTY
    state.ready[queue, word >> 6] ^= np.uint64(1) << np.uint64(word & 63)
    for column in range(begin):
        if state.ready[queue, column] != 0:
            word = (column << 6) + np.int64(trailing_zeros(state.ready[queue, column]))
            bit = np.int64(trailing_zeros(state.ready[queue, begin + word]))
            state.head[queue] = (word << 6) + bit
            return


@internal_njit
def _record_input(action: int, tables: DispatchTables, state: _State) -> bool:
    """Record the arrival of an input of an action. Return True if it was the last input."""
    state.pending_inputs[action] -= 1
    if state.pending_inputs[action] != 0:
        return False
    _insert(tables.queue[action], state.priority[tables.segment[action]], state)
    return True


@internal_njit
def _receive_messages(rank: int, now_ps: int, tables: DispatchTables, state: _State) -> int:
    """Receive all arrived messages of a rank. Return the time of the next arrival, or IDLE."""
    next_ps = IDLE
    for channel in range(tables.inbound_offsets[rank], tables.inbound_offsets[rank + 1]):
        first = state.first[channel]
        while first < state.last[channel] and state.arrives_ps[first] <= now_ps:
            _record_input(state.in_flight_targets[first], tables, state)
            first += np.uint32(1)
        state.first[channel] = first
        if first < state.last[channel]:
            next_ps = min(next_ps, state.arrives_ps[first])
    return next_ps


@internal_njit
def _start_next(
    rank: int, now_ps: int, order: Uint32s, tables: DispatchTables, state: _State
) -> int:
    """Start the next action of an idle rank. Return -1 if it has to wait.

    Forward and backward actions alternate if both are ready, starting with a forward action.
    Forward actions wait while the first of the queue does not fit into memory. Backward actions
    need no additional memory.
    """
    state.ends_ps[rank] = _receive_messages(rank, now_ps, tables, state)
    queue = 2 * rank + state.after_forward[rank]
    for _ in range(2):
        priority = state.head[queue]
        if priority != EMPTY:
            action = tables.action_at[order[priority], queue]
            needed = state.used_bytes[rank] + tables.allocated_bytes[action]
            if needed <= tables.limit_bytes[rank]:
                state.used_bytes[rank] = needed
                state.peak_bytes[rank] = max(state.peak_bytes[rank], needed)
                state.running[rank] = action
                state.after_forward[rank] = 1 - (queue & 1)
                state.ends_ps[rank] = now_ps + tables.duration_ps[action]
                _remove_head(queue, state)
                return action
        queue ^= 1  # the rank's other queue
    return -1


@internal_njit
def _send_message(edge: int, now_ps: int, tables: DispatchTables, state: _State) -> int:
    """Append an edge to the queue of its channel. Return its arrival time."""
    channel = tables.channel[edge]
    last = state.last[channel]
    arrives_ps = max(now_ps, state.free_ps[channel]) + tables.wire_ps[edge]
    state.in_flight_targets[last] = tables.target[edge]
    state.arrives_ps[last] = state.free_ps[channel] = arrives_ps
    state.last[channel] = last + np.uint32(1)
    return arrives_ps


@internal_njit
def _end_action(rank: int, now_ps: int, count: int, tables: DispatchTables, state: _State) -> int:
    """End the action of a rank: free its memory and process its edges. Return the new length of
    `selecting`."""
    state.ends_ps[rank] = SELECTING
    state.selecting[count] = rank
    count += 1
    action = state.running[rank]
    if action < 0:  # an idle rank that an arrival wakes up
        return count
    state.running[rank] = -1
    state.used_bytes[rank] -= tables.freed_bytes[action]
    for edge in range(tables.pointers[action], tables.pointers[action + 1]):
        user = tables.queue[tables.target[edge]] >> 1  # the rank
        if tables.channel[edge] < 0:
            arrives_ps = now_ps
            wakes = _record_input(tables.target[edge], tables, state)
        else:
            arrives_ps = _send_message(edge, now_ps, tables, state)
            wakes = True
        if wakes and state.running[user] < 0 and state.ends_ps[user] != SELECTING:
            if arrives_ps > now_ps:
                state.ends_ps[user] = min(state.ends_ps[user], arrives_ps)
            else:
                state.ends_ps[user] = SELECTING
                state.selecting[count] = user
                count += 1
    return count


@internal_njit
def _run_events(
    order: Uint32s, tables: DispatchTables, state: _State, sequence: Uint32s
) -> tuple[int, int]:
    """Run the event loop of `simulate_dispatch`."""
    now_ps = 0
    done = 0
    count = len(state.running)
    while True:
        for index in range(count):
            action = _start_next(state.selecting[index], now_ps, order, tables, state)
            if action >= 0:
                sequence[done] = action
                done += 1
        next_ps = IDLE
        for end_ps in state.ends_ps:
            next_ps = min(next_ps, end_ps)
        if next_ps == IDLE:
            return now_ps, done
        now_ps, count = next_ps, 0
        for rank in range(len(state.running)):
            if state.ends_ps[rank] == now_ps:
                count = _end_action(rank, now_ps, count, tables, state)


@cached_njit
def _initial_state(order: Uint32s, tables: DispatchTables, used: Int64s, peak: Int64s) -> _State:
    """Return the initial state, in which all ranks select an action."""
    ranks = len(tables.limit_bytes)
    channels = len(tables.channel_offsets) - 1
    units = len(tables.action_at)
    priority = np.empty(units, np.int32)
    for index in range(units):
        priority[order[index]] = index
    used[:] = 0
    peak[:] = 0
    state = _State(
        tables.pending_inputs.copy(),
        priority,
        np.zeros((2 * ranks, 2 + (units >> 12) + (units >> 6)), np.uint64),
        np.full(2 * ranks, EMPTY, np.int64),
        np.full(ranks, SELECTING, np.int64),
        np.full(ranks, -1, np.int64),
        np.zeros(ranks, np.int64),
        np.arange(ranks),
        used,
        peak,
        tables.channel_offsets[:-1].copy(),
        tables.channel_offsets[:-1].copy(),
        np.zeros(channels, np.int64),
        np.empty(tables.channel_offsets[-1], np.uint32),
        np.empty(tables.channel_offsets[-1], np.int64),
    )
    for action in range(len(tables.pending_inputs)):
        if tables.pending_inputs[action] == 0:
            _insert(tables.queue[action], priority[tables.segment[action]], state)
    return state


@cached_njit
def is_permutation(order: Uint32s, count: int) -> bool:
    """Return True if an order contains each of 0 to `count` - 1 once."""
    seen = np.zeros(count, np.bool_)
    for value in order:
        if value >= count or seen[value]:
            return False
        seen[value] = True
    return len(order) == count


@nogil_njit
def simulate_dispatch(
    order: Uint32s, tables: DispatchTables, sequence: Uint32s, peak_bytes: Int64s, used: Int64s
) -> tuple[int, int]:
    """Simulate a step.

    Args:
        order: Segments, highest priority first.
        tables: Actions of the step.
        sequence: Output, actions in the order of their start times.
        peak_bytes: Output, maximum memory of each rank.
        used: Output, used memory of each rank at the end, or when no rank can continue.

    Returns:
        End time in picoseconds, and the number of actions that ran. All actions run unless no rank
        has memory for its next forward action.
    """
    return _run_events(order, tables, _initial_state(order, tables, used, peak_bytes), sequence)
