"""What messages take between two ranks of a plan, from records of steps, whatever their clocks say.

A rank knows when it began to send, and when a message arrived for which it was waiting. The two are
times of different clocks, whose difference nobody knows; but it is added to messages in one
direction and taken off those in the other. So the mean of both directions is free of it:

    (arrival of a -> b - its sending + arrival of b -> a - its sending) / 2

Of each direction the median counts. A message that was there before its WAIT says nothing: when it
came is not known. Ranks add up the times of the first messages of each channel, which come in the
order of sending, in one small table.

Rejected: clocks set by messages before the step, which drift and take turns of their own; the time
of a WAIT, most of which is the sender computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.balance.rates import SMOOTHING
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.plan.transfers import RECV, SEND, WAIT

Pair = tuple[int, int]
"""Ranks of a plan: of a channel source and destination, else the lower one first."""
MESSAGES = 64
"""Of a channel, in a step."""
BLOCKED_MS = 0.05
"""A WAIT that took longer has waited for its message."""


def message_stamps(records: Iterable[ActionRecord], channels: Sequence[Pair]) -> Float64s:
    """(channels, `MESSAGES`, 4): when a rank began to send, and 1; when a message arrived for which
    it waited, and 1; zeros for what is not known here. To be added up over ranks.

    Args:
        records: of one rank, from its step's start.
        channels: of the plan, the same on all ranks.
    """
    found = np.zeros((len(channels), MESSAGES, 4))
    index = {channel: number for number, channel in enumerate(channels)}
    sent: Counter[Pair] = Counter()
    posted: Counter[Pair] = Counter()
    places: dict[Action, tuple[int, int]] = {}
    for record in records:
        action = record.action
        if action.type in SEND:
            channel = record.rank, action.peer
            if sent[channel] < MESSAGES and channel in index:
                found[index[channel], sent[channel], :2] = record.start_ms, 1.0
            sent[channel] += 1
        elif action.type in RECV:
            channel = action.peer, record.rank
            if posted[channel] < MESSAGES and channel in index:
                wait = WAIT[RECV.index(action.type)]
                places[action._replace(type=wait)] = index[channel], posted[channel]
            posted[channel] += 1
        elif action in places and record.end_ms - record.start_ms > BLOCKED_MS:
            found[*places[action], 2:] = record.end_ms, 1.0
    return found


def between_ranks_ms(stamps: Float64s, channels: Sequence[Pair]) -> dict[Pair, float]:
    """What messages took between two ranks; nothing where one direction is not known.

    Args:
        stamps: `message_stamps` of all ranks.
    """
    delays: dict[Pair, float] = {}
    for channel, (sent_M, is_sent_M, arrived_M, is_awaited_M) in zip(
        channels, stamps.transpose(0, 2, 1), strict=True
    ):
        known_M = (is_sent_M > 0) & (is_awaited_M > 0)
        if known_M.any():
            delays[channel] = float(np.median(arrived_M[known_M] - sent_M[known_M]))
    return {
        (a, b): max(0.0, (delay + delays[b, a]) / 2)
        for (a, b), delay in delays.items()
        if a < b and (b, a) in delays
    }


@dataclass
class TransferTimes:
    """What messages take, smoothed over the steps of a run.

    Attributes:
        ms: by pair of ranks; those that were never measured are missing.
    """

    ms: dict[Pair, float] = field(default_factory=dict)

    def learn(self, measured_ms: Mapping[Pair, float]) -> None:
        """Takes in a step."""
        for pair, new in measured_ms.items():
            old = self.ms.get(pair, new)
            self.ms[pair] = SMOOTHING * new + (1 - SMOOTHING) * old
