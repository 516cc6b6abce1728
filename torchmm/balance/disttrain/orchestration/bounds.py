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

from torchmm.balance.numba_utils import Float64s
from torchmm.pipelining.schedules.layouts import balanced_split

SavedMicrobatches = Literal["1f1b", "all", "some"]
"""Microbatches whose activations a schedule saves: as (interleaved) 1F1B, all, or at least those of
an average 1F1B rank."""


class SampleSeconds(NamedTuple):
    """Times of one unit for the samples of a step, with one tensor-parallel size."""

    mean_s: float
    """Mean seconds per sample, forward and backward. Samples without input for the unit are
    included."""
    min_forward_s: float
    """Minimum forward seconds over samples. 0 if a sample has no input for the unit."""
    min_backward_s: float
    min_layer_fraction: float
    """Minimum fraction of the unit time that one inner layer uses."""


@dataclass(frozen=True, eq=False)
class UnitBounds:
    """Bounds of one unit.

    Attributes:
        layer_costs: Cost of each layer, with operations before and after the layers, for the split
            into stages.
        seconds: Times by tensor-parallel size.
        state_bytes: Weights and gradients of the unit.
        sharded_bytes: Bytes that are sharded over data-parallel ranks.
        min_activation_bytes: Activations that the smallest sample saves, by tensor-parallel size.
        min_layer_activation_fraction: Minimum fraction of these activations that one inner layer
            saves.
    """

    layer_costs: Sequence[float]
    seconds: Mapping[int, SampleSeconds]
    state_bytes: float
    sharded_bytes: float
    min_activation_bytes: Mapping[int, float]
    min_layer_activation_fraction: float
    _counts_by_split: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)

    def chain_s(self, tensor: int, *, unsplit_backward: bool) -> float:
        """Return the minimum time of one sample through the unit, forward and, if unsplit,
        backward."""
        sample = self.seconds[tensor]
        return sample.min_forward_s + unsplit_backward * sample.min_backward_s

    def step_bounds_s(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        first: float,
        *,
        stages: int,
        unsplit_backward: bool,
    ) -> Float64s:
        """Return the step time bound of the most loaded rank for each option.

        Args:
            sizes_O: Tensor-, data- and pipeline-parallel sizes.
            samples: Samples of the step.
            first: Samples of a microbatch that passes earlier ranks first. 0 if there is no such
                chain.
            stages: Stages per rank.
            unsplit_backward: Whether the schedule never splits backward passes.
        """
        bounds_s = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            sample = self.seconds[tensor]
            layers, last_layers, preceding_layers, _ = self._layer_counts(pipeline, stages)
            work_s = samples / data * sample.mean_s
            chain_s = first * self.chain_s(tensor, unsplit_backward=unsplit_backward)
            by_layers = max(work_s * layers, work_s * last_layers + chain_s * preceding_layers)
            bounds_s[option] = max(by_layers * sample.min_layer_fraction, work_s / pipeline)
        return bounds_s

    def _layer_counts(self, pipeline: int, stages: int) -> tuple[float, ...]:
        """Return layer counts of a split into stages.

        The counts are those of the rank with the most layers, of the last rank, of the first stages
        before the last rank, and of the first rank. Operations before and after the layers have a
        different efficiency. Ranks therefore count only layers, and one rank has at least the
        average work.
        """
        layer_counts = self._counts_by_split.get((pipeline, stages))
        if layer_counts is None:
            counts = np.array(balanced_split(self.layer_costs, pipeline * stages), float)
            by_stage = counts.reshape(stages, pipeline)
            layers_R = by_stage.sum(axis=0)
            preceding_layers = float(by_stage[0, :-1].sum())
            layer_counts = (
                float(layers_R.max()),
                float(layers_R[-1]),
                preceding_layers,
                float(layers_R[0]),
            )
            self._counts_by_split[pipeline, stages] = layer_counts
        return layer_counts

    def memory_bounds_O(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        microbatches: int,
        later_ranks: int,
        saved_microbatches: SavedMicrobatches = "some",
        stages: int = 1,
    ) -> Float64s:
        """Return the memory bound of a rank for each option.

        Args:
            sizes_O: Tensor-, data- and pipeline-parallel sizes.
            samples: Samples of a microbatch on all replicas of the unit together.
            microbatches: Microbatches of the step.
            later_ranks: Minimum number of pipeline ranks of later units.
            saved_microbatches: Microbatches that the schedule saves.
            stages: Stages per rank.
        """
        bounds = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            states = (self.state_bytes + self.sharded_bytes / data) / tensor
            kept = samples / data * self.min_activation_bytes[tensor]
            if saved_microbatches == "some":  # an average rank of 1F1B
                count = min((pipeline + 1) / 2 + later_ranks, microbatches)
                bounds[option] = (states + kept * count) / pipeline
                continue
            layers = self._layer_counts(pipeline, stages)[3]
            count = min_microbatches_in_flight(
                saved_microbatches, pipeline, stages, later_ranks, microbatches
            )
            share = layers / len(self.layer_costs)
            bounds[option] = (
                states * share + kept * count * layers * self.min_layer_activation_fraction
            )
        return bounds


def min_microbatches_in_flight(
    saved_microbatches: SavedMicrobatches,
    pipeline: int,
    stages: int,
    later_ranks: int,
    microbatches: int,
) -> float:
    """Return the minimum number of microbatches that the first rank of a unit saves at once."""
    if saved_microbatches == "all":
        return microbatches
    chunks = pipeline * stages + stages * later_ranks
    if stages > 1:  # bursts of interleaved 1F1B, and a second burst before a generator
        chunks += (pipeline - 1) * (1 + (later_ranks > 0))
    return min(chunks / stages, microbatches)
