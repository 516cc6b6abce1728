"""Tests of timelines: bubbles, module times, and the list simulator, against counted cells."""

import random
from collections import Counter

import pytest

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES, analyze_timeline, simulate_order

F, B, I, W = ActionType.F, ActionType.B, ActionType.I, ActionType.W  # noqa: E741


def chain(ranks, module="llm", trainable=True):
    stages = tuple(StageSpec(i, module, i, i + 1, (i,), trainable=trainable) for i in range(ranks))
    return StageLayout(stages, tuple((i, i + 1) for i in range(ranks - 1)))


def encoder_and_llm(trainable=True):
    """Return a layout of a sub-microbatched encoder on rank 0, and an LLM on ranks 0 and 1."""
    stages = (
        StageSpec(0, "vision", 0, 2, (0,), trainable=trainable),
        StageSpec(1, "llm", 0, 2, (0,)),
        StageSpec(2, "llm", 2, 4, (1,)),
    )
    return StageLayout(stages, ((0, 1), (1, 2)), frozenset({"vision"}))


def one_f_one_b(ranks, microbatches):
    order = []
    for rank in range(ranks):
        warmup = min(ranks - rank - 1, microbatches)
        actions = [Action(F, rank, i) for i in range(warmup)]
        for i in range(microbatches - warmup):
            actions += [Action(F, rank, warmup + i), Action(B, rank, i)]
        actions += [Action(B, rank, i) for i in range(microbatches - warmup, microbatches)]
        order.append(actions)
    return order


def forward_2_backward_3(action):
    return 2.0 if action.type is F else 3.0


def record(rank, kind, start_ms, end_ms, stage=None, microbatch=0):
    action = Action(kind, rank if stage is None else stage, microbatch)
    return ActionRecord(rank, action, start_ms, end_ms)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (4, 2), (4, 4), (4, 9)])
def test_1f1b_has_known_makespan_and_bubbles(ranks, microbatches):
    graph = StageGraph(chain(ranks), microbatches)
    records = simulate_order(one_f_one_b(ranks, microbatches), graph, forward_2_backward_3)
    timeline = analyze_timeline(records, graph.layout)
    assert timeline.makespan_ms == (microbatches + ranks - 1) * 5
    assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert timeline.bubble_ms["warmup"] == 2 * sum(range(ranks))
    assert timeline.bubble_ms["cooldown"] == 3 * sum(range(ranks))
    assert sum(timeline.busy_ms) + sum(timeline.bubble_ms.values()) == ranks * timeline.makespan_ms


def test_transfers_delay_only_dependent_ranks():
    graph = StageGraph(encoder_and_llm(), 1, {"vision": (1,)})
    order = [
        [Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)],
        [Action(F, 2, 0), Action(B, 2, 0)],
    ]
    records = simulate_order(order, graph, forward_2_backward_3, transfer_ms=10)
    times = {str(r.action): (r.start_ms, r.end_ms) for r in records}
    assert times == {
        "0F0": (0, 2),
        "1F0": (2, 4),
        "2F0": (14, 16),
        "2B0": (16, 19),
        "1B0": (29, 32),
        "0B0": (32, 35),
    }


def test_llm_waits_for_all_sub_microbatches():
    graph = StageGraph(encoder_and_llm(trainable=False), 2, {"vision": (3, 0)})
    parts = [Action(F, 0, 0, part) for part in range(3)]
    llm = [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)]
    last = [Action(F, 2, 0), Action(B, 2, 0), Action(F, 2, 1), Action(B, 2, 1)]
    start = {
        str(r.action): r.start_ms
        for r in simulate_order([parts + llm, last], graph, lambda action: 1.0)
    }
    assert start["1F0"] == 3
    first = simulate_order([[llm[1], *parts, llm[0], *llm[2:]], last], graph, lambda action: 1.0)
    assert next(r for r in first if r.action == llm[1]).start_ms == 0


def test_weight_backward_delays_no_other_rank():
    graph = StageGraph(chain(2), 1)
    order = [
        [Action(F, 0, 0), Action(B, 0, 0)],
        [Action(F, 1, 0), Action(I, 1, 0), Action(W, 1, 0)],
    ]
    times = {
        str(r.action): (r.start_ms, r.end_ms) for r in simulate_order(order, graph, lambda a: 1.0)
    }
    assert times["0B0"] == times["1W0"] == (3, 4)


@pytest.mark.parametrize(
    ("order", "waiting"),
    [
        ([[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]], "rank 0: 0B0"),
        ([[Action(F, 0, 0), Action(B, 0, 0)], [Action(F, 1, 0)]], "rank 0: 0B0"),
        ([[Action(F, 0, 0)], [Action(F, 1, 0), Action(W, 1, 0)]], "rank 1: 1W0"),
    ],
)
def test_deadlocked_orders_are_rejected(order, waiting):
    with pytest.raises(ValueError, match=waiting):
        simulate_order(order, StageGraph(chain(2), 1), lambda action: 1.0)


def test_exposed_collectives_are_separate_bubbles():
    records = [
        record(0, ActionType.UNSHARD, 0, 4),
        record(0, F, 3, 6),
        record(0, ActionType.SEND_F, 6, 7),
        record(0, B, 9, 10),
        record(0, ActionType.REDUCE_GRAD, 12, 15),
        record(1, ActionType.UNSHARD, 1, 2),
        record(1, ActionType.REDUCE_GRAD, 3, 20),
    ]
    timeline = analyze_timeline(records, chain(3))
    by_rank = {rank: Counter() for rank in range(3)}
    for bubble in timeline.bubbles:
        by_rank[bubble.rank][bubble.kind] += bubble.end_ms - bubble.start_ms
    assert by_rank == {
        0: {"dp_all_gather": 3, "other": 3, "cooldown": 7, "dp_reduce_scatter": 3},
        1: {"dp_all_gather": 1, "dp_reduce_scatter": 17, "other": 2},
        2: {"other": 20},
    }
    assert timeline.busy_ms == (4, 0, 0)
    assert timeline.bubble_fraction == pytest.approx(56 / 60)


def naive_classes(records, ranks):
    """Count bubbles per cell of one millisecond."""
    end = max(r.end_ms for r in records)
    counts = Counter()
    for rank in range(ranks):
        rank_records = [r for r in records if r.rank == rank]
        compute = [
            r for r in rank_records if r.action.type in (F, B, I, W) and r.end_ms > r.start_ms
        ]
        for cell in range(end):
            active = {r.action.type for r in rank_records if r.start_ms <= cell < r.end_ms}
            if active & {F, B, I, W}:
                counts["compute"] += 1
            elif ActionType.UNSHARD in active:
                counts["dp_all_gather"] += 1
            elif ActionType.REDUCE_GRAD in active:
                counts["dp_reduce_scatter"] += 1
            elif compute and cell < min(r.start_ms for r in compute):
                counts["warmup"] += 1
            elif compute and cell >= max(r.end_ms for r in compute):
                counts["cooldown"] += 1
            else:
                counts["other"] += 1
    return counts


@pytest.mark.parametrize("seed", range(200))
def test_bubble_classes_match_counted_cells(seed):
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    records = []
    for _ in range(rng.randint(1, 20)):
        start_ms = rng.randint(0, 30)
        kind = rng.choice([F, B, I, W, ActionType.UNSHARD, ActionType.REDUCE_GRAD,
                            ActionType.WAIT_F])  # fmt: skip
        end_ms = start_ms + rng.randint(0, 6)
        records.append(record(rng.randrange(ranks), kind, start_ms, end_ms, stage=0))
    timeline = analyze_timeline(records, chain(ranks))
    expected = naive_classes(records, ranks)
    assert sum(timeline.busy_ms) == expected.pop("compute", 0)
    assert timeline.bubble_ms == dict.fromkeys(BUBBLE_CLASSES, 0) | expected
    assert sum(timeline.busy_ms) + sum(timeline.bubble_ms.values()) == ranks * timeline.makespan_ms


def test_mean_module_times_average_over_ranks():
    records = [
        record(0, F, 0, 5, stage=0),
        record(0, F, 5, 6, stage=1),
        record(1, F, 6, 10, stage=2),
        record(1, ActionType.WAIT_F, 0, 6, stage=2),
    ]
    timeline = analyze_timeline(records, encoder_and_llm())
    assert timeline.mean_module_ms() == {"vision": 2.5, "llm": 2.5}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record(2, F, 0, 1, stage=0), "rank 2.*ranks 0..1"),
        (record(0, F, 0, 1, stage=5), "5F0.*2 stages"),
        (record(0, F, 3, 1), "3 to 1 ms"),
        (record(0, F, -1, 1), "-1 to 1 ms"),
        (record(0, F, 0, float("nan")), "nan"),
    ],
)
def test_invalid_records_are_rejected(bad, words):
    with pytest.raises(ValueError, match=words):
        analyze_timeline([bad], chain(2))


def test_step_without_records_is_empty():
    timeline = analyze_timeline([], chain(2))
    assert timeline.makespan_ms == timeline.bubble_fraction == 0
