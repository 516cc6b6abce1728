"""Sections of a page, as HTML. All text from files is escaped and cannot inject HTML."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from statistics import median
from typing import Any

import tomli_w

from torchmm.extensions.reports.page.run_contents import (
    RunContents,
    downsample_curve,
    slowest_ranks,
)
from torchmm.recipe.read import changed_values, dotted_values
from torchmm.training.tracking.run_directory import SAMPLES_FOLDER, GeneratedSample

MAX_RANKS = 8
MAX_SAMPLES = 24
MAX_STEPS = 6
"""Number of steps at which the text of a sample is shown: the first and the newest steps."""
GIB = 2.0**30
RECIPE_WARNING = (
    "If you received this directory from another person, read recipe.toml before you start "
    "it. A recipe contains files to read and to write, URLs that checkpoints are uploaded "
    "to, and the program of validation.benchmarks."
)


@dataclass(frozen=True)
class Chart:
    """Curves over the steps in one chart.

    Attributes:
        curves: Maps a key of a record to its label on the page.
        scale: Factor of the values.
        from_zero: Whether the value axis starts at 0.
    """

    title: str
    unit: str
    curves: Mapping[str, str]
    scale: float = 1.0
    from_zero: bool = True


LOSSES = {
    "loss": "training",
    "validation_loss": "validation",
    "loss_text": "text",
    "validation_loss_text": "text, validation",
    "loss_image": "generated images",
    "validation_loss_image": "generated images, validation",
}
CHARTS = (
    Chart("Loss", "nats per target token", LOSSES, from_zero=False),
    Chart("Tokens", "per second", {"tokens_per_s": "tokens"}),
    Chart("Samples", "per second", {
        "samples_per_s": "samples", "media_per_s": "images read",
        "generated_images_per_s": "generated",
    }),
    Chart("Model FLOPs", "% of peak FLOP/s", {"mfu": "MFU"}, 100.0),
    Chart("Step time, slowest rank", "ms", {
        "step_ms": "step", "encoder_ms": "encoders", "llm_ms": "LLM", "generator_ms": "generator",
        "data_wait_ms": "waiting for data",
    }),
    Chart("Pipeline, predicted and measured", "ms", {
        "pipeline_ms": "measured", "predicted_step_ms": "predicted",
    }),
    Chart("Pipeline bubbles", "% of the pipeline time", {"bubble_fraction": "bubbles"}, 100.0),
    Chart("Predicted speedup of the schedule", "% over the original order", {
        "speedup_over_default_order": "gain",
    }, 100.0),
    Chart("Work of the slowest rank relative to the mean rank", "1 means equal work", {
        "image_imbalance": "images", "image_imbalance_before": "images, not balanced",
        "sequence_imbalance": "sequences", "sequence_imbalance_before": "sequences, not reordered",
    }),
    Chart("Time of the slowest rank above the median rank", "% of the time of the slowest rank", {
        "straggler_fraction": "slowest rank",
    }, 100.0),
    Chart("Peak memory, rank with the highest use", "GiB", {"peak_memory_bytes": "peak"}, 1 / GIB),
    Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    Chart("Learning rate", "", {"lr": "rate"}),
    Chart("Most loaded expert", "relative to the mean", {"max_expert_load_ratio": "load"}),
)  # fmt: skip
"""Charts in page order. Charts without values are omitted."""


def charts_section(runs: Sequence[RunContents]) -> str:
    """Return all charts with values for `charts.js`, with one curve per run."""
    by_source = Chart(
        "Loss by data source",
        "nats per target token",
        _named_curves(runs, "loss_by_source")
        | _named_curves(runs, "validation_loss_by_source", " (validation)"),
        from_zero=False,
    )
    scores = Chart("Scores of generated text", "", _named_curves(runs, "scores"))
    parts = []
    for chart in (CHARTS[0], by_source, scores, *CHARTS[1:]):
        curves = list(_curves(chart, runs))
        if curves:
            payload = {"unit": chart.unit, "zero": chart.from_zero, "curves": curves}
            parts.append(
                f'<figure class="chart"><figcaption>{escape(chart.title)}'
                f"<small>{escape(chart.unit)}</small></figcaption>"
                f'<script type="application/json">{_script_json(payload)}</script></figure>'
            )
    return f'<div class="charts">{"".join(parts)}</div>' if parts else _empty_note("no steps yet")


def _named_curves(runs: Sequence[RunContents], metric: str, suffix: str = "") -> dict[str, str]:
    """Return the curves of a metric with several values by name, see `Chart.curves`."""
    names = sorted({name for run in runs for name in run.names_in(metric)})
    return {f"{metric}/{name}": f"{name}{suffix}" for name in names}


def _curves(chart: Chart, runs: Sequence[RunContents]) -> Iterator[dict[str, Any]]:
    for key, label in chart.curves.items():
        for number, run in enumerate(runs):
            points = downsample_curve(run.points(key, chart.scale))
            if not points:
                continue
            is_single = len(runs) == 1
            name = (
                label
                if is_single
                else f"{run.name}: {label}"
                if len(chart.curves) > 1
                else run.name
            )
            # In a comparison, a run has one color in all charts. Its curves have different line
            # styles.
            curve_index = list(chart.curves).index(key)
            yield {
                "name": name,
                "color": curve_index if is_single else number,
                "dash": 0 if is_single else curve_index,
                "points": points,
            }


def status_section(run: RunContents) -> str:
    """Return the status of the run as metrics."""
    status = run.status
    state = status.state if status else "unknown"
    step = max([status.step if status else 0, *(r["step"] for r in run.records[-1:])])
    displayed = {"state": state, "step": f"{step:,} of {run.steps:,}"}
    left = _remaining_time(run, step) if state == "running" else None
    if left:
        displayed["time remaining"] = left
    for label, key, form, scale in (
        ("loss", "loss", "{:.4f}", 1.0),
        ("validation loss", "validation_loss", "{:.4f}", 1.0),
        ("tokens/s", "tokens_per_s", "{:,.0f}", 1.0),
        ("MFU", "mfu", "{:.1f} %", 100.0),
        ("peak memory", "peak_memory_bytes", "{:.2f} GiB", 1 / GIB),
        ("skipped samples", "skipped_samples", "{:,.0f}", 1.0),
    ):
        value = run.last(key)
        if value is not None:
            displayed[label] = form.format(value * scale)
    tiles = "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>'
        for label, value in displayed.items()
    )
    payload = status.message.strip() if status else ""
    message = f'<pre class="message {state}">{escape(payload)}</pre>' if payload else ""
    progress = f'<progress max="{max(run.steps, 1)}" value="{step}"></progress>'
    return f'{progress}<dl class="tiles {state}">{tiles}</dl>{message}'


def _remaining_time(run: RunContents, step: int) -> str | None:
    newest = [r["step_ms"] for r in run.records[-50:] if isinstance(r.get("step_ms"), float)]
    if not newest:
        return None
    return str(timedelta(seconds=round(max(0, run.steps - step) * median(newest) / 1e3)))


def samples_section(run: RunContents) -> str:
    """Return held-out samples with the generated text over time."""
    cards = [_sample_card(run, entries) for entries in list(run.samples.values())[:MAX_SAMPLES]]
    if not cards:
        return _empty_note(
            "no validation samples; set validation.num_samples and validation.interval"
        )
    last = max(entries[-1].step for entries in run.samples.values())
    newest = [e[-1] for e in run.samples.values() if e[-1].step == last]
    right = sum(sample.is_correct for sample in newest)
    payload = (
        f"<p>After step {last:,}: {right} of {len(newest)} generated texts match the reference "
        "exactly.</p>"
    )
    more = len(run.samples) - MAX_SAMPLES
    rest = f"<p>and {more} more in samples.json</p>" if more > 0 else ""
    return f'{payload}<div class="cards">{"".join(cards)}</div>{rest}'


def _sample_card(run: RunContents, entries: Sequence[GeneratedSample]) -> str:
    displayed = [*entries[:1], *entries[1:][-MAX_STEPS + 1 :]]
    rows = "".join(
        f'<tr class="{"right" if entry.is_correct else ""}"><th>{entry.step:,}</th>'
        f"<td>{escape(entry.generated) or '<i>nothing</i>'}</td></tr>"
        for entry in displayed
    )
    newest = entries[-1]
    uri = run.png_uri(f"{SAMPLES_FOLDER}/{newest.picture}") if newest.picture else ""
    picture = f'<img alt="" src="{uri}">' if uri else ""
    prompt_html = f'<p class="prompt">{escape(newest.prompt)}</p>' if newest.prompt else ""
    return (
        f'<article class="card">{picture}<div>{prompt_html}<p class="truth">'
        f"{escape(newest.truth)}</p><table>{rows}</table>"
        f"<small>{escape(newest.source)}[{newest.index}]</small></div></article>"
    )


def images_section(run: RunContents) -> str:
    """Return the newest generated images, and timelines of pipelines.

    A timeline is an SVG in an <img>, in which no browser runs scripts or loads other files.
    """
    parts = [
        f'<figure><figcaption>{escape(file.stem)}</figcaption><img alt="{escape(file.stem)}" '
        f'src="{run.png_uri(f"{file.parent.name}/{file.name}")}"></figure>'
        for file in run.generated_images()[-1:]
    ]
    for name, svg in run.timelines():
        what = "the searched schedule and the static schedule" if "schedules" in name else "a step"
        data = base64.b64encode(svg.encode(errors="replace")).decode()
        parts.append(
            f"<figure><figcaption>{escape(name)}: {what}<small>wheel: zoom, drag: move, "
            f'double click: all</small></figcaption><div class="zoom"><img alt="{escape(name)}" '
            f'draggable="false" src="data:image/svg+xml;base64,{data}"></div></figure>'
        )
    return "".join(parts)


def ranks_section(run: RunContents) -> str:
    """Return the slowest ranks over the quarters of the run, or "" for one rank."""
    slowest = slowest_ranks(run.records, MAX_RANKS)
    if slowest is None:
        return ""
    head = "".join(f"<th>steps {first} to {last}</th>" for first, last in slowest.steps)
    rows = {str(rank): shares for rank, shares in slowest.slowest_fractions.items()}
    rows["time above the median rank"] = slowest.excess_fractions
    body = "".join(
        f"<tr><th>{label}</th>{''.join(f'<td>{share:.0%}</td>' for share in shares)}</tr>"
        for label, shares in rows.items()
    )
    return (
        "<p>Fraction of steps in which a rank was the slowest:</p>"
        f"<table class='figures'><tr><th>rank</th>{head}</tr>{body}</table>"
    )


def memory_section(run: RunContents) -> str:
    """Return the measured and predicted memory peaks, for many ranks only the largest."""
    peaks = run.memory()
    if peaks is None:
        return ""
    top_ranks = sorted(enumerate(peaks.ranks), key=lambda entry: -entry[1][0])[:MAX_RANKS]
    rows = ""
    for rank, (measured, predicted) in top_ranks:
        payload = ["", ""]
        if predicted:
            # The prediction excludes libraries, which use most of the memory of a small CPU
            # process.
            share = "" if peaks.device == "cpu" else f"{measured / predicted:.0%}"
            payload = [f"{predicted / GIB:.2f} GiB", share]
        cells = "".join(f"<td>{text}</td>" for text in (f"{measured / GIB:.2f} GiB", *payload))
        rows += f"<tr><th>{rank}</th>{cells}</tr>"
    what = "allocated on the device"
    if peaks.device == "cpu":
        what = "of the complete process, including libraries that the prediction does not contain"
    return (
        f"<p>Peak up to step {peaks.step:,} ({what}), and the simulated peak of the plan "
        "of that step:</p><table class='figures'><tr><th>rank</th><th>measured</th>"
        "<th>predicted</th>"
        f"<th>measured of predicted</th></tr>{rows}</table>"
    )


def warnings_section(run: RunContents) -> str:
    """Return the log messages of the ranks, including rejected and skipped samples with reasons."""
    lines = run.warnings()
    if not lines:
        return _empty_note("none")
    return f'<pre class="log">{escape(chr(10).join(lines))}</pre>'


def skipped_section(run: RunContents) -> str:
    """Return the notes on skipped content of the page. Call it after all other sections."""
    lines = list(dict.fromkeys(run.skipped))
    return f'<pre class="log">{escape(chr(10).join(lines))}</pre>' if lines else ""


def evaluations_section(run: RunContents) -> str:
    """Return the scores of exports."""
    rows = "".join(
        f"<tr><td>{escape(evaluation.export)}</td><td>{escape(name)}</td><td>{value:.4f}</td></tr>"
        for evaluation in run.evaluations
        for name, value in evaluation.scores.items()
    )
    if not rows:
        return ""
    return f'<table class="figures"><tr><th>of</th><th>score</th><th>value</th></tr>{rows}</table>'


def recipe_section(run: RunContents) -> str:
    """Return the changed keys of the recipe, and the complete recipe, collapsed."""
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_toml(value))}</td></tr>"
        for key, value in changed_values(run.recipe).items()
    )
    recipe_toml = escape(tomli_w.dumps(run.recipe))
    return (
        f'<p>Other than the defaults:</p><table class="recipe">{rows}</table>'
        f"<details><summary>All keys (recipe.toml)</summary><pre>{recipe_toml}</pre></details>"
    )


def commands_section(run: RunContents) -> str:
    """Return commands that use the run. Directory names are quoted for a shell."""
    directory = str(run.directory)
    run_path = shlex.quote(f"./{directory}" if directory.startswith("-") else directory)
    lines = {
        "Resume from the newest checkpoint, with the same command or": (
            f"torchrun --nproc-per-node N -m torchmm train {run_path}/recipe.toml"
        ),
        "Generate text": f"torchmm generate {run_path} IMAGE --prompt TEXT",
        "Export the newest checkpoint": f"torchmm export {run_path}",
        "Evaluate the export": f"torchmm evaluate {run_path}",
        "Compare with another run": f"torchmm compare {run_path} OTHER_RUN",
        "Write this page again": f"torchmm show {run_path} --page",
    }
    return f"<p>{escape(RECIPE_WARNING)}</p>" + "".join(
        f"<p>{escape(what)}</p><pre>{escape(command)}</pre>" for what, command in lines.items()
    )


def comparison_section(runs: Sequence[RunContents]) -> str:
    """Return a table of the metrics of several runs, and the keys in which their recipes differ."""
    head = "<tr><th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"
    metric_rows = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for label, values in compare_metrics(runs).items()
    )
    different_keys = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for key, values in recipe_differences(runs).items()
    )
    return f'<table class="figures">{head}{metric_rows}</table><h2>Recipes</h2>' + (
        f'<table class="recipe">{head}{different_keys}</table>'
        if different_keys
        else _empty_note("no differences")
    )


def compare_metrics(runs: Sequence[RunContents]) -> dict[str, list[str]]:
    """Return the metrics of each run by label. Metrics without values are omitted."""

    def best(values: Sequence[float]) -> float:
        return min(values)

    def newest(values: Sequence[float]) -> float:
        return values[-1]

    metrics = (
        ("last loss", "loss", newest, "{:.4f}", 1.0),
        ("best validation loss", "validation_loss", best, "{:.4f}", 1.0),
        ("tokens/s (median)", "tokens_per_s", median, "{:,.0f}", 1.0),
        ("step (median)", "step_ms", median, "{:,.0f} ms", 1.0),
        ("encoders (median)", "encoder_ms", median, "{:,.0f} ms", 1.0),
        ("LLM (median)", "llm_ms", median, "{:,.0f} ms", 1.0),
        ("generator (median)", "generator_ms", median, "{:,.0f} ms", 1.0),
        ("waiting for data (median)", "data_wait_ms", median, "{:,.1f} ms", 1.0),
        ("bubbles (median)", "bubble_fraction", median, "{:.1f} %", 100.0),
        ("image imbalance (median)", "image_imbalance", median, "{:.2f}", 1.0),
        ("sequence imbalance (median)", "sequence_imbalance", median, "{:.2f}", 1.0),
        ("MFU (median)", "mfu", median, "{:.1f} %", 100.0),
        ("peak memory", "peak_memory_bytes", max, "{:.2f} GiB", 1 / GIB),
    )
    table = {
        "state": [run.status.state if run.status else "unknown" for run in runs],
        "steps": [f"{len(run.records):,} of {run.steps:,}" for run in runs],
    }
    for label, key, reduce, form, scale in metrics:
        columns = [[value for _, value in run.points(key, scale)] for run in runs]
        if any(columns):
            table[label] = [form.format(reduce(values)) if values else "" for values in columns]
    return table


def recipe_differences(runs: Sequence[RunContents]) -> dict[str, list[str]]:
    """Return the values of the keys that differ between runs, "" for missing keys."""
    recipes = [dotted_values(run.recipe) for run in runs]
    keys = sorted({key for values in recipes for key in values})
    rows = {key: [_toml(v[key]) if key in v else "" for v in recipes] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _script_json(payload: Mapping[str, Any]) -> str:
    """Return JSON that cannot close its enclosing script element."""
    text = json.dumps(payload, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _empty_note(why: str) -> str:
    return f'<p class="none">{escape(why)}</p>'
