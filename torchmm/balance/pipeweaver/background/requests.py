"""Picklable requests to a planning process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.online_calibration import ActionKind, ActionTimeFit, RankKind
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.schedule_search.step_search import MIN_GAIN
from torchmm.balance.section import SearchConfig
from torchmm.balance.transfer_times import RankPair
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
class StepTimings:
    """Measured times of earlier steps. Empty before the first step.

    Attributes:
        rates: Milliseconds per FLOP by module and action type. Static schedules use factors on
            FLOPs instead.
        fits: Measured times of actions by module, action type and rank.
        rank_pair_ms: Measured times of messages between two ranks.
    """

    rates: Mapping[ActionKind, float] = field(default_factory=dict)
    fits: Mapping[RankKind, ActionTimeFit] = field(default_factory=dict)
    rank_pair_ms: Mapping[RankPair, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """A step to plan.

    Attributes:
        step: Number of the step.
        microbatches: Sizes of the microbatches of this data-parallel rank.
        measured: Measured times to plan with.
        seconds: Time limit of the search. If None, only evaluations are limited.
        min_gain: Minimum relative gain of a searched order over default and static orders.
    """

    step: int
    microbatches: tuple[MicrobatchMeta, ...]
    measured: StepTimings = field(default_factory=StepTimings)
    seconds: float | None = None
    min_gain: float = MIN_GAIN

    @property
    def rates(self) -> Mapping[ActionKind, float]:
        """Milliseconds per FLOP, as in `StepTimings.rates`."""
        return self.measured.rates
