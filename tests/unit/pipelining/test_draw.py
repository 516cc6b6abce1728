"""Tests of plots of a step: valid XML, each task once at its time, hatched idle time."""

import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.timeline import analyze_timeline, simulate_order

SVG = "{http://www.w3.org/2000/svg}"


def step(ranks, microbatches, modules=("vision", "llm")):
    """Return a step with all modules on all ranks, with 0 to 2 sub-microbatches.

    All forward passes precede all backward passes.
    """
    stages = tuple(
        StageSpec(m * ranks + r, module, r, r + 1, (r,))
        for m, module in enumerate(modules)
        for r in range(ranks)
    )
    edges = tuple((i, i + 1) for i in range(len(stages) - 1))
    layout = StageLayout(stages, edges, frozenset({modules[0]}))
    graph = StageGraph(
        layout, microbatches, {modules[0]: tuple(i % 3 for i in range(microbatches))}
    )
    order = [[] for _ in range(ranks)]
    tasks = list(graph.tasks())
    for task in tasks:
        order[graph.rank(task)].append(Action(ActionType.F, *task))
    for task in reversed(tasks):
        order[graph.rank(task)].append(Action(ActionType.B, *task))
    durations = {ActionType.F: 1.0, ActionType.B: 2.0}
    return graph, simulate_order(order, graph, lambda action: durations[action.type])


def boxes(group):
    """Return the boxes of a rank by tooltip."""
    return {
        rect.find(f"{SVG}title").text.split()[0]: rect
        for rect in group.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }


def test_each_task_is_plotted_once_at_its_time():
    graph, records = step(3, 5)
    root = ET.fromstring(timelines_svg("a step", [Panel("plan", records, graph.layout)]))
    rows = root.findall(f"{SVG}g")
    assert len(rows) == 3
    makespan_ms = max(r.end_ms for r in records)
    for rank, row in enumerate(rows):
        plotted = boxes(row)
        rank_records = [r for r in records if r.rank == rank]
        assert sorted(plotted) == sorted(str(r.action) for r in rank_records)
        titles = [t.text.split()[0] for t in row.iter(f"{SVG}title")]
        assert Counter(titles).most_common(1)[0][1] == 1
        for r in rank_records:
            x, width = (float(plotted[str(r.action)].get(k)) for k in ("x", "width"))
            assert x == pytest.approx(64 + r.start_ms * 1060 / makespan_ms, abs=0.1)
            assert width == pytest.approx((r.end_ms - r.start_ms) * 1060 / makespan_ms, abs=0.7)


def test_idle_time_is_hatched_and_summed():
    graph, records = step(3, 5)
    records.append(ActionRecord(1, Action(ActionType.REDUCE_GRAD, 1), 1000.0, 1100.0))
    timeline = analyze_timeline(records, graph.layout)
    svg = timelines_svg("a step", [Panel("plan", records, graph.layout)])
    root = ET.fromstring(svg)
    patterns = {p.get("id") for p in root.iter(f"{SVG}pattern")}
    for rank, row in enumerate(root.findall(f"{SVG}g")):
        hatched = [r for r in row.iter(f"{SVG}rect") if (r.get("fill") or "").startswith("url")]
        assert {r.get("fill")[5:-1] for r in hatched} <= patterns
        idle_ms = sum(float(r.get("width")) for r in hatched) * timeline.makespan_ms / 1060
        assert idle_ms == pytest.approx(timeline.makespan_ms - timeline.busy_ms[rank], rel=1e-2)
    text = " ".join(t.text for t in root.iter(f"{SVG}text"))
    assert f"bubbles {100 * timeline.bubble_fraction:.1f} %" in text
    assert f"DP reduce-scatter {100 * timeline.bubble_fractions['dp_reduce_scatter']:.1f} %" in text
    assert "idle: DP reduce-scatter" in text and "DP all-gather" not in text


def test_large_steps_are_plotted_without_labels():
    graph, records = step(8, 64)
    svg = timelines_svg("large", [Panel("plan", records, graph.layout)], width_px=1200)
    rows = ET.fromstring(svg).findall(f"{SVG}g")
    assert sum(len(boxes(row)) for row in rows) == len(records)
    assert not any(list(row.iter(f"{SVG}text")) for row in rows)
    assert len(svg) < 200 * len(records)
    wide = ET.fromstring(timelines_svg("large", [Panel("plan", records, graph.layout)]))
    assert 1200 < int(wide.get("width")) <= 4000
    graph, records = step(1, 3)
    root = ET.fromstring(timelines_svg("small", [Panel("plan", records, graph.layout)]))
    labels = Counter(t.text for t in root.find(f"{SVG}g").iter(f"{SVG}text"))
    assert labels == {"0": 2, "1": 4, "2": 4, "2.1": 2}


def test_panels_share_axis_and_module_colors():
    graph, fast = step(2, 4)
    slow = [ActionRecord(r.rank, r.action, 2 * r.start_ms, 2 * r.end_ms) for r in fast]
    panels = [Panel("predicted", fast, graph.layout), Panel("measured", slow, graph.layout)]
    root = ET.fromstring(timelines_svg("both", panels))
    above, below = (boxes(root.findall(f"{SVG}g")[i]) for i in (0, 2))
    for name in above:
        x_above, x_below = (float(b[name].get("x")) - 64 for b in (above, below))
        assert x_below == pytest.approx(2 * x_above, abs=0.2)
        assert above[name].get("class") == below[name].get("class")


def test_modules_and_directions_have_different_fills():
    graph, records = step(1, 3, ("vision", "llm"))
    split = [
        ActionRecord(0, Action(kind, stage, 9), 100.0 + i, 101.0 + i)
        for i, (kind, stage) in enumerate(
            (kind, stage) for kind in (ActionType.I, ActionType.W) for stage in (0, 1)
        )
    ]
    svg = timelines_svg("kinds", [Panel("plan", records + split, graph.layout)])
    fills = dict(re.findall(r"\.([FBIW]\d)\{fill:(#[0-9a-f]{6})\}", svg))
    used = {r.get("class") for r in ET.fromstring(svg).iter(f"{SVG}rect")} - {None}
    assert len(used) == 8 == len({fills[name] for name in used})


def test_names_are_escaped_in_svg():
    layout = StageLayout((StageSpec(0, 'a<&">b', 0, 1, (0,)),), ())
    records = [ActionRecord(0, Action(ActionType.F, 0, 0), 0.0, 1.0)]
    root = ET.fromstring(timelines_svg("1 < 2 & 3", [Panel("<x>", records, layout)]))
    text = [t.text for t in root.iter(f"{SVG}text")]
    assert "1 < 2 & 3" in text and "<x>" in text and 'a<&">b: forward' in text


def test_long_legends_break_into_lines():
    names = tuple(f"a_module_with_a_long_name_{i}" for i in range(6))
    graph, records = step(2, 3, names)
    root = ET.fromstring(timelines_svg("many", [Panel("plan", records, graph.layout)]))
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) < width and 0 < float(text.get("y")) < height
    legend = [t for t in root.iter(f"{SVG}text") if t.text.endswith(("forward", "backward"))]
    assert len({t.get("y") for t in legend}) > 1 and len(legend) == 12


def test_empty_step_is_plotted():
    layout = StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ())
    ET.fromstring(timelines_svg("empty", [Panel("plan", [], layout)]))
    with pytest.raises(ValueError, match="panel"):
        timelines_svg("none", [])
