"""Write findings as one self-contained HTML file: tables, samples, images, packed sequences.

Images are embedded, so that the page can be sent or opened on a host without network. All text from
the data is escaped, so that a caption cannot inject HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from torchmm.common.batch import SampleMeta
from torchmm.data.media.images import png_thumbnail
from torchmm.extensions.reports.inspection.findings import (
    DisplayedSample,
    SourceFindings,
    TokenSpan,
)
from torchmm.extensions.reports.inspection.findings_table import source_rows
from torchmm.recipe.recipe import Recipe

THUMBNAIL_PX = 224
HISTOGRAM_BINS = 40
SEQUENCE_SIZE_PX = (900, 18)
"""Width and height of a packed sequence in pixels."""
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;vertical-align:top}
th{font-weight:600;color:#555}tr{border-bottom:1px solid #e4e4e4}
.sample{border:1px solid #ddd;border-radius:6px;padding:.8em;margin:1em 0}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,monospace;font-size:13px}
.loss{background:#bfe8c5}.image{background:#cfe0ff;border-radius:3px;padding:0 .3em}
.pictures{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0}figcaption{font-size:12px;color:#555}
figure img{max-width:224px;max-height:224px;image-rendering:auto;border:1px solid #ddd}
.why{overflow-wrap:anywhere}h2{margin-top:2em}
"""


def write_data_report(path: Path, recipe: Recipe, findings: Sequence[SourceFindings]) -> None:
    """Write the page. Its directory must exist."""
    title = escape(f"Data of {recipe.name}")
    body = "".join(_source_html(found, recipe.training.sequence_length) for found in findings)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><p>Sequences of "
        f"{recipe.training.sequence_length:,} tokens. "
        '<span class="loss">Green</span> tokens are included in the loss. '
        '<span class="image">Blue</span> placeholders are replaced by encoder output.</p>'
        f"{body}</html>\n",
        # A lone surrogate in a caption must not cause an error.
        encoding="utf-8",
        errors="replace",
    )


def _source_html(findings: SourceFindings, length: int) -> str:
    table = "".join(
        f"<tr><th>{label}</th><td>{escape(text).replace(chr(10), '<br>')}</td></tr>"
        for label, text in source_rows(findings).items()
    )
    parts = [
        f"<h2>{escape(findings.name)}</h2><table>{table}</table>",
        "<h3>Lengths</h3>",
        _histogram_svg(findings.column("untruncated_tokens"), length),
        *_rejected_table(findings),
        "<h3>Packed sequences</h3>",
        "<p>The first packed sequences of this source, with one box per sample. Tokens of encoders "
        "are dark.</p>",
        *(_sequence_svg(pack, length) for pack in findings.packs),
        "<h3>Samples as the model receives them</h3>" if findings.displayed else "",
        *(_sample_html(sample) for sample in findings.displayed),
    ]
    return "".join(parts)


def _rejected_table(findings: SourceFindings) -> Iterator[str]:
    if not findings.rejected:
        return
    yield "<h3>Rejected records</h3><table><tr><th>records</th><th>first</th><th>reason</th></tr>"
    for count, first in findings.reasons():
        location = escape(first.location or first.name)
        why = escape(first.reason)
        yield f'<tr><td>{count:,}</td><td>{location}</td><td class="why">{why}</td></tr>'
    yield "</table>"


def _histogram_svg(tokens_N: np.ndarray, length: int) -> str:
    """Return a histogram of sample lengths, with a line at the sequence length."""
    counts, edges = np.histogram(
        tokens_N, bins=HISTOGRAM_BINS, range=(0, max(1, int(tokens_N.max())))
    )
    width, height = 600, 80
    step = width / HISTOGRAM_BINS
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{height - h:.1f}" width="{step - 1:.1f}" height="{h:.1f}" '
        'fill="#7a9cc6"/>'
        for i, h in enumerate(counts / counts.max() * height)
        if h
    )
    end = length / edges[-1] * width
    limit = (
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{height}" stroke="#c33"/>'
        if end <= width
        else ""
    )
    return (
        f'<svg width="{width}" height="{height + 16}" role="img">{bars}{limit}'
        f'<text x="0" y="{height + 13}" font-size="11">0</text>'
        f'<text x="{width}" y="{height + 13}" font-size="11" text-anchor="end">'
        f"{int(edges[-1]):,} tokens</text></svg>"
    )


def _sequence_svg(pack: Sequence[SampleMeta], length: int) -> str:
    width, height = SEQUENCE_SIZE_PX
    scale = width / length
    boxes, start = [], 0
    for sample in pack:
        images = sum(image.tokens for image in sample.images)
        what = escape(
            f"{sample.source}[{sample.index}]: {sample.tokens} tokens, {images} for images"
        )
        box = sample.tokens * scale
        boxes.append(
            f'<g><title>{what}</title><rect x="{start * scale:.1f}" width="{box:.1f}" '
            f'height="{height}" fill="#cfe8d3" stroke="#fff"/>'
            f'<rect x="{start * scale:.1f}" width="{images * scale:.1f}" height="{height}" '
            'fill="#7a9cc6"/></g>'
        )
        start += sample.tokens
    return (
        f'<svg width="{width}" height="{height + 2}" style="display:block" role="img">'
        f'<rect width="{width}" height="{height}" fill="#f2f2f2"/>{"".join(boxes)}</svg>'
    )


def _sample_html(sample: DisplayedSample) -> str:
    figures = "".join(
        f"<figure>{_image_html(sample_image.original)} {_image_html(sample_image.prepared)}"
        f"<figcaption>{escape(sample_image.label)}</figcaption></figure>"
        for sample_image in sample.sample_images
    )
    text = "".join(_span_html(span) for span in sample.spans)
    return (
        f'<div class="sample"><p>{escape(sample.name)} · {escape(sample.record_format)} · '
        f'{escape(sample.location)}</p><div class="pictures">{figures}</div>'
        f'<p class="text">{text}</p></div>'
    )


def _span_html(span: TokenSpan) -> str:
    if span.image is not None:
        return f'<span class="image">image {span.image + 1}: {span.tokens} tokens</span>'
    kind = ' class="loss"' if span.loss else ""
    return f"<span{kind}>{escape(span.text)}</span>"


def _image_html(sample_image: Image.Image | None) -> str:
    if sample_image is None:
        return ""
    data = base64.b64encode(png_thumbnail(sample_image, THUMBNAIL_PX)).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'
