"""The schedules of recipes: one table with their properties and requirements.

Pure data, so that recipes are checked without torch. `torchmm.pipelining.schedules.registry` has
the functions of schedules that depend only on the graph of a step. Extensions provide the functions
of schedules that require costs, as entries of the table "schedules" (`torchmm.planning.step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

Placement = Literal["interleaved", "colocated", "disaggregated"]

LlmSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "searched"]
"""Schedules that can also order the LLM alone, with encoders in its bubbles."""

CSV_PREFIX = "csv:"
"""Prefix of the path of a CSV file with a schedule."""


class Schedule(NamedTuple):
    """Properties of a named schedule."""

    cut: Literal["balanced", "megatron", "separated", "colocated"]
    """Partition into stages.

    "balanced" splits the layers of all modules into stages of equal cost. "megatron" places
    complete encoders before the first LLM stage. "separated" assigns every module separate stages
    on all pipeline ranks. "colocated" assigns encoders separate pipelines.
    """
    placements: tuple[Placement, ...] = ("interleaved",)
    """Supported values of `parallel.placement`."""
    planned: bool = False
    """Whether the schedule requires costs, and therefore an extension with this name."""
    one_f_one_b: bool = False
    """Whether it is 1F1B or interleaved 1F1B over one pipeline of virtual stages."""
    virtual_stages: bool = True
    """Whether a rank may have several virtual stages."""
    splits_backward: bool = False
    """Whether gradients of inputs and weights are computed in separate actions."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("balanced", ("interleaved", "disaggregated")),
    "1f1b": Schedule(
        "balanced", ("interleaved", "disaggregated"), one_f_one_b=True, virtual_stages=False
    ),
    "interleaved_1f1b": Schedule("balanced", ("interleaved", "disaggregated"), one_f_one_b=True),
    "zero_bubble": Schedule("balanced", ("interleaved", "disaggregated"), splits_backward=True),
    "megatron": Schedule("megatron", one_f_one_b=True),
    "megatron_balanced": Schedule("balanced", one_f_one_b=True),
    "separated": Schedule("separated", ("interleaved", "disaggregated")),
    "searched": Schedule("separated", planned=True),
    "optimus": Schedule("colocated", ("colocated",), planned=True),
}


def find_schedule(name: str) -> Schedule | None:
    """Return the schedule of a name or "csv:PATH", or None for unknown names."""
    return Schedule("separated") if name.startswith(CSV_PREFIX) else SCHEDULES.get(name)


def schedules_for(placement: Placement) -> tuple[str, ...]:
    """Return the schedule names for a placement of modules, without "csv:PATH"."""
    return tuple(name for name, schedule in SCHEDULES.items() if placement in schedule.placements)


def functions_by_schedule(functions: Mapping[str, T]) -> dict[str, T]:
    """Return the functions of all schedules that require no costs, in the order of `SCHEDULES`.

    Raises:
        ValueError: A function is missing, or `SCHEDULES` does not have its name.
    """
    names = [name for name, schedule in SCHEDULES.items() if not schedule.planned]
    if set(functions) != set(names):
        raise ValueError(
            f"the schedules {sorted(functions)} have functions, but the table lists "
            f"{sorted(names)}; register a function for each schedule, and add new schedules "
            "to torchmm/recipe/schedules.py"
        )
    return {name: functions[name] for name in names}
