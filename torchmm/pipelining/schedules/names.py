"""The schedules a recipe can name: which order, on which layout of the modules.

A schedule that treats stages as a chain is used with the layout that cuts all layers into equally
costly stages, except "megatron", which has whole encoders in front of the LLM's first stage.
"megatron" and "megatron_balanced" are the baselines of Optimus and PipeWeaver: interleaved 1F1B,
which is 1F1B where a rank has one virtual stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

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
from torchmm.pipelining.view.exchange import read_order

CSV_PREFIX = "csv:"


class Schedule(NamedTuple):
    """What a name stands for."""

    order: Callable[..., ComputeOrder]
    """Of a graph and, optionally, `Durations`: for planners that play the step through."""
    layout: Literal["separated", "megatron", "balanced"]


def _fixed(order: Callable[[StageGraph], ComputeOrder]) -> Callable[..., ComputeOrder]:
    return lambda graph, durations=None: order(graph)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(_fixed(gpipe), "balanced"),
    "1f1b": Schedule(_fixed(one_f_one_b), "balanced"),
    "interleaved_1f1b": Schedule(_fixed(interleaved_1f1b), "balanced"),
    "zero_bubble": Schedule(_fixed(zero_bubble), "balanced"),
    "megatron": Schedule(_fixed(interleaved_1f1b), "megatron"),
    "megatron_balanced": Schedule(_fixed(interleaved_1f1b), "balanced"),
    "separated": Schedule(separated, "separated"),
}


def schedule_named(name: str) -> Schedule:
    """The schedule of a recipe's name; "csv:PATH" reads the order from a file.

    A file's stages are those of the separated layout. It fits steps of one number of microbatches
    and sub-microbatches only; for others `order` raises a PlanError.

    Raises:
        ValueError: there is no such schedule.
    """
    if name.startswith(CSV_PREFIX):
        path = Path(name.removeprefix(CSV_PREFIX))
        return Schedule(_fixed(partial(read_order, path)), "separated")
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)} and csv:PATH")
    return SCHEDULES[name]


def schedule_layout(
    name: str,
    modules: Sequence[ModuleLayers],
    ranks: int,
    virtual_stages: int = 1,
    segments: Mapping[str, int] | None = None,
) -> StageLayout:
    """Stages for a schedule.

    Args:
        name: of the schedule.
        modules: encoders, LLM, generators.
        ranks: pipeline ranks.
        virtual_stages: per rank; in the separated layout: the LLM's segments.
        segments: by module, in the separated layout only; 1 where none is given.

    Raises:
        ValueError: there is no such schedule, or the modules cannot be cut like this.
    """
    kind = schedule_named(name).layout
    if name == "1f1b" and virtual_stages != 1:
        raise ValueError(
            f"1f1b with {virtual_stages} virtual stages per rank; it has 1, use interleaved_1f1b"
        )
    if kind == "megatron":
        return megatron_layout(modules, ranks, virtual_stages)
    if kind == "balanced":
        return megatron_balanced_layout(modules, ranks, virtual_stages)
    llm = {module.name: virtual_stages for module in modules if module.kind == "llm"}
    return separated_layout(modules, ranks, llm | dict(segments or {}))
