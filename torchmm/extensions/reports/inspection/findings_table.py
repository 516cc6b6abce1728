"""Findings as text: a table of each source on the terminal, and the first rejected records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from torchmm.data.sources.index.length_index import (
    describe_dropped,
    describe_filtered,
    describe_lengths,
)
from torchmm.data.steps.packing import pack_all
from torchmm.extensions.reports.inspection.findings import RejectedRecord, SourceFindings
from torchmm.planning.run_length import describe_passes, passes_warning
from torchmm.recipe.recipe import Recipe

MAX_DISPLAYED_REJECTIONS = 10


def length_lines(recipe: Recipe, findings: Sequence[SourceFindings]) -> list[str]:
    """Return the estimated steps of a pass, the passes of the run, and a warning if they are many.

    Args:
        recipe: Recipe with `training.steps` or `training.epochs`.
        findings: All sources of the recipe.
    """
    pass_steps = _pass_steps(recipe, findings)
    if pass_steps is None:
        return []
    epochs = recipe.training.epochs
    if epochs is not None:
        steps = max(1, round(epochs * pass_steps))
        return [f"training.epochs = {epochs:g}: about {steps:,} steps"]
    warning = passes_warning(recipe, pass_steps)
    return [describe_passes(recipe, pass_steps), *([f"warning: {warning}"] if warning else [])]


def _pass_steps(recipe: Recipe, findings: Sequence[SourceFindings]) -> float | None:
    """Return the steps until every training source was read once, or None if a size is unknown."""
    found = [source for source in findings if source.section == "data.sources"]
    if not found or recipe.data.mixture_schedule:
        return None
    sizes, weights, lengths = [], [], []
    for source in found:
        if source.records is None:
            return None
        size = source.records * len(source.samples) / source.read
        epochs = source.config.epochs
        sizes.append(size)
        weights.append(source.config.weight if epochs is None else epochs * size)
        lengths.append(source.column("tokens"))
    length = recipe.training.sequence_length
    packed = [
        pack_all(tokens.tolist(), length, recipe.data.packing_buffer_size) for tokens in lengths
    ]
    packs = sum(map(len, packed))
    fill = sum(tokens.sum() for tokens in lengths) / (packs * length)
    fractions = np.asarray(weights) / sum(weights)
    mean_tokens = float(fractions @ np.asarray([tokens.mean() for tokens in lengths]))
    step_samples = recipe.training.global_batch_size * length * fill / mean_tokens
    return float((np.asarray(sizes) / fractions).max() / step_samples)


def findings_table(findings: SourceFindings) -> Table:
    """Return the table of the findings of a source."""
    table = Table(title=findings.name, title_justify="left", show_header=False, box=None)
    for label, text in source_rows(findings).items():
        table.add_row(label, text.replace("\n", ", "))
    return table


def source_rows(findings: SourceFindings) -> dict[str, str]:
    """Return the findings about a source by label. A value has one line per metric."""
    record_total = "a stream" if findings.records is None else f"of {findings.records:,} records"
    format_counts = "\n".join(
        f"{name} x{count}" for name, count in findings.format_counts.most_common()
    )
    if len(findings.format_counts) == 1:
        format_counts = next(iter(findings.format_counts))
    untruncated = findings.column("untruncated_tokens")
    tokens = findings.column("tokens")
    is_truncated = untruncated > tokens
    truncation = "none"
    if is_truncated.any():
        lost_fraction = 1 - tokens.sum() / untruncated.sum()
        truncation = f"{is_truncated.mean():.1%} of samples\n{lost_fraction:.1%} of tokens"
    images = findings.column("images")
    image_counts = "none"
    if images.any():
        image_tokens = findings.column("image_tokens").sum() / images.sum()
        image_counts = (
            f"mean {images.mean():.2f}\nmax {images.max()}\n{image_tokens:.0f} tokens each"
        )
    flops: Counter[str] = Counter()
    for sample in findings.samples:
        flops.update(sample.flops)
    work = (f"{name} {count / max(1, flops.total()):.1%}" for name, count in flops.items())
    dropped = describe_dropped(findings.dropped, len(findings.samples))
    return {
        "source": f"{findings.kind}, {findings.section}, {findings.config.path}",
        "record format": format_counts,
        "records read": f"{findings.read:,} ({record_total}), {len(findings.rejected):,} rejected",
        "filtered": "\n".join(describe_filtered(findings.filtered, findings.read)) or "none",
        "tokens": "\n".join(describe_lengths(untruncated)),
        "truncated at the sequence length": truncation,
        "truncated content": "\n".join(dropped) or "none",
        "tokens in the loss": f"{findings.column('loss_tokens').sum() / tokens.sum():.1%}",
        "images, audio clips, frames": image_counts,
        "training FLOPs": "\n".join(work),
    }


def rejected_lines(findings: SourceFindings) -> list[str]:
    """Return the first record beyond each limit and the first corrupt records, with reasons."""
    first = [
        f"  filtered: {_describe_rejection(rejection)}"
        for rejection in findings.first_filtered.values()
    ]
    lines = [
        f"  {_describe_rejection(rejection)}"
        for rejection in findings.rejected[:MAX_DISPLAYED_REJECTIONS]
    ]
    more = len(findings.rejected) - len(lines)
    return [*first, *lines, f"  and {more} more"] if more else [*first, *lines]


def _describe_rejection(rejection: RejectedRecord) -> str:
    """Return reason and location of a rejected record: file and line, or source and index."""
    location = rejection.location or rejection.name
    return (
        rejection.reason
        if rejection.reason.startswith(location)
        else f"{location}: {rejection.reason}"
    )


def predict_corrupt_limit(recipe: Recipe, findings: Sequence[SourceFindings]) -> str:
    """Return a line that predicts if corrupt samples stop a run, or "" without corrupt samples.

    The number of corrupt samples is extrapolated from the records that were read.
    """
    sources = [found for found in findings if found.section == "data.sources"]
    if not any(found.rejected for found in sources):
        return ""
    corrupt, total = 0.0, 0
    for found in sources:
        count = found.records or found.read
        corrupt += count * len(found.rejected) / found.read
        total += count
    data = recipe.data
    stops_run = corrupt > data.max_corrupt_samples or corrupt / total > data.max_corrupt_fraction
    return (
        f"about {corrupt:,.0f} of {total:,} samples are corrupt ({corrupt / total:.1%}). The "
        f"limits data.max_corrupt_samples = {data.max_corrupt_samples:,} per pass and "
        f"data.max_corrupt_fraction = {data.max_corrupt_fraction:g} "
        + ("would end a run" if stops_run else "allow this number")
    )
