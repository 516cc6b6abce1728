"""Modules as sequences of blocks, the common input of FLOPs, times and memory.

    module      before the layers         layers         after the layers
    LLM         Table (embedding)         Layers         Head (norm, logits, loss)
    encoder     Projection (patches)      Layers         Projection per connector layer
                or Inputs
    generator   Encoding (VAE),           Layers         Projection (output)
                Projection (context),
                Projection (patches)

A block defines its costs. The costs of a layer are sums over its components (`components.py`).

A block needs weight gradients if it is trained. It needs input gradients if a preceding block is
trained, or if the stage sends a gradient to the preceding stage (`required_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchmm.common.layers import AdapterSizes, LayerDescription, ModuleDescription
from torchmm.costs.components import Linear, norm_saved_bytes
from torchmm.costs.execution import CostSetting
from torchmm.costs.layers import (
    layer_flops,
    layer_gradients_bytes,
    layer_operators,
    layer_saved_bytes,
    layer_temporary_bytes,
)
from torchmm.costs.mixers import AdapterComponent, AdapterCosts
from torchmm.costs.operators import (
    AutoencoderBlock,
    ModuleBlock,
    Operator,
    PassOperators,
    accumulation_operator,
    activation_operators,
    all_reduce_bytes,
    matmul_operator,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

GradientFlags = bool | NDArray[np.bool_]
"""Flag for all tasks, or one flag per task."""
LOGIT_BYTES = 12
"""Bytes per logit of a chunk of targets in float32. Chunks of bfloat16 logits can be larger."""
LOSS_CHUNK = 1024
"""Number of targets per chunk of float32 logits, see `torchmm.models.layers.loss`."""


@dataclass(frozen=True)
class LayerBlock(ModuleBlock):
    """Equal transformer layers.

    Attributes:
        layer: Description of a layer.
    """

    layer: LayerDescription = field(kw_only=True)

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the forward FLOPs of a layer, see `torchmm.costs.layers`."""
        return layer_flops(self.layer, sizes)

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """Return the FLOPs of adapters if there are any, otherwise of trained weights."""
        if self.layer.adapters:
            return sizes.units_N * 0.0 + AdapterComponent(self.layer).flops_N(sizes)
        return super().weight_flops(sizes)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators of a layer, see `torchmm.costs.layers`."""
        return layer_operators(self.layer, sizes, setting)

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return the bytes that a layer saves, see `torchmm.costs.layers`."""
        return layer_saved_bytes(self.layer, sizes, setting, weights=weights)

    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return the bytes of gradients of a layer from I to W, see `torchmm.costs.layers`."""
        return layer_gradients_bytes(self.layer, sizes, setting)

    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the bytes of temporaries, including the activations of a recomputed layer."""
        whole = setting._replace(execution=replace(setting.execution, recompute="none"))
        whole_N, kept_N = (self.saved_bytes(sizes, s, self.trained) for s in (whole, setting))
        own_N = layer_temporary_bytes(self.layer, sizes, setting, weights=self.trained)
        return (whole_N - kept_N) * has_backward + own_N


@dataclass(frozen=True)
class InputBlock(ModuleBlock):
    """Inputs of the layers without a matmul.

    Attributes:
        parameters: Number of parameters.
        flops_per_image: FLOPs per image, independent of the image size.
    """

    parameters: int = 0
    flops_per_image: int = 0

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the FLOPs per image."""
        nothing_N = sizes.inputs_N * 0.0
        return nothing_N + self.flops_per_image * sizes.images_N, nothing_N

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return no operators."""
        return PassOperators.empty()

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return the bytes of token IDs."""
        return 8 * sizes.inputs_N

    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return zeros."""
        return 0.0 * sizes.inputs_N

    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the bytes of the embedding gradient, which has the size of the embedding."""
        return sizes.units_N * 0.0 + self.trained * setting.element_bytes * self.parameters


@dataclass(frozen=True)
class EmbeddingBlock(InputBlock):
    """Embedding of the LLM, with placeholders replaced by encoder outputs.

    Attributes:
        hidden: Number of features.
    """

    hidden: int = 0

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return lookup and replacement. The backward pass has zeros, row sums and accumulation."""
        size = setting.element_bytes
        tensor = setting.execution.tensor
        row_bytes = size * sizes.inputs_N * self.hidden
        placed = Operator("copy", memory_bytes=2 * row_bytes, calls=1)
        forward = [placed, placed]
        if tensor > 1:
            sent = all_reduce_bytes(row_bytes, tensor)
            forward.append(Operator("all_reduce", network_bytes=sent, link=setting.tensor_link))
        table = self.parameters / tensor
        weights = [
            Operator("copy", memory_bytes=size * table + 2 * row_bytes, calls=2),
            accumulation_operator(table, setting, 1),
        ]
        return PassOperators(forward, [placed], weights, [])


@dataclass(frozen=True)
class ProjectionBlock(ModuleBlock):
    """Patch embedding, or a linear layer of a connector with its activation function.

    Attributes:
        role: "embedding" converts patches to features. "context" is a linear layer of a generator
            connector. "output" is a linear layer after the transformer layers.
        linear: (inputs, outputs).
        first: Whether it is the first linear layer of its role in the module.
        last: Whether it is the last linear layer of its role in the module.
        flops_per_image: FLOPs per image in addition to the linear layer.
        norm: Type and width of an adjacent norm of the module, if any.
        after_norm: Whether the input is the output of a norm that is trained with it.
        is_sharded: Whether tensor-parallel ranks shard it.
        adapter: Low-rank adapter, if only the adapter is trained.
    """

    role: Literal["embedding", "context", "output"] = field(kw_only=True)
    linear: Linear = field(kw_only=True)
    first: bool = False
    last: bool = False
    flops_per_image: int = 0
    norm: tuple[str, int] | None = None
    after_norm: bool = False
    is_sharded: bool = False
    adapter: AdapterSizes | None = None

    @property
    def _adapter_costs(self) -> AdapterCosts:
        return AdapterCosts([] if self.adapter is None else [self.adapter])

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """Return the FLOPs of the adapter if there is one, otherwise of trained weights."""
        every_N = super().weight_flops(sizes)
        return every_N if self.adapter is None else self._adapter_costs.flops_N(self._rows_N(sizes))

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the FLOPs of the linear layer, its adapter, and images."""
        inputs, outputs = self.linear
        rows_N = self._rows_N(sizes)
        dense_N = 2 * inputs * outputs * rows_N + self._adapter_costs.flops_N(rows_N)
        return dense_N + self.flops_per_image * sizes.images_N, sizes.inputs_N * 0.0

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return matmul, preceding activation function, position addition and all-reduces."""
        size = setting.element_bytes
        tensor = setting.execution.tensor
        rows_N = self._rows_N(sizes)
        inputs, outputs = self.linear
        split = tensor if self.is_sharded else 1
        product = matmul_operator(rows_N, inputs, outputs / split, setting)
        weights = [product, accumulation_operator(inputs * outputs / split, setting, 1)]
        passes = PassOperators([product], [product], weights if self.adapter is None else [], [])
        passes.add(self._adapter_costs.operators(rows_N, setting))
        if self.role == "embedding":  # positions are added
            added_bytes = 3 * size * rows_N * outputs
            passes.forward.append(Operator("elementwise", memory_bytes=added_bytes))
        elif not self.first:
            passes.add(activation_operators("gelu", False, rows_N * inputs / split, setting))
        if split > 1:
            width = outputs if self.last else inputs
            sent = all_reduce_bytes(size * rows_N * width, tensor)
            operator = Operator("all_reduce", network_bytes=sent, link=setting.tensor_link)
            (passes.forward if self.last else passes.inputs).append(operator)
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return the bytes of the inputs of linear layer, activation function and norm."""
        size = setting.element_bytes
        normed_N = sizes.units_N * 0.0
        if self.norm:
            kind, width = self.norm
            trained = weights and self.adapter is None
            normed_N = norm_saved_bytes(kind, sizes.units_N * width, size, trained)
            normed_N = normed_N + 8 * sizes.units_N
        normed_N = normed_N + weights * self._adapter_costs.saved_bytes(
            self._rows_N(sizes), setting
        )
        split = setting.execution.tensor if self.is_sharded and self.last else 1
        tensors = weights + (self.role != "embedding" and not self.first)
        return normed_N + size * tensors * self._rows_N(sizes) * self.linear[0] / split

    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return the bytes of the gradient of the result."""
        rows_N = sizes.outputs_N if self.role == "output" else sizes.inputs_N
        return setting.element_bytes * rows_N * self.linear[1]

    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the bytes of a result, its gradient and the weight gradient."""
        inputs, outputs = self.linear
        gradient = self.trained * setting.element_bytes * inputs * outputs
        return 2 * setting.element_bytes * self._rows_N(sizes) * max(inputs, outputs) + gradient

    def _rows_N(self, sizes: TaskSizes) -> Array:
        """Return the number of rows of the matmul, by task."""
        return {
            "embedding": sizes.inputs_N,
            "context": sizes.context_inputs_N,
            "output": sizes.outputs_N,
        }[self.role]


@dataclass(frozen=True)
class HeadBlock(ModuleBlock):
    """Final norm of all positions, logits of positions with a target, and cross entropy.

    Attributes:
        linear: (features, vocabulary size).
        norm: Type of the norm.
        chunk_targets: Number of targets per chunk if F computes logits and their gradients in
            chunks. 0 if all logits are computed at once.
    """

    linear: Linear = field(kw_only=True)
    norm: str = field(kw_only=True)
    chunk_targets: int = 0

    @property
    def backward_in_forward(self) -> bool:
        """Return True if F computes the gradients, including those of the norm."""
        return self.chunk_targets > 0

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the FLOPs of the logits."""
        hidden, vocabulary = self.linear
        return 2 * hidden * vocabulary * sizes.outputs_N, sizes.inputs_N * 0.0

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators of the head.

        On GPUs, one kernel reads the logits, and another one overwrites them with their gradient.
        On CPUs, half-precision logits of many targets are cast in chunks. The backward pass casts
        them again, unless gradients are computed with the loss.
        """
        size = setting.element_bytes
        tensor = setting.execution.tensor
        hidden, vocabulary = self.linear
        norm = norm_operators(self.norm, sizes.units_N * hidden, 1, setting)
        product = matmul_operator(sizes.outputs_N, hidden, vocabulary / tensor, setting)
        fused = self._fuses_loss(setting)
        chunks_N = np.ceil(sizes.outputs_N / self._chunk(setting)) if self.chunk_targets else 1
        product = product._replace(calls=product.calls * chunks_N)
        # Ranks have all logits or, in chunks, the logits of their shard of the vocabulary.
        logits_N = sizes.outputs_N * vocabulary / (tensor if self.chunk_targets else 1)
        selected_N = sizes.outputs_N * hidden
        casts = 4 + size if size < 4 else 0
        loss = Operator(
            "activation", memory_bytes=(8 + casts) * logits_N, calls=(2 + (casts > 0)) * chunks_N
        )
        select = Operator("copy", memory_bytes=2 * size * selected_N)
        scatter_bytes = size * (2 * sizes.units_N * hidden + selected_N)
        scatter = Operator("copy", memory_bytes=scatter_bytes, calls=2)
        # Gradient of the selected log-probabilities: zeros, then softmax times their sum.
        calls_N = (3 + (casts > 0)) * chunks_N
        backward_loss = Operator("activation", memory_bytes=(16 + casts) * logits_N, calls=calls_N)
        if fused:
            loss = Operator("activation", memory_bytes=size * logits_N, calls=2 * chunks_N)
            backward_loss = Operator("activation", memory_bytes=2 * size * logits_N, calls=chunks_N)
        forward = [*norm.forward, select, product, loss]
        inputs = [*norm.inputs, scatter, product, backward_loss]
        weights = [
            *norm.weights,
            product,
            accumulation_operator(hidden * vocabulary / tensor, setting, 1),
        ]
        if tensor > 1:
            link = setting.tensor_link
            if not self.chunk_targets:
                gathered_bytes = size * logits_N * (tensor - 1) / tensor
                forward.append(Operator("all_gather", network_bytes=gathered_bytes, link=link))
            sent = all_reduce_bytes(size * selected_N, tensor)
            inputs.append(Operator("all_reduce", network_bytes=sent, link=link))
        recomputed = []
        if size < 4 and not self.chunk_targets and not fused:  # chunks of logits are cast again
            is_chunked_N = (sizes.outputs_N > LOSS_CHUNK).astype(float)
            recomputed.append(
                loss._replace(
                    memory_bytes=loss.memory_bytes * is_chunked_N, calls=loss.calls * is_chunked_N
                )
            )
        return PassOperators(forward, inputs, weights, recomputed)

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return the bytes of final norm, selected positions, and log-probabilities or logits."""
        size = setting.element_bytes
        hidden, vocabulary = self.linear
        saved_N = norm_saved_bytes(self.norm, sizes.units_N * hidden, size, weights)
        selected_bytes_N = size * sizes.outputs_N * hidden
        if self.chunk_targets:  # gradients of selected positions and of the weight
            tensor = setting.execution.tensor
            return saved_N + selected_bytes_N + weights * size * hidden * vocabulary / tensor
        saved_N = saved_N + weights * selected_bytes_N
        is_chunked_N = ((sizes.outputs_N > LOSS_CHUNK) & (size < 4)) | self._fuses_loss(setting)
        return saved_N + np.where(is_chunked_N, size, 4) * sizes.outputs_N * vocabulary

    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return the bytes of the gradients of the logits."""
        return (self.chunk_targets == 0) * setting.element_bytes * sizes.outputs_N * self.linear[1]

    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the bytes of logits and their gradients, in chunks for many targets."""
        size = setting.element_bytes
        rows_N = sizes.outputs_N
        hidden, vocabulary = self.linear
        if (
            self.chunk_targets
        ):  # float32 log-probabilities, their gradients, and gradients of logits
            logit_bytes = size if self._fuses_loss(setting) else LOGIT_BYTES
            chunk_N = np.minimum(rows_N, self._chunk(setting))
            return logit_bytes * chunk_N * vocabulary / setting.execution.tensor
        bytes_N = 2 * size * rows_N * vocabulary
        if size < 4 and not self._fuses_loss(setting):
            bytes_N = bytes_N + 8 * np.minimum(rows_N, LOSS_CHUNK) * vocabulary
        return bytes_N + self.trained * size * hidden * vocabulary

    def _fuses_loss(self, setting: CostSetting) -> bool:
        """Return True if gradients overwrite logits: on GPUs, unless ranks share a vocabulary."""
        return setting.is_gpu and not (self.chunk_targets and setting.execution.tensor > 1)

    def _chunk(self, setting: CostSetting) -> float:
        """Return the number of targets per chunk of logits."""
        fused = self._fuses_loss(setting)
        ranks = setting.execution.tensor
        return self.chunk_targets * (LOGIT_BYTES // setting.element_bytes if fused else ranks)


def stage_blocks(module: ModuleDescription, start: int, stop: int) -> list[ModuleBlock]:
    """Return the blocks of the stage with layers [start, stop) of a complete module."""
    blocks: list[ModuleBlock] = []
    if start == 0:
        blocks += _embedding_blocks(module)
    blocks += (
        LayerBlock(module.trainable or bool(layer.adapters), len(list(equal)), layer=layer)
        for layer, equal in groupby(module.layers[start:stop])
    )
    if stop == len(module.layers):
        blocks += _head_blocks(module)
    return blocks


def required_gradients(
    blocks: Sequence[ModuleBlock], sends_gradient: GradientFlags
) -> Iterator[tuple[ModuleBlock, GradientFlags, bool]]:
    """Yield (block, whether it needs input gradients, whether it needs weight gradients).

    Args:
        blocks: Blocks of a stage in forward order.
        sends_gradient: Whether the stage sends a gradient to the preceding stage. An array has one
            flag per task.
    """
    reached = sends_gradient
    for block in blocks:
        # Matmuls inside of a trained layer need input gradients even if all sources are frozen.
        inputs = reached | (isinstance(block, LayerBlock) and block.trained)
        if isinstance(block, ProjectionBlock) and block.after_norm:
            inputs = inputs | block.trained
        yield block, inputs & (not block.needs_no_input_gradient), block.trained
        reached = reached | block.trained


def _embedding_blocks(module: ModuleDescription) -> list[ModuleBlock]:
    blocks: list[ModuleBlock] = []
    if module.latents is not None:
        blocks.append(
            AutoencoderBlock(
                trained=False, needs_no_input_gradient=True, autoencoder=module.latents
            )
        )
    if module.kind == "generator" and module.context_flops_per_unit:
        size = sqrt(module.context_flops_per_unit / 4)  # two linear layers, assumed equal
        trained = module.connector_trainable
        blocks += [
            ProjectionBlock(trained, role="context", linear=(size, size), first=i == 0)
            for i in (0, 1)
        ]
    linears: Sequence[Linear] = module.embedding_linears
    if module.embedding_flops_per_unit and not linears:
        linears = [_square_linear(module.embedding_flops_per_unit)]
    if module.kind == "llm":
        hidden = module.layers[0].hidden_size
        trained = module.trainable or module.token_rows_trainable
        return [EmbeddingBlock(trained, parameters=module.embedding_parameters, hidden=hidden)]
    per_image = module.flops_per_image
    if not linears:
        parameters = module.embedding_parameters
        return [*blocks, InputBlock(module.trainable, 1, True, parameters, per_image)]
    for index, linear in enumerate(linears):
        leaf = index == 0
        blocks.append(
            ProjectionBlock(
                module.trainable,
                needs_no_input_gradient=leaf,
                role="embedding",
                linear=linear,
                flops_per_image=per_image if leaf else 0,
                norm=_encoder_norm(module, "layer") if leaf else None,
            )
        )
    return blocks


def _head_blocks(module: ModuleDescription) -> list[ModuleBlock]:
    linears: Sequence[Linear] = module.head_linears
    if not linears and module.head_flops_per_unit:
        # A connector has two linear layers, which are assumed to be equal.
        linear_count = 2 if module.kind == "encoder" else 1
        linears = [_square_linear(module.head_flops_per_unit / linear_count)] * linear_count
    if module.kind == "llm":
        norm = module.layers[-1].norm
        rows = module.loss_chunk_targets
        trained = module.trainable or module.token_rows_trainable
        return [
            HeadBlock(trained, linear=sizes, norm=norm, chunk_targets=rows) for sizes in linears
        ]
    blocks: list[ModuleBlock] = []
    encoder_linears = len(linears) - module.connector_linears  # linear layers of the encoder
    for index, linear in enumerate(linears):
        is_connector = module.kind == "encoder" and index >= encoder_linears
        first = index == 0
        is_first_of_connector = is_connector and index == encoder_linears
        has_no_adapters = not module.connector_adapters
        adapter = (
            None
            if has_no_adapters or not is_connector
            else module.connector_adapters[index - encoder_linears]
        )
        trained = module.connector_trainable and (has_no_adapters or adapter is not None)
        blocks.append(
            ProjectionBlock(
                trained if is_connector else module.trainable,
                role="output",
                linear=linear,
                first=first,
                last=index == len(linears) - 1,
                norm=_encoder_norm(module, "layer", "rms") if first else None,
                after_norm=is_first_of_connector and module.connector_norm and has_no_adapters,
                is_sharded=module.kind != "generator",
                adapter=adapter,
            )
        )
    return blocks


def _encoder_norm(module: ModuleDescription, *kinds: str) -> tuple[str, int] | None:
    """Return type and width of the encoder norm next to the layers, if its type is in `kinds`."""
    layer = module.layers[0]
    if module.kind != "encoder" or layer.norm not in kinds:
        return None
    return layer.norm, layer.hidden_size


def _square_linear(flops: float) -> Linear:
    size = sqrt(flops / 2)
    return size, size
