"""Where the packs of a global batch go: balanced data-parallel groups, ordered microbatches.

DistTrain §6 as one function of metadata, for whatever placement: `balance_groups` deals packs to
groups of equal count and work (INTRA), `reorder_microbatches` orders those of each group for its
pipeline (INTER). A pack's size is the time a cost model gives all modules for it, vision, text and
generation alike, so samples with long texts count as much as samples with many images.

What the order depends on is a *chain*: the places in the pipeline with what each does for a
microbatch. Classic schedules are such chains. Others are taken as 1F1B over their ranks, each with
its stages of all modules: orders found so are good there, not best. Modules on ranks of their own
are places of their own; where a replica serves several microbatches at a time, its place takes that
many times as long. Encoders in an LLM's bubbles have no place in the chain; their planner orders
microbatches itself, so there only groups are balanced.

Ranks of consecutive groups may synchronize in every layer: shards, if FSDP2 gathers layer by layer,
and ranks that exchange tokens of experts. Equal sums do not help there, so equal work at the same
index is tried, too (`slices.py`). A stage then takes as long as on the slowest of these ranks.

What is good for a chain may be bad for the plan that runs, and groups with equal work do not end
together. So of as many arrangements as there are, balanced or not and ordered or not, the one is
taken whose slowest group ends first in the step's own graph: all stages, in the order of the
schedule, with tasks dealt to replicas as if all took the same. A step is never arranged to take
longer there. Without such an order the chain is the judge, and without a chain the largest share of
work. It is that, too, where orders are searched: these are nearly as long as the work, whatever
comes first, and the chain only decides between equal shares.

Rejected: the chain where orders are searched: of 128 pipelines of 16 ranks with 32 microbatches
each it left packs where they were, though the longest had 1.25 times the mean's work. FLOPs as
sizes, which rank text and images wrongly wherever efficiencies differ; ordering packs before they
are grouped, as microbatches of several packs would mix them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.costs.model import BlockCache, CostModel
from torchmm.balance.disttrain.reordering.groups import balance_groups
from torchmm.balance.disttrain.reordering.microbatches import makespans_ms, reorder_microbatches
from torchmm.balance.disttrain.reordering.program import StepProgram, compile_order
from torchmm.balance.disttrain.reordering.slices import slice_items
from torchmm.common.batch import Arrangement, Imbalance, MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import gradients_arrive
from torchmm.costs.layers import learns
from torchmm.costs.sizes import pack_sizes
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b, one_f_one_b
from torchmm.recipe.schedules import find_schedule

SEED = 0
OrderOfStep = Callable[[StageGraph], tuple[StageGraph, ComputeOrder]]
"""The order of a step whose tasks all take the same, and which replica runs which of them."""
NS_PER_MS = 1e6
"""Durations are whole nanoseconds, so that ranks with other processors arrange the same."""


class OrderedLayout(NamedTuple):
    """How modules are cut, and in which order a step of them runs."""

    layout: StageLayout
    schedule: str
    """By the recipe's name."""
    order_of_step: OrderOfStep | None
    """None where the order is made from the batch, or splits backwards."""
    shares_images: bool = False
    """Whether data-parallel ranks share the images of a microbatch, so that encoders take the same
    time on all ranks."""


@dataclass(frozen=True)
class Chain:
    """Places of a pipeline.

    Attributes:
        stages: by place: the stages that a microbatch passes there.
        ranks: of each place, from 0 on.
    """

    stages: tuple[tuple[StageSpec, ...], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, layout: StageLayout, schedule: str) -> Chain:
        """The chain of a run.

        Args:
            schedule: by the recipe's name.
        """
        known = find_schedule(schedule)
        if known is not None and known.one_f_one_b:
            found = cls._of([[layout.stages[i] for i in own] for own in layout.virtual_stages])
            if found.regular:
                return found
        by_rank: dict[int, list[StageSpec]] = {}
        for stage in layout.stages:
            by_rank.setdefault(stage.ranks[0], []).append(stage)
        return cls._of(list(by_rank.values()))

    @classmethod
    def _of(cls, places: Sequence[Sequence[StageSpec]]) -> Chain:
        numbers: dict[int, int] = {}
        for own in places:
            numbers.setdefault(own[0].ranks[0], len(numbers))
        ranks = tuple(numbers[own[0].ranks[0]] for own in places)
        return cls(tuple(tuple(own) for own in places), ranks)

    @property
    def regular(self) -> bool:
        """Whether every rank has as many places, which come in turn."""
        pipeline = 1 + max(self.ranks)
        places = range(len(self.ranks))
        return len(places) % pipeline == 0 and self.ranks == tuple(i % pipeline for i in places)

    def program(self, microbatches: int) -> StepProgram | None:
        """1F1B, or interleaved 1F1B, over the places; None where no order is better than others."""
        pipeline = 1 + max(self.ranks)
        if pipeline == 1 or microbatches == 1:
            return None
        places = tuple(
            StageSpec(i, "chain", i, i + 1, (rank,)) for i, rank in enumerate(self.ranks)
        )
        layout = StageLayout(places, tuple(pairwise(range(len(places)))))
        graph = StageGraph(layout, microbatches)
        if len(places) == pipeline:
            return compile_order(one_f_one_b(graph), graph)
        if microbatches % pipeline:
            return None  # not interleaved 1F1B
        return compile_order(interleaved_1f1b(graph), graph)


class PackTimes(NamedTuple):
    """Of every pack at every stage or place, in whole nanoseconds."""

    forward_SN: Float64s
    backward_SN: Float64s

    @property
    def totals_N(self) -> Float64s:
        """Of each pack at all of them."""
        return (self.forward_SN + self.backward_SN).sum(axis=0)

    def of(self, microbatches: Int64s) -> tuple[Float64s, Float64s]:
        """Both (G, S, M) of microbatches, given as (G, M, packs)."""
        forward_GSM, backward_GSM = (
            np.moveaxis(ns_SN[:, microbatches].sum(axis=-1), 0, 1) for ns_SN in self
        )
        return forward_GSM, backward_GSM


def _largest(times_GSM: tuple[Float64s, Float64s]) -> float:
    """The largest share of work, in nanoseconds."""
    forward_GSM, backward_GSM = times_GSM
    return float((forward_GSM + backward_GSM).sum(axis=(1, 2)).max())


class StepReorder:
    """Arranges the packs of one global batch after the other.

    Args:
        modules: encoders, LLM and generator, whole.
        model: of the devices the run has.
        runs: the plan that runs.
        groups: data-parallel ranks, as the loader counts them.
        microbatch_size: packs per microbatch.
        balance: whether packs change groups.
        order: whether a group's microbatches change places.
        synchronized: Number of consecutive groups whose ranks synchronize in every layer.
    """

    def __init__(
        self,
        modules: Sequence[ModuleDescription],
        model: CostModel,
        runs: OrderedLayout,
        groups: int,
        microbatch_size: int,
        *,
        balance: bool,
        order: bool,
        synchronized: int = 1,
    ) -> None:
        self._modules = list(modules)
        self._model = model
        layout, schedule, self._order_of_step, self._shares_images = runs
        self._layout = layout
        self._searches = schedule == "searched"
        self._chain = Chain.of(layout, schedule)
        replicas = {stage.module: len(stage.ranks) for stage in layout.stages}
        # Replicas of the LLM inside one plan take its microbatches in turn.
        self._waves = replicas["llm"]
        self._shares = {name: replicas["llm"] / count for name, count in replicas.items()}
        self._groups = groups
        self._synchronized = synchronized if self._waves == 1 else 1
        self._microbatch_size = microbatch_size
        self._balance = balance
        colocated = replicas["llm"] == 1 < max(replicas.values())
        self._order = order and not colocated
        self._programs: dict[int, StepProgram | None] = {}
        self._steps: dict[int, StepProgram | None] = {}

    def __call__(self, packs: Sequence[MicrobatchMeta]) -> Arrangement:
        """Return the best of several arrangements of the packs by group and microbatch.

        Args:
            packs: Global batch, each pack as a separate microbatch.
        """
        stages = self.stage_times(packs)
        chain = self._at_places(stages)
        sizes_N = chain.totals_N
        pipelines = self._groups * self._waves
        natural = np.arange(len(sizes_N)).reshape(pipelines, -1, self._microbatch_size)
        tried = [natural]
        if self._balance:
            tried.append(self._form(balance_groups(sizes_N, pipelines), sizes_N))
            if self._synchronized > 1:
                tried.append(self._sliced(stages, sizes_N))
        program = self._chain_program(natural.shape[1]) if self._order else None
        if program is not None:
            tried += [self._ordered(program, microbatches, chain) for microbatches in tried]
        best: Int64s = min(tried, key=lambda each: self._judged(each, stages, chain))
        mean = sum(float(ns_SN.sum()) for ns_SN in stages) / self._groups
        imbalance = None
        if mean:
            slowest = (
                _largest(self._slowest_ranks(stages, self._in_turn(each)))
                for each in (natural, best)
            )
            imbalance = Imbalance(*(each / mean for each in slowest))
        return Arrangement(self._in_turn(best).tolist(), imbalance)

    def _judged(
        self, microbatches: Int64s, stages: PackTimes, chain: PackTimes
    ) -> tuple[float, float]:
        """What is to be little, in nanoseconds, and what decides between equals."""
        ends_ns = self._slowest(microbatches, stages, chain)
        work_ns = _largest(self._slowest_ranks(chain, microbatches)) if self._searches else ends_ns
        return work_ns, ends_ns

    def _slowest_ranks(self, times: PackTimes, microbatches: Int64s) -> tuple[Float64s, Float64s]:
        """Return forward and backward times (groups, S, M) of the slowest synchronized ranks."""
        forward_GSM, backward_GSM = times.of(microbatches)
        shape = (-1, self._synchronized, *forward_GSM.shape[1:])
        return forward_GSM.reshape(shape).max(axis=1), backward_GSM.reshape(shape).max(axis=1)

    def _ordered(self, program: StepProgram, microbatches: Int64s, times: PackTimes) -> Int64s:
        """Return the microbatches in a good order, the same for synchronized pipelines."""
        slowest = self._slowest_ranks(times, microbatches)
        orders_GM = reorder_microbatches(program, *slowest, seed=SEED)
        orders_GM = orders_GM.repeat(self._synchronized, axis=0)
        return np.take_along_axis(microbatches, orders_GM[:, :, None], axis=1)

    def _sliced(self, stages: PackTimes, sizes_N: Float64s) -> Int64s:
        """Return (groups, microbatches, packs) with equal work at the same index."""
        packs_MB = np.arange(len(sizes_N))[:, None]
        if self._microbatch_size > 1:
            packs_MB = balance_groups(sizes_N, len(sizes_N) // self._microbatch_size)
        ns_SN = stages.forward_SN + stages.backward_SN
        names = [stage.module for stage in self._layout.stages]
        by_module_KN = np.stack(
            [ns_SN[[name == own for own in names]].sum(axis=0) for name in dict.fromkeys(names)]
        )
        costs_KM = by_module_KN[:, packs_MB].sum(axis=2)
        replicas = self._groups // self._synchronized
        return packs_MB[slice_items(costs_KM, replicas, self._synchronized)]

    def _chain_program(self, microbatches: int) -> StepProgram | None:
        if microbatches not in self._programs:
            self._programs[microbatches] = self._chain.program(microbatches)
        return self._programs[microbatches]

    def step_program(self, microbatches: int) -> StepProgram | None:
        """What a group does in a step, with all its stages and replicas; None where nothing is done
        in turn, or the order is not known."""
        ranks = {rank for stage in self._layout.stages for rank in stage.ranks}
        if self._order_of_step is None or len(ranks) == 1:
            return None
        whole = replace(self._layout, sub_microbatched=frozenset())
        graph, order = self._order_of_step(StageGraph(whole, microbatches))
        return compile_order(order, graph)

    def _slowest(self, microbatches: Int64s, stages: PackTimes, chain: PackTimes) -> float:
        """When the last group ends, in nanoseconds."""
        arranged = self._in_turn(microbatches)
        count = arranged.shape[1]
        if count not in self._steps:
            self._steps[count] = self.step_program(count)
        program = self._steps[count]
        times = self._slowest_ranks(stages, arranged)
        if program is None:
            program = self._chain_program(microbatches.shape[1])
            times = self._slowest_ranks(chain, microbatches)
        if program is None:
            return _largest(times)
        return float(makespans_ms(program, *times).max())

    def _in_turn(self, microbatches: Int64s) -> Int64s:
        """(groups, microbatches, packs): replicas of the LLM inside a plan take turns."""
        count = microbatches.shape[1]
        by_group = microbatches.reshape(self._groups, self._waves, count, -1)
        return np.swapaxes(by_group, 1, 2).reshape(self._groups, self._waves * count, -1)

    def _form(self, members: Int64s, sizes_N: Float64s) -> Int64s:
        """(pipelines, microbatches, packs): equally large microbatches where packs may move."""
        pipelines, per_pipeline = members.shape
        count = per_pipeline // self._microbatch_size
        if not self._balance or self._microbatch_size == 1 or count == 1:
            return members.reshape(pipelines, count, self._microbatch_size)
        return np.stack([own[balance_groups(sizes_N[own], count)] for own in members])

    def pack_ms(self, packs: Sequence[MicrobatchMeta]) -> tuple[Float64s, Float64s]:
        """Milliseconds of forwards and backwards (S, N) of packs at the places of the chain."""
        found = self._at_places(self.stage_times(packs))
        return found.forward_SN / NS_PER_MS, found.backward_SN / NS_PER_MS

    def _at_places(self, stages: PackTimes) -> PackTimes:
        """Of the places of the chain: each with all of its stages."""
        share_PS = np.zeros((len(self._chain.stages), len(self._layout.stages)))
        for place, own in enumerate(self._chain.stages):
            for stage in own:
                share_PS[place, stage.index] = self._shares[stage.module]
        return PackTimes(*(np.round(share_PS @ ns_SN) for ns_SN in stages))

    def stage_times(self, packs: Sequence[MicrobatchMeta]) -> PackTimes:
        """Of all stages."""
        forward_SN, backward_SN = (
            np.zeros((len(self._layout.stages), len(packs))) for _ in range(2)
        )
        arrives = [gradients_arrive(self._modules, pack) for pack in packs]
        for module in self._modules:
            at, sizes = pack_sizes(module, packs)
            if sizes is None or (self._shares_images and module.kind == "encoder"):
                continue
            arrives_N = np.array([arrives[i][module.name] for i in at], bool)
            cache: BlockCache = {}
            for stage in self._layout.stages:
                if stage.module != module.name:
                    continue
                reaches_N = arrives_N | (stage.start > 0 and learns(module))
                costs = self._model.stage_costs(
                    module, stage.start, stage.stop, sizes, reaches_N, cache=cache
                )
                forward_SN[stage.index, at] = costs.forward.total_ms
                backward_SN[stage.index, at] = costs.backward.total_ms
        return PackTimes(np.round(NS_PER_MS * forward_SN), np.round(NS_PER_MS * backward_SN))
