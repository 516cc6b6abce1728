"""FLOPs of the forward and backward passes of encoders, LLM and generator.

FLOPs are those of the mathematics, not of the executed kernels. A multiply-add of a matmul is two
FLOPs. Norms, softmax, element-wise operators, padding and recomputed activations are not included.
Attention among L tokens has 4 * heads * head_dim * L * min(L, window) FLOPs, with L per packed
document or per image. Causal masks do not halve this count. `torch.utils.flop_counter` and PaLM
(arXiv 2204.02311, appendix B) have the same convention.

A backward pass has the FLOPs of the forward pass once per required gradient:

    module                                    inputs              weights
    trainable, with trainable sources         dense + 2 * pairs   dense
    trainable, without trainable sources      within the module   dense
    frozen, with trainable sources            dense + 2 * pairs   -
    frozen, with adapters                     within the module   adapters
    frozen, without trainable sources         -                   -

`dense` is the FLOPs of matmuls with weights. `pairs` is the FLOPs of matmuls between activations,
which have two inputs and no weights.

Partitioning modules into stages and ordering tasks require only FLOPs, which are a common unit of
all modules. FLOPs depend on the contents of microbatches: a data set with many images results in
more encoder ranks, and a microbatch with many images in longer encoder tasks. The efficiency of
devices is in `torchmm.balance.costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.blocks import (
    GradientFlags,
    LayerBlock,
    ModuleBlock,
    required_gradients,
    stage_blocks,
)
from torchmm.costs.layers import has_trained_parameters
from torchmm.costs.sizes import (
    Array,
    TaskSizes,
    llm_sizes,
    module_tasks,
    sequence_sizes,
    text_tokens,
)
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers


class ModuleFlops(NamedTuple):
    """FLOPs of one module for one microbatch, summed over tensor-parallel ranks."""

    forward: int
    backward: int


class PassFlops(NamedTuple):
    """FLOPs of the passes over consecutive blocks, by task."""

    forward_N: Array
    inputs_N: Array
    """Backward pass for inputs."""
    weights_N: Array
    """Backward pass for weights."""


def microbatch_flops(
    modules: Sequence[ModuleDescription], meta: MicrobatchMeta, targets: int | None = None
) -> dict[str, ModuleFlops]:
    """Return the FLOPs of each module for one microbatch.

    Args:
        modules: Complete descriptions of the encoders, the LLM and the generator.
        meta: Metadata of the microbatch.
        targets: Number of positions that are included in the loss, for the LM head. If None, all
            tokens without padding.
    """
    count = meta.used_tokens if targets is None else targets
    has_trained_sources = modules_with_trained_sources(modules, meta)
    result = {}
    for module in modules:
        sizes = module_sizes(module, meta, count)
        if sizes is None:
            result[module.name] = ModuleFlops(0, 0)
            continue
        blocks = stage_blocks(module, 0, len(module.layers))
        flops = pass_flops(blocks, sizes, has_trained_sources[module.name])
        backward = flops.inputs_N + flops.weights_N
        result[module.name] = ModuleFlops(round(flops.forward_N.sum()), round(backward.sum()))
    return result


def modules_with_trained_sources(
    modules: Sequence[ModuleDescription], meta: MicrobatchMeta
) -> dict[str, bool]:
    """Return a flag per module: True if it has a trained source in a microbatch."""
    encoders = any(
        meta.images_of_encoder(m.name) and (has_trained_parameters(m) or m.connector_trainable)
        for m in modules
        if m.kind == "encoder"
    )
    llm = encoders or any(has_trained_parameters(m) for m in modules if m.kind == "llm")
    return {m.name: {"encoder": False, "llm": encoders, "generator": llm}[m.kind] for m in modules}


def step_flops(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> NDArray[np.float64]:
    """Return the FLOPs of all modules, forward and backward, by microbatch (`microbatch_flops`)."""
    flops_N = np.zeros(len(microbatches))
    for module in modules:
        flops_N += module_flops(modules, module, microbatches)
    return flops_N


def module_flops(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
) -> NDArray[np.float64]:
    """Return the FLOPs of one of the modules, forward and backward, by microbatch."""
    total_N = np.zeros(len(microbatches))
    counts = [meta.used_tokens for meta in microbatches]
    at, sizes = _useful_sizes(module, microbatches, counts)
    if sizes is not None:
        blocks = stage_blocks(module, 0, len(module.layers))
        flops = pass_flops(blocks, sizes, _sends_gradient(modules, module, microbatches)[at])
        total_N[at] = np.round(flops.forward_N) + np.round(flops.inputs_N + flops.weights_N)
    return total_N


def _sends_gradient(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
) -> NDArray[np.bool_]:
    """Return a flag per microbatch: True if a module sends a gradient to its sources."""
    if module.kind == "encoder":
        return np.zeros(len(microbatches), bool)
    sources = [
        m
        for m in modules
        if m.kind == "encoder" and (has_trained_parameters(m) or m.connector_trainable)
    ]
    has_source = [any(meta.images_of_encoder(m.name) for m in sources) for meta in microbatches]
    is_trained = module.kind == "generator" and any(
        has_trained_parameters(m) for m in modules if m.kind == "llm"
    )
    return np.array(has_source, bool) | is_trained


def module_sizes(module: ModuleDescription, meta: MicrobatchMeta, targets: int) -> TaskSizes | None:
    """Return the sizes of a microbatch as one task without padding, or None without inputs."""
    return _useful_sizes(module, [meta], [targets])[1]


def _useful_sizes(
    module: ModuleDescription, microbatches: Sequence[MicrobatchMeta], targets: Sequence[int]
) -> tuple[NDArray[np.int64], TaskSizes | None]:
    """Return the indices of the microbatches of a module, and their sizes without padding."""
    if module.kind == "llm":
        at = np.arange(len(microbatches))
        return at, llm_sizes(microbatches, targets, padding=False)
    return sequence_sizes(module, microbatches)


def pass_flops(
    blocks: Sequence[ModuleBlock], sizes: TaskSizes, sends_gradient: GradientFlags
) -> PassFlops:
    """Return the FLOPs of consecutive blocks.

    Args:
        blocks: Blocks in forward order.
        sizes: Sizes of the tasks.
        sends_gradient: Whether the first block sends a gradient to its source. An array has one
            flag per task.
    """
    forward_N, inputs_N, weights_N = (sizes.inputs_N * 0.0 for _ in range(3))
    for block, inputs, weights in required_gradients(blocks, sends_gradient):
        dense_N, attention_N = (block.count * flops_N for flops_N in block.flops(sizes))
        forward_N += dense_N + attention_N
        if block.backward_in_forward:
            forward_N += (1.0 * inputs + weights) * dense_N
            continue
        inputs_N += inputs * (dense_N + 2 * attention_N)
        weights_N += weights * block.count * block.weight_flops(sizes)
    return PassFlops(forward_N, inputs_N, weights_N)


def sample_costs(llm: ModuleDescription, tokens: Sequence[int]) -> list[float]:
    """Return the forward FLOPs of samples without targets in the LLM, by number of tokens.

    Attention has half of its FLOPs, because kernels skip the masked half.
    """
    metas = [MicrobatchMeta((SampleMeta("", 0, count),), count) for count in tokens]
    sizes = llm_sizes(metas, [0] * len(tokens), padding=False)
    flops_N = np.zeros(len(tokens))
    for block in stage_blocks(llm, 0, len(llm.layers)):
        dense_N, attention_N = block.flops(sizes)
        flops_N += block.count * (dense_N + attention_N / 2)
    return flops_N.tolist()


def module_layers(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> list[ModuleLayers]:
    """Return the modules with a cost per layer, the input of the partition into stages.

    Costs are the mean FLOPs of forward and backward passes.

    Args:
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches to average over.

    Raises:
        ValueError: `microbatches` is empty.
    """
    if not microbatches:
        raise ValueError("no microbatches for averaging costs")
    result = []
    for module in modules:
        blocks = stage_blocks(module, 0, len(module.layers))
        costs = _mean_costs(modules, module, blocks, microbatches)
        layer_indices = [i for i, block in enumerate(blocks) if isinstance(block, LayerBlock)]
        layers = [costs[i] / blocks[i].count for i in layer_indices for _ in range(blocks[i].count)]
        first = layer_indices[0] if layer_indices else len(blocks)
        # The connector of a generator precedes its layers.
        is_generator = module.kind == "generator"
        result.append(
            ModuleLayers(
                name=module.name,
                kind=module.kind,
                costs=tuple(layers),
                sub_microbatched=module.kind != "llm",
                trainable=tuple(module.trainable or bool(o.adapters) for o in module.layers),
                embedding_cost=sum(costs[:first]),
                head_cost=sum(costs[first + len(layer_indices) :]),
                embedding_trainable=module.trainable
                or module.token_rows_trainable
                or (is_generator and module.connector_trainable),
                head_trainable=module.trainable
                or module.token_rows_trainable
                or (not is_generator and module.connector_trainable),
                tied=module.tied,
            )
        )
    return result


def _mean_costs(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    blocks: Sequence[ModuleBlock],
    microbatches: Sequence[MicrobatchMeta],
) -> list[float]:
    """Return the mean FLOPs per microbatch of each block, forward and backward."""
    counts = [text_tokens(meta) for meta in microbatches]
    at, sizes = _useful_sizes(module, microbatches, counts)
    if sizes is None:
        return [0.0] * len(blocks)
    costs = []
    for block, inputs, weights in required_gradients(
        blocks, _sends_gradient(modules, module, microbatches)[at]
    ):
        dense_N, attention_N = (block.count * flops_N for flops_N in block.flops(sizes))
        backward_N = inputs * (dense_N + 2 * attention_N)
        backward_N = backward_N + weights * block.count * block.weight_flops(sizes)
        costs.append(sum(((dense_N + attention_N + backward_N) / len(microbatches)).tolist()))
    return costs


def task_durations(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
) -> Callable[[Action], float]:
    """Return a function from F, B, I and W actions to FLOPs, for planners.

    The mirrors of a stage share its FLOPs equally.

    Args:
        graph: Task graph of the step.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the graph.
        targets: Number of positions that are included in the loss, by microbatch. If None, all
            text tokens.

    Raises:
        ValueError: The graph has a different number of microbatches, or more sub-microbatches than
            images.
    """
    counts = targets or [text_tokens(meta) for meta in microbatches]
    by_name = {m.name: module_tasks(graph, m, microbatches, counts) for m in modules}
    flops: dict[tuple[ActionType, int, int, int], float] = {}
    for stage in graph.layout.stages:
        tasks = by_name[stage.module]
        blocks = stage_blocks(tasks.module, stage.start, stage.stop)
        arrives_N = tasks.sends_gradient_N(graph, stage.index)
        # Generator tasks have different padding, which requires time, so it is included.
        sizes = tasks.sizes if tasks.module.kind == "generator" else tasks.unpadded_sizes
        passes = pass_flops(blocks, sizes, arrives_N)
        backward_N = passes.inputs_N + passes.weights_N
        values = (passes.forward_N, backward_N, passes.inputs_N, passes.weights_N)
        for kind, values_N in zip(_KINDS, values, strict=True):
            for key, value in zip(tasks.keys, values_N.tolist(), strict=True):
                flops[kind, stage.index, *key] = value / len(
                    graph.layout.mirror_stages[stage.index]
                )

    return lambda action: flops[action[:4]]


_KINDS = (ActionType.F, ActionType.B, ActionType.I, ActionType.W)
