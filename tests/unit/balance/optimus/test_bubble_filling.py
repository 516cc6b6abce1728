"""Tests of bubble filling: invariants of schedules, and their quality."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from colocated_cases import (
    Kernel,
    NaiveFit,
    kernels_of,
    llm_step,
    random_timeline,
    random_work,
)

from torchmm.balance.optimus.bubble_scheduler import (
    BubbleFiller,
    BubbleSchedule,
    fill_bubbles,
    search_assignment,
)
from torchmm.balance.optimus.bubble_scheduler_kernels import NEVER_PS, _earliest_fit
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.idle_intervals import busy_intervals
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, to_picoseconds
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType

CASES = 60


def random_case(seed: int):
    rng = random.Random(seed)
    ranks, microbatches = rng.choice((2, 4)), rng.choice((4, 6))
    timeline = random_timeline(rng, ranks, microbatches)
    uniform, groups = rng.random() < 0.4, rng.choice((1, 1, 2))
    works = [random_work(rng, ranks, microbatches, uniform=uniform, devices_per_rank=groups)]
    if rng.random() < 0.3:
        works.append(
            random_work(
                rng, ranks, microbatches, uniform=False, name="audio", devices_per_rank=groups
            )
        )
    return timeline, works


def unequal_case(seed: int):
    """Return three encoders with as many devices as the LLM, half as many, and one."""
    rng = random.Random(seed)
    ranks, microbatches = rng.choice((1, 2)), rng.choice((4, 6))
    timeline = random_timeline(rng, ranks, microbatches)
    widths = {"vision": 2, "audio": 1, "video": 4}
    works = [
        random_work(
            rng, ranks, microbatches, uniform=False, name=name, devices_per_rank=4, width=width
        )
        for name, width in rng.sample(sorted(widths.items()), rng.choice((2, 3)))
    ]
    return timeline, works


@pytest.fixture(scope="module")
def schedules() -> list[tuple[int, str, BubbleSchedule]]:
    """Return coarse and fine schedules of random cases."""
    return [
        (seed, kind, fill_bubbles(*make(seed), kind, evaluations=20))
        for make, seeds in ((random_case, range(CASES)), (unequal_case, range(100, 120)))
        for seed in seeds
        for kind in ("coarse", "fine")
    ]


def on_every_device(schedule: BubbleSchedule) -> Iterator[Kernel]:
    """Yield each kernel once for each device that runs it."""
    for (encoder, *_), kernels in kernels_of(schedule).items():
        for first, *rest in kernels:
            for offset in range(schedule.works[encoder].width):
                yield first + offset, *rest


def overlaps(start: int, end: int, spans: np.ndarray) -> bool:
    return bool(((start < spans[1]) & (end > spans[0])).any())


@pytest.mark.parametrize("width", [1, 2, 3])
def test_wide_kernel_starts_at_first_common_gap(width):
    rng = random.Random(width)
    for _ in range(300):
        gaps = []
        for _ in range(width + 1):
            ends = sorted(rng.sample(range(40), 8))
            gaps.append(list(zip(ends[::2], ends[1::2], strict=True)))
        first, earliest, duration = rng.randrange(2), rng.randrange(15), rng.randrange(1, 5)
        expected = next(
            (
                start
                for start in range(earliest, 40)
                if all(
                    any(begin <= start and start + duration <= end for begin, end in gaps[device])
                    for device in range(first, first + width)
                )
            ),
            NEVER_PS,
        )
        ends = np.array([gap for device in gaps for gap in device], np.int64).T
        pointers = np.arange(0, 4 * width + 8, 4)
        start = _earliest_fit.py_func(
            earliest, duration, pointers[:-1].copy(), pointers, (ends[0], ends[1]), first, width
        )
        assert start == expected


def test_encoder_kernels_avoid_busy_llm_spans(schedules):
    for seed, kind, schedule in schedules:
        groups = schedule.works[0].devices_per_rank
        spans = [
            busy_intervals(*rank_schedule, schedule.timeline.pieces)
            for rank_schedule in schedule.llm
        ]
        for kernels in kernels_of(schedule).values():
            for device, start, end, on_links in kernels:
                busy_spans = spans[device // groups]
                busy = busy_spans.communication_ps if on_links else busy_spans.computation_ps
                assert not overlaps(start, end, busy), (seed, kind)


def test_devices_run_one_kernel_at_a_time(schedules):
    for seed, kind, schedule in schedules:
        kernels = sorted(kernel[:3] for kernel in on_every_device(schedule))
        for (device, _, end), (next_device, start, _) in pairwise(kernels):
            assert device != next_device or end <= start, (seed, kind)


def test_kernels_follow_the_pipeline_both_ways(schedules):
    for seed, kind, schedule in schedules:
        groups, entry = schedule.works[0].devices_per_rank, schedule.timeline.entry_rank
        entry_times = {a.microbatch: (start, back) for a, start, back in llm_entry(schedule)}
        for (encoder, task, back), kernels in kernels_of(schedule).items():
            if not kernels:
                continue
            work = schedule.works[encoder]
            hop = to_picoseconds(work.transfer_times_ms_NS.max(initial=0.0))
            for (device, _, end, _), (other, start, _, _) in pairwise(kernels):
                assert end + hop * (device // groups != other // groups) <= start, (seed, kind)
            needed, returned = entry_times[task[0]]
            if back:
                far = hop * (kernels[0][0] // groups != entry)
                assert returned + far <= kernels[0][1], (seed, kind)
            else:
                far = hop * (kernels[-1][0] // groups != entry)
                assert kernels[-1][2] + far <= needed, (seed, kind)


def llm_entry(schedule: BubbleSchedule):
    """Yield (action, start, end of the backward pass) of forward actions of the first LLM stage."""
    rank_schedule = schedule.llm[schedule.timeline.entry_rank]
    stage = min(action.stage for action in rank_schedule.actions)
    times = list(
        zip(
            rank_schedule.actions,
            rank_schedule.start_ps.tolist(),
            rank_schedule.end_ps.tolist(),
            strict=True,
        )
    )
    ends = {a.microbatch: end for a, _, end in times if a.stage == stage and a.type.value in "BI"}
    for action, start, _ in times:
        if action.stage == stage and action.type is ActionType.F:
            yield action, start, ends[action.microbatch]


def test_kernels_stay_within_the_step(schedules):
    for seed, kind, schedule in schedules:
        total_ps = to_picoseconds(schedule.total_ms)
        timeline, groups = schedule.timeline, schedule.works[0].devices_per_rank
        gathered = timeline.unsharded_ps
        stages = [{a.stage for a in rank.actions} for rank in schedule.llm]
        each = timeline.llm_reduce_ps
        reduce = [sum(each.get(stage, 0) for stage in stages_of_rank) for stages_of_rank in stages]
        last = [each.get(min(stages_of_rank), 0) for stages_of_rank in stages]
        for kernels in kernels_of(schedule).values():
            for device, start, end, _ in kernels:
                rank = device // groups
                assert start >= gathered[rank], (seed, kind)
                remaining = 0 if timeline.overlaps_reduction else reduce[rank]
                assert end + remaining <= total_ps + 2, (seed, kind)
        remaining = last if timeline.overlaps_reduction else reduce
        for rank_schedule, tail in zip(schedule.llm, remaining, strict=True):
            assert rank_schedule.end_ps[-1] + tail <= total_ps + 2


def test_llm_reductions_overlap_encoder_backward():
    """Use two ranks of two stages, one microbatch, and encoder backward passes of 4 ms."""
    costs = PlanCosts(
        {Action(k, s, 0): 1.0 for k in (ActionType.F, ActionType.B) for s in range(4)},
        reduce_ms=dict.fromkeys(range(4), 3.0),
    )
    work = EncoderWork(
        "vision",
        ((0, 0),),
        np.arange(2, dtype=np.int32).reshape(1, 2),
        np.zeros((1, 2, 1)),
        np.full((1, 2, 1), 4.0),
    )
    ends = {}
    for hides in (False, True):
        timeline = llm_step(
            2, 2, 1, "gpipe", costs=costs, sharding="step", overlaps_reduction=hides
        )
        # Backward passes of stages 3 to 0 end at 5, 6, 7 and 8 ms.
        reduced = [6 + 8, 6 + 7] if not hides else [6 + 3 + 3, 5 + 3 + 3]
        assert timeline.reduced_ps == [to_picoseconds(ms) for ms in reduced]
        ends[hides] = fill_bubbles(timeline, [work]).total_ms
    assert ends == {False: 8 + 4 + 4 + 6, True: 8 + 4 + 4}


def test_all_encoder_work_is_scheduled(schedules):
    for seed, kind, schedule in schedules:
        busy: dict[int, int] = {}
        for device, start, end, on_links in on_every_device(schedule):
            busy[device] = busy.get(device, 0) + (end - start) * (not on_links)
        expected = sum(
            work.width * to_picoseconds(ms)
            for work in schedule.works
            for durations, links in zip(
                (work.forward_ms_NSK, work.backward_ms_NSK), work.links, strict=True
            )
            for ms in durations[:, :, ~links].flatten()
        )
        assert sum(busy.values()) == expected, (seed, kind)
        groups = schedule.works[0].devices_per_rank
        total_ps = to_picoseconds(schedule.total_ms)
        for device, own_ps in busy.items():
            spans = schedule.timeline.spans[device // groups].computation_ps
            assert own_ps + int((spans[1] - spans[0]).sum()) <= total_ps + 2, (seed, kind)
        assert schedule.total_ms >= schedule.llm_ms
        assert schedule.efficiency <= 1


def test_fine_schedules_are_shorter_than_coarse(schedules):
    totals = {(seed, kind): schedule for seed, kind, schedule in schedules}
    shorter = 0
    for seed in range(CASES):
        fine, coarse = totals[seed, "fine"], totals[seed, "coarse"]
        assert fine.total_ms <= coarse.total_ms + 1e-9, seed
        shorter += fine.total_ms < 0.999 * coarse.total_ms
        hops_ms = sum(2 * work.transfer_times_ms_NS.sum() for work in coarse.works)
        reduce_ms = sum(coarse.timeline.llm_reduce_ps.values()) / PICOSECONDS_PER_MS
        serial_ms = sum(work.busy_ms for work in coarse.works) + hops_ms + reduce_ms
        gathered_ms = coarse.timeline.unsharded_ps.max() / PICOSECONDS_PER_MS
        assert coarse.total_ms <= coarse.llm_ms + serial_ms + gathered_ms, seed
    assert shorter > CASES / 4


@pytest.mark.parametrize("make", [random_case, unequal_case])
def test_delay_of_assignment_is_minimal(make):
    delayed = 0
    for seed in range(40):
        timeline, works = make(seed)
        rng, work = random.Random(seed), works[0]
        filler = BubbleFiller(timeline, [work])
        for kind in ("coarse", "fine"):
            chosen = [rng.choice(choices) for choices in filler.choices]
            before_ps = filler.evaluate(kind, np.array(chosen, np.int32)).before_ps
            naive = NaiveFit(timeline, work, coarse=kind == "coarse")
            assert naive.fits(chosen, before_ps), (seed, kind)
            if before_ps:
                assert not naive.fits(chosen, before_ps - 1), (seed, kind)
                delayed += 1
    assert delayed > 20


def small_case(seed: int, uniform: bool):
    rng = random.Random(seed)
    microbatches = rng.choice((4, 6, 8))
    timeline = random_timeline(rng, 4, microbatches)
    work = random_work(rng, 4, microbatches, uniform=uniform)
    blocks = np.arange(4, dtype=np.int32).reshape(2, 2)  # two pipelines
    shape = (len(work.tasks), 2, work.forward_ms_NSK.shape[2])
    forward = np.resize(work.forward_ms_NSK, shape)
    hop = np.resize(work.transfer_times_ms_NS, shape[:2])
    return timeline, replace(
        work, devices_MS=blocks, forward_ms_NSK=forward, backward_ms_NSK=1.5 * forward,
        backward_links_K=work.forward_links_K, transfer_ms_NS=hop,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["coarse", "fine"])
def test_uniform_microbatches_are_assigned_optimally(kind):
    # Try all assignments of the microbatches to two pipelines.
    for seed in range(15):
        timeline, work = small_case(seed, uniform=True)
        filler = BubbleFiller(timeline, [work])
        assignments = product(range(2), repeat=len(work.tasks))
        placed = [filler.evaluate(kind, np.array(a, np.int32)) for a in assignments]
        greedy = filler.evaluate(kind, filler.assign_by_forward(kind))
        tolerance_ps = 1e-4 * to_picoseconds(work.busy_ms)
        assert greedy.before_ps <= min(p.before_ps for p in placed) + tolerance_ps, seed
        best_ms = min(p.total_ps for p in placed) / PICOSECONDS_PER_MS
        filled = fill_bubbles(
            timeline, [work], kind, evaluations=40
        )  # too few evaluations for an exhaustive search
        assert filled.total_ms <= 1.01 * best_ms, seed


def test_small_steps_reach_the_optimum():
    gains = []
    for seed in range(20):
        timeline, work = small_case(100 + seed, uniform=False)
        if len(work.tasks) > 8:
            continue
        filler = BubbleFiller(timeline, [work])
        assignments = product(range(2), repeat=len(work.tasks))
        best = min(filler.evaluate("fine", np.array(a, np.int32)).total_ps for a in assignments)
        filled = fill_bubbles(timeline, [work])
        assert filled.total_ms <= best / PICOSECONDS_PER_MS + 1e-9, seed
        greedy = filler.evaluate("fine", filler.assign_by_forward("fine")).total_ps
        gains.append(greedy / best - 1)
    assert len(gains) >= 6 and max(gains) > 0.001, "greedy assignments are optimal in these cases"


def test_wide_encoder_waits_for_all_devices():
    """Use a vision encoder on both devices of a rank, and two audio tasks, one per device.

    Vision and audio never run at the same time. The audio tasks run concurrently.
    """
    timeline = llm_step(1, 1, 1)
    tasks, ms = ((0, 0), (0, 1)), np.ones((2, 1, 2))
    both = np.array([[0]], np.int32), np.array([[0], [1]], np.int32)
    vision, audio = (
        EncoderWork(name, tasks, devices, ms, ms, devices_per_rank=2, width=width)
        for name, devices, width in zip(("vision", "audio"), both, (2, 1), strict=True)
    )
    schedule = fill_bubbles(timeline, [vision, audio])
    kernels = sorted(kernel[:3] for kernel in on_every_device(schedule))
    assert len(kernels) == 2 * 2 * 4 + 8
    for (device, _, end), (other, start, _) in pairwise(kernels):
        assert device != other or end <= start
    assert schedule.before_ms + schedule.after_ms == pytest.approx(8 + 4)
    assert [work.busy_ms for work in schedule.works] == [16, 8]


def test_encoder_without_cost_adds_no_time():
    timeline = llm_step(4, 2, 8)
    devices = np.arange(4, dtype=np.int32).reshape(4, 1)
    zeros = np.zeros((8, 1, 3))
    work = EncoderWork("vision", tuple((m, 0) for m in range(8)), devices, zeros, zeros)
    for kind in ("coarse", "fine"):
        schedule = fill_bubbles(timeline, [work], kind)
        assert schedule.total_ms == schedule.llm_ms == timeline.llm_ps / PICOSECONDS_PER_MS
        assert schedule.efficiency == 1


def test_deferred_forwards_hide_more_encoder_work():
    # Figure 12: warm-up bubbles precede forward actions that can be deferred.
    devices = np.arange(4, dtype=np.int32).reshape(4, 1)
    forward = np.full((8, 1, 4), 0.5)
    work = EncoderWork("vision", tuple((m, 0) for m in range(8)), devices, forward, forward)
    totals = [fill_bubbles(llm_step(4, 2, 8, defer=d), [work]).total_ms for d in (False, True)]
    assert totals[1] < totals[0]


def test_invalid_encoder_work_is_rejected():
    timeline = llm_step(4, 1, 4)
    tasks, one = tuple((m, 0) for m in range(4)), np.ones((4, 1, 2))
    devices = np.arange(4, dtype=np.int32).reshape(4, 1)
    work = EncoderWork("vision", tasks, devices, one, one)
    with pytest.raises(ValueError, match=r"devices \[0, 1\]; assign them to all 4"):
        fill_bubbles(timeline, [replace(work, devices_MS=devices[:2])])
    with pytest.raises(ValueError, match=r"have \[1, 2\] devices per rank"):
        eight = np.arange(8, dtype=np.int32).reshape(8, 1)
        fill_bubbles(
            timeline, [work, replace(work, name="audio", devices_MS=eight, devices_per_rank=2)]
        )
    with pytest.raises(ValueError, match=r"task \(4, 0\) of a step of 4"):
        fill_bubbles(timeline, [replace(work, tasks=tuple((m, 0) for m in range(1, 5)))])
    with pytest.raises(ValueError, match="use \\(tasks, stages, kernels\\)"):
        replace(work, forward_ms_NSK=one[:3])
    with pytest.raises(ValueError, match="kernels of -1"):
        replace(work, backward_ms_NSK=-one)
    with pytest.raises(ValueError, match="in order, each once"):
        replace(work, tasks=tasks[::-1])
    with pytest.raises(ValueError, match="a device has two stages"):
        replace(work, devices_MS=devices % 2)


def test_annealing_escapes_local_optima():
    # Jobs of sizes 3+3 | 2+2+2 on two machines balance. No single move improves 3+3+2 | 2+2.
    sizes = np.array([3, 3, 2, 2, 2])

    def cost(assignment: np.ndarray) -> int:
        return int(max(sizes[assignment == 0].sum(), sizes[assignment == 1].sum()))

    start = np.array([0, 1, 0, 1, 0], np.int32)
    assert cost(start) == 7
    choices = [range(2)] * 5
    best = search_assignment([start], choices, cost, evaluations=25, stop_cost=6)
    assert cost(best) == 6
    again = search_assignment([start], choices, cost, evaluations=25, stop_cost=6)
    assert (best == again).all(), "the search is not deterministic"
    assert (search_assignment([start], choices, cost, evaluations=0) == start).all()
