"""Lower bounds of simulated steps: no simulation of a plan is shorter than its bound.

The formula of `search` is an estimate. It includes a warm-up that a schedule may hide and a reserve
that a step may not need, so it can exceed the simulated time and cannot end a search. A bound
contains only work that no schedule can hide:

- A rank runs all its work. The samples of a step are those of the simulation. The most loaded
  replica group runs at least the mean sample time multiplied by the samples per replica. Layers
  are split by the function that splits them for a run.
- Before the last LLM rank starts, a microbatch passes the first stages of all previous ranks. After
  the last rank finishes, the last backward pass returns through them. The work of a generator has a
  forward and a backward pass of the complete LLM around it. These chains use the minimum over all
  samples. The way back is included only for schedules that do not split backward passes.

    rank 0   F........................................B
    rank 1     F..................................B        chain forward, work of the last
    last         |<--- work of the last rank --->|         rank, chain backward

    max over units u:  max(n_u (most loaded rank), n_u (last rank) + k (min chain to it)) + k (LLM)

n_u is the number of samples of a replica, k that of a microbatch, and (LLM) the LLM chain before
generators. Transfers, all-gathers, reductions, idle time, and chains inside encoders and generators
(whose samples can be empty) are omitted.

The memory bound includes states and activations. The first LLM rank saves the activations of the
smallest samples, as many as the schedule has in flight. Other units, and other schedules, use the
average rank of 1F1B, which is the schedule with the fewest microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.pipelining.schedules.layouts import balanced_split

Waiting = Literal["1f1b", "all", "some"]
"""Microbatches whose activations a schedule saves: as (interleaved) 1F1B, all, or at least those of
an average 1F1B rank."""


class SampleSeconds(NamedTuple):
    """Times of one unit for the samples of a step, with one tensor-parallel size."""

    mean_s: float
    """Mean seconds per sample, forward and backward. Samples without input for the unit are
    included."""
    least_forward_s: float
    """Minimum forward seconds over samples. 0 if a sample has no input for the unit."""
    least_backward_s: float
    layer_share: float
    """Minimum fraction of the unit time that one inner layer uses."""


@dataclass(frozen=True, eq=False)
class UnitBound:
    """Bounds of one unit.

    Attributes:
        layer_costs: Cost of each layer, with operations before and after the layers, for the split
            into stages.
        seconds: Times by tensor-parallel size.
        state_bytes: Weights and gradients of the unit.
        sharded_bytes: Bytes that are sharded over data-parallel ranks.
        least_kept_bytes: Activations that the smallest sample saves, by tensor-parallel size.
        layer_kept_share: Minimum fraction of these activations that one inner layer saves.
    """

    layer_costs: Sequence[float]
    seconds: Mapping[int, SampleSeconds]
    state_bytes: float
    sharded_bytes: float
    least_kept_bytes: Mapping[int, float]
    layer_kept_share: float
    _cuts: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)

    def chain_s(self, tensor: int, *, whole_backwards: bool) -> float:
        """Return the minimum time of one sample through the unit, forward and, if unsplit,
        backward."""
        sample = self.seconds[tensor]
        return sample.least_forward_s + whole_backwards * sample.least_backward_s

    def steps_s(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        first: float,
        *,
        stages: int,
        whole_backwards: bool,
    ) -> Float64s:
        """Return the step time bound of the most loaded rank for each option.

        Args:
            sizes_O: Tensor-, data- and pipeline-parallel sizes.
            samples: Samples of the step.
            first: Samples of a microbatch that passes earlier ranks first. 0 if there is no such
                chain.
            stages: Stages per rank.
            whole_backwards: Whether the schedule never splits backward passes.
        """
        bounds_s = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            sample = self.seconds[tensor]
            layers, last_layers, before, _ = self._cut(pipeline, stages)
            work_s = samples / data * sample.mean_s
            chain_s = first * self.chain_s(tensor, whole_backwards=whole_backwards)
            by_layers = max(work_s * layers, work_s * last_layers + chain_s * before)
            bounds_s[option] = max(by_layers * sample.layer_share, work_s / pipeline)
        return bounds_s

    def _cut(self, pipeline: int, stages: int) -> tuple[float, ...]:
        """Return layer counts of a split into stages.

        The counts are those of the rank with the most layers, of the last rank, of the first stages
        before the last rank, and of the first rank. Operations before and after the layers have a
        different efficiency. Ranks therefore count only layers, and one rank has at least the
        average work.
        """
        counted = self._cuts.get((pipeline, stages))
        if counted is None:
            counts = np.array(balanced_split(self.layer_costs, pipeline * stages), float)
            by_stage = counts.reshape(stages, pipeline)
            layers_R = by_stage.sum(axis=0)
            before = float(by_stage[0, :-1].sum())
            counted = float(layers_R.max()), float(layers_R[-1]), before, float(layers_R[0])
            self._cuts[pipeline, stages] = counted
        return counted

    def least_bytes_O(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        microbatches: int,
        behind: int,
        waiting: Waiting = "some",
        stages: int = 1,
    ) -> Float64s:
        """Return the memory bound of a rank for each option.

        Args:
            sizes_O: Tensor-, data- and pipeline-parallel sizes.
            samples: Samples of a microbatch on all replicas of the unit together.
            microbatches: Microbatches of the step.
            behind: Minimum number of pipeline ranks of later units.
            waiting: Microbatches that the schedule saves.
            stages: Stages per rank.
        """
        bounds = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            states = (self.state_bytes + self.sharded_bytes / data) / tensor
            kept = samples / data * self.least_kept_bytes[tensor]
            if waiting == "some":  # an average rank of 1F1B
                count = min((pipeline + 1) / 2 + behind, microbatches)
                bounds[option] = (states + kept * count) / pipeline
                continue
            layers = self._cut(pipeline, stages)[3]
            count = in_flight(waiting, pipeline, stages, behind, microbatches)
            share = layers / len(self.layer_costs)
            bounds[option] = states * share + kept * count * layers * self.layer_kept_share
        return bounds


def in_flight(
    waiting: Waiting, pipeline: int, stages: int, behind: int, microbatches: int
) -> float:
    """Return the minimum number of microbatches that the first rank of a unit saves at once."""
    if waiting == "all":
        return microbatches
    chunks = pipeline * stages + stages * behind
    if stages > 1:  # bursts of interleaved 1F1B, and a second burst before a generator
        chunks += (pipeline - 1) * (1 + (behind > 0))
    return min(chunks / stages, microbatches)
