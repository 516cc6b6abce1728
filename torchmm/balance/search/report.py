"""Tables and recipe comments with the results of the search for parallelism degrees."""

from __future__ import annotations

from rich.table import Table

from torchmm.balance.search.result import PlanSearchResult, SimulatedPlan
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES
from torchmm.recipe.placement_sizes import unit_sizes
from torchmm.recipe.read import dump_recipe

GIB = 2**30
MIN_SHOWN_FRACTION = 0.005
"""Minimum difference that is listed as a reason, as a fraction of the best step."""


def result_tables(result: PlanSearchResult, title: str) -> list[Table]:
    """Return the best plan of each method, the fastest first, and the modules of the best one.

    Args:
        result: Result of a search with a plan.
        title: Devices and batch size, for the first title.
    """
    best = result.best
    assert best is not None
    tables = [_method_table(result, best, title)]
    if best.method == "disaggregated":
        tables.append(_module_table(best))
    return tables


def _method_table(result: PlanSearchResult, best: SimulatedPlan, title: str) -> Table:
    table = Table(title=f"Best plan of each method on {title} (simulated)", title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    table.add_column("parallelism degrees")
    for column in ("GPUs", "step ms", "MFU %", "tokens/s", "peak GiB"):
        table.add_column(column, justify="right")
    table.add_column("why slower")
    for candidate in result.ranked:
        step = candidate.report.step
        assert step is not None
        schedule = "-" if candidate.method == "fsdp" else candidate.report.schedule
        stages = candidate.recipe.parallel.virtual_stages
        table.add_row(
            candidate.method,
            f"{schedule}, {stages} per rank" if schedule != "-" and stages > 1 else schedule,
            candidate.recipe.activation_checkpoint.mode,
            candidate.sizes,
            str(candidate.devices),
            f"{candidate.step_ms:,.1f}",
            f"{100 * candidate.report.mfu:.1f}",
            f"{candidate.report.tokens_per_s:,.0f}",
            f"{max(step.peak_bytes) / GIB:.1f}",
            "best" if candidate is best else why_slower(candidate, best),
        )
    for method, reason in result.best_by_method.items():
        if isinstance(reason, str):
            table.add_row(method, *[""] * 8, reason)
    return table


def _module_table(best: SimulatedPlan) -> Table:
    """Return the parallelism degrees of disaggregated modules."""
    step = best.report.step
    assert step is not None
    table = Table(title="Modules of the best plan", title_justify="left")
    table.add_column("module", no_wrap=True)
    for column in ("GPUs", "tensor", "data", "pipeline", "busy %", "peak GiB"):
        table.add_column(column, justify="right")
    for name in best.recipe.model.modality_modules:
        sizes = unit_sizes(best.recipe.parallel, name)
        stages = [s for s in step.plan.graph.layout.stages if s.module == name]
        ranks = {rank for stage in stages for rank in stage.ranks}
        data = sizes["replicate"] * sizes["shard"]
        devices = sizes["tensor"] * data * sizes["pipeline"]
        busy = max(step.timeline.busy_ms[rank] for rank in ranks) / step.makespan_ms
        peak = max(step.peak_bytes[rank] for rank in ranks) / GIB
        numbers = (devices, sizes["tensor"], data, sizes["pipeline"])
        table.add_row(name, *map(str, numbers), f"{100 * busy:.0f}", f"{peak:.1f}")
    return table


def describe_optimality(result: PlanSearchResult) -> str:
    """Return the gap of the best plan to the lower bound of all considered plans as text."""
    best = result.best
    assert best is not None
    simulated = sum(result.simulated.values())
    considered = sum(result.considered.values())
    counts = f"{simulated} of {considered} plans simulated in {result.seconds:.0f} s of CPU time"
    memory = f"plans may use {USABLE_MEMORY_FRACTION:.0%} of the memory of a device"
    if result.complete:
        return (
            f"{counts}; the remaining plans have higher bounds or estimates or do not fit in "
            f"memory; {memory}"
        )
    within = best.step_ms / result.bound_ms - 1
    return (
        f"{counts}, then the time limit was reached; use a higher --budget-s to simulate more "
        f"plans. No considered plan is faster than {result.bound_ms:,.1f} ms, so the best "
        f"step is at most {100 * within:.1f} % slower; {memory}"
    )


def why_slower(candidate: SimulatedPlan, best: SimulatedPlan) -> str:
    """Return a short explanation why a candidate is slower than the best."""
    step = candidate.report.step
    first = best.report.step
    assert step is not None and first is not None
    times_ms = _times_ms(step, candidate)
    best_times_ms = _times_ms(first, best)
    excess = {name: (times_ms[name] - best_times_ms[name]) / best.step_ms for name in times_ms}
    largest = sorted(excess, key=lambda name: -excess[name])[:2]
    parts = [f"{name} {excess[name]:+.1%}" for name in largest if excess[name] > MIN_SHOWN_FRACTION]
    if idle := best.devices - candidate.devices:
        parts += [f"{idle} GPUs are not used"] if idle > 0 else []
    ratio = candidate.step_ms / best.step_ms - 1
    return f"{ratio:+.1%}: {', '.join(parts)}" if parts else f"{ratio:+.1%}"


def _times_ms(step: SimulatedStep, candidate: SimulatedPlan) -> dict[str, float]:
    """Return the time of an average rank by use: computing, each class of bubbles, the update."""
    timeline = step.timeline
    times_ms = {"computing": (1 - timeline.bubble_fraction) * step.makespan_ms}
    for kind in BUBBLE_CLASSES:
        times_ms[f"bubbles ({kind.replace('_', ' ')})"] = (
            timeline.bubble_fractions[kind] * step.makespan_ms
        )
    times_ms["optimizer"] = candidate.report.update_ms
    return times_ms


def recipe_text(candidate: SimulatedPlan, source: str, device: str) -> str:
    """Return a recipe file with a comment that shows the plan and how to run it."""
    step = candidate.report.step
    assert step is not None
    lines = [
        f"Planned by torchmm plan from {source}: {candidate.method}, {candidate.sizes}, on",
        f"{candidate.devices} x {device}. Simulated step: {candidate.step_ms:,.1f} ms, MFU "
        f"{100 * candidate.report.mfu:.1f} %, {max(step.peak_bytes) / GIB:.1f} GiB "
        f"(at most {USABLE_MEMORY_FRACTION:.0%} of a device).",
        "",
        f"  torchrun ... -m torchmm train THIS_FILE      with {candidate.devices} ranks",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comment}\n{dump_recipe(candidate.recipe)}"
