"""Simulated steps as a table, a JSON file, timelines and Perfetto traces.

simulation.json          metrics of every schedule
SCHEDULE.svg             timeline of each pipeline rank, with bubbles by class
SCHEDULE.trace.json      the same for Perfetto and chrome://tracing
SCHEDULE.json            action records, to plot with measured records (scripts/draw.py --records)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from torchmm.balance.recipe_simulation.step_simulator import SimulatedStepReport, StepSimulator
from torchmm.common.files import replace_atomically
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.file_formats import write_chrome_trace
from torchmm.pipelining.view.records import write_records
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES
from torchmm.recipe.placement_sizes import format_sizes

GIB = 2**30


def build_report_table(simulator: StepSimulator, reports: Sequence[SimulatedStepReport]) -> Table:
    """Return a table with a row for each schedule that has a plan.

    An iteration is the step of the plan and the optimizer update. Bubble fractions refer to the
    plan.
    """
    ranks = simulator.run.llm
    devices = f"{simulator.run.world_size} x {simulator.profile.device.name}"
    sizes = (
        f"pipeline {ranks.pipeline} x replicate {ranks.replicate} x shard {ranks.shard} x tensor "
        f"{ranks.tensor}"
    )
    if units := simulator.run.units:
        sizes = "; ".join(f"{name} {format_sizes(degrees)}" for name, degrees in units.items())
    shares = "  ".join(f"{m.name} {_format_count(m.parameters)}" for m in simulator.modules)
    title = (
        f"{simulator.recipe.name} on {devices}, simulated\n"
        f"{shares}\n"
        f"{sizes}; {len(simulator.workload.microbatches)} microbatches per pipeline"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("schedule", no_wrap=True)
    for column in (
        "iteration ms",
        "update ms",
        "MFU %",
        "bubble %",
        *BUBBLE_CLASSES,
        "peak GiB",
        "fits",
    ):
        table.add_column(column.replace("dp_", "dp "), justify="right")
    best = fastest_report(reports)
    for report in reports:
        step = report.step
        if step is None:
            continue
        timeline = step.timeline
        table.add_row(
            f"{report.schedule} *" if report is best else report.schedule,
            f"{report.iteration_ms:,.1f}",
            f"{report.update_ms:,.1f}",
            f"{100 * report.mfu:.1f}",
            f"{100 * timeline.bubble_fraction:.1f}",
            *(f"{100 * timeline.bubble_fractions[kind]:.1f}" for kind in BUBBLE_CLASSES),
            f"{max(step.peak_bytes) / GIB:.3g}",
            "yes" if step.fits else "no",
        )
    if best is not None and len(reports) > 1:
        table.caption = "* fastest schedule that fits into memory"
    return table


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def fastest_report(reports: Sequence[SimulatedStepReport]) -> SimulatedStepReport | None:
    """Return the report with the shortest step of those that fit into memory."""
    fitting = [(f.iteration_ms, i) for i, f in enumerate(reports) if f.step and f.step.fits]
    return reports[min(fitting)[1]] if fitting else None


def write_reports(
    directory: Path, simulator: StepSimulator, reports: Sequence[SimulatedStepReport]
) -> list[Path]:
    """Write all files into a new or existing directory. Return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": simulator.recipe.name,
        "device": simulator.profile.device.name,
        "layout": simulator.run.llm._asdict(),
        "units": {name: degrees._asdict() for name, degrees in simulator.run.units.items()},
        "parameters": {m.name: m.parameters for m in simulator.modules},
        "microbatches": len(simulator.workload.microbatches),
        "schedules": [report.as_dict() for report in reports],
    }
    files = [directory / "simulation.json"]
    replace_atomically(files[0], (json.dumps(content, indent=1) + "\n").encode())
    for report in reports:
        if report.step is not None:
            files += _write_step(directory, simulator.recipe.name, report)
    return files


def write_timeline(path: Path, recipe: str, report: SimulatedStepReport) -> None:
    """Write the timeline of a simulated step as SVG. Create the directory if needed."""
    assert report.step is not None
    panel = Panel(report.schedule, report.step.records, report.step.plan.graph.layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, timelines_svg(f"{recipe}, simulated", [panel]).encode())


def _write_step(directory: Path, recipe: str, report: SimulatedStepReport) -> list[Path]:
    assert report.step is not None
    records = report.step.records
    graph = report.step.plan.graph
    stem = report.schedule.replace(":", "_").replace("/", "_")
    picture, trace, rows = (directory / f"{stem}{end}" for end in (".svg", ".trace.json", ".json"))
    write_timeline(picture, recipe, report)
    write_chrome_trace(trace, records, graph.layout)
    write_records(rows, records, graph)
    return [picture, trace, rows]
