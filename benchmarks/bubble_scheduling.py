"""Simulate Optimus tables 5 to 7 and figures 15 to 17, and time its bubble scheduler.

    python benchmarks/bubble_scheduling.py [--quick] [--json FILE]

The tables are 5 and 7 (ViT-22B + GPT-175B on 1536, 2048 and 3072 GPUs) and 6 (two encoders), the
figures 15 (weak scaling), 16 and 17 (memory). `bubble_model` has the model. Scheduler times are
measured for all four encoder plans with full tensor-parallel groups (1, 2, 4 or 8 pipeline stages).
All other values are simulated. The paper does not report the number of patches per LLM token.
Results use several values. The first one is fitted to the coarse efficiency on 1536 GPUs.

The chosen encoder plan is the fastest that fits and that uses at most 12 % more memory than the
baseline with the lowest memory, without encoder activations (figure 17). Memory is that of the
device with the highest use, with all activations and without recomputation. The paper includes only
states and LLM activations. Steps that need more than 80 GB are marked.

Small cases are compared with the best of all assignments of microbatches to pipelines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from statistics import fmean
from typing import NamedTuple

import numpy as np
from support.harness import Row, run_cases
from support.models.bubble_memory import (
    DEVICE_BYTES,
    activation_bytes,
    baseline_bytes,
    plans_that_fit,
)
from support.models.bubble_model import (
    TWO_ENCODERS,
    WEAK_SCALING,
    Llm,
    Model,
    Speed,
    balanced_s,
    encoder_works,
    fitted,
    megatron_s,
    strong_scaling,
)
from support.models.encoder_sizes import ColocatedPlan
from support.models.layer_pieces import layer_pieces
from support.papers.paper_figures import (
    OPTIMUS_MAX_SPEEDUP,
    OPTIMUS_MEMORY_OVERHEAD,
    OPTIMUS_SCHEDULER,
    OPTIMUS_STRONG_SCALING,
    OPTIMUS_TWO_ENCODERS,
)

from torchmm.balance.optimus.bubble_scheduler import (
    BubbleFiller,
    BubbleSchedule,
    Granularity,
    fill_bubbles,
)
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.llm_timeline import build_llm_timeline
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers

GOAL_S = 0.5
EVALUATIONS = 24
"""Assignments tried per plan: microbatches are identical, so the first one is nearly the best."""
OPTIMUS_ERROR = 0.15
"""Of table 5's cells."""
FITTED = 1.75
"""Patches per token with which the coarse efficiency on 1536 GPUs is table 7's."""
PATCHES = (FITTED, 1, 4)
"""Numbers of patches per token at full size."""


class Filled(NamedTuple):
    """Encoder plan with its schedules and its memory use."""

    plan: ColocatedPlan
    coarse: BubbleSchedule
    fine: BubbleSchedule
    planned: float
    """Memory overhead as a fraction of the baseline with the lowest memory use.

    As in the planner of the paper, it includes states and LLM activations.
    """
    overhead: float
    """Memory overhead including encoder activations of both plans, as a fraction."""
    activations: float
    """Encoder activations in bytes on the device that stores most of them."""
    memory: float
    """Memory in bytes of the device with the highest memory use."""

    @property
    def fits(self) -> bool:
        """True if the plan fits into device memory."""
        return self.memory <= DEVICE_BYTES

    @property
    def name(self) -> str:
        """Name of the plan in the case column."""
        return f"{self.stages} encoder stages" + ("" if self.fits else ", does not fit")

    @property
    def stages(self) -> str:
        """Numbers of pipeline stages of the encoders."""
        return " + ".join(str(own.sizes.pipeline) for own in self.plan.encoders)

    def schedule(self, granularity: Granularity) -> BubbleSchedule:
        """Return the coarse or the fine schedule."""
        return self.fine if granularity == "fine" else self.coarse


def filled(model: Model, speed: Speed) -> list[Filled]:
    """Return all encoder plans that fit, starting with the fastest within the memory overhead."""
    timeline, found = Llm(model).timeline(speed), []
    lean = baseline_bytes(model, speed)
    lean_kept = baseline_bytes(model, speed, encoders_keep=True)
    for plan in plans_that_fit(model):
        works = encoder_works(model, speed, plan.encoders)
        coarse, fine = (
            fill_bubbles(timeline, works, kind, evaluations=EVALUATIONS)
            for kind in ("coarse", "fine")
        )
        kept = activation_bytes(model, speed, plan, fine)
        memory = max(a + b for a, b in zip(plan.rank_bytes, kept, strict=True))
        shares = plan.worst_bytes / lean - 1, memory / lean_kept - 1
        found.append(Filled(plan, coarse, fine, *shares, max(kept), memory))
    most = OPTIMUS_MEMORY_OVERHEAD.value
    return sorted(found, key=lambda f: (not f.fits, max(f.planned, most), f.fine.total_ms))


def memory_rows(case: str, found: Filled, name: str, *, goal: bool) -> list[Row]:
    """Return the rows of figure 17, and whether the plan fits."""
    most = OPTIMUS_MEMORY_OVERHEAD.value
    values = (
        ("encoder activations", "GiB", found.activations / 2**30, None),
        ("memory with encoder activations", "GiB", found.memory / 2**30, DEVICE_BYTES / 2**30),
        ("memory overhead before encoder activations", "", found.planned, None),
        ("memory overhead", "", found.overhead, most),
    )
    return [
        Row(
            case, f"{metric}, {name}", unit, ours, paper=most if bound == most else None,
            goal=bound if goal else None, better="lower", kind="simulated",
        )
        for metric, unit, ours, bound in values
    ]  # fmt: skip


def scheduler_rows(speed: Speed, repetitions: int) -> list[Row]:
    """Return the CPU times of coarse and fine schedules of four encoder plans."""
    rows = []
    for gpus, row in OPTIMUS_SCHEDULER.items():
        model = strong_scaling(gpus)
        llm = Llm(model)
        works = [encoder_works(model, speed, plan.encoders) for plan in plans_that_fit(model)]
        least_s = [float("inf")] * 3
        for _ in range(repetitions):
            begin_s = time.process_time()
            timeline = llm.timeline(speed)
            between_s = time.process_time()
            for own in works:
                fill_bubbles(timeline, own, evaluations=EVALUATIONS)
            end_s = time.process_time()
            took = (between_s - begin_s, end_s - between_s, end_s - begin_s)
            least_s = [min(pair) for pair in zip(least_s, took, strict=True)]
        case = f"{row.microbatches} microbatches, {gpus} GPUs"
        paper_s = row.runtime.value
        rows += [
            Row(case, "LLM costs and timeline", "s", least_s[0], better="lower"),
            Row(case, f"{len(works)} encoder plans", "s", least_s[1], better="lower"),
            Row(
                case,
                "scheduler, all plans",
                "s",
                least_s[2],
                paper=paper_s,
                goal=GOAL_S,
                better="lower",
            ),
            Row(case, "speedup over the paper", "x", paper_s / least_s[2]),
        ]
    return rows


def strong_rows(speed: Speed, gpus: int) -> list[Row]:
    """Return the rows of tables 5 and 7: step times and the hidden encoder fraction."""
    model, row = strong_scaling(gpus), OPTIMUS_SCHEDULER[gpus]
    case = f"{gpus} GPUs, {speed.patches:g} patches per token"
    paper_s = {
        method: OPTIMUS_STRONG_SCALING[method, gpus].seconds.value
        for method in ("Megatron-LM", "Megatron-LM balanced", "Optimus")
    }
    balanced, megatron = balanced_s(model, speed), megatron_s(model, speed)

    def simulated(metric: str, unit: str, ours: float, **more: float | str | None) -> Row:
        return Row(case, metric, unit, ours, kind="simulated", **more)  # type: ignore[arg-type]

    rows = [
        simulated("step, Megatron-LM", "s", megatron, paper=paper_s["Megatron-LM"], better="lower"),
        simulated(
            "step, balanced", "s", balanced, paper=paper_s["Megatron-LM balanced"], better="lower"
        ),
    ]
    every = filled(model, speed)
    for index, found in enumerate(every):
        chosen = " (chosen)" if index == 0 else ""
        for kind, printed in (("coarse", row.coarse.value), ("fine", row.fine.value)):
            own = found.schedule(kind)
            name = f"{kind}, {found.name}{chosen}"
            paper = paper_s["Optimus"] if kind == "fine" else None
            rows.append(
                simulated(
                    f"step, {name}", "s", own.total_ms / 1e3,
                    baseline=balanced, paper=paper, better="lower",
                )
            )  # fmt: skip
            rows.append(simulated(f"bubble efficiency, {name}", "", own.efficiency, paper=printed))
        rows += memory_rows(case, found, f"{found.name}{chosen}", goal=index == 0)
    best = every[0]
    steps_s = [best.fine.total_ms / 1e3, best.coarse.total_ms / 1e3, balanced, megatron]
    ordered = float(all(a < b for a, b in pairwise(steps_s)))
    error = abs(steps_s[0] / paper_s["Optimus"] - 1)
    return [
        *rows,
        simulated("fine < coarse < balanced < Megatron-LM", "", ordered, goal=1.0),
        simulated("error of Optimus' cell", "", error, goal=OPTIMUS_ERROR, better="lower"),
    ]


def weak_rows(speed: Speed) -> list[Row]:
    """Return the rows of figures 15 and 17."""
    rows = []
    for model in WEAK_SCALING:
        found, case = filled(model, speed)[0], f"{model.name}, {speed.patches:g} patches per token"
        step_s = found.fine.total_ms / 1e3
        name = f"step, fine, {found.name}"
        balanced, megatron = balanced_s(model, speed), megatron_s(model, speed)
        rows += [
            Row(case, name, "s", step_s, balanced, better="lower", kind="simulated"),
            Row(
                case, "speedup over balanced", "x", balanced / step_s,
                paper=OPTIMUS_MAX_SPEEDUP["Megatron-LM balanced"].value, kind="simulated",
            ),
            Row(
                case, "speedup over Megatron-LM", "x", megatron / step_s,
                paper=OPTIMUS_MAX_SPEEDUP["Megatron-LM"].value, kind="simulated",
            ),
            *memory_rows(case, found, found.name, goal=True),
        ]  # fmt: skip
    return rows


def two_encoder_rows(speed: Speed) -> list[Row]:
    """Return the rows of table 6 and figure 16."""
    rows = []
    for model in TWO_ENCODERS:
        found, case = filled(model, speed)[0], f"{model.name}, {speed.patches:g} patches per token"
        megatron, step_s = megatron_s(model, speed), found.fine.total_ms / 1e3
        name = f"step, fine, {found.name}"
        rows += [
            Row(case, name, "s", step_s, megatron, better="lower", kind="simulated"),
            Row(
                case, "speedup over Megatron-LM", "x", megatron / step_s,
                paper=OPTIMUS_TWO_ENCODERS[model.name].value, kind="simulated",
            ),
            *memory_rows(case, found, found.name, goal=True),
        ]  # fmt: skip
    return rows


def optimum_rows(cases: int) -> list[Row]:
    """Return torchmm / best assignment, for 4 to 8 microbatches and two pipelines."""
    rows = []
    kinds: tuple[Granularity, ...] = ("coarse", "fine")
    for alike, kind in product((True, False), kinds):
        ratios = [optimum_ratio(seed, alike, kind) for seed in range(cases)]
        case = f"{'identical' if alike else 'different'} microbatches, {cases} seeds from 0"
        for metric, ours, goal in (("worst", max(ratios), 1.01), ("mean", fmean(ratios), None)):
            name = f"{kind} / optimum, {metric}"
            rows.append(Row(case, name, "", ours, goal=goal, better="lower", kind="simulated"))
    return rows


def optimum_ratio(seed: int, alike: bool, granularity: Granularity) -> float:
    """Return one ratio. With identical microbatches, not all assignments are tried."""
    rng = random.Random(seed)
    microbatches = rng.choice((4, 6, 8))
    layers = ModuleLayers("llm", "llm", (1.0,) * 8)
    graph = StageGraph(colocated_layout([layers], 4, 2 - microbatches % 4 // 2), microbatches)
    order = interleaved_1f1b(graph)
    backward = rng.uniform(1.5, 2.5)
    compute = {a: backward if a.type is ActionType.B else 1.0 for row in order for a in row}
    tensor = {action: 0.15 * ms for action, ms in compute.items()}
    costs = PlanCosts(compute, tensor)
    timeline = build_llm_timeline(graph, order, costs, layer_pieces(graph, costs))
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


def scheduler(size: str) -> list[list[Row]]:
    """Return the times of the scheduler, and small cases against the best assignment."""
    full = size == "full"
    rows = scheduler_rows(fitted(FITTED), 10 if full else 3)
    return [rows, optimum_rows(100 if full else 20)]


def steps(size: str) -> Iterator[list[Row]]:
    """Yield tables 5 to 7 and figures 15 to 17, for one number of patches after the other."""
    for patches in PATCHES if size == "full" else (FITTED,):
        speed = fitted(patches)
        case = f"{speed.patches:g} patches per token"
        rows = [Row(case, "fitted efficiency", "", speed.efficiency, kind="simulated")]
        for gpus in OPTIMUS_SCHEDULER:
            rows += strong_rows(speed, gpus)
        yield rows + weak_rows(speed) + two_encoder_rows(speed)


CASES: dict[str, Callable[[str], Iterable[list[Row]]]] = {"scheduler": scheduler, "steps": steps}


def main() -> None:
    """Print the tables."""
    run_cases(
        "Bubble scheduling", __doc__, CASES, "all values are simulated, except scheduler times"
    )


if __name__ == "__main__":
    main()
