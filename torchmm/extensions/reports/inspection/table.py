"""Findings in words: a table for each source on a terminal, and the first refused records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from torchmm.data.sources.index.length_index import (
    describe_dropped,
    describe_filtered,
    describe_lengths,
)
from torchmm.data.steps.packing import pack_all
from torchmm.extensions.reports.inspection.findings import Refusal, SourceFindings
from torchmm.planning.run_length import describe_passes, passes_warning
from torchmm.recipe.recipe import Recipe

REFUSED_SHOWN = 10


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
    """Return the steps until every training source was read once; None if a size is unknown."""
    found = [source for source in findings if source.section == "data.sources"]
    if not found or recipe.data.stages:
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
    packed = [pack_all(tokens.tolist(), length, recipe.data.open_packs) for tokens in lengths]
    packs = sum(map(len, packed))
    fill = sum(tokens.sum() for tokens in lengths) / (packs * length)
    shares = np.asarray(weights) / sum(weights)
    mean_tokens = float(shares @ np.asarray([tokens.mean() for tokens in lengths]))
    step_samples = recipe.training.global_batch_size * length * fill / mean_tokens
    return float((np.asarray(sizes) / shares).max() / step_samples)


def findings_table(found: SourceFindings) -> Table:
    """What is known of a source, a line each."""
    table = Table(title=found.name, title_justify="left", show_header=False, box=None)
    for label, text in source_rows(found).items():
        table.add_row(label, text.replace("\n", ", "))
    return table


def source_rows(found: SourceFindings) -> dict[str, str]:
    """What is known of a source, by label; several lines where there are several figures."""
    of_all = "a stream" if found.records is None else f"of {found.records:,} records"
    work = work_shares(found)
    return {
        "read as": f"{found.kind}, {found.section}, {found.config.path}",
        "layout": layouts_text(found),
        "looked at": f"{found.read:,} ({of_all}), {len(found.refused):,} refused",
        "filtered": "\n".join(describe_filtered(found.filtered, found.read)) or "none",
        "tokens": "\n".join(describe_lengths(found.column("whole_tokens"))),
        "cut at the sequence length": cut_text(found),
        "dropped from samples": "\n".join(describe_dropped(found.dropped, len(found.samples)))
        or "none",
        "tokens in the loss": f"{loss_share(found):.1%}",
        "images, sounds, frames": images_text(found),
        "work (FLOPs of training)": "\n".join(f"{n} {share:.1%}" for n, share in work.items()),
    }


def refused_lines(found: SourceFindings) -> list[str]:
    """Return the first record beyond each limit and the first corrupt records, with reasons."""
    first = [f"  filtered: {_with_place(refusal)}" for refusal in found.first_filtered.values()]
    lines = [f"  {_with_place(refusal)}" for refusal in found.refused[:REFUSED_SHOWN]]
    more = len(found.refused) - len(lines)
    return [*first, *lines, f"  and {more} more"] if more else [*first, *lines]


def _with_place(refusal: Refusal) -> str:
    """Return place and reason of a rejected record: its file and line, or its source and index."""
    place = refusal.where or refusal.name
    return refusal.reason if refusal.reason.startswith(place) else f"{place}: {refusal.reason}"


def corrupt_limit_line(recipe: Recipe, findings: Sequence[SourceFindings]) -> str:
    """Return whether the limits on corrupt samples would end a run; empty if none is corrupt.

    The number of corrupt samples is extrapolated from the records that were read.
    """
    sources = [found for found in findings if found.section == "data.sources"]
    if not any(found.refused for found in sources):
        return ""
    corrupt, total = 0.0, 0
    for found in sources:
        count = found.records or found.read
        corrupt += count * len(found.refused) / found.read
        total += count
    data = recipe.data
    ends = corrupt > data.max_corrupt_samples or corrupt / total > data.max_corrupt_fraction
    return (
        f"about {corrupt:,.0f} of {total:,} samples are corrupt ({corrupt / total:.1%}). The "
        f"limits data.max_corrupt_samples = {data.max_corrupt_samples:,} per pass and "
        f"data.max_corrupt_fraction = {data.max_corrupt_fraction:g} "
        + ("would end a run" if ends else "allow that")
    )


def layouts_text(found: SourceFindings) -> str:
    """Names and counts of the layouts, most first."""
    if len(found.layouts) == 1:
        return next(iter(found.layouts))
    return "\n".join(f"{name} x{count}" for name, count in found.layouts.most_common())


def cut_text(found: SourceFindings) -> str:
    """How many samples are cut, and how many of all tokens that loses."""
    whole = found.column("whole_tokens")
    kept = found.column("tokens")
    cut = int((whole > kept).sum())
    if not cut:
        return "none"
    return f"{cut / len(whole):.1%} of samples\n{1 - kept.sum() / whole.sum():.1%} of tokens"


def loss_share(found: SourceFindings) -> float:
    """Share of tokens that count in the loss."""
    return float(found.column("loss_tokens").sum() / found.column("tokens").sum())


def images_text(found: SourceFindings) -> str:
    """Images (tiles, frames, sounds) and their tokens."""
    images = found.column("images")
    if not images.any():
        return "none"
    tokens = found.column("image_tokens").sum() / images.sum()
    return f"mean {images.mean():.2f}\nmost {images.max()}\n{tokens:.0f} tokens each"


def work_shares(found: SourceFindings) -> dict[str, float]:
    """Each module's share of the FLOPs of training on these samples."""
    totals: dict[str, int] = {}
    for sample in found.samples:
        for module, flops in sample.flops.items():
            totals[module] = totals.get(module, 0) + flops
    whole = max(1, sum(totals.values()))
    return {module: flops / whole for module, flops in totals.items()}
