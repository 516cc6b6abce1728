"""Schedules by name (`torchmm.recipe.schedules`), with their stage layouts.

"megatron" and "megatron_balanced" are the baselines of Optimus and PipeWeaver. Both use interleaved
1F1B, which is 1F1B if a rank has one virtual stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b, one_f_one_b, zero_bubble
from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.pipelining.schedules.separated import separated
from torchmm.pipelining.view.file_formats import read_order
from torchmm.recipe.schedules import CSV_PREFIX, find_schedule, functions_by_schedule

OrderFunction = Callable[..., ComputeOrder]
"""Returns the compute order of a graph. Schedules that simulate the step also use `Durations`."""


def _without_durations(order: Callable[[StageGraph], ComputeOrder]) -> OrderFunction:
    return lambda graph, durations=None: order(graph)


ORDERS: dict[str, OrderFunction] = functions_by_schedule(
    {
        "gpipe": _without_durations(gpipe),
        "1f1b": _without_durations(one_f_one_b),
        "interleaved_1f1b": _without_durations(interleaved_1f1b),
        "zero_bubble": _without_durations(zero_bubble),
        "megatron": _without_durations(interleaved_1f1b),
        "megatron_balanced": _without_durations(interleaved_1f1b),
        "separated": separated,
    }
)


def find_order(name: str) -> OrderFunction:
    """Return the schedule with a name. "csv:PATH" reads a compute order from a file.

    A file uses the stages of the separated layout. It matches steps with one number of microbatches
    and sub-microbatches. Other steps raise a PlanError.

    Raises:
        ValueError: The schedule does not exist, or requires a planner.
    """
    if name.startswith(CSV_PREFIX):
        return _without_durations(partial(read_order, Path(name.removeprefix(CSV_PREFIX))))
    if name not in ORDERS:
        raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(ORDERS)}, or csv:PATH")
    return ORDERS[name]


def schedule_layout(
    name: str,
    modules: Sequence[ModuleLayers],
    ranks: int,
    virtual_stages: int = 1,
    segments: Mapping[str, int] | None = None,
) -> StageLayout:
    """Return the stage layout of a schedule.

    Args:
        name: Name of the schedule.
        modules: Encoders, LLM, and generators.
        ranks: Number of pipeline ranks.
        virtual_stages: Virtual stages per rank. In the separated layout, segments of the LLM.
        segments: Segments of each module in the separated layout. Defaults to 1.

    Raises:
        ValueError: The schedule does not exist, or a module has too few layers.
    """
    find_order(name)  # raises if the schedule does not exist
    schedule = find_schedule(name)
    assert schedule is not None
    if virtual_stages != 1 and not schedule.virtual_stages:
        raise ValueError(
            f"{name} with {virtual_stages} virtual stages per rank supports only 1; use "
            "interleaved_1f1b"
        )
    if schedule.cut == "megatron":
        return megatron_layout(modules, ranks, virtual_stages)
    if schedule.cut == "balanced":
        return megatron_balanced_layout(modules, ranks, virtual_stages)
    llm = {module.name: virtual_stages for module in modules if module.kind == "llm"}
    return separated_layout(modules, ranks, llm | dict(segments or {}))
