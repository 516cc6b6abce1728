"""What a planning process is told and what it gives back; plain data that crosses processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

import numpy as np
import torch

from torchmm.balance.compiled import Int32s
from torchmm.balance.costs.model import CostModel
from torchmm.balance.pipeweaver.order_search.best_order import LEAST_GAIN
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.balance.rates import ActionFit, ActionKind, RankKind
from torchmm.balance.transfer_times import Pair
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.files import Arrays
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.plan.plan import Gathering
from torchmm.pipelining.run.messages import MessageSizes
from torchmm.recipe.parallel_section import ParallelConfig


@dataclass(frozen=True)
class PlanningSetup:
    """What stays the same during a run.

    Attributes:
        model: what actions cost on the run's device, where orders are searched with it; None: the
            order is the schedule's, by FLOPs.
        sizes: of messages, by module.
        dtype: in which modules compute.
        tuning: how plans choose what layers recompute; None: they do not.
        reduces_early: see `torchmm.planning.step.Choices`.
        planners: processes like this one on the machine: together they search on at most half of
            its cores.
        idle: whether the process runs only when nothing else wants its core; else it gets the
            little that others of the lowest priority get.
    """

    layout: StageLayout
    config: ParallelConfig
    modules: tuple[ModuleDescription, ...]
    sharding: Gathering
    model: CostModel | None
    sizes: Mapping[str, MessageSizes] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tuning: LayerTuning | None = None
    reduces_early: bool = False
    planners: int = 1
    idle: bool = True

    @property
    def workers(self) -> int:
        """Threads that search."""
        return min(self.config.search.workers, max(1, (os.cpu_count() or 1) // 2 // self.planners))


@dataclass(frozen=True)
class Measured:
    """Times of earlier steps; empty: nothing was measured yet.

    Attributes:
        rates: milliseconds per FLOP, of all kinds of actions. Where nothing is searched: factors on
            FLOPs, or none.
        fits: what actions of a rank take, as far as that was measured.
        between_ms: what messages take between two ranks, likewise.
    """

    rates: Mapping[ActionKind, float] = field(default_factory=dict)
    fits: Mapping[RankKind, ActionFit] = field(default_factory=dict)
    between_ms: Mapping[Pair, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """A step to be planned.

    Attributes:
        step: its number.
        microbatches: of this data-parallel rank.
        measured: what to plan with.
        seconds: to search in; None: as long as all evaluations take.
        least_gain: share by which a searched order has to be faster than natural and static ones.
    """

    step: int
    microbatches: tuple[MicrobatchMeta, ...]
    measured: Measured = field(default_factory=Measured)
    seconds: float | None = None
    least_gain: float = LEAST_GAIN

    @property
    def rates(self) -> Mapping[ActionKind, float]:
        """Of actions."""
        return self.measured.rates


@dataclass(frozen=True)
class PlannedStep:
    """A plan for a step, and what it is worth.

    Attributes:
        step: its number.
        numbers: `encode_plan`.
        planner_ms: since the request came.
        planner: what the order comes from (`SearchedOrder`); None: the recipe's schedule.
        predicted_ms: what forwards and backwards are to take in this order; None before anything
            was measured, and where nothing was searched.
        gain_over_natural: how much longer they would take in natural order, as a share; None
            where that does not fit into memory, or nothing was searched.
        evaluations: of the search; None: there was none.
        finished: whether the search was done.
    """

    step: int
    numbers: Int32s
    planner_ms: float
    planner: str | None = None
    predicted_ms: float | None = None
    gain_over_natural: float | None = None
    evaluations: int | None = None
    finished: bool = True

    def arrays(self) -> Arrays:
        """For a file."""
        values = {
            "step": self.step,
            "numbers": self.numbers,
            "planner_ms": self.planner_ms,
            "planner": self.planner or "",
            "predicted_ms": nan if self.predicted_ms is None else self.predicted_ms,
            "gain_over_natural": nan if self.gain_over_natural is None else self.gain_over_natural,
            "evaluations": self.evaluations or 0,
            "finished": self.finished,
        }
        return {name: np.asarray(value) for name, value in values.items()}

    @classmethod
    def of(cls, found: Arrays) -> PlannedStep:
        """From a file."""
        values: dict[str, Any] = {n: a if a.ndim else a.item() for n, a in found.items()}
        for name in ("predicted_ms", "gain_over_natural"):
            values[name] = None if isnan(values[name]) else values[name]
        for name in ("planner", "evaluations"):
            values[name] = values[name] or None
        return cls(**values)
