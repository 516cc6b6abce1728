"""Costs of a transformer layer, and number of parameters of a stage.

The costs of a layer are sums over its components (`torchmm.costs.components`), plus norms,
residual additions and tensor-parallel communication. Four quantities describe a layer on one
tensor-parallel rank:

    quantity     function                 lifetime
    operators    layer_operators          -
    kept bytes   layer_saved_bytes         from F to B (or I)
    gradients    layer_gradients_bytes    from I to W, in addition to the kept bytes
    temporary    layer_temporary_bytes    while one task runs

    memory
      ^          ______ temporary ______
      |         |                       |
      |   ______|  kept bytes           |______ gradients (split backward only)
      |  |                                     |
      +--F----------------------------I--------W-----> time

**Operators** are the calls of Hugging Face layers in eager PyTorch. For example, an RMSNorm is six
element-wise calls that read or write its input seven times. The counts match real layers (tests
compare), so efficiencies of single operators apply. `torchmm.costs.flops` counts mathematical
FLOPs only. Operators also include padding and the scores that fused attention computes again in
the backward pass. Causal attention skips the masked half.

**Compiled layers** have the same matmuls and attention calls. Inductor fuses the operators between
them into kernels that read and write each tensor once. Norms and residuals of a forward pass move
9 values per token and feature instead of 40. The counts match the Inductor scheduler for real
layers (tests compare).

**Kept bytes** are the tensors that autograd saves, each counted once: inputs of trained linear
layers, input and output of norms, and tensors for attention and activation functions. RMSNorms
save float32 copies of their input. With "full" recomputation, a layer saves its input. With
"selective", it also saves the results of matmuls and attention. Between I and W, torch retains the
full graph and the gradients of all results of linear layers and norms. A split backward pass
therefore needs more memory, not less. Layers share rotary tables (`shared_bytes`).

**Temporary bytes** are bounds: the maximum over attention, MLP and norms. They include gradients
of results, weight gradients of the current microbatch, recomputed results, and float32 copies in
norms and rotary embeddings. Tests compare them with the recorded allocations of
real layers of each family, in each recomputation mode.

Not included: scratch space inside kernels, and states of random generators (5 KB of host memory
for each recomputed layer).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np

from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.component import Experts, Linear, apply_float8, cast_bytes
from torchmm.costs.components import (
    layer_components,
    norm_input_saved_bytes,
    norm_scales,
)
from torchmm.costs.execution import (
    FLOAT32,
    CostSetting,
    Matrices,
    ParameterStates,
    RecomputeSetting,
)
from torchmm.costs.mixers import AdapterComponent, AdapterCosts
from torchmm.costs.operators import (
    Operator,
    OperatorKind,
    PassOperators,
    accumulation_operator,
    all_reduce_bytes,
    decode_operator,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

SAVED_KINDS: tuple[OperatorKind, ...] = ("matmul", "attention", "tensor_linear")
"""Operator classes whose results selective recomputation saves instead of recomputing."""


def layer_linears(layer: LayerDescription) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers that read hidden states, by name.

    Linear layers that read the context of a generator are not included.
    """
    components = [c for c in layer_components(layer) if not c.reads_context]
    return {name: size for c in components for name, size in c.linears().items()}


def local_linears(layer: LayerDescription, tensor: int) -> dict[str, Linear]:
    """Return (inputs, outputs) of the `layer_linears` shards of a rank, by name."""
    components = [c for c in layer_components(layer) if not c.reads_context]
    return {name: size for c in components for name, size in c.local_linears(tensor).items()}


def muon_rounds(
    module: ModuleDescription, start: int, stop: int, ranks: int, expert: int
) -> list[list[Matrices]]:
    """Return the matrices of layers [start, stop) in the rounds in which Muon gathers them.

    Args:
        module: Complete module.
        start: First layer.
        stop: Layer after the last layer.
        ranks: Number of ranks that share each parameter. In a round, each rank updates one matrix.
        expert: Expert-parallel size. If it is larger than 1, experts have separate rounds.
    """
    matrices = [m for layer in module.layers[start:stop] for m in _matrices(module, layer)]
    groups = [
        [m for m in matrices if m.matrix_count == 1],
        [m for m in matrices if m.matrix_count > 1],
    ]
    return [
        group[first : first + ranks]
        for group in (groups if expert > 1 else [matrices])
        for first in range(0, len(group), ranks)
    ]


def _matrices(module: ModuleDescription, layer: LayerDescription) -> list[Matrices]:
    """Return the trained matrices of a layer."""
    if layer.adapters:
        return AdapterComponent(layer).matrices()
    if not module.trainable:
        return []
    return [matrix for component in layer_components(layer) for matrix in component.matrices()]


@cache
def layer_parameters(layer: LayerDescription, tensor: int = 1, expert: int = 1) -> float:
    """Return the number of parameters of a layer on one rank.

    Biases and norms are included if the description of the layer includes them.

    Args:
        layer: Description of the layer.
        tensor: Tensor-parallel size.
        expert: Expert-parallel size, which requires `tensor` = 1.
    """
    components = layer_components(layer)
    matmuls = sum(c.parameters(1) for c in components)
    other_parameters: float = max(0, layer.parameters - matmuls)
    if any(c.shards_other_parameters for c in components):
        other_parameters /= tensor
    total = sum(c.parameters(tensor) for c in components) + other_parameters
    return total - expert_parameters(layer) * (1 - 1 / expert)


def trained_parameters(
    module: ModuleDescription, layer: LayerDescription, tensor: int = 1, expert: int = 1
) -> float:
    """Return the number of trained parameters of a layer on one rank: all, none, or adapters."""
    if layer.adapters:
        return AdapterComponent(layer).parameters(tensor)
    return module.trainable * layer_parameters(layer, tensor, expert)


def module_tensors(module: ModuleDescription, start: int, stop: int) -> float:
    """Return the approximate number of trained tensors (weights, norms) of layers [start, stop)."""
    tensors = 0.0
    for layer, equal in groupby(module.layers[start:stop]):
        count = len(list(equal))
        if layer.adapters:
            tensors += count * 2 * len(layer.adapters)
        elif module.trainable:
            norms = _norm_count(layer, _residual_branches(layer)) + 2 * layer.qk_norm
            tensors += count * (norms + len(layer_linears(layer)))
    return tensors + 1


def has_trained_parameters(module: ModuleDescription) -> bool:
    """Return True if a module has trained parameters outside of its connector."""
    return module.trainable or any(layer.adapters for layer in module.layers)


@cache
def expert_parameters(layer: LayerDescription) -> float:
    """Return the number of parameters of all experts of a layer.

    Norms and biases of the layer are counted as parameters of experts.
    """
    components = layer_components(layer)
    selected = sum(
        prod(size)
        for component in components
        if isinstance(component, Experts)
        for name, size in component.linears().items()
        if name in component.divided
    )
    other_parameters = sum(c.parameters(1) for c in components) - selected
    return max(0.0, layer.parameters - other_parameters) if selected else 0.0


def layer_flops(layer: LayerDescription, sizes: TaskSizes) -> tuple[Array, Array]:
    """Return the forward FLOPs of matmuls with weights, and of matmuls between activations."""
    nothing_N = sizes.units_N * 0.0
    components = layer_components(layer)
    dense_N = nothing_N + sum(c.flops_N(sizes) for c in components)
    return dense_N, nothing_N + sum(c.pair_flops_N(sizes) for c in components)


def layer_operators(
    layer: LayerDescription, sizes: TaskSizes, setting: CostSetting
) -> PassOperators:
    """Return the operators of one layer on one rank."""
    components = layer_components(layer)
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
        passes.add(component.communication(sizes, setting))
    parameters = sum(component.gradients(setting) for component in components)
    tensors = sum(len(c.local_linears(setting.execution.tensor)) for c in components)
    passes.weights.append(accumulation_operator(parameters, setting, tensors))
    if layer.adapters:  # all other weights are frozen
        passes.weights[:] = AdapterComponent(layer).operators(sizes, setting).weights
    if setting.execution.compiled:
        passes.forward.append(Operator("compiled_call"))
        passes.inputs.append(Operator("compiled_call"))
    mode = setting.execution.recompute
    if mode != "none":
        # With other norm placements, the backward pass of a norm needs the last matmul.
        ends_with_matmul = layer.norm_place in ("before", "shared")
        matmul_count = len(local_linears(layer, setting.execution.tensor))
        last = linears.forward[matmul_count - 1] if ends_with_matmul else None
        is_weighted = bool(layer.experts and not layer.shared_ffn_size)
        passes.recomputed.extend(_recomputed_operators(passes.forward, last, mode, is_weighted))
    return passes


def _recomputed_operators(
    forward: list[Operator], last: Operator | None, mode: RecomputeSetting, is_weighted: bool
) -> Iterator[Operator]:
    """Yield the operators that the backward pass recomputes.

    torch stops the recomputation after the last tensor that the backward pass needs. It skips the
    last matmul of the layer and the tensor-parallel reduction of its result.

    Args:
        forward: Operators of the forward pass.
        last: Last matmul of the layer. If None, the complete layer is recomputed.
        mode: Recomputation mode, "selective" or "full".
        is_weighted: Whether expert weights multiply the result of `last`, which the backward pass
            then needs.
    """
    for operator in forward:
        is_not_needed = (operator is last and not is_weighted) or operator.kind == "compiled_call"
        if is_not_needed or (mode == "selective" and operator.kind in SAVED_KINDS):
            continue
        fraction = 1.0
        if last is not None and operator.kind in ("all_reduce", "reduce_scatter"):
            fraction = 1 - 1 / float(operator.calls)
        yield operator._replace(
            network_bytes=fraction * operator.network_bytes, calls=fraction * operator.calls
        )


def _residual_branches(layer: LayerDescription, *, context: bool = True) -> int:
    """Return the number of residual branches, optionally without cross-attention branches."""
    components = layer_components(layer)
    return sum(c.is_residual_branch and (context or not c.reads_context) for c in components)


def _norm_count(layer: LayerDescription, sublayers: int) -> int:
    """Return the number of norms over all features, without the norm of the router."""
    if layer.norm_place == "shared":
        return 1 + layer.extra_norms
    return sublayers * (2 if layer.norm_place == "around" else 1) + layer.extra_norms


def saves_input(layer: LayerDescription, setting: CostSetting, *, weights: bool) -> bool:
    """Return True if a layer saves its input, and not only a float32 copy of it.

    Args:
        layer: Description of the layer.
        setting: Execution of the layer.
        weights: Whether the weights of the layer are trained.
    """
    if setting.execution.recompute != "none":
        return True  # recomputation starts from the input
    if layer.norm_place == "behind":
        return weights  # the input of linear layers
    return layer.norm == "layer" or (layer.norm == "rms" and setting.element_bytes == 4)


def _norms(layer: LayerDescription, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
    rows_N = sizes.units_N * setting.execution.residual_fraction
    count = _norm_count(layer, _residual_branches(layer))
    elements_N = count * rows_N * layer.hidden_size
    return norm_operators(layer.norm, elements_N, count, setting, layer.norm_weight_float32)


def _linears(layer: LayerDescription, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
    """Return the matmuls with weights: those on hidden states, then those on a context."""
    components = sorted(layer_components(layer), key=lambda c: c.reads_context)
    matmuls = [product for component in components for product in component.matmuls(sizes, setting)]
    blocks = setting.execution.tensor if setting.execution.async_tensor else 1
    # Async TP splits each matmul into one block per rank. Small matmuls are less efficient. Matmuls
    # for weight gradients are not split.
    split = [product._replace(calls=blocks * product.calls) for product in matmuls]
    passes = PassOperators(split, list(split), list(matmuls), [])
    if layer.rounded is not None:
        apply_float8(passes, layer.rounded, components, sizes, setting)
    decoded = [decode_operator(linear, setting) for linear in layer.quantized]
    passes.forward.extend(decoded)
    passes.inputs.extend(decoded)
    weights = passes.weights
    if layer.norm == "layer" or (layer.packed_qkv and not layer.causal):  # these have biases
        results = sum(component.result_elements_N(sizes, setting) for component in components)
        bias_bytes = setting.element_bytes * results
        weights.append(Operator("elementwise", memory_bytes=bias_bytes, calls=len(matmuls)))
    return passes


def _residuals(layer: LayerDescription, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
    """Return the additions to the residual stream.

    In the backward pass, these are sums of gradients of tensors that several matmuls read.
    """
    size = setting.element_bytes
    share = setting.execution.residual_fraction
    elements = sizes.units_N * layer.hidden_size
    adds = _residual_branches(layer)
    readers = sum(c.extra_input_readers() for c in layer_components(layer))
    readers += layer.norm_place == "shared"
    if setting.execution.compiled:
        # Norm kernels include the additions. In the forward pass, they read the summands, and the
        # last kernel writes the sum. In the backward pass, they read one more gradient for each
        # sum and reader, also for weight gradients.
        first, second, third = (
            Operator("elementwise", memory_bytes=passed * size * elements, calls=calls)
            for passed, calls in (
                ((2 * adds + 1) * share, 1),
                (adds * share + readers, 0),
                (readers, 0),
            )
        )
        return PassOperators([first], [second], [third], [])
    forward = Operator("elementwise", memory_bytes=3 * adds * size * share * elements, calls=adds)
    inputs = [
        forward,
        Operator("elementwise", memory_bytes=3 * readers * size * elements, calls=readers),
    ]
    return PassOperators([forward], inputs if readers else inputs[:1], [], [])


def _communication(
    layer: LayerDescription, sizes: TaskSizes, setting: CostSetting
) -> PassOperators:
    """Return the tensor-parallel reductions: after each sublayer, and of gradients before it."""
    execution = setting.execution
    link = setting.tensor_link
    tensor = setting.execution.tensor
    if tensor == 1:
        return PassOperators.empty()
    regions = _residual_branches(layer)
    whole = regions * setting.element_bytes * sizes.units_N * layer.hidden_size
    forward = list(_reduction_operator(whole, regions, setting))
    forward.append(Operator("tensor_linear", calls=len(layer_linears(layer))))
    weights = []
    if execution.async_tensor:  # gathered inputs are not saved
        again = whole * (tensor - 1) / tensor
        weights.append(Operator("all_gather", network_bytes=again, calls=regions, link=link))
        weights.append(Operator("copy", memory_bytes=2 * again, calls=0))
    replicated = 0
    for component in layer_components(layer):
        linears = component.linears()
        for name in component.replicated_linears(tensor):
            replicated += linears[name][0] * linears[name][1]
    if replicated:
        sent = all_reduce_bytes(setting.element_bytes * replicated, tensor)
        weights.append(Operator("all_reduce", network_bytes=sent, link=link))
    return PassOperators(forward, list(forward), weights, [])


def _reduction_operator(whole: Array, calls: int, setting: CostSetting) -> Iterator[Operator]:
    """Yield all-reduces or, with sequence parallelism, reduce-scatters and all-gathers."""
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
        # Blocks are copied while matmuls run, which uses memory bandwidth. The reduce-scatter sums
        # the blocks of all ranks at the end.
        yield Operator("copy", memory_bytes=2 * 2 * sent + whole, calls=calls)
        return
    yield Operator("sequence_exchange", calls=2 * calls)
    if setting.calls_per_segment:
        # DTensor reorders the slices of the ranks before a scatter and after a gather. This was
        # measured on CPUs only, so it is included on CPUs only.
        yield Operator("copy", memory_bytes=4 * whole, calls=2 * calls)


def layer_saved_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: CostSetting, *, weights: bool
) -> Array:
    """Return the bytes that autograd saves for one layer, by task.

    Args:
        layer: Description of the layer.
        sizes: Sizes of the tasks.
        setting: Execution of the layer.
        weights: Whether weights of the layer, or adapters of its linear layers, are trained.
    """
    execution = setting.execution
    element_bytes = setting.element_bytes
    norm_weights = weights and not layer.adapters
    components = layer_components(layer)
    input_N = sizes.units_N * layer.hidden_size * execution.residual_fraction
    if execution.recompute == "full":
        return element_bytes * input_N
    if execution.recompute == "selective":
        result_elements_N = sum(c.saved_results_bytes(sizes, setting) for c in components)
        return element_bytes * input_N + result_elements_N
    sublayers = _residual_branches(layer, context=False)
    norms = _norm_count(layer, sublayers)
    kept_N = norms * norm_input_saved_bytes(layer, input_N, setting, norm_weights)
    kept_N += 4 * norms * norm_scales(layer.norm) * sizes.units_N * execution.residual_fraction
    gathered = execution.residual_fraction if execution.async_tensor else 1.0
    inputs_N = gathered * sizes.units_N * layer.hidden_size
    if element_bytes == 4 or execution.compiled:  # norms save no copies
        kept_N -= layer.norms_sharing_input * element_bytes * input_N
    read = 1 if layer.norm_place == "shared" else sublayers
    kept_N += read * weights * element_bytes * inputs_N  # inputs of linear layers
    return kept_N + sum(c.saved_bytes(sizes, setting, weights) for c in components)


def received_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: CostSetting, *, weights: bool
) -> Array:
    """Return the bytes of the stage input that are not counted in `layer_saved_bytes`, by task.

    The runtime retains the received input of a stage until its gradient is computed. The first
    layer saves either this tensor or another one, such as the float32 input of a norm.

    Args:
        layer: First layer of the stage.
        sizes: Sizes of the tasks.
        setting: Execution of the layer.
        weights: Whether the weights of the layer are trained.
    """
    same = saves_input(layer, setting, weights=weights)
    received_N = sizes.units_N * layer.hidden_size * setting.execution.residual_fraction
    return (not same) * setting.element_bytes * received_N


def shared_bytes(module: ModuleDescription, sizes: TaskSizes, element_bytes: int) -> Array:
    """Return the bytes that the layers of a stage share: rotary cosines and sines, by task."""
    layer = module.layers[0]
    if module.kind != "llm" and layer.norm != "rms":
        return sizes.units_N * 0.0  # encoders with LayerNorm add position embeddings instead
    size = element_bytes if module.kind == "llm" and not layer.rotary_float32 else 4
    return 2 * size * sizes.units_N * layer.head_dim


def layer_gradients_bytes(layer: LayerDescription, sizes: TaskSizes, setting: CostSetting) -> Array:
    """Return the bytes of gradients that are saved from I to W, by task."""
    execution = setting.execution
    linears = local_linears(layer, execution.tensor).values()
    normed = (
        _residual_branches(layer, context=False) * layer.hidden_size * execution.residual_fraction
    )
    results = sum(outputs for _, outputs in linears) + normed
    return setting.element_bytes * sizes.units_N * results


def layer_temporary_bytes(
    layer: LayerDescription, sizes: TaskSizes, setting: CostSetting, *, weights: bool
) -> Array:
    """Return the maximum bytes of temporaries of one layer in any pass, by task.

    Activations of a layer that the backward pass recomputes are not included.

    Args:
        layer: Description of the layer.
        sizes: Sizes of the tasks.
        setting: Execution of the layer.
        weights: Whether the weights of the layer are trained.
    """
    units_N = sizes.units_N
    hidden = layer.hidden_size
    temporaries = [c.temporaries(sizes, setting) for c in layer_components(layer)]
    casts_N = cast_bytes(layer.rounded, layer_components(layer), sizes, setting)
    norms_N = (16 if layer.norm == "rms" else 0) * units_N * hidden
    backward_N = np.max([norms_N, *(t.backward_N + 0 * units_N for t in temporaries)], axis=0)
    if weights:
        backward_N = backward_N + _weight_gradient_bytes(layer, setting)
    decoded = max((o.local_weights(setting.execution.tensor) for o in layer.quantized), default=0.0)
    casts_N = casts_N + setting.element_bytes * decoded
    forward_N = [t.forward_N + 0 * units_N for t in temporaries]
    peak_N = np.max([backward_N, *forward_N], axis=0) + casts_N
    return setting.element_bytes * units_N * hidden + peak_N


def _weight_gradient_bytes(layer: LayerDescription, setting: CostSetting) -> float:
    """Return the bytes of the weight gradients of one microbatch before their accumulation.

    FSDP2 accumulates all gradients of a layer after the backward pass of the layer, and casts them
    one by one.
    """
    execution = setting.execution
    element_bytes = setting.element_bytes
    if layer.adapters:
        return (element_bytes + 4) * AdapterComponent(layer).parameters(execution.tensor)
    largest = max(component.largest_gradient(setting) for component in layer_components(layer))
    if execution.shard * execution.replicate == 1 and element_bytes == 4:
        return element_bytes * largest
    whole = layer_parameters(layer, execution.tensor, execution.expert)
    return element_bytes * whole + 4 * largest


class StageParameters(NamedTuple):
    """Numbers of parameters, and the bytes of their training states."""

    total: float
    trained: float
    in_layers: float = 0.0
    """Number of trained parameters in transformer layers."""
    states: ParameterStates = FLOAT32
    quantized: float = 0.0
    """Number of frozen parameters that are stored in few bits."""
    quantized_bytes: float = 0.0
    """Bytes of the quantized parameters."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters between steps."""
        return self.states.weight * (self.total - self.quantized) + self.quantized_bytes

    def compute_bytes(self, element_bytes: int) -> float:
        """Return the bytes of parameters for computing. Quantized parameters are not cast."""
        return element_bytes * (self.total - self.quantized) + self.quantized_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the float32 gradients of trained parameters."""
        return 4 * self.trained

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of optimizer moments on the device and of moving averages."""
        states = self.states
        others = self.trained - self.in_layers
        moments = states.moments * others + states.layer_moments * self.in_layers
        return moments + states.moving_average * self.trained

    def divide_by(self, ranks: int) -> StageParameters:
        """Return the parameters of one of `ranks` equal shards."""
        return StageParameters(
            self.total / ranks,
            self.trained / ranks,
            self.in_layers / ranks,
            self.states,
            self.quantized / ranks,
            self.quantized_bytes / ranks,
        )


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
    states: ParameterStates = FLOAT32,
) -> StageParameters:
    """Return the unsharded parameters of the stage with layers [start, stop) on one rank.

    If the description has no counts for the parameters before and after the layers, all parameters
    outside of the layers are counted before the layers.

    Args:
        module: Complete module.
        start: First layer.
        stop: Layer after the last layer.
        tensor: Tensor-parallel size. Biases, norms, packed projections and the parameters of a
            generator outside of its layers are replicated on each rank.
        expert: Expert-parallel size.
        states: Bytes of the training states per parameter.
    """
    first = start == 0
    last = stop == len(module.layers)
    before = float(module.embedding_parameters)
    behind = float(module.head_parameters)
    unknown = not before and not behind
    if unknown or (module.tied and first and last):  # tied: the embedding is the head
        before = max(0.0, module.parameters - _all_layers(module) - behind)
    draws = module.kind == "generator"
    sees = module.kind == "encoder"
    layers = module.layers[start:stop]
    adapters = [adapter for adapter in module.connector_adapters if adapter is not None]
    whole = sees and module.connector_trainable and not adapters
    split = 1 if draws else tensor
    given = module.autoencoder_parameters
    draws = draws and module.connector_trainable
    tokens = module.token_rows_trainable  # of which gradients and states are complete
    counts = [
        (before / split * first, given[0] * first, module.trainable or draws or tokens),
        (behind / split * last, given[1] * last, module.trainable or whole or tokens),
    ]
    equal = [(layer, len(list(group))) for layer, group in groupby(layers)]
    of_layers = sum(n * layer_parameters(layer, tensor, expert) for layer, n in equal)
    every = of_layers + sum(n for n, _, _ in counts)
    in_layers = sum(n * trained_parameters(module, layer, tensor, expert) for layer, n in equal)
    trained = in_layers + sum(n - fixed for n, fixed, is_trained in counts if is_trained)
    trained += last * AdapterCosts(adapters).parameters(tensor)
    quantized = [(o.local_weights(tensor), o.value_bytes) for n in layers for o in n.quantized]
    return StageParameters(
        every,
        trained,
        in_layers,
        states,
        sum(count for count, _ in quantized),
        sum(count * value_bytes for count, value_bytes in quantized),
    )
