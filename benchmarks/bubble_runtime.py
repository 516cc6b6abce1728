"""Encoders in the LLM's bubbles on the wall clock.

    python benchmarks/bubble_runtime.py [--quick] [--json FILE] [--cases NAME ...]

    compute    `bubble_compute_case`: Hugging Face layers on two ranks of one thread each
    sleep      eight ranks whose layers sleep: runtime, processes and messages are real

Compared are plans of the same work:

    filled             Optimus: encoder work wherever the LLM leaves a rank idle
    not filled         the same plan, but every rank's encoder work before and behind its LLM work
    tower in stage 0   Megatron-LM's placement
    coarse             Optimus' plan that fills no bubble between LLM actions (sleep)
    balanced chain     all layers in one chain of equally costly stages (sleep)

Each may choose among sizes that are played through with known or measured times first; "not
filled" has those of "filled". Numbers of images per microbatch are those of real documents, which
are committed; the tower takes as much of the time as in SmolVLM-500M.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import bubble_compute_case as compute_case
import torch
from bubble_compute_case import outside
from documents import load_documents
from harness import Row, run_cases
from pipeline_sleep_case import QUIET, SEED, SETTINGS, TRANSFER_S, Setting, load_work
from ranks import Comparison, Stopwatch, print_choices, run_ranks
from sleepers import RANKS, WIDTH, OurSleep, Work, chain_modules, durations, message_rows

from torchmm.balance.planners import PLANNERS
from torchmm.config import ParallelConfig
from torchmm.pipelining.classic import interleaved_1f1b
from torchmm.pipelining.graph import StageGraph
from torchmm.pipelining.layouts import megatron_balanced_layout, megatron_layout
from torchmm.pipelining.lowering import lower_plan
from torchmm.pipelining.plan import ComputeOrder, PipelinePlan, TensorSpec
from torchmm.pipelining.timeline import uniform_timeline
from torchmm.pipelining.validation import validate_plan

OPTIMUS, FLOAT = PLANNERS["optimus"], torch.float32
CHAIN, COARSE, FINE = "balanced chain", "coarse", "filled"
UNFILLED, FRONT = "not filled", "tower in stage 0"
PATIENCE_S = 20
"""How long to wait for other programs to end."""
GOALS = {"compute": 1.15, "sleep": 1.3}
"""For the speed against the tower in stage 0."""


class Planned(NamedTuple):
    """A step's tasks with their replicas, and their order."""

    graph: StageGraph
    order: ComputeOrder


@dataclass(frozen=True)
class Chain:
    """Layers of both modules in one chain.

    Attributes:
        virtual: stages per rank.
    """

    virtual: int

    def plan(self, work: Work, index: int) -> Planned:
        """Of a step."""
        images = work.images[index]
        layout = megatron_balanced_layout(chain_modules(work), RANKS, self.virtual)
        graph = StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})
        return Planned(graph, interleaved_1f1b(graph))


@dataclass(frozen=True)
class Front:
    """The whole tower in front of the LLM's first stage.

    Attributes:
        virtual: stages of the LLM per rank.
    """

    virtual: int

    def plan(self, work: Work, index: int) -> Planned:
        """Of a step."""
        images = work.images[index]
        layout = megatron_layout(chain_modules(work), RANKS, self.virtual)
        graph = StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})
        return Planned(graph, interleaved_1f1b(graph))


@dataclass(frozen=True)
class Colocated:
    """The tower in pipelines of its own.

    Attributes:
        bubbles: "coarse" or "fine".
        tower: ranks of each of its pipelines.
        slices: its stages per rank.
        virtual: stages of the LLM per rank.
        images: processed at once, at most.
    """

    bubbles: str
    tower: int
    slices: int
    virtual: int
    images: int

    def plan(self, work: Work, index: int) -> Planned:
        """Of a step."""
        config = ParallelConfig(
            pipeline=RANKS,
            virtual_stages=self.virtual,
            placement="colocated",
            schedule="optimus",
            bubbles=self.bubbles,
            vision={"pipeline": self.tower, "segments": self.slices},
        )
        images = work.images[index]
        layout = OPTIMUS.layout(config, chain_modules(work))
        parts = tuple(ceil(i / self.images) for i in images)
        graph = StageGraph(layout, len(images), {"vision": parts})
        return Planned(*OPTIMUS.plan(config, graph, durations(graph, work, index)))


@dataclass(frozen=True)
class Outside:
    """A colocated plan without filling."""

    filled: Colocated

    def plan(self, work: Work, index: int) -> Planned:
        """Of a step."""
        graph, order = self.filled.plan(work, index)
        return Planned(graph, outside(order, graph))


Choice = Chain | Front | Colocated | Outside


class PlannedSleep(OurSleep):
    """Steps of plans made by a choice."""

    def _plan(self, index: int) -> PipelinePlan:
        planner: Any = self.choice
        graph, order = planner.plan(self.work, index)
        images = self.work.images[index]
        specs = {
            message: (
                TensorSpec((message_rows(task, graph, images[task.microbatch]), WIDTH), FLOAT),
            )
            for task in graph.tasks()
            for message in graph.outgoing(task)
        }
        plan = lower_plan(order, graph, specs)
        validate_plan(plan).raise_for_problems()
        return plan


def played_s(work: Work, choice: Choice) -> float:
    """Makespan of all steps, played through."""
    total = 0.0
    for index in range(len(work.images)):
        graph, order = choice.plan(work, index)
        records = uniform_timeline(order, graph, durations(graph, work, index), TRANSFER_S)
        total += max(record.end_ms for record in records)
    return total


def candidates() -> dict[str, list[Choice]]:
    """By name of the plan."""
    sizes = list(product((1, 2, 4, 8), (1, 3, 6), (1, 2), (4, 64)))
    fitting = [(t, s, v, i) for t, s, v, i in sizes if t * s <= 24]
    return {
        CHAIN: [Chain(virtual) for virtual in (1, 2, 3)],
        FRONT: [Front(virtual) for virtual in (1, 2, 4)],
        COARSE: [Colocated("coarse", *size) for size in fitting if size[1] == 1],
        FINE: [Colocated("fine", *size) for size in fitting],
    }


def run_rank(setting: Setting, work: Work, chosen: dict[str, list[Choice]]) -> dict[str, Any]:
    """Everything one rank does."""
    watch = Stopwatch(setting.patience_s, QUIET)
    programs = [
        watch.fastest([PlannedSleep(name, work, choice) for choice in tried])
        for name, tried in chosen.items()
    ]
    (filled,) = (program for program in programs if program.name == FINE)
    programs.append(PlannedSleep(UNFILLED, work, Outside(filled.choice)))  # type: ignore[arg-type]
    return {
        "choices": {program.name: str(program.choice) for program in programs},
        "comparison": watch.compare(programs, len(work.images), setting.runs),
    }


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Eight ranks that sleep."""
    for each in SETTINGS[size]:
        setting = replace(each, steps=1, patience_s=min(each.patience_s, PATIENCE_S))
        work = load_work(setting)
        chosen = {
            name: sorted(every, key=lambda choice: played_s(work, choice))[: setting.tried]
            for name, every in candidates().items()
        }
        found = run_ranks(run_rank, RANKS, setting, work, chosen)
        found["images"] = work.images
        print_choices("sleep", found)
        case = f"{RANKS} sleeping ranks, {setting.microbatches} microbatches"
        yield compared(case, found["comparison"], GOALS["sleep"])


def run_compute(size: str) -> Iterator[list[Row]]:
    """Two ranks that compute."""
    for setting in compute_case.SETTINGS[size]:
        names = FINE, UNFILLED, FRONT
        found = run_ranks(compute_case.run_rank, compute_case.RANKS, setting, names)
        print_choices("compute", found)
        print(f"compute: the tower takes {found['tower share']:.0%} of the computing time")
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
    """The filled plan against the others.

    Args:
        goal: against the tower in stage 0.
    """
    goals = {UNFILLED: 1.0, FRONT: goal, COARSE: None, CHAIN: None}
    present = {name: least for name, least in goals.items() if name in comparison.times}
    return comparison.rows(case, FINE, present)


CASES = {"compute": run_compute, "sleep": run_sleep}


def main() -> None:
    """Prints a table whenever a case has ended; the file then has the rows so far."""
    conditions = f"documents: {load_documents().source}; seed {SEED}"
    run_cases("Bubbles filled on the wall clock", __doc__, CASES, conditions)


if __name__ == "__main__":
    main()
