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

from torchmm.balance.forecasts.forecast import Forecast, Forecaster
from torchmm.common.files import replace_atomically
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.file_formats import write_chrome_trace
from torchmm.pipelining.view.records import write_records
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES
from torchmm.recipe.placement_sizes import format_sizes

GIB = 2**30


def forecast_table(forecaster: Forecaster, forecasts: Sequence[Forecast]) -> Table:
    """Return a table with a row for each schedule that has a plan.

    An iteration is the step of the plan and the optimizer update. Bubble fractions refer to the
    plan.
    """
    ranks = forecaster.run.llm
    devices = f"{forecaster.run.world_size} x {forecaster.profile.device.name}"
    sizes = (
        f"pipeline {ranks.pipeline} x replicate {ranks.replicate} x shard {ranks.shard} x tensor "
        f"{ranks.tensor}"
    )
    if units := forecaster.run.units:
        sizes = "; ".join(f"{name} {format_sizes(degrees)}" for name, degrees in units.items())
    shares = "  ".join(f"{m.name} {_count(m.parameters)}" for m in forecaster.modules)
    title = (
        f"{forecaster.recipe.name} on {devices}, simulated\n"
        f"{shares}\n"
        f"{sizes}; {len(forecaster.workload.microbatches)} microbatches per pipeline"
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
    best = fastest(forecasts)
    for forecast in forecasts:
        step = forecast.step
        if step is None:
            continue
        timeline = step.timeline
        table.add_row(
            f"{forecast.schedule} *" if forecast is best else forecast.schedule,
            f"{forecast.iteration_ms:,.1f}",
            f"{forecast.update_ms:,.1f}",
            f"{100 * forecast.mfu:.1f}",
            f"{100 * timeline.bubble_fraction:.1f}",
            *(f"{100 * timeline.bubble_fractions[kind]:.1f}" for kind in BUBBLE_CLASSES),
            f"{max(step.peak_bytes) / GIB:.3g}",
            "yes" if step.fits else "no",
        )
    if best is not None and len(forecasts) > 1:
        table.caption = "* fastest schedule that fits into memory"
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def fastest(forecasts: Sequence[Forecast]) -> Forecast | None:
    """Return the forecast with the shortest step of those that fit into memory."""
    fitting = [(f.iteration_ms, i) for i, f in enumerate(forecasts) if f.step and f.step.fits]
    return forecasts[min(fitting)[1]] if fitting else None


def write_forecasts(
    directory: Path, forecaster: Forecaster, forecasts: Sequence[Forecast]
) -> list[Path]:
    """Write all files into a new or existing directory. Return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": forecaster.recipe.name,
        "device": forecaster.profile.device.name,
        "layout": forecaster.run.llm._asdict(),
        "units": {name: own._asdict() for name, own in forecaster.run.units.items()},
        "parameters": {m.name: m.parameters for m in forecaster.modules},
        "microbatches": len(forecaster.workload.microbatches),
        "schedules": [forecast.as_dict() for forecast in forecasts],
    }
    files = [directory / "simulation.json"]
    replace_atomically(files[0], (json.dumps(content, indent=1) + "\n").encode())
    for forecast in forecasts:
        if forecast.step is not None:
            files += _write_step(directory, forecaster.recipe.name, forecast)
    return files


def write_picture(path: Path, recipe: str, forecast: Forecast) -> None:
    """Write the timeline of a forecast with a step as SVG. Create the directory if needed."""
    assert forecast.step is not None
    panel = Panel(forecast.schedule, forecast.step.records, forecast.step.plan.graph.layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, timelines_svg(f"{recipe}, simulated", [panel]).encode())


def _write_step(directory: Path, recipe: str, forecast: Forecast) -> list[Path]:
    assert forecast.step is not None
    records = forecast.step.records
    graph = forecast.step.plan.graph
    stem = forecast.schedule.replace(":", "_").replace("/", "_")
    picture, trace, rows = (directory / f"{stem}{end}" for end in (".svg", ".trace.json", ".json"))
    write_picture(picture, recipe, forecast)
    write_chrome_trace(trace, records, graph.layout)
    write_records(rows, records, graph)
    return [picture, trace, rows]
