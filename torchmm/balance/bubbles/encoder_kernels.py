"""Encoder work by kernels: actions cut into products and collectives, for bubbles inside of layers.

`encoder_work` has whole actions, which is what a plan places. Optimus' scheduler goes below that
(§4.2): a tensor-parallel collective of the LLM leaves the compute units idle for less than a layer
of an encoder takes, but for longer than one product. Here each of an encoder's actions becomes its
layers' chain: gather, product, product, scatter, once for attention and once for the feed-forward
part. Collectives are marked, so that the scheduler puts them beside computation of the LLM.

A cost model tells times of whole actions. Computation is shared out among products as their weights
are, which gives what stands between two products (scores, norms) to both; collectives are equally
long. Backward, a product is as many kernels as its action takes times as long as forward: gradients
of inputs, of weights, and forward again where a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchmm.balance.bubbles.encoder_work import EncoderWork, encoder_work, pipeline_stages
from torchmm.balance.bubbles.llm_timeline import RankActions
from torchmm.balance.bubbles.scheduler import BubbleSchedule
from torchmm.balance.compiled import Int64s
from torchmm.balance.costs.layers import layer_linears
from torchmm.balance.costs.sizes import Array
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import LayerDescription, ModuleDescription
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph

HALVES = (("query", "key", "value"), ("attention_output",)), (("gate", "up"), ("down",))
"""Products of a layer between which nothing is sent."""


def kernel_work(graph: StageGraph, costs: PlanCosts, module: ModuleDescription) -> EncoderWork:
    """`encoder_work` with kernels in the place of actions.

    Args:
        graph: of the step.
        costs: of the graph; `tensor_ms` is what collectives take.
        module: the encoder, whole.

    Raises:
        SimulationError, ValueError: as `encoder_work`.
    """
    whole = encoder_work(graph, costs, module.name)
    sent = encoder_work(
        graph,
        replace(costs, compute_ms={a: costs.tensor_ms.get(a, 0.0) for a in costs.compute_ms}),
        module.name,
    )
    groups = pipeline_stages(graph, module.name)
    layers = [[stage.stop - stage.start for stage in stages] for stages in groups]
    forward, forward_links = _kernels(
        whole.forward_ms_NSK, sent.forward_ms_NSK, layers, _chain(module.layers[0], 1)
    )
    total = whole.forward_ms_NSK.sum()
    times = max(1, round(float(whole.backward_ms_NSK.sum() / total))) if total else 1
    backward, backward_links = _kernels(
        whole.backward_ms_NSK,
        sent.backward_ms_NSK,
        [own[::-1] for own in layers],
        _chain(module.layers[0], times)[::-1],
    )
    return replace(
        whole,
        forward_ms_NSK=forward,
        backward_ms_NSK=backward,
        forward_links_K=forward_links,
        backward_links_K=backward_links,
    )


def whole_actions(
    schedule: BubbleSchedule, works: Sequence[EncoderWork], kernel: int = -1
) -> BubbleSchedule:
    """The schedule with actions in the place of kernels: each starts when one of its kernels does.

    Args:
        schedule: of `kernel_work`s, or of works `in_pieces`.
        works: the same encoders' `encoder_work`s.
        kernel: which: the last or, 0, the first.
    """

    def chosen(start_ps: Int64s, ms_NSK: Array) -> Int64s:
        return start_ps.reshape(*ms_NSK.shape, -1)[..., kernel]

    forward = zip(schedule.forward_start_ps, works, strict=True)
    backward = zip(schedule.backward_start_ps, works, strict=True)
    return replace(
        schedule,
        works=tuple(works),
        forward_start_ps=tuple(chosen(starts, work.forward_ms_NSK) for starts, work in forward),
        backward_start_ps=tuple(chosen(starts, work.backward_ms_NSK) for starts, work in backward),
    )


def hidden_ms(schedule: BubbleSchedule, graph: StageGraph) -> dict[Action, float]:
    """How much of each encoder action runs inside of the LLM's actions.

    Args:
        schedule: of `kernel_work`s.
        graph: of the step.
    """
    found: dict[Action, float] = {}
    for index, work in enumerate(schedule.works):
        groups = pipeline_stages(graph, work.name)
        devices_NS = work.devices_MS[schedule.pipeline_N[index]]
        for kind, starts_ps, ms_NSK in (
            (ActionType.F, schedule.forward_start_ps[index], work.forward_ms_NSK),
            (ActionType.B, schedule.backward_start_ps[index], work.backward_ms_NSK),
        ):
            for position, stages in enumerate(groups):
                own = stages if kind is ActionType.F else stages[::-1]
                for row, task in enumerate(work.tasks):
                    llm = schedule.llm[devices_NS[row, position] // work.parts]
                    begin = starts_ps[row, position]
                    end = begin + np.rint(ms_NSK[row, position] * PICOSECONDS_PER_MS)
                    inside = _active_ps(llm, end) - _active_ps(llm, begin)
                    sums = inside.reshape(max(map(len, groups)), -1).sum(1) / PICOSECONDS_PER_MS
                    for stage, value in zip(own, sums.tolist(), strict=False):
                        found[Action(kind, stage.index, *task)] = value
    return found


def _active_ps(llm: RankActions, time_ps: Array | Int64s) -> Array:
    """How long a rank's LLM actions have run until given times."""
    edges = np.stack((llm.start_ps, llm.end_ps), 1).reshape(-1)
    ran = np.cumsum(llm.end_ps - llm.start_ps)
    sums = np.stack((ran - (llm.end_ps - llm.start_ps), ran), 1).reshape(-1)
    return np.interp(time_ps, edges, sums)


def _chain(layer: LayerDescription, times: int) -> list[float | None]:
    """A layer's kernels: shares of its computation; None: a collective."""
    linears = {name: a * b for name, (a, b) in layer_linears(layer).items()}
    every = sum(linears.get(name, 0) for half in HALVES for own in half for name in own)
    found: list[float | None] = []
    for half in HALVES:
        shares = [sum(linears.get(name, 0) for name in own) / every for own in half]
        found += [None, *(share / times for share in shares for _ in range(times)), None]
    return found


def _kernels(
    whole_ms_NSK: Array,
    sent_ms_NSK: Array,
    layers: Sequence[Sequence[int]],
    chain: Sequence[float | None],
) -> tuple[Array, np.ndarray]:
    """Durations and which of them communicate.

    Args:
        whole_ms_NSK: of actions.
        sent_ms_NSK: of their collectives.
        layers: by pipeline stage and action.
        chain: of a layer, see `_chain`.
    """
    most = max(max(own) for own in layers)
    links = np.array([share is None for share in chain] * most)
    shares = np.zeros((*whole_ms_NSK.shape[1:], len(links)))
    wires = np.zeros_like(shares)
    for position, own in enumerate(layers):
        for index, count in enumerate(own):
            row = [share or 0.0 for share in chain] * count
            shares[position, index, : len(row)] = np.array(row) / count
            wires[position, index, : len(row)] = links[: len(row)] / (4 * count)
    computed_ms = (whole_ms_NSK - sent_ms_NSK)[..., None] * shares
    found = computed_ms + sent_ms_NSK[..., None] * wires
    return found.reshape(*whole_ms_NSK.shape[:2], -1), np.tile(links, whole_ms_NSK.shape[2])
