"""Random steps with encoders on the ranks of the LLM, and a slow, simple check of schedules."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise

import numpy as np
from support.models.layer_pieces import layer_pieces

from torchmm.balance.optimus.bubble_scheduler import BubbleSchedule
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.llm_timeline import LlmTimeline, build_llm_timeline
from torchmm.balance.picoseconds import to_picoseconds
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph
from torchmm.pipelining.schedules.colocated import backbone_order, colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.pipelining.schedules.registry import ORDERS, OrderFunction

T = ActionType
SCHEDULES_OF_LLM = ("1f1b", "interleaved_1f1b", "gpipe", "zero_bubble")


def llm_step(
    ranks: int,
    virtual: int,
    microbatches: int,
    schedule: str | OrderFunction = "interleaved_1f1b",
    **options,
) -> LlmTimeline:
    """Return an LLM of equal stages, of 1 ms forward and 2 ms backward unless costs are given."""
    graph = StageGraph(
        colocated_layout([ModuleLayers("llm", "llm", (1.0,) * ranks * virtual)], ranks, virtual),
        microbatches,
    )
    durations = {T.F: 1.0, T.B: 2.0, T.I: 1.0, T.W: 1.0}
    compute = {Action(k, *task): ms for task in graph.tasks() for k, ms in durations.items()}
    costs = options.pop("costs", PlanCosts(compute))
    order = backbone_order(graph, ORDERS[schedule] if isinstance(schedule, str) else schedule)
    return build_llm_timeline(graph, order, costs, layer_pieces(graph, costs), **options)


def random_timeline(rng: random.Random, ranks: int, microbatches: int) -> LlmTimeline:
    """Return the timeline of a random schedule with random costs of compute and communication."""
    schedule = rng.choice(SCHEDULES_OF_LLM)
    virtual = 1 if schedule in ("1f1b", "gpipe") else rng.choice((1, 2))
    layers = ModuleLayers("llm", "llm", (1.0,) * 2 * ranks * virtual)
    graph = StageGraph(colocated_layout([layers], ranks, virtual), microbatches)
    stages = len(graph.layout.stages)
    each = [rng.uniform(0.5, 2) for _ in range(stages)] if rng.random() < 0.5 else [1.0] * stages
    backward = rng.uniform(1, 2.5)
    share = {T.F: 1.0, T.B: backward, T.I: 0.6 * backward, T.W: 0.4 * backward}
    compute = {Action(k, *t): each[t.stage] * s for t in graph.tasks() for k, s in share.items()}
    tensor = rng.choice((0.0, 0.2))
    wire = rng.choice((0.0, 0.1))
    costs = PlanCosts(
        compute,
        tp_comm_ms={action: tensor * ms for action, ms in compute.items()},
        transfer_ms={
            (Message(s, d, m), back): wire
            for s, d in graph.layout.edges
            for m in range(microbatches)
            for back in (False, True)
        },
        gather_ms={s: 0.3 for s in range(stages)},
        reduce_ms={s: 0.7 for s in range(stages)},
    )
    order = backbone_order(graph, ORDERS[schedule])
    return build_llm_timeline(
        graph,
        order,
        costs,
        layer_pieces(graph, costs),
        sharding=rng.choice(("none", "step")),
        overlaps_reduction=rng.random() < 0.5,
    )


def random_work(
    rng: random.Random,
    ranks: int,
    microbatches: int,
    *,
    uniform: bool,
    name: str = "vision",
    devices_per_rank=1,
    width=1,
) -> EncoderWork:
    """Return the random kernels of an encoder, some of which communicate."""
    stages = rng.choice([n for n in (1, 2, 4) if ranks % n == 0])
    devices = np.arange(0, ranks * devices_per_rank, width, dtype=np.int32)
    blocks = devices.reshape(ranks // stages, stages, -1).transpose(0, 2, 1)
    kernels = rng.choice((1, 3, 8))
    counts = (
        [1] * microbatches if uniform else [rng.choice((0, 1, 1, 2)) for _ in range(microbatches)]
    )
    tasks = tuple((m, n) for m, count in enumerate(counts) for n in range(count))
    each = [1.0 if uniform else rng.choice((0.2, 1.0, 1.0, 3.0)) for _ in tasks]
    base = rng.uniform(0.1, 2.0) / kernels / stages
    shape = np.array([rng.uniform(0.2, 1.5) for _ in range(stages * kernels)])
    forward = base * np.array(each)[:, None, None] * shape.reshape(1, stages, kernels)
    links = np.array([kernel % 4 == 2 for kernel in range(kernels)])
    frozen = rng.random() < 0.2
    return EncoderWork(
        name,
        tasks,
        blocks.reshape(-1, stages),
        forward,
        forward[:, :, ::-1] * (0.0 if frozen else rng.uniform(1, 2)),
        devices_per_rank,
        links,
        links[::-1],
        np.full((len(tasks), stages), rng.choice((0.0, 0.05))),
        width,
    )


Kernel = tuple[int, int, int, bool]
"""Device (the first one if several run it together), start, end, whether it communicates."""


def kernels_of(schedule: BubbleSchedule) -> dict[tuple, list[Kernel]]:
    """Return kernels in their required order by (encoder, task, whether backward)."""
    kernels: dict[tuple, list[Kernel]] = {}
    starts = (schedule.forward_start_ps, schedule.backward_start_ps)
    for encoder, work in enumerate(schedule.works):
        durations = (work.forward_ms_NSK, work.backward_ms_NSK)
        for n, task in enumerate(work.tasks):
            devices = work.devices_MS[schedule.pipeline_N[encoder][n]]
            for back in (False, True):
                stages = range(len(devices))
                kernels[encoder, task, back] = [
                    (int(devices[s]), start, start + to_picoseconds(ms), bool(on_links))
                    for s in (reversed(stages) if back else stages)
                    for start, ms, on_links in zip(
                        starts[back][encoder][n, s].tolist(),
                        durations[back][n, s].tolist(),
                        work.links[back],
                        strict=True,
                    )
                    if to_picoseconds(ms)
                ]
    return kernels


class NaiveFit:
    """Checks if tasks meet their deadlines with a delay; places each kernel first-fit."""

    def __init__(self, timeline: LlmTimeline, work: EncoderWork, coarse: bool) -> None:
        self.timeline, self.work = timeline, work
        self.devices_per_rank = work.devices_per_rank
        free = timeline.idle_outside() if coarse else timeline.idle_compute()
        links = timeline.idle_outside() if coarse else timeline.idle_links()
        self.free = [self._intervals(each) for each in (free, links)]

    def _intervals(self, free) -> list[list[tuple[int, int]]]:
        spans = list(zip(free.start_ps.tolist(), free.end_ps.tolist(), strict=True))
        pointers = free.pointers.tolist()
        return [spans[a:b] for a, b in pairwise(pointers)]

    def fits(self, pipeline_N: list[int], delay_ps: int) -> bool:
        """Return whether all tasks, in the order in which the LLM needs them, are in time."""
        timeline, work = self.timeline, self.work
        device_ps = {
            int(d): int(timeline.unsharded_ps[d // self.devices_per_rank]) - delay_ps
            for d in work.devices_MS.flatten()
        }
        order = sorted(range(len(work.tasks)), key=lambda n: timeline.deadline_ps[work.tasks[n][0]])
        for n in order:
            now, before = -(1 << 60), None
            for stage, device in enumerate(work.devices_MS[pipeline_N[n]].tolist()):
                rank = device // self.devices_per_rank
                if before is not None and before != rank:
                    now += to_picoseconds(work.transfer_times_ms_NS[n, stage - 1])
                now = max(now, device_ps[device])
                for ms, on_links in zip(work.forward_ms_NSK[n, stage], work.links[0], strict=True):
                    now = self._first_fit(rank, now, to_picoseconds(ms), bool(on_links))
                    if now is None:
                        return False
                device_ps[device] = now
                before = rank
            if before != timeline.entry_rank:
                now += to_picoseconds(work.transfer_times_ms_NS[n, -1])
            if now > timeline.deadline_ps[work.tasks[n][0]]:
                return False
        return True

    def _first_fit(self, rank: int, now: int, duration: int, on_links: bool) -> int | None:
        spans = self.free[on_links][rank]
        for start, end in spans[max(0, bisect_right(spans, (now, 1 << 62)) - 1) :]:
            if end - max(now, start) >= duration:
                return max(now, start) + duration
        return None
