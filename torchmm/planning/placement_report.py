"""What orchestration found, as tables and as the comment of a recipe. All figures are simulated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES
from torchmm.planning.apart.search import Candidate, JudgedPlans, fits
from torchmm.planning.placement import PlannedRun
from torchmm.recipe.placement_sizes import unit_sizes
from torchmm.recipe.read import dump_recipe

GIB = 2**30


def unit_table(planned: PlannedRun, device: str) -> Table:
    """The best plan, unit by unit."""
    best = planned.judged.best
    assert best is not None and best.forecast.step is not None
    problem = planned.problem
    step = best.forecast.step
    title = (
        f"best plan on {problem.devices} x {device}, global batch {problem.global_batch_size}: "
        f"{best.devices} devices, {_schedule(best)}, step {best.step_ms / 1e3:.3f} s, MFU "
        f"{100 * best.forecast.mfu:.1f} %"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("module", no_wrap=True)
    for column in ("devices", "tensor", "data", "pipeline", "busy %", "memory GiB"):
        table.add_column(column, justify="right")
    timeline = step.timeline
    for unit in problem.units:
        own = unit_sizes(best.recipe.parallel, unit.name)
        ranks = {
            rank
            for stage in step.plan.graph.layout.stages
            if stage.module == unit.name
            for rank in stage.ranks
        }
        data = own["replicate"] * own["shard"]
        numbers = own["tensor"], data, own["pipeline"]
        busy = max(timeline.busy_ms[rank] for rank in ranks) / step.makespan_ms
        memory = max(step.peak_bytes[rank] for rank in ranks) / GIB
        devices = own["tensor"] * data * own["pipeline"]
        cells = (str(n) for n in (devices, *numbers))
        table.add_row(unit.name, *cells, f"{100 * busy:.0f}", f"{memory:.1f}")
    return table


def certificate(judged: JudgedPlans) -> str:
    """What is known of the best plan."""
    tried = f"{len(judged.candidates)} plans simulated"
    fit = f"fits into {MEMORY_SHARE:.0%} of a device"
    if not judged.left:
        return f"{fit}; no plan is faster: {tried}, all others have higher bounds"
    return (
        f"{fit}; within {100 * judged.within:.1f} % of any plan: {tried}, no other can be below "
        f"{judged.bound_s:.3f} s"
    )


def _schedule(candidate: Candidate) -> str:
    stages = candidate.recipe.parallel.virtual_stages
    name = candidate.forecast.schedule
    return f"{name}, {stages} per rank" if stages > 1 else name


def placement_table(
    candidates: Sequence[Candidate], others: Sequence[tuple[str, Candidate | str]] = ()
) -> Table:
    """Simulated steps of all placements, the fastest first, and of simpler rules. Peaks are of all
    that a rank holds; "encoders" is what their activations take of it at most.

    Args:
        others: with their names.
    """
    table = Table(title="first step, simulated action by action", title_justify="left")
    table.add_column("placement", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    table.add_column("recompute", no_wrap=True)
    table.add_column("tensor x data x pipeline")
    for column in ("devices", "step ms", "MFU %", "bubble %", "peak GiB", "encoders GiB", "fits"):
        table.add_column(column, justify="right")
    table.add_column("against the first")
    best = candidates[0]
    rows: list[tuple[str, Candidate | str]] = [(each.placement, each) for each in candidates]
    for title, candidate in [*rows, *others]:
        if isinstance(candidate, str):
            table.add_row(title, *[""] * 10, candidate)
            continue
        forecast = candidate.forecast
        step = forecast.step
        mode = candidate.recipe.activation_checkpoint.mode
        row = [title, _schedule(candidate), mode, candidate.sizes, str(candidate.devices)]
        if step is None:
            table.add_row(*row, *[""] * 6, forecast.problem)
            continue
        table.add_row(
            *row,
            f"{forecast.iteration_ms:,.1f}",
            f"{100 * forecast.mfu:.1f}",
            f"{100 * step.timeline.bubble_fraction:.1f}",
            f"{max(step.peak_bytes) / GIB:.1f}",
            f"{forecast.encoder_bytes / GIB:.1f}",
            "yes" if fits(step) else "no",
            "" if candidate is best else why_slower(candidate, best),
        )
    return table


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """Why a candidate is not the best, in a few words."""
    step = candidate.forecast.step
    first = best.forecast.step
    assert step is not None and first is not None
    if not fits(step):
        limit = MEMORY_SHARE * (step.costs.memory_limit_bytes or 0)
        return f"does not fit into {limit / GIB:.1f} GiB ({MEMORY_SHARE:.0%} of a device)"
    ours = _times_ms(step)
    theirs = _times_ms(first)
    more = sorted(ours, key=lambda name: theirs[name] - ours[name])[:2]
    parts = ", ".join(
        f"{name} {(ours[name] - theirs[name]) / first.makespan_ms:+.1%}"
        for name in more
        if ours[name] > theirs[name]
    )
    ratio = candidate.forecast.iteration_ms / best.forecast.iteration_ms - 1
    idle = best.devices - candidate.devices
    unused = f"; {idle} devices more stay idle" if idle > 0 else ""
    return f"{ratio:+.1%}: {parts}{unused}"


def _times_ms(step: SimulatedStep) -> dict[str, float]:
    """What an average rank does in a step."""
    timeline = step.timeline
    found = {"computing": (1 - timeline.bubble_fraction) * step.makespan_ms}
    for kind in BUBBLE_CLASSES:
        found[f"bubbles ({kind.replace('_', ' ')})"] = (
            timeline.bubble_share[kind] * step.makespan_ms
        )
    return found


def recipe_text(candidate: Candidate, source: str, device: str) -> str:
    """A recipe file that says what was chosen and how to run it."""
    step = candidate.forecast.step
    assert step is not None
    lines = [
        f"Planned by scripts/plan.py from {source}: modules are {candidate.placement} on",
        f"{candidate.devices} x {device}; a step is predicted to take "
        f"{candidate.forecast.iteration_ms:,.1f} ms (MFU {100 * candidate.forecast.mfu:.1f} %) and "
        f"{max(step.peak_bytes) / GIB:.1f} GiB, simulated.",
        "",
        f"  torchrun ... train.py --config THIS_FILE      with {candidate.devices} ranks",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comment}\n{dump_recipe(candidate.recipe)}"
