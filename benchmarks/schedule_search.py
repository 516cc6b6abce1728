"""Measure the gap of searched schedules to a lower bound, by strategy and time.

Steps are like those of PipeWeaver's VLM-L (`search_instances`), with printed seeds. Every strategy
uses one core, the same dispatcher and the same default order. The bound is that of equal ranks
(`bounds`), without a memory limit, so with a tight cap a part of the gap comes from the cap.
PipeWeaver needs 10 s on 64 cores for "near-optimal" schedules (section 6). It compares MCTS with
random and depth-first search over time (figure 12).

Goals: at most 0.2 % within 1 s with a loose memory cap, at most 1 % within 10 s with a tight cap.
Other caps have no goal. Seconds are CPU time of one thread.

`--plot FILE` plots the gap over time, the mean over the steps of each cap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from support.cases.search_instances import LOOSE, MEDIUM, TIGHT, VERY_TIGHT, Instance
from support.harness import Row, describe_machine, make_parser, report
from support.strategies import STRATEGIES

from torchmm.balance.pipeweaver.schedule_search.bounds import lower_bound_ms
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.order_timing import time_order
from torchmm.balance.pipeweaver.schedule_search.search import (
    OrderSearchResult,
    SearchBudget,
    search_orders,
)
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.changes import reject_renamed_options

SHAPES = (((1, 4), (1, 5), (2, 6)), ((2, 4), (2, 5), (1, 6)))
"""Segments of the encoder and of the LLM, by seed."""
GOAL_PERCENT = {LOOSE: 0.2, TIGHT: 1.0}
CAPS = {
    LOOSE: "loose cap",
    MEDIUM: "medium cap",
    TIGHT: "tight cap",
    VERY_TIGHT: "very tight cap",
}
NAMES = {
    "natural": "natural order",
    "dfs": "depth first",
    "random": "random",
    "mcts": "MCTS",
    "annealing": "annealing (torchmm)",
}
POINTS = 60
"""Number of points per curve."""


class Searched(NamedTuple):
    """Result of a search strategy on a step."""

    instance: Instance
    strategy: str
    found: OrderSearchResult
    seconds: float
    bests: list[tuple[float, float]]
    """(seconds, step time of the best schedule in ms), starting with the natural order."""
    bound_ms: float

    def gap_percent(self, makespan_ms: float) -> float:
        """Return the gap to the lower bound in percent."""
        return 100 * (makespan_ms / self.bound_ms - 1)

    def after(self, seconds: float) -> float:
        """Return the gap of the best schedule after `seconds`."""
        times = [makespan_ms for begin_s, makespan_ms in self.bests if begin_s <= seconds]
        return self.gap_percent(times[-1])


def run(instance: Instance, seconds: dict[str, float]) -> tuple[list[Searched], list[Row]]:
    """Run all strategies on a step, and return their results and rows.

    Args:
        instance: Step to schedule.
        seconds: Maps a strategy to its time limit in seconds.
    """
    graph, costs = instance.build()
    begin_s = time.process_time()
    dispatcher = Dispatcher(graph, costs)
    built_s = time.process_time() - begin_s
    bound_ms = lower_bound_ms(dispatcher)
    dispatcher.evaluate()  # compiled and warm
    searched = []
    for strategy, budget_s in seconds.items():
        searched.append(watched(instance, strategy, dispatcher, budget_s, bound_ms))
    natural = searched[0].gap_percent(searched[0].found.default_order_ms)
    rows = [
        Row(instance.name, "setup", "s", built_s, better="lower"),
        static_row(searched[0], dispatcher, natural),
        *(row_of(each, budget, natural) for each, budget in
          zip(searched, seconds.values(), strict=True)),
    ]  # fmt: skip
    ours = searched[-1].found
    per_s = ours.evaluations / max(searched[-1].seconds, 1e-9)
    rows.append(Row(instance.name, "annealing, evaluations", "1/s", per_s))
    return searched, rows


def watched(
    instance: Instance, strategy: str, dispatcher: Dispatcher, budget_s: float, bound_ms: float
) -> Searched:
    """Run a search and record the time of each improvement."""
    bests = [(0.0, dispatcher.evaluate())]
    begin_s = time.perf_counter()

    def note(found: OrderSearchResult) -> bool:
        bests.append((time.perf_counter() - begin_s, found.makespan_ms))
        return True

    budget = SearchBudget(seconds=budget_s)
    found = search_orders(
        dispatcher, budget, bound_ms=bound_ms, on_round=note, strategy=STRATEGIES[strategy]
    )
    seconds = time.perf_counter() - begin_s
    return Searched(instance, strategy, found, seconds, bests, bound_ms)


def row_of(each: Searched, budget_s: float, natural: float) -> Row:
    """Return the row of the gap at the end of the time limit."""
    goal = GOAL_PERCENT.get(each.instance.cap) if each.strategy == "annealing" else None
    metric = f"gap, {NAMES[each.strategy]}, {budget_s:g} s"
    if each.strategy == "natural":
        metric = "gap, default order"
    gap = each.gap_percent(each.found.makespan_ms)
    return Row(
        each.instance.name, metric, "%", gap, baseline=natural, goal=goal, better="lower",
        kind="simulated",
    )  # fmt: skip


def static_row(each: Searched, dispatcher: Dispatcher, natural: float) -> Row:
    """Return the row of the separated schedule.

    It limits the number of microbatches in flight instead of memory.
    """
    durations = dispatcher.costs.compute_ms.__getitem__
    timed = time_order(dispatcher, separated(dispatcher.graph, durations))
    name = "gap, separated" + ("" if timed.fits else ", more memory")
    gap = each.gap_percent(timed.makespan_ms)
    return Row(
        each.instance.name, name, "%", gap, baseline=natural, better="lower", kind="simulated"
    )


def summary(searched: Sequence[Searched], budgets: dict[float, float]) -> list[Row]:
    """Return the mean and the maximum gap of annealing for each memory cap."""
    rows = []
    for cap, name in CAPS.items():
        ours = [s for s in searched if s.instance.cap == cap and s.strategy == "annealing"]
        if not ours:
            continue
        gaps = [s.gap_percent(s.found.makespan_ms) for s in ours]
        goal = GOAL_PERCENT.get(cap)
        case = f"all {len(ours)} steps, {name}"
        for what, gap in (("worst", max(gaps)), ("mean", fmean(gaps))):
            metric = f"gap, annealing, {what}, {budgets[cap]:g} s"
            rows.append(Row(case, metric, "%", gap, goal=goal, better="lower", kind="simulated"))
    return rows


def draw(searched: Sequence[Searched], file: Path) -> None:
    """Plot the mean gap of each strategy over time, with one panel per memory cap."""
    caps = [cap for cap in CAPS if any(s.instance.cap == cap for s in searched)]
    figure = Figure(figsize=(4.2 * len(caps), 3.4), layout="constrained")
    panels = figure.subplots(1, len(caps), squeeze=False)[0]
    for axes, cap in zip(panels, caps, strict=True):
        for strategy, name in NAMES.items():
            own = [s for s in searched if s.instance.cap == cap and s.strategy == strategy]
            last_s = max(s.seconds for s in searched if s.instance.cap == cap)
            times = [0.01 * (last_s / 0.01) ** (i / (POINTS - 1)) for i in range(POINTS)]
            gaps = [fmean(s.after(t) for s in own) for t in times]
            axes.plot(times, gaps, label=name, linewidth=2 if strategy == "annealing" else 1.2)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{CAPS[cap]} ({cap:g}x)")
        axes.set_xlabel("seconds on one core")
    panels[0].set_ylabel("above the lower bound (%)")
    panels[0].legend(frameon=False)
    figure.savefig(file)


def measure(quick: bool) -> tuple[list[Searched], list[Row]]:
    """Measure all steps. All strategies have the time limit of the goal."""
    budgets = dict.fromkeys(CAPS, 1.5 if quick else 10.0) | {LOOSE: 1.0}
    caps = (LOOSE, TIGHT) if quick else tuple(CAPS)
    searched, rows = [], []
    for seed, shapes in enumerate(SHAPES[:1] if quick else SHAPES):
        for shape in shapes:
            for cap in caps:
                seconds = dict.fromkeys(STRATEGIES, budgets[cap])
                found, own = run(Instance(seed, *shape, cap), seconds)
                searched += found
                rows += own
    return searched, rows + summary(searched, budgets)


def main() -> None:
    """Print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the gap over time to FILE")
    reject_renamed_options(parser, "schedule_search")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm = Instance(0, 1, 4, LOOSE, microbatches=4)
    run(warm, dict.fromkeys(STRATEGIES, 0.01))
    searched, rows = measure(arguments.quick)
    machine = describe_machine(torch.device("cpu"))
    report(f"Schedule search on one core, search seed 0; {machine}", rows, arguments.json)
    if arguments.plot is not None:
        draw(searched, arguments.plot)


if __name__ == "__main__":
    main()
