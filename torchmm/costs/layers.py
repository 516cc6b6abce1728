"""What a transformer layer costs: sums over its components; how many parameters a stage has.

**Operators** are what really runs, call by call, in forward and backward. Numbers of calls and
bytes are those of Hugging Face's layers in eager PyTorch on one rank of a tensor-parallel group: an
RMSNorm is six element-wise calls that read or write its input seven times. They were counted on
real layers (tests compare), so efficiencies measured on single operators apply. Unlike the FLOPs of
`torchmm.costs.flops`, what is not mathematics counts too: padding, and the scores that
fused attention computes again in backward; causal attention skips the masked half.

**Compiled layers** run matrix products and attention as before. Operators between them become fused
kernels that read and write each tensor once: 9 values a token and feature instead of 40 for norms
and residuals of a forward. Numbers are those of Inductor's scheduler for real layers (tests
compare).

**Kept bytes** are the tensors that autograd saves, each once: inputs of trained linears, both sides
of norms, what attention and activation functions need. RMSNorms keep float32 copies of their input.
With activation recomputation a layer keeps its input ("full"), or that and the results of matrix
products and attention ("selective"). Between the two halves of a split backward (I and W) torch
keeps the whole graph, and with it the gradients of all results of linears and norms: more than
before, not less. Layers share rotary tables, which `shared_bytes` has.

**Temporary bytes** are what a running task needs beyond what it keeps: gradients of a layer's
results, of its weights before they are added to those of other microbatches, results of a layer
that is about to run again, float32 copies in norms and rotary embeddings. They are bounds, not
sums: the largest of what attention, feed-forward network and norms have at one time, found by
following every allocation of real layers of each family, with weights, in each mode of
recomputation; tests do.

Left out: buffers inside one operator, such as a kernel's scratch space, and states of random
generators (5 KB on the host for each layer that is run again).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np

from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.component import Experts, Linear, cast_bytes, round_products
from torchmm.costs.components import (
    components_of,
    norm_scales,
    normed_kept_bytes,
)
from torchmm.costs.execution import FLOAT32, Matrices, Recompute, Setting, States
from torchmm.costs.mixers import Adapters, LowRanks
from torchmm.costs.operators import (
    Kind,
    Operator,
    Operators,
    accumulate,
    all_reduce_bytes,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

KEPT_KINDS: tuple[Kind, ...] = ("matmul", "attention", "tensor_linear")
"""What selective recomputation does not run again."""


def layer_linears(layer: LayerDescription) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of matrix products with weights for a layer's own positions, by name."""
    components = [c for c in components_of(layer) if not c.reads_context]
    return {name: size for c in components for name, size in c.linears().items()}


def local_linears(layer: LayerDescription, tensor: int) -> dict[str, Linear]:
    """The same of the matrix products that a tensor-parallel rank computes."""
    components = [c for c in components_of(layer) if not c.reads_context]
    return {name: size for c in components for name, size in c.local_linears(tensor).items()}


def matrix_rounds(
    module: ModuleDescription, start: int, stop: int, ranks: int, expert: int
) -> list[list[Matrices]]:
    """What Muon moves of layers [start, stop), in the rounds in which it does.

    Args:
        ranks: that share each parameter, and take turns.
        expert: ranks that divide experts, which then have rounds of their own.
    """
    every = [own for layer in module.layers[start:stop] for own in _matrices(module, layer)]
    groups = [[own for own in every if own.stacked == 1], [own for own in every if own.stacked > 1]]
    return [
        group[first : first + ranks]
        for group in (groups if expert > 1 else [every])
        for first in range(0, len(group), ranks)
    ]


def _matrices(module: ModuleDescription, layer: LayerDescription) -> list[Matrices]:
    """Those of a layer's parameters that are trained and matrices."""
    if layer.adapters:
        return Adapters(layer).matrices()
    if not module.trainable:
        return []
    return [own for component in components_of(layer) for own in component.matrices()]


@cache
def layer_parameters(layer: LayerDescription, tensor: int = 1, expert: int = 1) -> float:
    """Parameters that a layer computes with on one rank; no biases and norms where the description
    has none.

    Args:
        expert: ranks that divide experts among themselves; without tensor parallelism.
    """
    components = components_of(layer)
    products = sum(c.parameters(1) for c in components)
    rest: float = max(0, layer.parameters - products)
    if any(c.splits_rest for c in components):
        rest /= tensor
    whole = sum(c.parameters(tensor) for c in components) + rest
    return whole - expert_parameters(layer) * (1 - 1 / expert)


def trained_parameters(
    module: ModuleDescription, layer: LayerDescription, tensor: int = 1, expert: int = 1
) -> float:
    """Those of them that are trained: all, none, or adapters."""
    if layer.adapters:
        return Adapters(layer).parameters(tensor)
    return module.trainable * layer_parameters(layer, tensor, expert)


def module_tensors(module: ModuleDescription, start: int, stop: int) -> float:
    """Return about how many trained parameters layers [start, stop) have: weights and norms."""
    found = 0.0
    for layer, equal in groupby(module.layers[start:stop]):
        count = len(list(equal))
        if layer.adapters:
            found += count * 2 * len(layer.adapters)
        elif module.trainable:
            norms = _norm_count(layer, _sublayers(layer)) + 2 * layer.qk_norm
            found += count * (norms + len(layer_linears(layer)))
    return found + 1


def learns(module: ModuleDescription) -> bool:
    """Whether anything of a module but its connector is trained."""
    return module.trainable or any(layer.adapters for layer in module.layers)


@cache
def expert_parameters(layer: LayerDescription) -> float:
    """Parameters of all experts of a layer; norms and biases of the others are taken for theirs."""
    components = components_of(layer)
    chosen = sum(
        prod(size)
        for component in components
        if isinstance(component, Experts)
        for name, size in component.linears().items()
        if name in component.divided
    )
    others = sum(c.parameters(1) for c in components) - chosen
    return max(0.0, layer.parameters - others) if chosen else 0.0


def layer_flops(layer: LayerDescription, sizes: TaskSizes) -> tuple[Array, Array]:
    """Forward FLOPs: (products with weights, products between activations)."""
    nothing_N = sizes.units_N * 0.0
    components = components_of(layer)
    dense_N = nothing_N + sum(c.flops_N(sizes) for c in components)
    return dense_N, nothing_N + sum(c.pair_flops_N(sizes) for c in components)


def layer_operators(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Operators of one layer, on one rank."""
    components = components_of(layer)
    linears = _linears(layer, sizes, setting)
    passes = _norms(layer, sizes, setting)
    for component in components:
        passes.add(component.inner_norms(sizes, setting))
    passes.add(linears)
    for component in components:
        passes.add(component.operators(sizes, setting))
    passes.add(_residuals(layer, sizes, setting))
    passes.add(_communication(layer, sizes, setting))
    for component in components:
        passes.add(component.exchange(sizes, setting))
    parameters = sum(component.gradients(setting) for component in components)
    tensors = sum(len(c.local_linears(setting.execution.tensor)) for c in components)
    passes.weights.append(accumulate(parameters, setting, tensors))
    if layer.adapters:  # all else is frozen
        passes.weights[:] = Adapters(layer).operators(sizes, setting).weights
    if setting.execution.compiled:
        passes.forward.append(Operator("compiled_call"))
        passes.inputs.append(Operator("compiled_call"))
    mode = setting.execution.recompute
    if mode != "none":
        ends = layer.norm_place in ("before", "shared")  # else a norm needs the last product
        products = len(local_linears(layer, setting.execution.tensor))
        last = linears.forward[products - 1] if ends else None
        weighed = bool(layer.experts and not layer.shared_ffn_size)
        passes.again.extend(_again(passes.forward, last, mode, weighed))
    return passes


def _again(
    forward: list[Operator], last: Operator | None, mode: Recompute, weighed: bool
) -> Iterator[Operator]:
    """What is run again. torch stops where the last tensor is there that backward needs: before the
    layer's last product, whose result is summed over ranks after it; None: at the end.

    Args:
        weighed: whether shares of experts multiply that result, which backward needs then.
    """
    for operator in forward:
        unneeded = (operator is last and not weighed) or operator.kind == "compiled_call"
        if unneeded or (mode == "selective" and operator.kind in KEPT_KINDS):
            continue
        share = 1.0
        if last is not None and operator.kind in ("all_reduce", "reduce_scatter"):
            share = 1 - 1 / float(operator.calls)
        yield operator._replace(
            network_bytes=share * operator.network_bytes, calls=share * operator.calls
        )


def _sublayers(layer: LayerDescription, *, context: bool = True) -> int:
    """Branches of the residual stream; on request without those that read a context."""
    components = components_of(layer)
    return sum(c.sublayer and (context or not c.reads_context) for c in components)


def _norm_count(layer: LayerDescription, sublayers: int) -> int:
    """Norms of all features, but the router's."""
    if layer.norm_place == "shared":
        return 1 + layer.more_norms
    return sublayers * (2 if layer.norm_place == "around" else 1) + layer.more_norms


def keeps_input(layer: LayerDescription, setting: Setting, *, weights: bool) -> bool:
    """Whether a layer keeps its input itself, and not just what it makes of it in float32.

    Args:
        weights: whether its weights are trained.
    """
    if setting.execution.recompute != "none":
        return True  # from there it runs again
    if layer.norm_place == "behind":
        return weights  # the input of linears
    return layer.norm == "layer" or (layer.norm == "rms" and setting.element_bytes == 4)


def _norms(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    rows_N = sizes.units_N * setting.execution.residual_share
    count = _norm_count(layer, _sublayers(layer))
    elements_N = count * rows_N * layer.hidden_size
    return norm_operators(layer.norm, elements_N, count, setting, layer.norm_weight_float32)


def _linears(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Matrix products with weights: those for the layer's own positions, then the others."""
    components = sorted(components_of(layer), key=lambda c: c.reads_context)
    every = [product for component in components for product in component.products(sizes, setting)]
    blocks = setting.execution.tensor if setting.execution.async_tensor else 1
    # A block of rows per rank: smaller matmuls are less efficient. Weight gradients stay whole.
    split = [product._replace(calls=blocks * product.calls) for product in every]
    passes = Operators(split, list(split), list(every), [])
    if layer.rounded is not None:
        round_products(passes, layer.rounded, components, sizes, setting)
    weights = passes.weights
    if layer.norm == "layer" or (layer.packed_qkv and not layer.causal):  # these have biases
        summed = sum(component.results_N(sizes, setting) for component in components)
        bias_bytes = setting.element_bytes * summed
        weights.append(Operator("elementwise", memory_bytes=bias_bytes, calls=len(every)))
    return passes


def _residuals(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Adding to the residual stream; in backward, gradients of what several products read."""
    size = setting.element_bytes
    share = setting.execution.residual_share
    elements = sizes.units_N * layer.hidden_size
    adds = _sublayers(layer)
    readers = sum(c.extra_readers() for c in components_of(layer))
    readers += layer.norm_place == "shared"
    if setting.execution.compiled:
        # The kernels of norms add: a forward reads what is added, and the last kernel writes the
        # sum of all. A backward reads one more gradient for each sum and reader, in weights too.
        first, second, third = (
            Operator("elementwise", memory_bytes=passed * size * elements, calls=calls)
            for passed, calls in (
                ((2 * adds + 1) * share, 1),
                (adds * share + readers, 0),
                (readers, 0),
            )
        )
        return Operators([first], [second], [third], [])
    forward = Operator("elementwise", memory_bytes=3 * adds * size * share * elements, calls=adds)
    inputs = [
        forward,
        Operator("elementwise", memory_bytes=3 * readers * size * elements, calls=readers),
    ]
    return Operators([forward], inputs if readers else inputs[:1], [], [])


def _communication(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Tensor parallelism: a sum after each sublayer, and of gradients before it."""
    execution = setting.execution
    link = setting.tensor_link
    tensor = setting.execution.tensor
    if tensor == 1:
        return Operators.none()
    regions = _sublayers(layer)
    whole = regions * setting.element_bytes * sizes.units_N * layer.hidden_size
    forward = list(_reduction(whole, regions, setting))
    forward.append(Operator("tensor_linear", calls=len(layer_linears(layer))))
    weights = []
    if execution.async_tensor:  # gathered inputs are not kept
        again = whole * (tensor - 1) / tensor
        weights.append(Operator("all_gather", network_bytes=again, calls=regions, link=link))
        weights.append(Operator("copy", memory_bytes=2 * again, calls=0))
    replicated = 0
    for component in components_of(layer):
        linears = component.linears()
        for name in component.replicated(tensor):
            replicated += linears[name][0] * linears[name][1]
    if replicated:
        sent = all_reduce_bytes(setting.element_bytes * replicated, tensor)
        weights.append(Operator("all_reduce", network_bytes=sent, link=link))
    return Operators(forward, list(forward), weights, [])


def _reduction(whole: Array, calls: int, setting: Setting) -> Iterator[Operator]:
    """Sums over the ranks, in one piece or as scatter and gather."""
    execution = setting.execution
    link = setting.tensor_link
    size = execution.tensor
    if not execution.sequence_parallel:
        sent = all_reduce_bytes(whole, size)
        yield Operator("all_reduce", network_bytes=sent, calls=calls, link=link)
        return
    sent = whole * (size - 1) / size
    yield Operator("reduce_scatter", network_bytes=sent, calls=calls, link=link)
    yield Operator("all_gather", network_bytes=sent, calls=calls, link=link)
    if execution.async_tensor:
        # Blocks are read and written while matmuls run, and take memory bandwidth from them. A
        # scatter adds up the blocks of all ranks at the end.
        yield Operator("copy", memory_bytes=2 * 2 * sent + whole, calls=calls)
        return
    yield Operator("sequence_exchange", calls=2 * calls)
    if setting.segment_calls:
        # DTensors put the ranks' slices one after the other before they are scattered and after
        # they were gathered. Counted on CPUs only, where it was measured.
        yield Operator("copy", memory_bytes=4 * whole, calls=2 * calls)


def layer_kept_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: Setting, *, weights: bool
) -> Array:
    """What one layer keeps, by task.

    Args:
        weights: whether its weights, or adapters of its linears, are trained.
    """
    execution = setting.execution
    element_bytes = setting.element_bytes
    norm_weights = weights and not layer.adapters
    components = components_of(layer)
    input_N = sizes.units_N * layer.hidden_size * execution.residual_share
    if execution.recompute == "full":
        return element_bytes * input_N
    if execution.recompute == "selective":
        results_N = sum(c.kept_results_bytes(sizes, setting) for c in components)
        return element_bytes * input_N + results_N
    sublayers = _sublayers(layer, context=False)
    norms = _norm_count(layer, sublayers)
    kept_N = norms * normed_kept_bytes(layer, input_N, setting, norm_weights)
    kept_N += 4 * norms * norm_scales(layer.norm) * sizes.units_N * execution.residual_share
    gathered = execution.residual_share if execution.async_tensor else 1.0
    inputs_N = gathered * sizes.units_N * layer.hidden_size
    if element_bytes == 4 or execution.compiled:  # no copies of what norms read
        kept_N -= layer.norms_of_same * element_bytes * input_N
    read = 1 if layer.norm_place == "shared" else sublayers
    kept_N += read * weights * element_bytes * inputs_N  # by linears
    return kept_N + sum(c.kept_bytes(sizes, setting, weights) for c in components)


def received_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: Setting, *, weights: bool
) -> Array:
    """What a stage's input holds beside what its first layer keeps, by task.

    The runtime keeps what a stage received, for its gradient, whatever its first layer keeps: that
    is the same tensor or something else, such as what a norm in float32 has read.

    Args:
        weights: whether the layer's are trained.
    """
    same = keeps_input(layer, setting, weights=weights)
    received_N = sizes.units_N * layer.hidden_size * setting.execution.residual_share
    return (not same) * setting.element_bytes * received_N


def shared_bytes(module: ModuleDescription, sizes: TaskSizes, element_bytes: int) -> Array:
    """What the layers of a stage keep together: cosines and sines of positions."""
    layer = module.layers[0]
    if module.kind != "llm" and layer.norm != "rms":
        return sizes.units_N * 0.0  # towers with layer norms add positions instead
    size = element_bytes if module.kind == "llm" and not layer.rotary_float32 else 4
    return 2 * size * sizes.units_N * layer.head_dim


def layer_gradients_bytes(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Array:
    """Gradients of results that wait for W after I, besides what was kept, by task."""
    execution = setting.execution
    linears = local_linears(layer, execution.tensor).values()
    normed = _sublayers(layer, context=False) * layer.hidden_size * execution.residual_share
    results = sum(outputs for _, outputs in linears) + normed
    return setting.element_bytes * sizes.units_N * results


def layer_temporary_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: Setting, *, weights: bool
) -> Array:
    """The most that one layer needs beyond what is kept of it, by task, in forward or backward.

    In a backward that runs the layer again, its activations come on top.

    Args:
        weights: whether they are trained.
    """
    units_N = sizes.units_N
    hidden = layer.hidden_size
    own = [c.temporaries(sizes, setting) for c in components_of(layer)]
    casts_N = cast_bytes(layer.rounded, components_of(layer), sizes, setting)
    norms_N = (16 if layer.norm == "rms" else 0) * units_N * hidden
    backward_N = np.max([norms_N, *(t.backward_N + 0 * units_N for t in own)], axis=0)
    if weights:
        backward_N = backward_N + _weight_gradient_bytes(layer, setting)
    forward_N = [t.forward_N + 0 * units_N for t in own]
    most_N = np.max([backward_N, *forward_N], axis=0) + casts_N
    return setting.element_bytes * units_N * hidden + most_N


def _weight_gradient_bytes(layer: LayerDescription, setting: Setting) -> float:
    """Gradients of one microbatch before they are added to those of others.

    FSDP adds those of a layer together, after its backward, and casts one after the other.
    """
    execution = setting.execution
    element_bytes = setting.element_bytes
    if layer.adapters:
        return (element_bytes + 4) * Adapters(layer).parameters(execution.tensor)
    largest = max(component.largest_gradient(setting) for component in components_of(layer))
    if execution.shard * execution.replicate == 1 and element_bytes == 4:
        return element_bytes * largest
    whole = layer_parameters(layer, execution.tensor, execution.expert)
    return element_bytes * whole + 4 * largest


class Parameters(NamedTuple):
    """Numbers of parameters, and the bytes of what training holds of them."""

    all: float
    trained: float
    in_layers: float = 0.0
    """Of the trained ones."""
    states: States = FLOAT32

    @property
    def weight_bytes(self) -> float:
        """Between steps, of all parameters."""
        return self.states.weight * self.all

    @property
    def gradient_bytes(self) -> float:
        """Float32 sums, of trained ones."""
        return 4 * self.trained

    @property
    def optimizer_bytes(self) -> float:
        """Moments on the device and averages, of trained ones."""
        states = self.states
        others = self.trained - self.in_layers
        moments = states.moments * others + states.layer_moments * self.in_layers
        return moments + states.average * self.trained

    def divided(self, ranks: int) -> Parameters:
        """A rank's part."""
        in_layers = self.in_layers / ranks
        return Parameters(self.all / ranks, self.trained / ranks, in_layers, self.states)


def _all_layers(module: ModuleDescription) -> float:
    """Return the number of parameters of all layers of a module."""
    equal = groupby(module.layers)
    return sum(len(list(group)) * layer_parameters(layer) for layer, group in equal)


def stage_parameters(
    module: ModuleDescription,
    start: int,
    stop: int,
    tensor: int = 1,
    expert: int = 1,
    states: States = FLOAT32,
) -> Parameters:
    """Parameters of the stage with layers [start, stop) of a whole module, on one rank while it
    computes.

    Where a description does not say how many stand before and after the layers, the rest of the
    module's is taken to stand before them.

    Args:
        tensor: tensor-parallel ranks; biases, norms and packed projections are whole on each, and
            so is what a generator has around its layers.
        expert: ranks that divide experts among themselves.
        states: of the parameters.
    """
    first = start == 0
    last = stop == len(module.layers)
    before = float(module.pre_parameters)
    behind = float(module.post_parameters)
    unknown = not before and not behind
    if unknown or (module.tied and first and last):  # tied: the table is the head
        before = max(0.0, module.parameters - _all_layers(module) - behind)
    draws = module.kind == "generator"
    sees = module.kind == "encoder"
    layers = module.layers[start:stop]
    adapters = [own for own in module.connector_adapters if own is not None]
    whole = sees and module.connector_trainable and not adapters
    split = 1 if draws else tensor
    given = module.given_parameters
    draws = draws and module.connector_trainable
    counts = [
        (before / split * first, given[0] * first, module.trainable or draws),
        (behind / split * last, given[1] * last, module.trainable or whole),
    ]
    equal = [(layer, len(list(group))) for layer, group in groupby(layers)]
    of_layers = sum(n * layer_parameters(layer, tensor, expert) for layer, n in equal)
    every = of_layers + sum(n for n, _, _ in counts)
    in_layers = sum(n * trained_parameters(module, layer, tensor, expert) for layer, n in equal)
    trained = in_layers + sum(n - fixed for n, fixed, own in counts if own)
    trained += last * LowRanks(adapters).parameters(tensor)
    return Parameters(every, trained, in_layers, states)
