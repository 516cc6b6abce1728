"""Encoders in an LLM's bubbles: how fast the scheduler is, and how much it hides (Optimus §5.3.2).

    python benchmarks/bubble_filling.py [--quick] [--json FILE]

ViT-22B + GPT-175B as in the paper's tables 5, 7 and 12: 8 pipeline ranks with 12 virtual stages,
tensor parallelism 8, 32, 24 or 16 microbatches. Scheduler times are measured, for all four encoder
plans with whole tensor-parallel groups (1, 2, 4 or 8 pipeline stages). All else is simulated from a
model with one fitted number, the efficiency of computation: the baseline with layers in one chain
(appendix B) takes the paper's 10.43 s on 1536 GPUs. Taken from the paper are the gather and
reduction of table 1 (0.167 and 0.458 s) and the length of a tensor-parallel collective of the LLM
(0.3 ms). How many patches there are for each token of the LLM the paper does not say; results are
given for 1, 2 and 4.

Small cases are compared with the best of all assignments of microbatches to pipelines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import numpy as np
import torch
from harness import Row, describe_machine, make_parser, report
from paper_figures import OPTIMUS_SCHEDULER, OPTIMUS_STRONG_SCALING

from torchmm.balance.bubble_filling import BubbleFiller, Granularity, fill_bubbles
from torchmm.balance.encoder_plans import ParallelSizes
from torchmm.balance.encoder_work import EncoderWork
from torchmm.balance.llm_timeline import LlmTimeline, llm_timeline
from torchmm.balance.operator_graph import PICOSECONDS_PER_MS
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.actions import Action, ActionType
from torchmm.pipelining.classic import interleaved_1f1b
from torchmm.pipelining.colocated import colocated_layout
from torchmm.pipelining.graph import StageGraph, Task
from torchmm.pipelining.layouts import ModuleLayers
from torchmm.pipelining.partition import balanced_cuts
from torchmm.pipelining.plan import ComputeOrder

PEAK_FLOPS = 989e12
RANKS, TENSOR, VIRTUAL = 8, 8, 12
LLM_TOKENS, SEQUENCE = 4096, 2048
LLM_WIDTH, LLM_LAYERS, VIT_WIDTH, VIT_LAYERS = 12288, 96, 6144, 48
GATHER_MS, REDUCE_MS, COLLECTIVE_MS = 167.0, 458.0, 0.3
STAGES = (1, 2, 4, 8)
GOAL_S = 0.5
EVALUATIONS = 24
"""Assignments tried per plan: microbatches are alike, so the first one is nearly the best."""


@dataclass(frozen=True)
class Speed:
    """What the model needs to know.

    Attributes:
        efficiency: share of the peak that computation reaches.
        patches: per token of the LLM.
    """

    efficiency: float
    patches: int

    def kernels_ms(self, width: int, tokens: float) -> tuple[list[float], list[bool]]:
        """One layer forward: durations, and which of them are collectives."""
        flops = [
            6 * tokens * width**2 + 4 * tokens * SEQUENCE * width,  # queries, keys, values; scores
            2 * tokens * width**2,
            8 * tokens * width**2,
            8 * tokens * width**2,
        ]
        compute = [n / (TENSOR * PEAK_FLOPS * self.efficiency) * 1e3 for n in flops]
        wire = COLLECTIVE_MS * tokens * width / (LLM_TOKENS * LLM_WIDTH)
        half = [wire, compute[0], compute[1], wire]
        durations = [*half, wire, compute[2], compute[3], wire]
        return durations, [True, False, False, True] * 2

    def layer_ms(self, width: int, tokens: float) -> float:
        """One layer forward; its backward computes twice as much."""
        durations, links = self.kernels_ms(width, tokens)
        return sum(d for d, link in zip(durations, links, strict=True) if not link)


class Llm:
    """The LLM's pipeline with so many microbatches."""

    def __init__(self, microbatches: int) -> None:
        layers = ModuleLayers("llm", "llm", (1.0,) * LLM_LAYERS)
        self.graph = StageGraph(colocated_layout([layers], RANKS, VIRTUAL), microbatches)
        self.order: ComputeOrder = interleaved_1f1b(self.graph)

    def costs(self, speed: Speed) -> PlanCosts:
        """Of stages of one layer."""
        forward = speed.layer_ms(LLM_WIDTH, LLM_TOKENS)
        return self.stage_costs(lambda stage: forward, lambda stage: 4 * COLLECTIVE_MS)

    def stage_costs(
        self, forward: Callable[[int], float], wire: Callable[[int], float]
    ) -> PlanCosts:
        """Of stages that compute and communicate for given times forward."""
        share = {ActionType.F: 1.0, ActionType.B: 2.0}
        tasks = [Task(a.stage, a.microbatch) for row in self.order for a in row]
        compute, tensor = {}, {}
        for task in dict.fromkeys(tasks):
            for kind, times in share.items():
                action = Action(kind, *task)
                tensor[action] = wire(task.stage)
                compute[action] = times * forward(task.stage) + tensor[action]
        # Only the first chunk's gather and the last reduction are not hidden (§2.2).
        ends = range(RANKS)
        return PlanCosts(
            compute, tensor, dict.fromkeys(ends, GATHER_MS), dict.fromkeys(ends, REDUCE_MS)
        )

    def timeline(self, speed: Speed) -> LlmTimeline:
        """With halves of layers as long as attention and feed-forward."""
        durations, _ = speed.kernels_ms(LLM_WIDTH, LLM_TOKENS)
        first, second = durations[1] + durations[2], durations[5] + durations[6]
        wire = COLLECTIVE_MS
        pieces = {
            kind: (wire, times * first, 2 * wire, times * second, wire)
            for kind, times in ((ActionType.F, 1), (ActionType.B, 2))
        }
        return llm_timeline(
            self.graph,
            self.order,
            self.costs(speed),
            sharding="step",
            reduction_hides=True,
            pieces=lambda action: pieces[action.type],
        )

    def balanced_s(self, speed: Speed) -> float:
        """The baseline: layers of both models in one chain, cut into equal virtual stages."""
        vit_tokens = LLM_TOKENS * speed.patches
        vit, llm = speed.layer_ms(VIT_WIDTH, vit_tokens), speed.layer_ms(LLM_WIDTH, LLM_TOKENS)
        vit_wire = 4 * speed.kernels_ms(VIT_WIDTH, vit_tokens)[0][0]
        computes = [vit] * VIT_LAYERS + [llm] * LLM_LAYERS
        wires = [vit_wire] * VIT_LAYERS + [4 * COLLECTIVE_MS] * LLM_LAYERS
        sizes = balanced_cuts([3 * c + 2 * w for c, w in zip(computes, wires, strict=True)], 96)
        stops = np.cumsum(sizes)
        parts = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        costs = self.stage_costs(
            lambda stage: sum(computes[parts[stage]]), lambda stage: sum(wires[parts[stage]])
        )
        found = llm_timeline(self.graph, self.order, costs, sharding="step", defer=False)
        return found.llm_ps / PICOSECONDS_PER_MS / 1e3


def fitted(patches: int) -> Speed:
    """The efficiency with which the baseline takes the paper's time; time is linear in 1/efficiency
    as long as the critical path stays."""
    target_s = OPTIMUS_STRONG_SCALING["Megatron-LM balanced", 1536].seconds.value
    llm = Llm(OPTIMUS_SCHEDULER[1536].microbatches)
    ends = [(inverse, llm.balanced_s(Speed(1 / inverse, patches))) for inverse in (2.0, 3.0)]
    for _ in range(3):
        (x0, y0), (x1, y1) = ends[-2:]
        inverse = x1 + (target_s - y1) * (x1 - x0) / (y1 - y0) if y1 != y0 else x1
        ends.append((inverse, llm.balanced_s(Speed(1 / inverse, patches))))
    return Speed(1 / ends[-1][0], patches)


def encoder(speed: Speed, microbatches: int, stages: int) -> EncoderWork:
    """ViT-22B in pipelines of so many stages, kernel by kernel."""
    # Kernels of LLM_TOKENS patches, which the paper's own layer of 1.4 ms has, one after the other.
    whole, whole_links = speed.kernels_ms(VIT_WIDTH, LLM_TOKENS)
    durations = [duration for duration in whole for _ in range(speed.patches)]
    links = [link for link in whole_links for _ in range(speed.patches)]
    layers = VIT_LAYERS // stages
    backward, backward_links = [], []
    for duration, link in zip(reversed(durations), reversed(links), strict=True):
        times = 1 if link else 2  # gradients of inputs and of weights
        backward += [duration] * times
        backward_links += [link] * times
    shape = (microbatches, stages, 1)
    sizes = ParallelSizes(1, RANKS, TENSOR)
    return EncoderWork(
        "vision",
        tuple((index, 0) for index in range(microbatches)),
        np.arange(sizes.pipeline, dtype=np.int32).reshape(-1, stages),
        np.tile(durations * layers, shape),
        np.tile(backward * layers, shape),
        forward_links_K=np.array(links * layers),
        backward_links_K=np.array(backward_links * layers),
    )


def scheduler_rows(speed: Speed, repetitions: int) -> list[Row]:
    """CPU time for the schedules of four encoder plans, coarse and fine."""
    rows = []
    for gpus, row in OPTIMUS_SCHEDULER.items():
        llm = Llm(row.microbatches)
        works = [encoder(speed, row.microbatches, stages) for stages in STAGES]
        least_s = [float("inf")] * 3
        for _ in range(repetitions):
            begin_s = time.process_time()
            timeline = llm.timeline(speed)
            between_s = time.process_time()
            for work in works:
                fill_bubbles(timeline, [work], evaluations=EVALUATIONS)
            end_s = time.process_time()
            took = (between_s - begin_s, end_s - between_s, end_s - begin_s)
            least_s = [min(pair) for pair in zip(least_s, took, strict=True)]
        case = f"{row.microbatches} microbatches, {gpus} GPUs"
        paper_s = row.runtime.value
        rows += [
            Row(case, "costs and timeline of the LLM", "s", least_s[0], better="lower"),
            Row(case, "four encoder plans", "s", least_s[1], better="lower"),
            Row(
                case, "scheduler, all", "s", least_s[2], paper=paper_s, goal=GOAL_S, better="lower"
            ),
            Row(case, "speed-up over the paper", "x", paper_s / least_s[2]),
        ]
    return rows


def efficiency_rows(speed: Speed, gpus: int) -> list[Row]:
    """Table 7 and the steps it belongs to: with the best encoder plan, and with pipelines of two
    stages, of which the paper's running times tell (C(N - 1, 3) N: four pipelines)."""
    row = OPTIMUS_SCHEDULER[gpus]
    llm = Llm(row.microbatches)
    timeline, balanced_s = llm.timeline(speed), llm.balanced_s(speed)
    case = f"{gpus} GPUs, {speed.patches} patches per token"
    paper_s = {
        method: OPTIMUS_STRONG_SCALING[method, gpus].seconds.value
        for method in ("Optimus", "Megatron-LM balanced")
    }

    def step(name: str, ours_s: float, baseline_s: float | None, paper: float | None) -> Row:
        return Row(
            case, f"step, {name}", "s", ours_s, baseline_s, paper, better="lower", kind="simulated"
        )

    rows = [step("balanced", balanced_s, None, paper_s["Megatron-LM balanced"])]
    printed_efficiency: dict[Granularity, float] = {
        "coarse": row.coarse.value,
        "fine": row.fine.value,
    }
    for kind, paper in printed_efficiency.items():
        found = {
            stages: fill_bubbles(
                timeline,
                [encoder(speed, row.microbatches, stages)],
                kind,
                evaluations=EVALUATIONS,
            )
            for stages in STAGES
        }
        best = min(found, key=lambda stages: found[stages].total_ms)
        for stages in dict.fromkeys((best, 2)):
            name = f"{kind}, {stages} encoder stage{'s' * (stages > 1)}"
            own = found[stages]
            rows.append(Row(case, f"Eff {name}", "", own.efficiency, paper=paper, kind="simulated"))
            printed = paper_s["Optimus"] if kind == "fine" else None
            rows.append(step(name, own.total_ms / 1e3, balanced_s, printed))
    return rows


def optimum_rows(cases: int) -> list[Row]:
    """Ours over the best of all assignments: 4 to 8 microbatches, two pipelines."""
    rows = []
    kinds: tuple[Granularity, ...] = ("coarse", "fine")
    for alike, kind in product((True, False), kinds):
        ratios = [optimum_ratio(seed, alike, kind) for seed in range(cases)]
        case = f"microbatches {'alike' if alike else 'different'}, {cases} seeds from 0"
        for metric, ours, goal in (("worst", max(ratios), 1.01), ("mean", fmean(ratios), None)):
            name = f"{kind} / optimum, {metric}"
            rows.append(Row(case, name, "", ours, goal=goal, better="lower", kind="simulated"))
    return rows


def optimum_ratio(seed: int, alike: bool, granularity: Granularity) -> float:
    """One case. Where microbatches are alike, too few assignments are tried to see all."""
    rng = random.Random(seed)
    microbatches = rng.choice((4, 6, 8))
    layers = ModuleLayers("llm", "llm", (1.0,) * 8)
    graph = StageGraph(colocated_layout([layers], 4, 2 - microbatches % 4 // 2), microbatches)
    order = interleaved_1f1b(graph)
    backward = rng.uniform(1.5, 2.5)
    compute = {a: backward if a.type is ActionType.B else 1.0 for row in order for a in row}
    tensor = {action: 0.15 * ms for action, ms in compute.items()}
    timeline = llm_timeline(graph, order, PlanCosts(compute, tensor))
    kernels, scale = rng.choice((2, 8)), rng.uniform(0.3, 2)
    sizes = [1.0 if alike else rng.choice((0.1, 0.5, 1, 1, 2, 4)) for _ in range(microbatches)]
    forward = np.tile(scale / (2 * kernels) * np.array(sizes)[:, None, None], (1, 2, kernels))
    work = EncoderWork(
        "vision",
        tuple((index, 0) for index in range(microbatches)),
        np.arange(4, dtype=np.int32).reshape(2, 2),
        forward,
        rng.uniform(1, 2) * forward,
    )
    filler = BubbleFiller(timeline, [work])
    every = product(range(2), repeat=microbatches)
    placed = [filler.evaluate(granularity, np.array(found, np.int32)).total_ps for found in every]
    tried = 15 if alike else 256
    found = fill_bubbles(timeline, [work], granularity, evaluations=tried)
    return found.total_ms * PICOSECONDS_PER_MS / min(placed)


def all_rows(quick: bool, patches: Sequence[int]) -> list[Row]:
    """Everything."""
    speeds = [fitted(each) for each in patches]
    rows = scheduler_rows(speeds[0], 3 if quick else 10)
    for speed in speeds:
        case = f"{speed.patches} patches per token"
        rows.append(Row(case, "fitted efficiency", "", speed.efficiency, kind="simulated"))
        for gpus in OPTIMUS_SCHEDULER:
            rows += efficiency_rows(speed, gpus)
    return rows + optimum_rows(20 if quick else 100)


def main() -> None:
    """Prints the table."""
    arguments = make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = all_rows(arguments.quick, (2,) if arguments.quick else (2, 1, 4))
    machine = describe_machine(torch.device("cpu"))
    report(f"Bubble filling; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
