"""Reordering of a global batch: balanced data-parallel groups with ordered microbatches.

DistTrain §6 as one function of metadata for any placement. `balance_groups` assigns packs to groups
of equal count and work (INTRA). `reorder_microbatches` orders the microbatches of each group for
its pipeline (INTER). The size of a pack is its time in all modules by the cost model. FLOPs rank
text and images wrongly if modules have different efficiencies.

    packs --+--> original order -------------+--> order by the chain --+
            +--> balanced groups ------------+                         +--> arrangement with the
            +--> equal work per index -------+--> unordered -----------+    shortest slowest group
                 (synchronized ranks only)

**Chain.** Orders depend on a *chain*: the positions of a pipeline, with the time of each microbatch
at each position. Classic schedules are chains. Other schedules are modeled as 1F1B over their
ranks, with the stages of all modules on a rank. Orders are then good, but not the best. Modules on
separate ranks are separate positions. If a replica serves several microbatches, its time is
multiplied by their number. Encoders in LLM bubbles have no position, and their planner orders
microbatches itself. Only groups are balanced for them.

**Synchronized ranks.** Ranks of consecutive groups can synchronize in every layer: shards if FSDP2
all-gathers each layer, and ranks that exchange tokens of experts. Equal sums do not help them, so
equal work at the same index is a candidate (`lockstep_slices`). A stage takes as long as on the
slowest of these ranks.

**Selection.** An order that is good for the chain can be bad for the executed plan, and groups with
equal work do not end at the same time. The candidate whose slowest group ends first in the task
graph of the step is selected. This graph has all stages in the order of the schedule, with replicas
assigned as if all tasks took the same time. The predicted step is never longer than in the original
order. If the order depends on the batch, the chain is the criterion, and without a chain the
maximum work of a group. For searched orders, the maximum work is the criterion and the chain only
breaks ties. Searched steps take almost as long as their work for any microbatch order. With the
chain as the criterion, 128 pipelines of 16 ranks with 32 microbatches kept the original order,
although the longest had 1.25 times the mean work.

Groups are formed before microbatches are ordered, because groups with several packs per microbatch
would undo an order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import BlockCache, CostModel
from torchmm.balance.disttrain.reordering.compiled_schedule import (
    CompiledSchedule,
    compile_schedule,
)
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.disttrain.reordering.lockstep_slices import slice_microbatches
from torchmm.balance.disttrain.reordering.microbatch_order import makespans_ms, reorder_microbatches
from torchmm.balance.numba_utils import Float64s, Int64s
from torchmm.common.batch import Imbalance, MicrobatchMeta, SequenceAssignment
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import modules_with_trained_sources
from torchmm.costs.layers import has_trained_parameters
from torchmm.costs.sizes import sequence_sizes
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b, one_f_one_b
from torchmm.recipe.schedules import find_schedule

SEED = 0
StepOrderFunction = Callable[[StageGraph], tuple[StageGraph, ComputeOrder]]
"""Function that returns the order of a step with equal task times, and the replica of each task."""
NS_PER_MS = 1e6
"""Durations are integers in nanoseconds, so that all processors compute equal results."""


class ScheduledLayout(NamedTuple):
    """Stage layout with the schedule that runs it."""

    layout: StageLayout
    schedule: str
    """Name of the schedule in the recipe."""
    step_order: StepOrderFunction | None
    """Order of a step. None if it depends on the batch or splits backward passes."""
    balances_images: bool = False
    """Whether data-parallel ranks share the images of a microbatch. Encoders then take the same
    time on all ranks."""


@dataclass(frozen=True)
class PipelinePositions:
    """Positions of a pipeline.

    Attributes:
        stages: Stages that a microbatch passes at each position.
        ranks: Rank of each position, numbered from 0.
    """

    stages: tuple[tuple[StageSpec, ...], ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_layout(cls, layout: StageLayout, schedule: str) -> PipelinePositions:
        """Return the chain of a run.

        Args:
            layout: Stages of the modules.
            schedule: Name of the schedule in the recipe.
        """
        recipe_schedule = find_schedule(schedule)
        if recipe_schedule is not None and recipe_schedule.one_f_one_b:
            chain = cls._from_stages(
                [
                    [layout.stages[i] for i in virtual_stage]
                    for virtual_stage in layout.virtual_stages
                ]
            )
            if chain.is_round_robin:
                return chain
        by_rank: dict[int, list[StageSpec]] = {}
        for stage in layout.stages:
            by_rank.setdefault(stage.ranks[0], []).append(stage)
        return cls._from_stages(list(by_rank.values()))

    @classmethod
    def _from_stages(cls, positions: Sequence[Sequence[StageSpec]]) -> PipelinePositions:
        numbers: dict[int, int] = {}
        for position in positions:
            numbers.setdefault(position[0].ranks[0], len(numbers))
        ranks = tuple(numbers[position[0].ranks[0]] for position in positions)
        return cls(tuple(tuple(position) for position in positions), ranks)

    @property
    def is_round_robin(self) -> bool:
        """True if all ranks have the same number of positions, in round-robin order."""
        pipeline = 1 + max(self.ranks)
        positions = range(len(self.ranks))
        return len(positions) % pipeline == 0 and self.ranks == tuple(
            i % pipeline for i in positions
        )

    def compile(self, microbatches: int) -> CompiledSchedule | None:
        """Return the program of 1F1B, or interleaved 1F1B, over the positions.

        None if all orders are equally good.
        """
        pipeline = 1 + max(self.ranks)
        if pipeline == 1 or microbatches == 1:
            return None
        stages = tuple(
            StageSpec(i, "chain", i, i + 1, (rank,)) for i, rank in enumerate(self.ranks)
        )
        layout = StageLayout(stages, tuple(pairwise(range(len(stages)))))
        graph = StageGraph(layout, microbatches)
        if len(stages) == pipeline:
            return compile_schedule(one_f_one_b(graph), graph)
        if microbatches % pipeline:
            return None  # not interleaved 1F1B
        return compile_schedule(interleaved_1f1b(graph), graph)


class PackTimes(NamedTuple):
    """Times of every pack at every stage or position, in integer nanoseconds."""

    forward_SN: Float64s
    backward_SN: Float64s

    @property
    def totals_N(self) -> Float64s:
        """Total time of each pack."""
        return (self.forward_SN + self.backward_SN).sum(axis=0)

    def sum_packs(self, microbatches: Int64s) -> tuple[Float64s, Float64s]:
        """Return forward and backward times (G, S, M) of microbatches with packs (G, M, packs)."""
        forward_GSM, backward_GSM = (
            np.moveaxis(ns_SN[:, microbatches].sum(axis=-1), 0, 1) for ns_SN in self
        )
        return forward_GSM, backward_GSM


def _max_group_work(times_GSM: tuple[Float64s, Float64s]) -> float:
    """Return the maximum work of a group in nanoseconds."""
    forward_GSM, backward_GSM = times_GSM
    return float((forward_GSM + backward_GSM).sum(axis=(1, 2)).max())


class StepReorder:
    """Reordering of the packs of global batches.

    Args:
        modules: Encoders, LLM and generator with all layers.
        model: Cost model of the devices of the run.
        scheduled_layout: Stage layout and schedule of the run.
        groups: Number of data-parallel ranks of the data loader.
        microbatch_size: Packs per microbatch.
        balance: Whether packs can change groups.
        order: Whether the microbatches of a group are reordered.
        synchronized: Number of consecutive groups whose ranks synchronize in every layer.
    """

    def __init__(
        self,
        modules: Sequence[ModuleDescription],
        model: CostModel,
        scheduled_layout: ScheduledLayout,
        groups: int,
        microbatch_size: int,
        *,
        balance: bool,
        order: bool,
        synchronized: int = 1,
    ) -> None:
        self._modules = list(modules)
        self._model = model
        layout, schedule, self._step_order, self._balances_images = scheduled_layout
        self._layout = layout
        self._is_searched = schedule == "searched"
        self._positions = PipelinePositions.from_layout(layout, schedule)
        replicas = {stage.module: len(stage.ranks) for stage in layout.stages}
        # LLM replicas inside one plan run microbatches round-robin.
        self._llm_replicas = replicas["llm"]
        self._replica_fractions = {
            name: replicas["llm"] / count for name, count in replicas.items()
        }
        self._groups = groups
        self._synchronized = synchronized if self._llm_replicas == 1 else 1
        self._microbatch_size = microbatch_size
        self._balance = balance
        colocated = replicas["llm"] == 1 < max(replicas.values())
        self._order = order and not colocated
        self._programs: dict[int, CompiledSchedule | None] = {}
        self._steps: dict[int, CompiledSchedule | None] = {}

    def __call__(self, packs: Sequence[MicrobatchMeta]) -> SequenceAssignment:
        """Return the best of several arrangements of the packs by group and microbatch.

        Args:
            packs: Global batch, each pack as a separate microbatch.
        """
        stages = self.stage_times(packs)
        chain = self._position_times(stages)
        sizes_N = chain.totals_N
        pipelines = self._groups * self._llm_replicas
        default = np.arange(len(sizes_N)).reshape(pipelines, -1, self._microbatch_size)
        candidates = [default]
        if self._balance:
            candidates.append(self._form_microbatches(balance_groups(sizes_N, pipelines), sizes_N))
            if self._synchronized > 1:
                candidates.append(self._form_lockstep_slices(stages, sizes_N))
        program = self._compile_positions(default.shape[1]) if self._order else None
        if program is not None:
            candidates += [
                self._order_microbatches(program, microbatches, chain)
                for microbatches in candidates
            ]
        best: Int64s = min(candidates, key=lambda candidate: self._score(candidate, stages, chain))
        mean = sum(float(ns_SN.sum()) for ns_SN in stages) / self._groups
        imbalance = None
        if mean:
            slowest = (
                _max_group_work(self._slowest_ranks(stages, self._interleave_replicas(candidate)))
                for candidate in (default, best)
            )
            imbalance = Imbalance(*(candidate / mean for candidate in slowest))
        return SequenceAssignment(self._interleave_replicas(best).tolist(), imbalance)

    def _score(
        self, microbatches: Int64s, stages: PackTimes, chain: PackTimes
    ) -> tuple[float, float]:
        """Return the time to minimize, and the time that breaks ties, in nanoseconds."""
        ends_ns = self._slowest_group_ns(microbatches, stages, chain)
        work_ns = (
            _max_group_work(self._slowest_ranks(chain, microbatches))
            if self._is_searched
            else ends_ns
        )
        return work_ns, ends_ns

    def _slowest_ranks(self, times: PackTimes, microbatches: Int64s) -> tuple[Float64s, Float64s]:
        """Return forward and backward times (groups, S, M) of the slowest synchronized ranks."""
        forward_GSM, backward_GSM = times.sum_packs(microbatches)
        shape = (-1, self._synchronized, *forward_GSM.shape[1:])
        return forward_GSM.reshape(shape).max(axis=1), backward_GSM.reshape(shape).max(axis=1)

    def _order_microbatches(
        self, program: CompiledSchedule, microbatches: Int64s, times: PackTimes
    ) -> Int64s:
        """Return the microbatches in a good order, the same for synchronized pipelines."""
        slowest = self._slowest_ranks(times, microbatches)
        orders_GM = reorder_microbatches(program, *slowest, seed=SEED)
        orders_GM = orders_GM.repeat(self._synchronized, axis=0)
        return np.take_along_axis(microbatches, orders_GM[:, :, None], axis=1)

    def _form_lockstep_slices(self, stages: PackTimes, sizes_N: Float64s) -> Int64s:
        """Return (groups, microbatches, packs) with equal work at the same index."""
        packs_MB = np.arange(len(sizes_N))[:, None]
        if self._microbatch_size > 1:
            packs_MB = balance_groups(sizes_N, len(sizes_N) // self._microbatch_size)
        ns_SN = stages.forward_SN + stages.backward_SN
        names = [stage.module for stage in self._layout.stages]
        by_module_KN = np.stack(
            [
                ns_SN[[name == module for module in names]].sum(axis=0)
                for name in dict.fromkeys(names)
            ]
        )
        costs_KM = by_module_KN[:, packs_MB].sum(axis=2)
        replicas = self._groups // self._synchronized
        return packs_MB[slice_microbatches(costs_KM, replicas, self._synchronized)]

    def _compile_positions(self, microbatches: int) -> CompiledSchedule | None:
        if microbatches not in self._programs:
            self._programs[microbatches] = self._positions.compile(microbatches)
        return self._programs[microbatches]

    def compile_step(self, microbatches: int) -> CompiledSchedule | None:
        """Return the program of a group in a step, with all stages and replicas.

        None with one rank, or if the order is not known before the step.
        """
        ranks = {rank for stage in self._layout.stages for rank in stage.ranks}
        if self._step_order is None or len(ranks) == 1:
            return None
        layout = replace(self._layout, sub_microbatched=frozenset())
        graph, order = self._step_order(StageGraph(layout, microbatches))
        return compile_schedule(order, graph)

    def _slowest_group_ns(self, microbatches: Int64s, stages: PackTimes, chain: PackTimes) -> float:
        """Return the end time of the slowest group in nanoseconds."""
        arranged = self._interleave_replicas(microbatches)
        count = arranged.shape[1]
        if count not in self._steps:
            self._steps[count] = self.compile_step(count)
        program = self._steps[count]
        times = self._slowest_ranks(stages, arranged)
        if program is None:
            program = self._compile_positions(microbatches.shape[1])
            times = self._slowest_ranks(chain, microbatches)
        if program is None:
            return _max_group_work(times)
        return float(makespans_ms(program, *times).max())

    def _interleave_replicas(self, microbatches: Int64s) -> Int64s:
        """Return the packs as (groups, microbatches, packs).

        LLM replicas inside a plan run microbatches round-robin.
        """
        count = microbatches.shape[1]
        by_group = microbatches.reshape(self._groups, self._llm_replicas, count, -1)
        return np.swapaxes(by_group, 1, 2).reshape(self._groups, self._llm_replicas * count, -1)

    def _form_microbatches(self, members: Int64s, sizes_N: Float64s) -> Int64s:
        """Return the packs as (pipelines, microbatches, packs).

        If packs can move, microbatches have similar sizes.
        """
        pipelines, per_pipeline = members.shape
        count = per_pipeline // self._microbatch_size
        if not self._balance or self._microbatch_size == 1 or count == 1:
            return members.reshape(pipelines, count, self._microbatch_size)
        return np.stack([group[balance_groups(sizes_N[group], count)] for group in members])

    def pack_times_ms(self, packs: Sequence[MicrobatchMeta]) -> tuple[Float64s, Float64s]:
        """Return forward and backward times (S, N) of packs at the positions of the chain in ms."""
        times = self._position_times(self.stage_times(packs))
        return times.forward_SN / NS_PER_MS, times.backward_SN / NS_PER_MS

    def _position_times(self, stages: PackTimes) -> PackTimes:
        """Return the times at the positions of the chain, each with all of its stages."""
        share_PS = np.zeros((len(self._positions.stages), len(self._layout.stages)))
        for position, stages_at in enumerate(self._positions.stages):
            for stage in stages_at:
                share_PS[position, stage.index] = self._replica_fractions[stage.module]
        return PackTimes(*(np.round(share_PS @ ns_SN) for ns_SN in stages))

    def stage_times(self, packs: Sequence[MicrobatchMeta]) -> PackTimes:
        """Return the times of packs at all stages."""
        forward_SN, backward_SN = (
            np.zeros((len(self._layout.stages), len(packs))) for _ in range(2)
        )
        arrives = [modules_with_trained_sources(self._modules, pack) for pack in packs]
        for module in self._modules:
            indices_with_input, sizes = sequence_sizes(module, packs)
            if sizes is None or (self._balances_images and module.kind == "encoder"):
                continue
            needs_input_grad_N = np.array(
                [arrives[i][module.name] for i in indices_with_input], bool
            )
            cache: BlockCache = {}
            for stage in self._layout.stages:
                if stage.module != module.name:
                    continue
                stage_needs_input_grad_N = needs_input_grad_N | (
                    stage.start > 0 and has_trained_parameters(module)
                )
                costs = self._model.stage_costs(
                    module, stage.start, stage.stop, sizes, stage_needs_input_grad_N, cache=cache
                )
                forward_SN[stage.index, indices_with_input] = costs.forward.total_ms
                backward_SN[stage.index, indices_with_input] = costs.backward.total_ms
        return PackTimes(np.round(NS_PER_MS * forward_SN), np.round(NS_PER_MS * backward_SN))
