"""Bounds of what a simulation can find: no step of a plan is simulated to be shorter.

The formula of `search` estimates. It counts a warm-up that orders may hide and a reserve that a
step may not need, so it can be above what is simulated, and ends no search. What cannot be hidden,
whatever the schedule:

- a rank does all its work. The samples of a step are those of the simulation, so their mean times
  the share of a replica is what a rank of the busiest replica group does at least; layers are cut
  by the function that cuts them for a run;
- before the last rank of the LLM begins, some microbatch passes forward through the first stages
  of the ranks before it, and the last backward passes back there; around a generator's work stand
  a forward and a backward of the whole LLM. Counted with the least that any sample takes, and the
  way back only for schedules whose backwards are whole.

    max over units u:  max(n_u (fullest rank), n_u (last rank) + k (least chain to it)) + k (LLM)

n_u are the samples of a replica, k those of a microbatch, (LLM) its chain in front of generators.
Left out, so that the bound is one: transfers, gathering and reduction, waiting, and the chains
inside of encoders and generators, whose samples may be empty.

Memory is bounded as well: states, and activations of as many of the leanest samples as wait on the
LLM's first rank, where the schedule says how many; of other units, and under other schedules, as
many as 1F1B, of all schedules here the one that keeps fewest, has on an average rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.pipelining.schedules.layouts import balanced_cuts

Waiting = Literal["1f1b", "all", "some"]
"""Which microbatches a schedule keeps: as (interleaved) 1F1B does, all, or at least an average
rank's under 1F1B."""


class SampleSeconds(NamedTuple):
    """One unit's time for the samples of a step, with one tensor-parallel size."""

    mean_s: float
    """Of a sample, forward and backward, over all samples, those with nothing for the unit too."""
    least_forward_s: float
    """Of the sample that takes least; 0 if one has nothing for the unit."""
    least_backward_s: float
    layer_share: float
    """What one inner layer takes of the whole, at least."""


@dataclass(frozen=True, eq=False)
class UnitBound:
    """One unit.

    Attributes:
        layer_costs: by layer, with what stands before and after the layers, as they are cut by.
        seconds: by tensor-parallel size.
        state_bytes: weights and gradients of the whole unit.
        sharded_bytes: what data-parallel ranks divide.
        least_kept_bytes: by tensor-parallel size: of the leanest sample, until its backward.
        layer_kept_share: what the leanest inner layer keeps of that, at least.
    """

    layer_costs: Sequence[float]
    seconds: Mapping[int, SampleSeconds]
    state_bytes: float
    sharded_bytes: float
    least_kept_bytes: Mapping[int, float]
    layer_kept_share: float
    _cuts: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)

    def chain_s(self, tensor: int, *, whole_backwards: bool) -> float:
        """Passing the unit with one sample, forward, and back after all else."""
        own = self.seconds[tensor]
        return own.least_forward_s + whole_backwards * own.least_backward_s

    def steps_s(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        first: float,
        *,
        stages: int,
        whole_backwards: bool,
    ) -> Float64s:
        """The busiest rank's step, by option.

        Args:
            sizes_O: tensor, data, pipeline.
            samples: of the step.
            first: of a microbatch, where something has to pass ranks before; 0: nothing has to.
            stages: per rank.
        """
        found = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            own = self.seconds[tensor]
            layers, last_layers, before, _ = self._cut(pipeline, stages)
            work_s = samples / data * own.mean_s
            chain_s = first * self.chain_s(tensor, whole_backwards=whole_backwards)
            by_layers = max(work_s * layers, work_s * last_layers + chain_s * before)
            found[option] = max(by_layers * own.layer_share, work_s / pipeline)
        return found

    def _cut(self, pipeline: int, stages: int) -> tuple[float, ...]:
        """Layers of the fullest rank, of the last one, of the first stages before that, and of the
        first rank. Beside layers stand ends, of another efficiency: no rank has less than its
        layers, and one no less than the average."""
        found = self._cuts.get((pipeline, stages))
        if found is None:
            counts = np.array(balanced_cuts(self.layer_costs, pipeline * stages), float)
            by_stage = counts.reshape(stages, pipeline)
            layers_R = by_stage.sum(axis=0)
            before = float(by_stage[0, :-1].sum())
            found = float(layers_R.max()), float(layers_R[-1]), before, float(layers_R[0])
            self._cuts[pipeline, stages] = found
        return found

    def least_bytes_O(
        self,
        sizes_O: Sequence[tuple[int, int, int]],
        samples: float,
        microbatches: int,
        behind: int,
        waiting: Waiting = "some",
        stages: int = 1,
    ) -> Float64s:
        """Memory of a rank, at least, by option.

        Args:
            sizes_O: tensor, data, pipeline.
            samples: of a microbatch, on all of the unit's replicas together.
            microbatches: of the step.
            behind: pipeline ranks of units after this one, at least.
            waiting: what is known of the schedule.
            stages: per rank.
        """
        found = np.empty(len(sizes_O))
        for option, (tensor, data, pipeline) in enumerate(sizes_O):
            states = (self.state_bytes + self.sharded_bytes / data) / tensor
            kept = samples / data * self.least_kept_bytes[tensor]
            if waiting == "some":  # an average rank's
                count = min((pipeline + 1) / 2 + behind, microbatches)
                found[option] = (states + kept * count) / pipeline
                continue
            layers = self._cut(pipeline, stages)[3]
            count = in_flight(waiting, pipeline, stages, behind, microbatches)
            share = layers / len(self.layer_costs)
            found[option] = states * share + kept * count * layers * self.layer_kept_share
        return found


def in_flight(
    waiting: Waiting, pipeline: int, stages: int, behind: int, microbatches: int
) -> float:
    """Microbatches that a unit's first rank keeps at once, at least."""
    if waiting == "all":
        return microbatches
    chunks = pipeline * stages + stages * behind
    if stages > 1:  # bursts of interleaved 1F1B, and once more in front of a generator
        chunks += (pipeline - 1) * (1 + (behind > 0))
    return min(chunks / stages, microbatches)
