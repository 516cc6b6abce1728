"""Measure encoder work in the bubbles of the LLM pipeline (Optimus).

    python benchmarks/bubble_runtime.py [--quick] [--json FILE] [--cases NAME ...]

    compute    `bubble_compute_case`: Hugging Face layers on two ranks of one thread each
    sleep      eight ranks whose layers sleep; runtime, processes and messages are real

Compared plans of the same work:

    filled                    Optimus: encoder work in all idle times of the LLM
    not filled                the same plan, with encoder work before and after the LLM work
    encoder in stage 0        Megatron-LM's placement
    coarse                    the best Optimus plan that fills no bubble between LLM actions (sleep)
    balanced single pipeline  all layers in stages of equal cost (sleep)

Each plan is selected by simulation with known or measured times. "not filled" has the sizes of
"filled". Image counts are those of real documents.

Sleeping ranks run three cases. In the first, all plans may choose the number of LLM stages per
rank. With two stages per rank, bubbles between LLM actions are short compared with encoder work, so
filling them gains nothing over coarse plans. In the other cases, the LLM runs under 1F1B and the
encoder (trained or frozen) needs about as long as the bubbles. Each measured speedup is reported
with its simulated speedup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from statistics import mean
from typing import Any, NamedTuple

import torch
from documents import load_documents
from support.cases import bubble_compute_case as compute_case
from support.cases.bubble_compute_case import outside
from support.cases.pipeline_sleep_case import (
    QUIET,
    SEED,
    TOWER_SHARE,
    TRANSFER_S,
    Setting,
    load_work,
)
from support.harness import Row, run_cases
from support.ranks import Comparison, Stopwatch, print_choices, run_ranks
from support.sleepers import (
    LLM_LAYERS,
    RANKS,
    TOWER_LAYERS,
    WIDTH,
    OurSleep,
    SleepWork,
    chain_modules,
    durations,
    message_rows,
)

from torchmm.balance.schedules import OPTIMUS_SCHEDULE
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan, TensorSpec
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import megatron_balanced_layout, megatron_layout
from torchmm.pipelining.view.timeline import simulate_order
from torchmm.recipe.parallel_section import ParallelConfig

OPTIMUS, FLOAT = OPTIMUS_SCHEDULE, torch.float32
CHAIN, COARSE, FINE = "balanced single pipeline", "coarse", "filled"
UNFILLED, FRONT = "not filled", "encoder in stage 0"
PATIENCE_S = 20
"""Time limit in seconds for waiting until other programs finish."""
GOALS = {"compute": 1.15, "sleep": 1.3}
"""Goals of the speedup compared with the encoder in stage 0."""
NAP_S = {"full": 4e-3, "quick": 2e-3, "tiny": 2e-4}
"""Forward time of an LLM layer in seconds."""


class Nap(NamedTuple):
    """Case with sleeping ranks."""

    name: str
    microbatches: int
    tower_share: float
    """Encoder fraction of the compute time."""
    frozen: bool
    virtual: tuple[int, ...]
    """LLM stages per rank that colocated plans may choose."""


NAPS = (
    Nap("any stages", 8, TOWER_SHARE, False, (1, 2)),
    Nap("1F1B", 16, 0.35, False, (1,)),
    Nap("1F1B, frozen encoder", 12, 0.25, True, (1,)),
)


class Planned(NamedTuple):
    """Task graph and schedule of a step."""

    graph: StageGraph
    order: ComputeOrder


@dataclass(frozen=True)
class Chain:
    """Single pipeline with the layers of both modules.

    Attributes:
        virtual: Stages per rank.
    """

    virtual: int

    def plan(self, work: SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        images = work.images[index]
        layout = megatron_balanced_layout(chain_modules(work), RANKS, self.virtual)
        graph = StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})
        return Planned(graph, interleaved_1f1b(graph))


@dataclass(frozen=True)
class Front:
    """Plan with the full encoder before the first LLM stage.

    Attributes:
        virtual: LLM stages per rank.
    """

    virtual: int

    def plan(self, work: SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        images = work.images[index]
        layout = megatron_layout(chain_modules(work), RANKS, self.virtual)
        graph = StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})
        return Planned(graph, interleaved_1f1b(graph))


@dataclass(frozen=True)
class Colocated:
    """Optimus plan with the encoder in separate pipelines on the same ranks.

    Attributes:
        bubbles: "coarse" or "fine".
        tower: Ranks per encoder pipeline.
        slices: Encoder stages per rank.
        virtual: LLM stages per rank.
        images: Maximum number of images per sub-microbatch.
    """

    bubbles: str
    tower: int
    slices: int
    virtual: int
    images: int

    def plan(self, work: SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        config = ParallelConfig(
            pipeline=RANKS,
            virtual_stages=self.virtual,
            placement="colocated",
            schedule="optimus",
            bubble_granularity=self.bubbles,
            vision={"pipeline": self.tower, "segments": self.slices},
        )
        images = work.images[index]
        layout = OPTIMUS.layout(config, chain_modules(work))
        parts = tuple(ceil(i / self.images) for i in images)
        graph = StageGraph(layout, len(images), {"vision": parts})
        return Planned(*OPTIMUS.plan(config, graph, durations(graph, work, index)))


@dataclass(frozen=True)
class Outside:
    """Colocated plan that fills no bubbles."""

    filled: Colocated

    def plan(self, work: SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        graph, order = self.filled.plan(work, index)
        return Planned(graph, outside(order, graph))


Choice = Chain | Front | Colocated | Outside


class PlannedSleep(OurSleep):
    """Program that runs the plans of a choice."""

    def _plan(self, index: int) -> PipelinePlan:
        planner: Any = self.choice
        graph, order = planner.plan(self.work, index)
        images = self.work.images[index]
        specs = {
            message: (
                TensorSpec(
                    (message_rows(task, graph, images[task.microbatch]), WIDTH),
                    FLOAT,
                    graph.sends_gradient(message),
                ),
            )
            for task in graph.tasks()
            for message in graph.outgoing(task)
        }
        plan = lower_plan(order, graph, specs)
        validate_plan(plan).raise_for_problems()
        return plan


def played_s(work: SleepWork, choice: Choice | Made) -> float:
    """Return the simulated time of all steps in seconds."""
    total = 0.0
    for index in range(len(work.images)):
        graph, order = choice.plan(work, index)
        records = simulate_order(order, graph, durations(graph, work, index), TRANSFER_S)
        total += max(record.end_ms for record in records)
    return total


@dataclass(frozen=True)
class Made:
    """Choice with its plans, which are computed once for all ranks."""

    choice: Choice
    steps: tuple[Planned, ...]

    @classmethod
    def of(cls, choice: Choice, work: SleepWork) -> Made:
        """Return the choice with the plans of all steps."""
        return cls(choice, tuple(choice.plan(work, i) for i in range(len(work.images))))

    def plan(self, work: SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        return self.steps[index]

    def __str__(self) -> str:
        return str(self.choice)


def load_nap(nap: Nap, layer_s: float) -> SleepWork:
    """Return the first step of a case, with the image counts of real documents."""
    work = load_work(Setting(layer_s, nap.microbatches, 1, 1, 0, 1))
    mean_images = mean(work.images[0])
    forward = 1 if nap.frozen else 3  # units of work: forward pass 1, backward pass 2
    tower_s = nap.tower_share / (1 - nap.tower_share) * 3 / forward * LLM_LAYERS * layer_s
    return SleepWork(work.images, layer_s, tower_s / TOWER_LAYERS / mean_images, nap.frozen)


def candidates(virtual: Sequence[int] = (1, 2)) -> dict[str, list[Choice]]:
    """Return the candidates of each plan by name.

    Args:
        virtual: LLM stages per rank of colocated plans.
    """
    fine = product((1, 2), (3, 6), virtual, (4,))
    coarse = product((1, 2), (1,), virtual, (4, 64))
    return {
        CHAIN: [Chain(stages) for stages in (1, 2, 3)],
        FRONT: [Front(stages) for stages in (1, 2)],
        COARSE: [Colocated("coarse", *size) for size in coarse],
        FINE: [Colocated("fine", *size) for size in fine],
    }


def best_plans(nap: Nap, work: SleepWork) -> dict[str, Made]:
    """Return the fastest plan of each method in the simulation, by name."""
    best = {}
    for name, every in candidates(nap.virtual).items():
        made = [Made.of(choice, work) for choice in every]
        best[name] = min(made, key=lambda one: played_s(work, one))
    filled = best[FINE]
    unfilled = tuple(Planned(graph, outside(order, graph)) for graph, order in filled.steps)
    return {**best, UNFILLED: Made(Outside(filled.choice), unfilled)}  # type: ignore[arg-type]


def run_rank(work: SleepWork, plans: dict[str, Made], runs: int, patience_s: float) -> Comparison:
    """Measure all plans on this rank. Collective."""
    programs = [PlannedSleep(name, work, made) for name, made in plans.items()]
    return Stopwatch(patience_s, QUIET).compare(programs, len(work.images), runs)


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Yield the rows of each case with eight sleeping ranks."""
    full = size == "full"
    for nap in NAPS if full else NAPS[-1:]:
        work = load_nap(nap, NAP_S[size])
        plans = best_plans(nap, work)
        comparison = run_ranks(
            run_rank, RANKS, work, plans, 3 if full else 1, PATIENCE_S if full else 0
        )
        found = {"images": work.images, "choices": plans, "comparison": comparison}
        print_choices("sleep", found)
        case = f"{RANKS} sleeping ranks, {nap.microbatches} microbatches, {nap.name}"
        yield compared(case, comparison, GOALS["sleep"]) + played_rows(case, work, plans)


def played_rows(case: str, work: SleepWork, plans: dict[str, Made]) -> list[Row]:
    """Return speedups of simulated makespans."""
    times_s = {name: played_s(work, made) for name, made in plans.items()}
    return [
        Row(case, f"simulated speedup, {name}", "x", time_s / times_s[FINE],
            kind="simulated")
        for name, time_s in times_s.items()
        if name != FINE
    ]  # fmt: skip


def run_compute(size: str) -> Iterator[list[Row]]:
    """Yield the rows of each case with two computing ranks."""
    for setting in compute_case.SETTINGS[size]:
        names = FINE, UNFILLED, FRONT
        found = run_ranks(compute_case.run_rank, compute_case.RANKS, setting, names)
        print_choices("compute", found)
        print(f"compute: the encoder takes {found['tower share']:.0%} of the compute time")
        case = (
            f"{compute_case.RANKS} ranks, {setting.size.tower_layers} + {setting.size.llm_layers} "
            f"layers, {setting.microbatches} microbatches"
        )
        difference = Row(
            case, "gradient difference", "relative", found["difference"],
            goal=compute_case.TOLERANCE, better="lower",
        )  # fmt: skip
        yield [*compared(case, found["comparison"], GOALS["compute"]), difference]


def compared(case: str, comparison: Comparison, goal: float) -> list[Row]:
    """Return the rows that compare the filled plan with the other plans.

    Args:
        case: Name of the case.
        comparison: Times of all plans.
        goal: Goal of the speedup compared with the encoder in stage 0.
    """
    goals = {UNFILLED: 1.0, FRONT: goal, COARSE: None, CHAIN: None}
    present = {name: least for name, least in goals.items() if name in comparison.times}
    return comparison.rows(case, FINE, present)


CASES = {"compute": run_compute, "sleep": run_sleep}


def main() -> None:
    """Run the cases, and print and store the rows after each case."""
    conditions = f"documents: {load_documents().source}; seed {SEED}"
    run_cases("Filled bubbles, measured", __doc__, CASES, conditions)


if __name__ == "__main__":
    main()
