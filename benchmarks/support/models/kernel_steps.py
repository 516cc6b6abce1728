"""Optimus with kernels in bubbles inside the LLM's layers: what its steps take at best.

`optimus` makes plans at action granularity. Here encoders are placed kernel by kernel, as in the
paper (§4.2): a tensor-parallel collective of the LLM is shorter than an encoder layer, but longer
than one matmul. Each encoder action becomes its layers' chain:
gather, product, product, scatter, once for attention and once for the feed-forward block.
Collectives are marked, so that the scheduler places them alongside computation of the LLM. The LLM
may have any order, a searched one included (PipeWeaver's search, on the LLM alone).

The cost model has times of complete actions. Computation is divided among products in proportion to
their weights, which attributes what is between two products (scores, norms) to both;
collectives are equally long. Backward, a product is as many kernels as its action takes times as
long as forward: gradients of inputs, of weights, and forward again where a layer is recomputed.

A plan has complete actions. Here each is at its last kernel, and takes as long as the part
of it that is *not* inside the LLM's actions: so the one simulator times these steps like all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from support.models.layer_pieces import layer_pieces
from torchmm.balance.numba_utils import Int64s
from torchmm.balance.optimus.action_order import (
    assign_encoder_replicas,
    build_action_order,
    merge_kernels,
)
from torchmm.balance.optimus.bubble_scheduler import BubbleSchedule, fill_bubbles
from torchmm.balance.optimus.encoder_work import EncoderWork, encoder_work, pipeline_stages
from torchmm.balance.optimus.llm_schedules import SEARCHED, microbatch_sequences
from torchmm.balance.optimus.llm_timeline import RankActions, build_llm_timeline
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import StepSearch
from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.layers import layer_linears
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, UnshardMode
from torchmm.pipelining.schedules.colocated import backbone_order, encoder_names
from torchmm.pipelining.schedules.registry import find_order

HALVES = (("query", "key", "value"), ("attention_output",)), (("gate", "up"), ("down",))
"""Products of a layer between which nothing is sent."""


class KernelStep(NamedTuple):
    """Result of `optimus_kernels`."""

    graph: StageGraph
    """The step's, with the replica that runs each encoder task."""
    order: ComputeOrder
    schedule: BubbleSchedule
    """Schedule of kernels."""
    hidden_ms: dict[Action, float]
    """Time of the kernels of each encoder action during LLM actions."""

    def costs(self, costs: PlanCosts) -> PlanCosts:
        """Return the costs of the step without the hidden time."""
        compute, tensor = dict(costs.compute_ms), dict(costs.tp_comm_ms)
        for action, hidden in self.hidden_ms.items():
            if action in compute:
                compute[action] = max(0.0, compute[action] - hidden)
                tensor[action] = min(tensor.get(action, 0.0), compute[action])
        return replace(costs, compute_ms=compute, tp_comm_ms=tensor)


def optimus_kernels(
    graph: StageGraph,
    costs: PlanCosts,
    modules: Sequence[ModuleDescription],
    *,
    llm_schedule: str = "interleaved_1f1b",
    sharding: UnshardMode = "none",
    evaluations: int = 256,
) -> KernelStep:
    """Return the shortest step found.

    Args:
        graph: Graph of a colocated layout (`torchmm.pipelining.schedules.colocated`).
        costs: Costs of the graph.
        modules: Complete encoders, LLM and generator.
        llm_schedule: Name of a classic schedule for the LLM alone, or "searched".
        sharding: Argument of `optimus`.
        evaluations: Argument of `fill_bubbles` and of the search for the LLM.

    Raises:
        SimulationError: A cost is missing or not a duration.
        ValueError: As for `optimus`, or no searched order fits into memory.
    """
    names = encoder_names(graph.layout)
    encoders = [module for name in names for module in modules if module.name == name]
    works = [kernel_work(graph, costs, module) for module in encoders]
    best: BubbleSchedule | None = None
    for sequence in microbatch_sequences(graph, costs):
        schedule = _schedule(llm_schedule, costs, sequence, evaluations)
        order = backbone_order(graph, schedule, sequence)
        pieces = layer_pieces(graph, costs)
        timeline = build_llm_timeline(graph, order, costs, pieces, sharding=sharding)
        candidate = fill_bubbles(timeline, works, evaluations=evaluations)
        if best is None or candidate.total_ms < best.total_ms:
            best = candidate
    assert best is not None
    placed = assign_encoder_replicas(graph, best)
    actions = merge_kernels(best, [encoder_work(graph, costs, name) for name in names])
    return KernelStep(placed, build_action_order(actions, placed), best, hidden_ms(best, placed))


def _schedule(
    name: str, costs: PlanCosts, sequence: Sequence[int], evaluations: int
) -> Callable[[StageGraph], ComputeOrder]:
    """Return the schedule of a backbone with a given sequence of microbatches."""
    if name != SEARCHED:
        return find_order(name)

    def searched(backbone: StageGraph) -> ComputeOrder:
        stages = max(action.stage for action in costs.compute_ms) + 1
        offset = stages - len(backbone.layout.stages)
        place = {microbatch: index for index, microbatch in enumerate(sequence)}
        compute = {
            action._replace(stage=action.stage - offset, microbatch=place[action.microbatch]): ms
            for action, ms in costs.compute_ms.items()
            if action.stage >= offset
        }
        step = StepSearch(backbone, PlanCosts(compute))
        return step.search(SearchBudget(evaluations=evaluations), SearchSettings()).order

    return searched


def kernel_work(graph: StageGraph, costs: PlanCosts, module: ModuleDescription) -> EncoderWork:
    """Return `encoder_work` with kernels in place of actions.

    Args:
        graph: Graph of the step.
        costs: Costs of the graph; `tp_comm_ms` is the time of collectives.
        module: Complete encoder.

    Raises:
        SimulationError, ValueError: As for `encoder_work`.
    """
    work = encoder_work(graph, costs, module.name)
    sent = encoder_work(
        graph,
        replace(costs, compute_ms={a: costs.tp_comm_ms.get(a, 0.0) for a in costs.compute_ms}),
        module.name,
    )
    groups = pipeline_stages(graph, module.name)
    layers = [[stage.stop - stage.start for stage in stages] for stages in groups]
    forward, forward_links = _kernels(
        work.forward_ms_NSK, sent.forward_ms_NSK, layers, _chain(module.layers[0], 1)
    )
    total = work.forward_ms_NSK.sum()
    times = max(1, round(float(work.backward_ms_NSK.sum() / total))) if total else 1
    backward, backward_links = _kernels(
        work.backward_ms_NSK,
        sent.backward_ms_NSK,
        [layer[::-1] for layer in layers],
        _chain(module.layers[0], times)[::-1],
    )
    return replace(
        work,
        forward_ms_NSK=forward,
        backward_ms_NSK=backward,
        forward_links_K=forward_links,
        backward_links_K=backward_links,
    )


def hidden_ms(schedule: BubbleSchedule, graph: StageGraph) -> dict[Action, float]:
    """Return the time of each encoder action that overlaps with LLM actions.

    Args:
        schedule: Schedule of `kernel_work`s.
        graph: Graph of the step.
    """
    hidden: dict[Action, float] = {}
    for index, work in enumerate(schedule.works):
        groups = pipeline_stages(graph, work.name)
        devices_NS = work.devices_MS[schedule.pipeline_N[index]]
        for kind, starts_ps, ms_NSK in (
            (ActionType.F, schedule.forward_start_ps[index], work.forward_ms_NSK),
            (ActionType.B, schedule.backward_start_ps[index], work.backward_ms_NSK),
        ):
            for position, stages in enumerate(groups):
                ordered = stages if kind is ActionType.F else stages[::-1]
                for row, task in enumerate(work.tasks):
                    llm = schedule.llm[devices_NS[row, position] // work.devices_per_rank]
                    begin = starts_ps[row, position]
                    end = begin + np.rint(ms_NSK[row, position] * PICOSECONDS_PER_MS)
                    inside = _active_ps(llm, end) - _active_ps(llm, begin)
                    sums = inside.reshape(max(map(len, groups)), -1).sum(1) / PICOSECONDS_PER_MS
                    for stage, value in zip(ordered, sums.tolist(), strict=False):
                        hidden[Action(kind, stage.index, *task)] = value
    return hidden


def _active_ps(llm: RankActions, time_ps: Array | Int64s) -> Array:
    """Return the accumulated time of the LLM actions of a rank at given times."""
    edges = np.stack((llm.start_ps, llm.end_ps), 1).reshape(-1)
    ran = np.cumsum(llm.end_ps - llm.start_ps)
    sums = np.stack((ran - (llm.end_ps - llm.start_ps), ran), 1).reshape(-1)
    return np.interp(time_ps, edges, sums)


def _chain(layer: LayerDescription, times: int) -> list[float | None]:
    """Return the kernels of a layer as fractions of its computation; None is a collective."""
    linears = {name: a * b for name, (a, b) in layer_linears(layer).items()}
    total = sum(linears.get(name, 0) for half in HALVES for pair in half for name in pair)
    kernels: list[float | None] = []
    for half in HALVES:
        shares = [sum(linears.get(name, 0) for name in pair) / total for pair in half]
        kernels += [None, *(share / times for share in shares for _ in range(times)), None]
    return kernels


def _kernels(
    whole_ms_NSK: Array,
    sent_ms_NSK: Array,
    layers: Sequence[Sequence[int]],
    chain: Sequence[float | None],
) -> tuple[Array, np.ndarray]:
    """Return durations of kernels, and which kernels communicate."""
    most_kernels = max(max(layer_kernels) for layer_kernels in layers)
    links = np.array([share is None for share in chain] * most_kernels)
    shares = np.zeros((*whole_ms_NSK.shape[1:], len(links)))
    wires = np.zeros_like(shares)
    for position, layer_kernels in enumerate(layers):
        for index, count in enumerate(layer_kernels):
            row = [share or 0.0 for share in chain] * count
            shares[position, index, : len(row)] = np.array(row) / count
            wires[position, index, : len(row)] = links[: len(row)] / (4 * count)
    computed_ms = (whole_ms_NSK - sent_ms_NSK)[..., None] * shares
    kernel_ms = computed_ms + sent_ms_NSK[..., None] * wires
    return kernel_ms.reshape(*whole_ms_NSK.shape[:2], -1), np.tile(links, whole_ms_NSK.shape[2])
