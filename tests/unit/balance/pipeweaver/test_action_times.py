"""Tests of action and message times that are learned from steps."""

import random

import pytest

from torchmm.balance.online_calibration import MAX_CONSTANT_FRACTION, ActionTimes, ActionTotals
from torchmm.balance.transfer_times import (
    MAX_MESSAGES,
    MIN_BLOCKED_MS,
    TransferTimes,
    message_timestamps,
    rank_pair_times_ms,
)
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.plan import ActionRecord

F = ActionType.F
KEY = 0, "vision", F


def total_of(actions: list[tuple[float, float]]) -> ActionTotals:
    """Return the totals of actions with (FLOPs, ms)."""
    total = ActionTotals(0.0, 0.0)
    for flops, ms in actions:
        total = total.plus(ActionTotals(ms, flops, 1.0, flops**2, ms * flops))
    return total


def learned(*steps: list[tuple[float, float]]) -> ActionTimes:
    times = ActionTimes()
    for step in steps:
        times.update({KEY: total_of(step)})
    return times


def test_constant_and_rate_are_fitted_separately():
    rng = random.Random(0)
    steps = [
        [(flops, 0.4 + 2e-9 * flops) for flops in rng.choices((1e8, 3e8, 9e8), k=12)]
        for _ in range(6)
    ]
    fit = learned(*steps).fit_lines()[KEY]
    assert fit.constant_ms == pytest.approx(0.4, rel=0.1)
    assert fit.ms_per_flop == pytest.approx(2e-9, rel=0.05)


def test_fit_without_constant_has_zero_constant():
    fit = learned([(flops, 3e-9 * flops) for flops in (1e8, 3e8, 9e8)]).fit_lines()[KEY]
    assert fit.constant_ms == pytest.approx(0.0, abs=1e-9)
    assert fit.ms_per_flop == pytest.approx(3e-9)


def test_noise_of_uniform_actions_adds_no_constant():
    rng = random.Random(1)
    fit = learned([(1e9 * (1 + 0.001 * rng.random()), 2.0 + rng.gauss(0, 0.05)) for _ in range(16)])
    assert fit.fit_lines()[KEY].constant_ms < 0.1


def test_fitted_times_sum_to_measured_time():
    rng = random.Random(2)
    for _ in range(20):
        actions = [(rng.uniform(1e8, 1e9), rng.uniform(0.1, 5.0)) for _ in range(rng.randint(1, 9))]
        fit = learned(actions).fit_lines()[KEY]
        total_ms = sum(fit.constant_ms + fit.ms_per_flop * flops for flops, _ in actions)
        assert total_ms == pytest.approx(sum(ms for _, ms in actions))
        mean_ms = total_ms / len(actions)
        assert 0 <= fit.constant_ms <= MAX_CONSTANT_FRACTION * mean_ms * (1 + 1e-9)
        assert fit.ms_per_flop > 0


def test_ranks_have_separate_recent_times():
    times = ActionTimes()
    for step in range(12):
        slow = 3.0 if step >= 6 else 1.0
        actions = [1e8, 4e8, 9e8]
        times.update(
            {
                (rank, "llm", F): total_of([(f, 1e-9 * f * (slow if rank else 1)) for f in actions])
                for rank in (0, 1)
            }
        )
    fits = times.fit_lines()
    assert fits[0, "llm", F].ms_per_flop == pytest.approx(1e-9)
    assert fits[1, "llm", F].ms_per_flop == pytest.approx(3e-9, rel=0.05)
    times.update({(0, "llm", F): ActionTotals(0.0, 0.0)})  # a step without actions
    assert times.fit_lines() == fits


CHANNELS = [(0, 1), (1, 0)]


def records_of(
    transfer_ms: tuple[float, float], clock_ms: float, waits: bool = True, messages: int = 5
) -> list[list[ActionRecord]]:
    """Return records of two ranks that alternately send messages to each other.

    Args:
        takes_ms: Time of a message from rank 0 to 1, and from rank 1 to 0.
        clock_ms: Clock of rank 1 minus clock of rank 0.
        waits: Whether WAIT actions block. If False, messages arrive long before the WAIT action.
        messages: Number of messages per direction.
    """
    ranks: list[list[ActionRecord]] = [[], []]
    for number in range(messages):
        for source in (0, 1):
            kind = "FB"[source]
            sent_ms = 100.0 * number + 40.0 * source
            arrived_ms = sent_ms + transfer_ms[source]
            send = Action(ActionType[f"SEND_{kind}"], source, number, 0, 1 - source, 1 - source)
            receive = Action(ActionType[f"RECV_{kind}"], 1 - source, number, 0, source, source)
            wait = receive._replace(type=ActionType[f"WAIT_{kind}"])
            began_ms = sent_ms - 5.0 if waits else arrived_ms + 20.0
            ended_ms = arrived_ms if waits else began_ms + MIN_BLOCKED_MS / 2
            for rank, action, begin, end in (
                (1 - source, receive, began_ms - 1.0, began_ms - 0.9),
                (source, send, sent_ms, sent_ms + 0.1),
                (1 - source, wait, began_ms, ended_ms),
            ):
                ahead_ms = clock_ms * rank
                ranks[rank].append(ActionRecord(rank, action, begin + ahead_ms, end + ahead_ms))
    return [sorted(records, key=lambda record: record.start_ms) for records in ranks]


@pytest.mark.parametrize("clock_ms", [0.0, 1e6, -37.5])
def test_message_times_are_independent_of_clocks(clock_ms):
    ranks = records_of((3.0, 5.0), clock_ms)
    stamps = sum(message_timestamps(records, CHANNELS) for records in ranks)
    assert rank_pair_times_ms(stamps, CHANNELS) == pytest.approx({(0, 1): 4.0})


def test_messages_without_waits_are_not_timed():
    stamps = sum(message_timestamps(r, CHANNELS) for r in records_of((3.0, 5.0), 0.0, waits=False))
    assert rank_pair_times_ms(stamps, CHANNELS) == {}
    one_way, _ = records_of((3.0, 5.0), 0.0)
    assert rank_pair_times_ms(message_timestamps(one_way, CHANNELS), CHANNELS) == {}


def test_number_of_timed_messages_is_limited():
    ranks = records_of((3.0, 5.0), 2.0, messages=MAX_MESSAGES + 10)
    stamps = sum(message_timestamps(records, CHANNELS) for records in ranks)
    assert stamps.shape == (2, MAX_MESSAGES, 4) and stamps[..., 1].sum() == 2 * MAX_MESSAGES
    assert rank_pair_times_ms(stamps, CHANNELS) == pytest.approx({(0, 1): 4.0})


def test_message_times_are_smoothed():
    times = TransferTimes()
    times.update({(0, 1): 4.0})
    times.update({(0, 1): 2.0, (1, 2): 1.0})
    assert times.ms == {(0, 1): 3.0, (1, 2): 1.0}
