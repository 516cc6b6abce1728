"""FLOPs of one microbatch, forward and backward, for the LLM, the encoders *and* the generator.

Counted is what the mathematics needs, not what a kernel executes: two FLOPs per multiply-add of
matrix products; norms, softmax and element-wise work are left out, padding and recomputed
activations count nothing. Attention among L tokens costs 4 * heads * head_dim * L * min(L, window)
with L per packed segment (or per image), *without* halving it for causal masks: the convention
of `torch.utils.flop_counter` and of PaLM's formula (arXiv 2204.02311, appendix B).

Backward costs once the forward per gradient that is needed: weight gradients (trainable module),
input gradients (something upstream is trainable). Attention products have two inputs and no
weights: twice. So a frozen encoder has no backward, and a frozen LLM after a trainable encoder
has only input gradients, and one with adapters these and adapters' weight gradients.

Cutting modules and ordering tasks need no more than that: FLOPs are a unit that all modules share.
They follow from what microbatches contain, so a
data set with many images gives the encoder a larger share of the ranks, and a microbatch with many
images longer encoder tasks. How fast a device does them is left out: it matters where modules
differ in efficiency, which only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.blocks import Block, Flag, Layers, gradients, stage_blocks
from torchmm.costs.layers import learns
from torchmm.costs.sizes import (
    Array,
    TaskSizes,
    llm_sizes,
    module_tasks,
    pack_sizes,
    text_tokens,
)
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers


class ModuleFlops(NamedTuple):
    """FLOPs of one module for one microbatch, over all tensor-parallel ranks together."""

    forward: int
    backward: int


class PassFlops(NamedTuple):
    """FLOPs of the passes over consecutive blocks, by task."""

    forward_N: Array
    inputs_N: Array
    """Backward for inputs."""
    weights_N: Array
    """Backward for weights."""


def microbatch_flops(
    modules: Sequence[ModuleDescription], meta: MicrobatchMeta, targets: int | None = None
) -> dict[str, ModuleFlops]:
    """FLOPs by module name.

    Args:
        modules: encoders, LLM and generator.
        meta: what the microbatch contains.
        targets: positions that count in the loss, for the LM head; None: all used tokens.
    """
    count = meta.used_tokens if targets is None else targets
    reached = gradients_arrive(modules, meta)
    result = {}
    for module in modules:
        sizes = module_sizes(module, meta, count)
        if sizes is None:
            result[module.name] = ModuleFlops(0, 0)
            continue
        blocks = stage_blocks(module, 0, len(module.layers))
        flops = pass_flops(blocks, sizes, reached[module.name])
        backward = flops.inputs_N + flops.weights_N
        result[module.name] = ModuleFlops(round(flops.forward_N.sum()), round(backward.sum()))
    return result


def gradients_arrive(modules: Sequence[ModuleDescription], meta: MicrobatchMeta) -> dict[str, bool]:
    """By module: whether something trained before it feeds it in a microbatch."""
    encoders = any(
        meta.images_read_by(m.name) and (learns(m) or m.connector_trainable)
        for m in modules
        if m.kind == "encoder"
    )
    llm = encoders or any(learns(m) for m in modules if m.kind == "llm")
    return {m.name: {"encoder": False, "llm": encoders, "generator": llm}[m.kind] for m in modules}


def step_flops(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> NDArray[np.float64]:
    """Return the FLOPs of all modules, forward and backward, by microbatch (`microbatch_flops`)."""
    found_N = np.zeros(len(microbatches))
    for module in modules:
        found_N += module_flops(modules, module, microbatches)
    return found_N


def module_flops(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
) -> NDArray[np.float64]:
    """Return the FLOPs of one of the modules, forward and backward, by microbatch."""
    found_N = np.zeros(len(microbatches))
    counts = [meta.used_tokens for meta in microbatches]
    at, sizes = _useful_sizes(module, microbatches, counts)
    if sizes is not None:
        blocks = stage_blocks(module, 0, len(module.layers))
        flops = pass_flops(blocks, sizes, _arriving(modules, module, microbatches)[at])
        found_N[at] = np.round(flops.forward_N) + np.round(flops.inputs_N + flops.weights_N)
    return found_N


def _arriving(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
) -> NDArray[np.bool_]:
    """Return whether a gradient leaves a module backwards, by microbatch (`gradients_arrive`)."""
    if module.kind == "encoder":
        return np.zeros(len(microbatches), bool)
    sources = [m for m in modules if m.kind == "encoder" and (learns(m) or m.connector_trainable)]
    found = [any(meta.images_read_by(m.name) for m in sources) for meta in microbatches]
    is_trained = module.kind == "generator" and any(learns(m) for m in modules if m.kind == "llm")
    return np.array(found, bool) | is_trained


def module_sizes(module: ModuleDescription, meta: MicrobatchMeta, targets: int) -> TaskSizes | None:
    """A whole microbatch as one task, without padding; None if there is nothing to process."""
    return _useful_sizes(module, [meta], [targets])[1]


def _useful_sizes(
    module: ModuleDescription, microbatches: Sequence[MicrobatchMeta], targets: Sequence[int]
) -> tuple[NDArray[np.int64], TaskSizes | None]:
    """Return which microbatches a module processes, and their sizes without padding."""
    if module.kind == "llm":
        at = np.arange(len(microbatches))
        return at, llm_sizes(microbatches, targets, padding=False)
    return pack_sizes(module, microbatches)


def pass_flops(blocks: Sequence[Block], sizes: TaskSizes, arrives: Flag) -> PassFlops:
    """FLOPs of a chain of blocks.

    Args:
        arrives: whether a gradient goes back to what stands before the chain; an array: by task.
    """
    forward_N, inputs_N, weights_N = (sizes.inputs_N * 0.0 for _ in range(3))
    for block, inputs, weights in gradients(blocks, arrives):
        dense_N, attention_N = (block.count * flops_N for flops_N in block.flops(sizes))
        forward_N += dense_N + attention_N
        if block.backward_in_forward:
            forward_N += (1.0 * inputs + weights) * dense_N
            continue
        inputs_N += inputs * (dense_N + 2 * attention_N)
        weights_N += weights * block.count * block.weight_flops(sizes)
    return PassFlops(forward_N, inputs_N, weights_N)


def module_layers(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> list[ModuleLayers]:
    """Modules as `torchmm.pipelining.schedules.layouts` cuts them; costs are of forward and
    backward.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: over which costs are averaged.

    Raises:
        ValueError: no microbatches.
    """
    if not microbatches:
        raise ValueError("no microbatches for averaging costs")
    result = []
    for module in modules:
        blocks = stage_blocks(module, 0, len(module.layers))
        costs = _mean_costs(modules, module, blocks, microbatches)
        of_layers = [i for i, block in enumerate(blocks) if isinstance(block, Layers)]
        layers = [costs[i] / blocks[i].count for i in of_layers for _ in range(blocks[i].count)]
        first = of_layers[0] if of_layers else len(blocks)
        draws = module.kind == "generator"  # and has its connector before its layers
        result.append(
            ModuleLayers(
                name=module.name,
                kind=module.kind,
                costs=tuple(layers),
                sub_microbatched=module.kind != "llm",
                trainable=tuple(module.trainable or bool(o.adapters) for o in module.layers),
                pre_cost=sum(costs[:first]),
                post_cost=sum(costs[first + len(of_layers) :]),
                pre_trainable=module.trainable or (draws and module.connector_trainable),
                post_trainable=module.trainable or (not draws and module.connector_trainable),
                tied=module.tied,
            )
        )
    return result


def _mean_costs(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    blocks: Sequence[Block],
    microbatches: Sequence[MicrobatchMeta],
) -> list[float]:
    """FLOPs of forward and backward of every block of a whole module, mean over microbatches."""
    counts = [text_tokens(meta) for meta in microbatches]
    at, sizes = _useful_sizes(module, microbatches, counts)
    if sizes is None:
        return [0.0] * len(blocks)
    costs = []
    for block, inputs, weights in gradients(blocks, _arriving(modules, module, microbatches)[at]):
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
    """FLOPs of the F, B, I and W of a step's tasks, for planners; mirrors share a stage's.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: of the graph.
        targets: positions that count in the loss, by microbatch; None: all text.

    Raises:
        ValueError: the graph has another number of microbatches, or more sub-microbatches than
            there are images.
    """
    counts = targets or [text_tokens(meta) for meta in microbatches]
    by_name = {m.name: module_tasks(graph, m, microbatches, counts) for m in modules}
    flops: dict[tuple[ActionType, int, int, int], float] = {}
    for stage in graph.layout.stages:
        tasks = by_name[stage.module]
        blocks = stage_blocks(tasks.module, stage.start, stage.stop)
        arrives_N = tasks.gradient_arrives_N(graph, stage.index)
        # A generator's padding differs from task to task, and takes time as all else does.
        sizes = tasks.sizes if tasks.module.kind == "generator" else tasks.useful
        found = pass_flops(blocks, sizes, arrives_N)
        backward_N = found.inputs_N + found.weights_N
        values = (found.forward_N, backward_N, found.inputs_N, found.weights_N)
        for kind, values_N in zip(_KINDS, values, strict=True):
            for key, value in zip(tasks.keys, values_N.tolist(), strict=True):
                flops[kind, stage.index, *key] = value / len(graph.layout.mirrored[stage.index])

    return lambda action: flops[action[:4]]


_KINDS = (ActionType.F, ActionType.B, ActionType.I, ActionType.W)
