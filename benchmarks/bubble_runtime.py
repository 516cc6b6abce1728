"""Encoders in the LLM's bubbles on the wall clock: eight ranks whose layers sleep.

    python benchmarks/bubble_runtime.py [--quick] [--json FILE]

Everything but the layers is real: runtime, processes, messages over gloo. Compared are plans of the
same work: all layers in one chain (Megatron-LM balanced), Optimus' coarse plan and its fine one.
Each may choose among sizes that are played through with the known times first. Numbers of images
per microbatch are those of real documents, which are committed; the tower takes as much of the time
as in SmolVLM-500M.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import torch
from harness import Row, describe_machine, make_parser, report
from pipeline_sleep_case import QUIET, SETTINGS, TRANSFER_S, Setting, load_work
from ranks import Comparison, Stopwatch, run_ranks
from sleepers import RANKS, WIDTH, OurSleep, Work, chain_modules, durations, message_rows

from torchmm.balance.planners import PLANNERS
from torchmm.config import ParallelConfig
from torchmm.pipelining.classic import interleaved_1f1b
from torchmm.pipelining.graph import StageGraph
from torchmm.pipelining.layouts import megatron_balanced_layout
from torchmm.pipelining.lowering import lower_plan
from torchmm.pipelining.plan import ComputeOrder, PipelinePlan, TensorSpec
from torchmm.pipelining.timeline import uniform_timeline
from torchmm.pipelining.validation import validate_plan

OPTIMUS, FLOAT = PLANNERS["optimus"], torch.float32
CHAIN, COARSE, FINE = "balanced chain", "coarse", "fine"


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


Choice = Chain | Colocated


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
    return {
        "choices": {program.name: str(program.choice) for program in programs},
        "comparison": watch.compare(programs, len(work.images), setting.runs),
    }


def case_rows(setting: Setting) -> Iterator[Row]:
    """Times one setting."""
    work = load_work(setting)
    chosen = {
        name: sorted(every, key=lambda choice: played_s(work, choice))[: setting.tried]
        for name, every in candidates().items()
    }
    found = run_ranks(run_rank, RANKS, setting, work, chosen)
    comparison = found["comparison"]
    assert isinstance(comparison, Comparison)
    print(f"images per microbatch, by step: {work.images}")
    for name, choice in found["choices"].items():
        print(f"{name}: {choice}")
    print(comparison)
    case = f"{RANKS} sleeping ranks, {setting.microbatches} microbatches"
    for ours, baseline in ((FINE, CHAIN), (FINE, COARSE), (COARSE, CHAIN)):
        ratio = comparison.speed_ratio(ours, baseline)
        times = comparison.wall_s(ours), comparison.wall_s(baseline)
        idle = comparison.idle_share(ours), comparison.idle_share(baseline)
        yield Row(case, f"speed ratio, {ours} / {baseline}", "x", ratio, 1.0)
        yield Row(case, f"step time, {ours} and {baseline}", "s", *times, better="lower")
        yield Row(case, f"idle share, {ours} and {baseline}", "share", *idle, better="lower")


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="for tests: seconds, says nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    rows = [row for setting in SETTINGS[size] for row in case_rows(setting)]
    machine = describe_machine(torch.device("cpu"))
    report(f"Bubbles filled on the wall clock; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
