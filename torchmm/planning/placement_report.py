"""What orchestration found, as tables and as the comment of a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.orchestration.search import OrchestrationPlan, compare_plans
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES
from torchmm.planning.placement import Candidate, PlannedRun, fits
from torchmm.recipe.read import dump_recipe

GIB = 2**30


def unit_table(planned: PlannedRun, device: str) -> Table:
    """The best plan, unit by unit."""
    best = planned.found.best
    problem = planned.problem
    title = (
        f"best of all plans on {problem.devices} x {device}, global batch "
        f"{problem.global_batch_size}: {best.devices} devices, step {best.step_s:.3f} s, MFU "
        f"{100 * planned.mfu(best):.1f} %\n"
        f"(first microbatch {best.warmup_s:.3f} s, {best.microbatches - 1} more at "
        f"{best.bottleneck.stage_s * 1e3:.1f} ms, gradients {best.sync_s:.3f} s; no plan can be "
        f"below {planned.found.bound_s:.3f} s)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("module", no_wrap=True)
    for column in ("devices", "tensor", "data", "pipeline", "microbatch ms", "memory GiB"):
        table.add_column(column, justify="right")
    for unit in best.units:
        own = unit.sizes
        table.add_row(
            unit.name,
            *(str(n) for n in (own.devices, own.tensor, own.data, own.pipeline)),
            f"{1e3 * unit.stage_s:,.1f}",
            f"{unit.used_bytes / GIB:.1f}",
        )
    return table


def comparison_table(planned: PlannedRun) -> Table:
    """Next-best plans and other ways of placing modules, and why they lose."""
    found = planned.found
    table = Table(title="sizes are tensor x data x pipeline", title_justify="left")
    names = [unit.name for unit in planned.problem.units]
    table.add_column("plan", no_wrap=True)
    for column in (*names, "devices", "step s", "MFU %"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("against the best")
    rows: list[tuple[str, OrchestrationPlan | str]] = [("best", found.best)]
    rows += [(f"next {i}", other) for i, other in enumerate(found.alternatives, start=1)]
    for name, plan in [*rows, *planned.baselines.items()]:
        if isinstance(plan, str):
            table.add_row(name, *[""] * (len(names) + 3), plan)
            continue
        sizes = [unit.sizes for unit in plan.units]
        table.add_row(
            name,
            *(f"{own.tensor}x{own.data}x{own.pipeline}" for own in sizes),
            str(plan.devices),
            f"{plan.step_s:.3f}",
            f"{100 * planned.mfu(plan):.1f}",
            "" if plan is found.best else compare_plans(plan, found.best),
        )
    return table


def placement_table(candidates: Sequence[Candidate]) -> Table:
    """Simulated steps of all placements, the fastest first."""
    table = Table(title="first step, simulated action by action", title_justify="left")
    table.add_column("placement", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    table.add_column("tensor x data x pipeline")
    for column in ("devices", "step ms", "MFU %", "bubble %", "peak GiB"):
        table.add_column(column, justify="right")
    table.add_column("against the first")
    best = candidates[0]
    for candidate in candidates:
        forecast = candidate.forecast
        step = forecast.step
        stages = candidate.recipe.parallel.virtual_stages
        name = f"{forecast.schedule}, {stages} per rank" if stages > 1 else forecast.schedule
        row = [candidate.placement, name, candidate.sizes, str(candidate.devices)]
        if step is None:
            table.add_row(*row, "", "", "", "", forecast.problem)
            continue
        table.add_row(
            *row,
            f"{step.makespan_ms:,.1f}",
            f"{100 * forecast.mfu:.1f}",
            f"{100 * step.timeline.bubble_fraction:.1f}",
            f"{max(step.peak_bytes) / GIB:.1f}",
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
    ratio = step.makespan_ms / first.makespan_ms - 1
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
        f"{step.makespan_ms:,.1f} ms (MFU {100 * candidate.forecast.mfu:.1f} %).",
        "",
        f"  torchrun ... train.py --config THIS_FILE      with {candidate.devices} ranks",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comment}\n{dump_recipe(candidate.recipe)}"
