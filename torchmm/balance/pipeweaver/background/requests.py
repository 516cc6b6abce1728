"""Requests to a planning process, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.pipeweaver.order_search.best_order import LEAST_GAIN
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.balance.rates import ActionFit, ActionKind, RankKind
from torchmm.balance.section import SearchConfig
from torchmm.balance.transfer_times import Pair
from torchmm.common.batch import MicrobatchMeta
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
        reduces_early: see `torchmm.planning.step.plan_step`.
        planners: processes like this one on the machine: together they search on at most half of
            its cores.
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

    @property
    def workers(self) -> int:
        """Threads that search."""
        return min(
            SearchConfig.of(self.config).workers,
            max(1, (os.cpu_count() or 1) // 2 // self.planners),
        )


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
