"""Transfer times of messages between two ranks of a plan, independent of clock offsets.

A rank records when it starts to send, and when a message arrives for which it waits. The times come
from different clocks with an unknown offset. The offset is added in one direction and subtracted in
the other, so the mean of both directions is independent of it:

    rank a   send |------>            wait    |
    rank b            wait | arrive   send |--+-->

    (arrival of a -> b - its start + arrival of b -> a - its start) / 2

The median of each direction is used. A message that arrives before its WAIT is ignored, because its
arrival time is unknown. Ranks sum the times of the first messages of each channel, in sending
order, in one small array.

Clock synchronization before the step would drift. The duration of a WAIT is mostly computation of
the sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchmm.balance.numba_utils import Float64s
from torchmm.balance.online_calibration import SMOOTHING
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.plan.transfers import RECV, SEND, WAIT

RankPair = tuple[int, int]
"""Two ranks of a plan: source and destination of a channel, otherwise the lower rank first."""
MAX_MESSAGES = 64
"""Maximum number of recorded messages per channel in a step."""
MIN_BLOCKED_MS = 0.05
"""Minimum duration of a WAIT that has waited for its message."""


def message_timestamps(records: Iterable[ActionRecord], channels: Sequence[RankPair]) -> Float64s:
    """Return the times of messages as an array (channels, `MAX_MESSAGES`, 4), for a sum over ranks.

    The columns are the start of a send, 1, the arrival of a message after a wait, and 1. Values
    that are unknown on this rank are 0.

    Args:
        records: Records of one rank, relative to the start of its step.
        channels: Channels of the plan, equal on all ranks.
    """
    stamps = np.zeros((len(channels), MAX_MESSAGES, 4))
    index = {channel: number for number, channel in enumerate(channels)}
    sent: Counter[RankPair] = Counter()
    posted: Counter[RankPair] = Counter()
    awaited: dict[Action, tuple[int, int]] = {}
    for record in records:
        action = record.action
        if action.type in SEND:
            channel = record.rank, action.peer
            if sent[channel] < MAX_MESSAGES and channel in index:
                stamps[index[channel], sent[channel], :2] = record.start_ms, 1.0
            sent[channel] += 1
        elif action.type in RECV:
            channel = action.peer, record.rank
            if posted[channel] < MAX_MESSAGES and channel in index:
                wait = WAIT[RECV.index(action.type)]
                awaited[action._replace(type=wait)] = index[channel], posted[channel]
            posted[channel] += 1
        elif action in awaited and record.end_ms - record.start_ms > MIN_BLOCKED_MS:
            stamps[*awaited[action], 2:] = record.end_ms, 1.0
    return stamps


def rank_pair_times_ms(stamps: Float64s, channels: Sequence[RankPair]) -> dict[RankPair, float]:
    """Return the transfer time between pairs of ranks.

    Pairs with an unknown direction are omitted.

    Args:
        stamps: Sum of `message_timestamps` over all ranks.
        channels: Channels of the plan.
    """
    delays: dict[RankPair, float] = {}
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
    """Transfer times of messages, smoothed over the steps of a run.

    Attributes:
        ms: Time by pair of ranks. Pairs without a measurement are missing.
    """

    ms: dict[RankPair, float] = field(default_factory=dict)

    def update(self, measured_ms: Mapping[RankPair, float]) -> None:
        """Update the times with a step."""
        for pair, new in measured_ms.items():
            old = self.ms.get(pair, new)
            self.ms[pair] = SMOOTHING * new + (1 - SMOOTHING) * old
