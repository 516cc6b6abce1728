"""Kernel-level model of the clusters in the Optimus evaluation, for `bubble_scheduling`.

Every layer has four matmuls on each of 8 tensor-parallel ranks, with a collective before and after
each pair of matmuls (Megatron-LM with sequence parallelism). One value is fitted: the compute
efficiency, so that the balanced single pipeline (appendix B) needs 10.43 s on 1536 GPUs as in the
paper.

The paper has the times of all-gather and reduce-scatter in table 1 (0.167 and 0.458 s). Times of
other models are in proportion to the LLM parameters per device. The paper also has the time of a
collective of the largest LLM (0.3 ms). It does not report the number of patches per LLM token.

Encoders split a microbatch into sub-microbatches with at most as many patches as a sequence has
tokens, as with `sub_microbatch_images`. A pipeline of full microbatches would start too slowly.
Nothing is recomputed, so the backward pass of a layer needs twice its forward time.

`torchmm.balance.costs.model` is more accurate, but it places full actions. This model places
kernels into bubbles inside layers, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from support.models.encoder_sizes import EncoderPlan, ParallelSizes
from support.models.layer_pieces import layer_pieces
from support.papers.paper_figures import OPTIMUS_STRONG_SCALING
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.llm_timeline import LlmTimeline, build_llm_timeline
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers, balanced_split

PEAK_FLOPS = 989e12
TENSOR, HEAD_DIM = 8, 128
MICROBATCH, SEQUENCE = 2, 2048
LLM_TOKENS = MICROBATCH * SEQUENCE
GATHER_MS, REDUCE_MS, COLLECTIVE_MS = 167.0, 458.0, 0.3


@dataclass(frozen=True)
class Shape:
    """Stack of layers. Output sizes of matmuls are multiples of the width."""

    name: str
    width: int
    layers: int
    qkv: float = 3.0
    up: float = 4.0
    down: float = 4.0

    def describe(self, kind: str) -> ModuleDescription:
        """Return the module description for memory estimates."""
        heads = self.width // HEAD_DIM
        parameters = round((self.qkv + 1 + self.up + self.down) * self.width**2)
        layer = LayerDescription(
            self.width,
            heads,
            heads,
            HEAD_DIM,
            round(self.down * self.width),
            gated_ffn=self.up > self.down,
            causal=kind == "llm",
            parameters=parameters,
        )
        total = parameters * self.layers
        return ModuleDescription(self.name, kind, (layer,) * self.layers, 0, 0, total)  # type: ignore[arg-type]


GPT_175B, LLAMA_70B = Shape("llm", 12288, 96), Shape("llm", 8192, 80, 1.25 + 1, 7.0, 3.5)
VIT_5B, VIT_10B, VIT_22B = (Shape("vision", width, 48) for width in (3072, 4096, 6144))


@dataclass(frozen=True)
class Model:
    """Row of table 3, 6 or 12, with tensor parallelism 8 and two sequences per microbatch.

    Attributes:
        balanced: Virtual stages per rank of the balanced baseline.
    """

    name: str
    encoders: tuple[Shape, ...]
    llm: Shape
    data: int
    pipeline: int
    virtual: int
    balanced: int
    batch: int

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return prod(self.sizes)

    @property
    def sizes(self) -> ParallelSizes:
        """Parallelism degrees of the LLM."""
        return ParallelSizes(self.data, self.pipeline, TENSOR)

    @property
    def microbatches(self) -> int:
        """Number of microbatches per pipeline."""
        return self.batch // (self.data * MICROBATCH)

    @property
    def exposed(self) -> float:
        """LLM parameters per device, as a fraction of those in table 1."""
        parameters = self.llm.describe("llm").parameters / self.pipeline
        return parameters / (GPT_175B.describe("llm").parameters / 8)


def strong_scaling(gpus: int) -> Model:
    """Return the model of a column of table 5 (table 12)."""
    return Model(f"{gpus} GPUs", (VIT_22B,), GPT_175B, gpus // 64, 8, 12, 12, 1536)


WEAK_SCALING = (
    Model("Model A", (VIT_10B,), LLAMA_70B, 2, 4, 5, 6, 32),
    Model("Model B", (VIT_22B,), LLAMA_70B, 4, 4, 5, 6, 64),
    Model("Model C", (VIT_10B,), GPT_175B, 4, 8, 12, 12, 128),
    Model("Model D", (VIT_22B,), GPT_175B, 8, 8, 12, 12, 256),
)
"""Models of table 3. The 80 layers of LLaMA on 4 ranks have 5 virtual stages of 4 layers."""
TWO_ENCODERS = tuple(
    Model(name, encoders, GPT_175B, 8, 8, 12, 12, 256)
    for name, encoders in (
        ("DualEnc(11B, 5B)", (VIT_10B, VIT_5B)),
        ("DualEnc(22B, 5B)", (VIT_22B, VIT_5B)),
        ("DualEnc(22B, 11B)", (VIT_22B, VIT_10B)),
    )
)
"""Models of table 6."""


@dataclass(frozen=True)
class Speed:
    """Parameters of the model.

    Attributes:
        efficiency: Fraction of peak FLOP/s that computation achieves.
        patches: Patches of each encoder per LLM token.
    """

    efficiency: float
    patches: float

    def kernels_ms(self, shape: Shape, tokens: float) -> tuple[list[float], list[bool]]:
        """Return the forward kernel times of a layer in ms, and True for collectives."""
        per_product = 2 * tokens * shape.width**2
        flops = [
            shape.qkv * per_product + 4 * tokens * SEQUENCE * shape.width,  # and the scores
            per_product,
            shape.up * per_product,
            shape.down * per_product,
        ]
        compute = [n / (TENSOR * PEAK_FLOPS * self.efficiency) * 1e3 for n in flops]
        wire = COLLECTIVE_MS * tokens * shape.width / (LLM_TOKENS * GPT_175B.width)
        half = [wire, compute[0], compute[1], wire]
        durations = [*half, wire, compute[2], compute[3], wire]
        return durations, [True, False, False, True] * 2

    def layer_ms(self, shape: Shape, tokens: float) -> tuple[float, float]:
        """Return the forward times of computation and collectives of a layer in ms."""
        durations, links = self.kernels_ms(shape, tokens)
        wire = sum(d for d, link in zip(durations, links, strict=True) if link)
        return sum(durations) - wire, wire


WHOLE = Speed(1.0, 1.0)
"""Speed with one patch per token, as for tokens of the LLM."""


class Llm:
    """Pipeline of the LLM."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.graph, self.order = _interleaved(model, model.virtual)

    def timeline(self, speed: Speed) -> LlmTimeline:
        """Return the timeline with layer halves of the length of attention and feed-forward."""
        shape, model = self.model.llm, self.model
        durations, _ = speed.kernels_ms(shape, LLM_TOKENS)
        first, second = durations[1] + durations[2], durations[5] + durations[6]
        wire = durations[0]
        layers = shape.layers // (model.pipeline * model.virtual)
        pieces = {
            kind: (wire, times * first, 2 * wire, times * second, wire) * layers
            for kind, times in ((ActionType.F, 1), (ActionType.B, 2))
        }
        merged = {kind: _merged(kernels) for kind, kernels in pieces.items()}
        compute, wires = (value * layers for value in speed.layer_ms(shape, LLM_TOKENS))
        return build_llm_timeline(
            self.graph,
            self.order,
            _stage_costs(model, self.order, lambda stage: compute, lambda stage: wires),
            lambda action: merged[action.type],
            sharding="step",
            overlaps_reduction=True,
        )


def _merged(pieces: Sequence[float]) -> tuple[float, ...]:
    """Return sub-layer chunks: communication, computation, ..., communication."""
    merged = list(pieces[:5])
    for begin in range(5, len(pieces), 5):
        merged[-1] += pieces[begin]
        merged += pieces[begin + 1 : begin + 5]
    return tuple(merged)


def balanced_s(model: Model, speed: Speed) -> float:
    """Return the step time of Megatron-LM balanced: a single pipeline of equal virtual stages."""
    layers = _chain_times(model, speed)
    cuts = chain_layers(model, speed)
    return _chain_s(model, model.balanced, [layers[a : a + n] for a, n in cuts])


def _chain_times(model: Model, speed: Speed) -> list[tuple[float, float]]:
    """Return times of the layers of the encoder and then of the LLM."""
    (encoder,) = model.encoders
    encoder_ms = speed.layer_ms(encoder, LLM_TOKENS * speed.patches)
    return [encoder_ms] * encoder.layers + [
        speed.layer_ms(model.llm, LLM_TOKENS)
    ] * model.llm.layers


def chain_layers(model: Model, speed: Speed) -> list[tuple[int, int]]:
    """Return first layer and number of layers of every virtual stage (appendix B)."""
    costs = [3 * compute + 2 * wire for compute, wire in _chain_times(model, speed)]
    sizes = balanced_split(costs, model.pipeline * model.balanced)
    return list(zip((np.cumsum(sizes) - sizes).tolist(), sizes, strict=True))


def megatron_s(model: Model, speed: Speed) -> float:
    """Return the step time of Megatron-LM, with encoders before the first LLM stage and V = 1.

    Tables 11 and 12 do not list V.
    """
    llm = [speed.layer_ms(model.llm, LLM_TOKENS)] * (model.llm.layers // model.pipeline)
    tokens = LLM_TOKENS * speed.patches
    front = [
        layer_ms for e in model.encoders for layer_ms in [speed.layer_ms(e, tokens)] * e.layers
    ]
    return _chain_s(model, 1, [front + llm, *[llm] * (model.pipeline - 1)])


def _chain_s(model: Model, virtual: int, stages: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the step time of a pipeline whose layers have (computation, collective) times."""
    graph, order = _interleaved(model, virtual)
    sums = [tuple(map(sum, zip(*stage, strict=True))) for stage in stages]
    costs = _stage_costs(model, order, lambda s: sums[s][0], lambda s: sums[s][1])
    pieces = layer_pieces(graph, costs)
    timeline = build_llm_timeline(graph, order, costs, pieces, sharding="step", defer=False)
    return timeline.llm_ps / PICOSECONDS_PER_MS / 1e3


def _interleaved(model: Model, virtual: int) -> tuple[StageGraph, ComputeOrder]:
    chain = ModuleLayers("llm", "llm", (1.0,) * (model.pipeline * virtual))
    layout = colocated_layout([chain], model.pipeline, virtual)
    graph = StageGraph(layout, model.microbatches)
    return graph, interleaved_1f1b(graph)


def _stage_costs(
    model: Model,
    order: ComputeOrder,
    forward: Callable[[int], float],
    wire: Callable[[int], float],
) -> PlanCosts:
    """Return the costs of stages with the forward times `forward` and `wire`."""
    compute, tensor = {}, {}
    for task in dict.fromkeys(Task(a.stage, a.microbatch) for row in order for a in row):
        for kind, times in ((ActionType.F, 1.0), (ActionType.B, 2.0)):
            action = Action(kind, *task)
            tensor[action] = wire(task.stage)
            compute[action] = times * forward(task.stage) + tensor[action]
    # Only the first chunk's gather and the last reduction are not hidden (§2.2).
    gathers, reductions = (
        dict.fromkeys(range(model.pipeline), time_ms * model.exposed)
        for time_ms in (GATHER_MS, REDUCE_MS)
    )
    return PlanCosts(compute, tensor, gathers, reductions)


def fitted(patches: float) -> Speed:
    """Return the efficiency for which the baseline has the step time of the paper.

    Time is linear in 1/efficiency while the critical path does not change.
    """
    model = strong_scaling(1536)
    target_s = OPTIMUS_STRONG_SCALING["Megatron-LM balanced", 1536].seconds.value
    ends = [(inverse, balanced_s(model, Speed(1 / inverse, patches))) for inverse in (2.0, 3.0)]
    for _ in range(3):
        (x0, y0), (x1, y1) = ends[-2:]
        inverse = x1 + (target_s - y1) * (x1 - x0) / (y1 - y0) if y1 != y0 else x1
        ends.append((inverse, balanced_s(model, Speed(1 / inverse, patches))))
    return Speed(1 / ends[-1][0], patches)


def encoder_works(model: Model, speed: Speed, plans: Sequence[EncoderPlan]) -> list[EncoderWork]:
    """Return the kernel-level work of all encoders under their plans."""
    shapes = zip(model.encoders, plans, strict=True)
    return [_work(shape, plan, speed, model.microbatches) for shape, plan in shapes]


def image_parts(speed: Speed) -> int:
    """Return the number of encoder tasks per microbatch.

    Images are independent, so they pass through the encoder pipeline in several tasks. A task has
    at most as many patches as a sequence has tokens.
    """
    return MICROBATCH * ceil(speed.patches)


def _work(shape: Shape, plan: EncoderPlan, speed: Speed, microbatches: int) -> EncoderWork:
    parts = image_parts(speed)
    durations, links = speed.kernels_ms(shape, LLM_TOKENS * speed.patches / parts)
    layers = shape.layers // plan.sizes.pipeline
    backward, backward_links = [], []
    for duration, link in zip(reversed(durations), reversed(links), strict=True):
        times = 1 if link else 2  # gradients of inputs and of weights
        backward += [duration] * times
        backward_links += [link] * times
    tiles = (microbatches * parts, plan.sizes.pipeline, 1)
    return EncoderWork(
        plan.name,
        tuple((index, part) for index in range(microbatches) for part in range(parts)),
        plan.devices_MS,
        np.tile(durations * layers, tiles),
        np.tile(backward * layers, tiles),
        forward_links_K=np.array(links * layers),
        backward_links_K=np.array(backward_links * layers),
    )
