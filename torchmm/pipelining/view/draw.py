"""Plots of steps as SVG: one line of boxes per rank. Idle time is hatched by cause.

Several steps share one figure and one time axis, for example a simulated and a measured step, or
two schedules. The colors are the palette of Okabe and Ito, which is suitable for color-blind
readers. The SVG is written as text because a step has thousands of boxes. Files of matplotlib would
be many times larger, and would have no tooltips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import NamedTuple
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw

from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.timeline import BUBBLE_CLASSES, BubbleClass, Timeline, analyze_timeline

_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")
# Mixed with white (> 0) or black (< 0). A module has the same hue in forward and backward passes.
_SHADES = {ActionType.F: 0.6, ActionType.B: 0.0, ActionType.I: 0.3, ActionType.W: -0.35}
_NAMES = {
    ActionType.F: "forward",
    ActionType.B: "backward",
    ActionType.I: "backward, inputs",
    ActionType.W: "backward, weights",
}
# By bubble class: angle of the hatching in degrees, distance of the lines in pixels, color.
_HATCHES: dict[BubbleClass, tuple[int, float, str]] = {
    "warmup": (45, 6, "#9a9a9a"),
    "cooldown": (-45, 6, "#9a9a9a"),
    "other": (0, 5, "#9a9a9a"),
    "dp_all_gather": (90, 3, "#555555"),
    "dp_reduce_scatter": (0, 3, "#555555"),
    "tp": (90, 6, "#9a9a9a"),
}
_LEFT, _RIGHT, _ROW, _BOX = 64, 76, 26, 22  # pixels: margins, height of a line and of its boxes
_STRIP = 3  # pixels: height of reductions, which overlap with the boxes
_REDUCING = "#222222"
_LETTER = 5.8  # pixels: upper bound of the average width of a letter
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.t{font-size:15px}.b{font-weight:bold}"
    ".n text{font-size:9px;text-anchor:middle}.e{text-anchor:end}.m{text-anchor:middle}"
    ".n .w{fill:#fff}.x{stroke:#ddd}"
)


class Panel(NamedTuple):
    """A step in a figure."""

    label: str
    records: Sequence[ActionRecord]
    layout: StageLayout


def timelines_svg(
    title: str, panels: Sequence[Panel], width_px: int | None = None, *, merge: bool = False
) -> str:
    """Plot steps below each other on one time axis.

    A box shows the microbatch ("3", or "3.1" for its second sub-microbatch) if there is enough
    space. The action and its times are a tooltip. Strips below the boxes are gradient reductions.

    Args:
        title: Title of the figure.
        panels: Steps, from top to bottom.
        width_px: Width of the figure. The default is 1200, and up to 4000 for steps with many
            actions.
        merge: Whether to merge consecutive actions of the same module and microbatch into one box,
            such as the actions of single layers. The files are much smaller.

    Returns:
        An SVG document.

    Raises:
        ValueError: `panels` is empty, or a record does not match its layout.
    """
    if not panels:
        raise ValueError("no step to plot; pass at least one panel")
    if merge:
        panels = [panel._replace(records=list(_merge_adjacent(panel))) for panel in panels]
    timelines = [analyze_timeline(panel.records, panel.layout) for panel in panels]
    span_ms = max(timeline.makespan_ms for timeline in timelines) or 1.0
    width_px = width_px or _default_width(panels)
    scale = (width_px - _LEFT - _RIGHT) / span_ms
    colors = _module_colors(panels)
    body = [f'<text class="t b" x="8" y="22">{escape(title)}</text>']
    legend, legend_y = _wrap_legend(_legend(panels, timelines, colors), 42, width_px)
    body += legend
    top = legend_y + 20
    for panel, timeline in zip(panels, timelines, strict=True):
        body += _heading(panel.label, timeline, top)
        body += _axis(span_ms, scale, top + 26, _ROW * panel.layout.rank_count)
        body += _rows(panel, timeline, colors, scale, top + 26)
        top += 26 + _ROW * panel.layout.rank_count + 40
    fills = "".join(
        f".{_class(index, kind)}{{fill:#{bytes(_shade(index, kind)).hex()}}}"
        for index in colors.values()
        for kind in COMPUTE
    )
    patterns = "".join(
        f'<pattern id="{kind}" width="{distance:g}" height="{distance:g}" '
        f'patternUnits="userSpaceOnUse" patternTransform="rotate({angle})">'
        f'<rect width="{distance:g}" height="{distance:g}" fill="#f6f6f6"/>'
        f'<path d="M0 0H{distance:g}" stroke="{color}" stroke-width="1.6"/></pattern>'
        for kind, (angle, distance, color) in _HATCHES.items()
    )
    size = f'width="{width_px}" height="{top:g}" viewBox="0 0 {width_px} {top:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{_STYLE}{fills}</style>",
            f"<defs>{patterns}</defs>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def timeline_image(panel: Panel, width_px: int = 1200) -> Image.Image:
    """Return the boxes of a step as an image, for viewers without SVG support."""
    span_ms = max((record.end_ms for record in panel.records), default=0.0) or 1.0
    colors = _module_colors([panel])
    image = Image.new("RGB", (width_px, _ROW * panel.layout.rank_count), "white")
    draw = ImageDraw.Draw(image)
    for record in panel.records:
        if record.action.type in COMPUTE:
            left, right = (ms / span_ms * (width_px - 1) for ms in (record.start_ms, record.end_ms))
            top = _ROW * record.rank
            module = panel.layout.stages[record.action.stage].module
            shade = _shade(colors[module], record.action.type)
            draw.rectangle((left, top, max(left, right - 1), top + _BOX), fill=shade)
    return image


def _merge_adjacent(panel: Panel) -> Iterator[ActionRecord]:
    """Yield the records. Adjacent records of the same module and microbatch are merged."""
    last: ActionRecord | None = None
    for record in sorted(panel.records, key=lambda r: (r.rank, r.start_ms, r.end_ms)):
        if record.action.type not in COMPUTE:
            yield record
        elif last is not None and _follows(record, last, panel.layout):
            last = last._replace(end_ms=record.end_ms)
        else:
            if last is not None:
                yield last
            last = record
    if last is not None:
        yield last


def _follows(record: ActionRecord, last: ActionRecord, layout: StageLayout) -> bool:
    """Return True if a record continues the preceding record."""
    modules = {layout.stages[each.action.stage].module for each in (record, last)}
    same = len(modules) == 1 and record.rank == last.rank
    same = same and record.action.type is last.action.type
    same = same and record.action[2:4] == last.action[2:4]
    return same and abs(record.start_ms - last.end_ms) <= 1e-6 * record.end_ms


def _default_width(panels: Sequence[Panel]) -> int:
    """Return a width with about 6 pixels per box of the rank with the most boxes."""
    boxes: Counter[tuple[int, int]] = Counter(
        (index, record.rank)
        for index, panel in enumerate(panels)
        for record in panel.records
        if record.action.type in COMPUTE
    )
    return min(max(1200, _LEFT + _RIGHT + 6 * max(boxes.values(), default=0)), 4000)


def _module_colors(panels: Sequence[Panel]) -> dict[str, int]:
    """Return the color index of each module, in the order of the stages."""
    modules = dict.fromkeys(stage.module for panel in panels for stage in panel.layout.stages)
    return {module: index for index, module in enumerate(modules)}


def _shade(module_index: int, kind: ActionType) -> tuple[int, ...]:
    """Return the (red, green, blue) color of a box."""
    color = _COLORS[module_index % len(_COLORS)]
    fraction = _SHADES[kind]
    goal = 255 if fraction > 0 else 0
    rgb = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(round(c + (goal - c) * abs(fraction)) for c in rgb)


def _class(module_index: int, kind: ActionType) -> str:
    return f"{kind.value}{module_index}"


def _legend(
    panels: Sequence[Panel], timelines: Sequence[Timeline], colors: dict[str, int]
) -> list[tuple[str, str]]:
    """Return (swatch attributes, text) of modules with the shades that occur, and of hatchings."""
    stages = [panel.layout.stages[r.action.stage] for panel in panels for r in panel.records]
    kinds = [record.action.type for panel in panels for record in panel.records]
    used = {(stage.module, kind) for stage, kind in zip(stages, kinds, strict=True)}
    entries = [
        (f'class="{_class(index, kind)}"', f"{escape(module)}: {_NAMES[kind]}")
        for module, index in colors.items()
        for kind in COMPUTE
        if (module, kind) in used
    ]
    if any(stage.segment for stage in stages):
        entries.append(('fill="none"', "(lower boxes: later segments)"))
    if ActionType.REDUCE_GRAD in kinds:
        entries.append((f'fill="{_REDUCING}"', "gradients are reduced"))
    return entries + [
        (f'fill="url(#{bubble})"', f"idle: {_bubble_label(bubble)}")
        for bubble in BUBBLE_CLASSES
        if any(timeline.bubble_ms[bubble] for timeline in timelines)
    ]


def _wrap_legend(
    entries: Sequence[tuple[str, str]], y: float, width_px: int
) -> tuple[list[str], float]:
    """Place legend entries in lines. Also return the y position of the last line."""
    body: list[str] = []
    x = float(_LEFT)
    for fill, text in entries:
        width = 34 + _LETTER * len(text)
        if x + width > width_px - 8 and x > _LEFT:
            x, y = float(_LEFT), y + 18
        body.append(f'<rect {fill} x="{x:g}" y="{y - 10:g}" width="14" height="12"/>')
        body.append(f'<text x="{x + 18:g}" y="{y:g}">{text}</text>')
        x += width
    return body, y


def _bubble_label(kind: BubbleClass) -> str:
    return kind.replace("dp_", "DP ").replace("_", "-").replace("tp", "TP")


def _heading(label: str, timeline: Timeline, top: float) -> Iterator[str]:
    """Yield the label, the makespan and the idle time by cause."""
    classes = [
        f"{_bubble_label(kind)} {100 * share:.1f} %"
        for kind, share in timeline.bubble_fractions.items()
        if share
    ]
    idle = f"bubbles {100 * timeline.bubble_fraction:.1f} %"
    modules = [f"{m} {_ms(ms)}" for m, ms in timeline.mean_module_ms().items() if ms]
    text = f"{_ms(timeline.makespan_ms)}; {idle}{' = ' if classes else ''}{' + '.join(classes)}"
    if modules:
        text += f"; mean compute per rank: {', '.join(modules)}"
    x = _LEFT + 12 + _LETTER * 1.25 * len(label)
    yield f'<text class="b" x="{_LEFT}" y="{top + 14:g}">{escape(label)}</text>'
    yield f'<text x="{x:g}" y="{top + 14:g}">{escape(text)}</text>'


def _ms(time_ms: float) -> str:
    return f"{time_ms:.4g} ms" if time_ms < 1000 else f"{time_ms:.0f} ms"


def _axis(span_ms: float, scale: float, top: float, height: float) -> Iterator[str]:
    """Yield vertical lines at round times, with labels below."""
    step_ms = 10.0 ** floor(log10(span_ms))
    step_ms *= next(f for f in (0.1, 0.2, 0.5, 1.0) if span_ms / (step_ms * f) <= 12)
    for index in range(int(span_ms / step_ms + 1e-9) + 1):
        x = _LEFT + index * step_ms * scale
        yield f'<path class="x" d="M{x:.1f} {top:g}v{height + 4:g}"/>'
        label = f"{index * step_ms:.6g}" + (" ms" if index == 0 else "")
        yield f'<text class="m" x="{x:.1f}" y="{top + height + 16:g}">{label}</text>'


def _rows(
    panel: Panel, timeline: Timeline, colors: dict[str, int], scale: float, top: float
) -> Iterator[str]:
    """Yield the boxes of each rank, its name on the left and its idle fraction on the right."""
    ranks: list[list[str]] = [[] for _ in range(panel.layout.rank_count)]
    for bubble in timeline.bubbles:
        width = (bubble.end_ms - bubble.start_ms) * scale
        ranks[bubble.rank].append(
            f'<rect fill="url(#{bubble.kind})" x="{_LEFT + bubble.start_ms * scale:.1f}" '
            f'width="{width:.1f}" height="{_BOX}"/>'
        )
    for record in panel.records:
        if record.action.type in COMPUTE:
            stage = panel.layout.stages[record.action.stage]
            inset = 4 * min(stage.segment, 2)
            ranks[record.rank].append(_box(record, colors[stage.module], inset, scale))
    for record in panel.records:
        if record.action.type is ActionType.REDUCE_GRAD:  # above the boxes
            width = (record.end_ms - record.start_ms) * scale
            ranks[record.rank].append(
                f'<rect fill="{_REDUCING}" x="{_LEFT + record.start_ms * scale:.1f}" '
                f'y="{_BOX - _STRIP}" width="{width:.1f}" height="{_STRIP}"><title>{record.action} '
                f"{record.start_ms:.6g}-{record.end_ms:.6g} ms</title></rect>"
            )
    end_x = _LEFT + timeline.makespan_ms * scale + 6
    for rank, boxes in enumerate(ranks):
        y = top + rank * _ROW + (_ROW - _BOX) / 2
        idle = 1 - timeline.busy_ms[rank] / timeline.makespan_ms if timeline.makespan_ms else 0.0
        yield f'<text class="e" x="{_LEFT - 6}" y="{y + 15:g}">rank {rank}</text>'
        yield f'<text x="{end_x:.1f}" y="{y + 15:g}">idle {100 * idle:.0f} %</text>'
        yield f'<g class="n" transform="translate(0 {y:g})">'
        yield from boxes
        yield "</g>"


def _box(record: ActionRecord, module_index: int, inset: int, scale: float) -> str:
    """Return the SVG of a compute action. Its top is `inset` pixels lower."""
    action = record.action
    x = _LEFT + record.start_ms * scale
    width = (record.end_ms - record.start_ms) * scale
    width -= 0.5 if width > 2 else 0.0  # a gap separates adjacent boxes of the same color
    box = (
        f'<rect class="{_class(module_index, action.type)}" x="{x:.1f}" y="{inset}" '
        f'width="{width:.1f}" height="{_BOX - inset}"><title>{action} '
        f"{record.start_ms:.6g}-{record.end_ms:.6g} ms</title></rect>"
    )
    label = f"{action.microbatch}" + (f".{action.sub_microbatch}" if action.sub_microbatch else "")
    if width < 5.2 * len(label) + 2:
        return box
    red, green, blue = _shade(module_index, action.type)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # white text is easier to read
    light = ' class="w"' if is_dark else ""
    return f'{box}<text{light} x="{x + width / 2:.1f}" y="{14.5 + inset / 2:g}">{label}</text>'
