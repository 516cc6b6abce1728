"""Picklable requests to a planning process."""

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
from torchmm.pipelining.plan.plan import UnshardMode
from torchmm.pipelining.run.messages import MessageSizes
from torchmm.recipe.parallel_section import ParallelConfig


@dataclass(frozen=True)
class PlanningSetup:
    """Constants of a run.

    Attributes:
        layout: Stages of the pipeline.
        config: [parallel] section of the recipe.
        modules: Encoders, LLM and generator, unsharded.
        sharding: Collectives as in `torchmm.planning.step.plan_step`.
        model: Cost model of the schedule search. None for static schedules, which use FLOPs.
        sizes: Message sizes by module.
        dtype: Dtype of the computation.
        tuning: Selection of the layers that recompute. None if plans do not select layers.
        reduces_early: Whether reductions overlap, as in `torchmm.planning.step.plan_step`.
        planners: Number of planning processes of the machine. Together they use at most half of its
            cores.
    """

    layout: StageLayout
    config: ParallelConfig
    modules: tuple[ModuleDescription, ...]
    sharding: UnshardMode
    model: CostModel | None
    sizes: Mapping[str, MessageSizes] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tuning: LayerTuning | None = None
    reduces_early: bool = False
    planners: int = 1

    @property
    def workers(self) -> int:
        """Number of threads of a search."""
        return min(
            SearchConfig.from_parent(self.config).workers,
            max(1, (os.cpu_count() or 1) // 2 // self.planners),
        )


@dataclass(frozen=True)
class Measured:
    """Measured times of earlier steps. Empty before the first step.

    Attributes:
        rates: Milliseconds per FLOP by module and action type. Static schedules use factors on
            FLOPs instead.
        fits: Measured times of actions by module, action type and rank.
        between_ms: Measured times of messages between two ranks.
    """

    rates: Mapping[ActionKind, float] = field(default_factory=dict)
    fits: Mapping[RankKind, ActionFit] = field(default_factory=dict)
    between_ms: Mapping[Pair, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """A step to plan.

    Attributes:
        step: Number of the step.
        microbatches: Sizes of the microbatches of this data-parallel rank.
        measured: Measured times to plan with.
        seconds: Time limit of the search. If None, only evaluations are limited.
        least_gain: Minimum relative gain of a searched order over natural and static orders.
    """

    step: int
    microbatches: tuple[MicrobatchMeta, ...]
    measured: Measured = field(default_factory=Measured)
    seconds: float | None = None
    least_gain: float = LEAST_GAIN

    @property
    def rates(self) -> Mapping[ActionKind, float]:
        """Milliseconds per FLOP, as in `Measured.rates`."""
        return self.measured.rates
