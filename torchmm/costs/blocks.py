"""A module as a chain of blocks: what stands before its layers, the layers, what stands after them.

FLOPs, times and memory all walk the same chain. A block says what it costs; a layer's costs are
sums over its components (`components.py`). A block needs weight gradients if it is trained, and
input gradients if anything before it in the chain is trained or a gradient is to go back to the
stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchmm.common.layers import LayerDescription, LowRank, ModuleDescription
from torchmm.costs.components import Linear, norm_kept_bytes
from torchmm.costs.execution import Setting
from torchmm.costs.layers import (
    layer_flops,
    layer_gradients_bytes,
    layer_kept_bytes,
    layer_operators,
    layer_temporary_bytes,
)
from torchmm.costs.mixers import Adapters, LowRanks
from torchmm.costs.operators import (
    Block,
    Encoding,
    Operator,
    Operators,
    accumulate,
    activation_operators,
    all_reduce_bytes,
    matmul,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

Flag = bool | NDArray[np.bool_]
LOGIT_BYTES = 12
"""Bytes per logit of a chunk of targets in float32, whose place more bfloat16 logits take."""
LOSS_CHUNK = 1024
"""Targets whose logits are float32 at a time, see `torchmm.models.layers.loss`."""


@dataclass(frozen=True)
class Layers(Block):
    """Equal transformer layers.

    Attributes:
        layer: sizes.
    """

    layer: LayerDescription = field(kw_only=True)

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """See `torchmm.costs.layers`."""
        return layer_flops(self.layer, sizes)

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """Where there are adapters, theirs."""
        if self.layer.adapters:
            return sizes.units_N * 0.0 + Adapters(self.layer).flops_N(sizes)
        return super().weight_flops(sizes)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """See `torchmm.costs.layers`."""
        return layer_operators(self.layer, sizes, setting)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """See `torchmm.costs.layers`."""
        return layer_kept_bytes(self.layer, sizes, setting, weights=weights)

    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """See `torchmm.costs.layers`."""
        return layer_gradients_bytes(self.layer, sizes, setting)

    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """With the activations of a layer that runs again in backward."""
        whole = setting._replace(execution=replace(setting.execution, recompute="none"))
        whole_N, kept_N = (self.kept_bytes(sizes, s, self.trained) for s in (whole, setting))
        own_N = layer_temporary_bytes(self.layer, sizes, setting, weights=self.trained)
        return (whole_N - kept_N) * has_backward + own_N


@dataclass(frozen=True)
class Inputs(Block):
    """What stands before the layers and has no matrix product.

    Attributes:
        parameters: of it.
        flops_per_image: whatever the image's size.
    """

    parameters: int = 0
    flops_per_image: int = 0

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """None but those of images."""
        nothing_N = sizes.inputs_N * 0.0
        return nothing_N + self.flops_per_image * sizes.images_N, nothing_N

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """None known."""
        return Operators.none()

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """Token ids."""
        return 8 * sizes.inputs_N

    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """None."""
        return 0.0 * sizes.inputs_N

    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """The gradient of a table is as large as the table."""
        return sizes.units_N * 0.0 + self.trained * setting.element_bytes * self.parameters


@dataclass(frozen=True)
class Table(Inputs):
    """The LLM's embedding, in which encoder outputs replace placeholders.

    Attributes:
        hidden: features.
    """

    hidden: int = 0

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Look up and place; in backward, zeros, sums into rows, accumulation."""
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
            accumulate(table, setting, 1),
        ]
        return Operators(forward, [placed], weights, [])


@dataclass(frozen=True)
class Projection(Block):
    """A patch embedding, or a linear of a connector with what follows it.

    Attributes:
        role: embedding: patches to features. context: a linear of a generator's connector. output:
            a linear after the layers.
        linear: (inputs, outputs).
        first, last: whether it is the first or last linear of its role in the module.
        flops_per_image: besides the linear, whatever the image's size.
        normed: kind and width of a norm that the module has next to it, if any.
        after_norm: whether its input comes from a norm that is trained with it.
        divided: among tensor-parallel ranks.
        adapter: what is trained of it, if that is not all.
    """

    role: Literal["embedding", "context", "output"] = field(kw_only=True)
    linear: Linear = field(kw_only=True)
    first: bool = False
    last: bool = False
    flops_per_image: int = 0
    normed: tuple[str, int] | None = None
    after_norm: bool = False
    divided: bool = False
    adapter: LowRank | None = None

    @property
    def _low_ranks(self) -> LowRanks:
        return LowRanks([] if self.adapter is None else [self.adapter])

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """The adapter's, if there is one."""
        every_N = super().weight_flops(sizes)
        return every_N if self.adapter is None else self._low_ranks.flops_N(self._rows_N(sizes))

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Of the matrix product, and of images."""
        inputs, outputs = self.linear
        rows_N = self._rows_N(sizes)
        dense_N = 2 * inputs * outputs * rows_N + self._low_ranks.flops_N(rows_N)
        return dense_N + self.flops_per_image * sizes.images_N, sizes.inputs_N * 0.0

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The product, the function before it, positions that are added, sums over ranks."""
        size = setting.element_bytes
        tensor = setting.execution.tensor
        rows_N = self._rows_N(sizes)
        inputs, outputs = self.linear
        split = tensor if self.divided else 1
        product = matmul(rows_N, inputs, outputs / split, setting)
        weights = [product, accumulate(inputs * outputs / split, setting, 1)]
        passes = Operators([product], [product], weights if self.adapter is None else [], [])
        passes.add(self._low_ranks.operators(rows_N, setting))
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

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """Input of the linear, and of the activation function before it; inputs of the norm."""
        size = setting.element_bytes
        normed_N = sizes.units_N * 0.0
        if self.normed:
            kind, width = self.normed
            trained = weights and self.adapter is None
            normed_N = norm_kept_bytes(kind, sizes.units_N * width, size, trained)
            normed_N = normed_N + 8 * sizes.units_N
        normed_N = normed_N + weights * self._low_ranks.kept_bytes(self._rows_N(sizes), setting)
        split = setting.execution.tensor if self.divided and self.last else 1
        tensors = weights + (self.role != "embedding" and not self.first)
        return normed_N + size * tensors * self._rows_N(sizes) * self.linear[0] / split

    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """Of the result."""
        rows_N = sizes.outputs_N if self.role == "output" else sizes.inputs_N
        return setting.element_bytes * rows_N * self.linear[1]

    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """A result and its gradient, and the gradient of the weight."""
        inputs, outputs = self.linear
        gradient = self.trained * setting.element_bytes * inputs * outputs
        return 2 * setting.element_bytes * self._rows_N(sizes) * max(inputs, outputs) + gradient

    def _rows_N(self, sizes: TaskSizes) -> Array:
        """Rows that it is computed for."""
        return {
            "embedding": sizes.inputs_N,
            "context": sizes.given_N,
            "output": sizes.outputs_N,
        }[self.role]


@dataclass(frozen=True)
class Head(Block):
    """Final norm of all positions, logits of those with a target, cross entropy.

    Attributes:
        linear: (features, vocabulary).
        norm: kind of the norm.
        rows: targets whose logits are computed at a time, and their gradients with them; 0: all.
    """

    linear: Linear = field(kw_only=True)
    norm: str = field(kw_only=True)
    rows: int = 0

    @property
    def backward_in_forward(self) -> bool:
        """Of the norm too, which takes next to nothing."""
        return self.rows > 0

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Of the logits."""
        hidden, vocabulary = self.linear
        return 2 * hidden * vocabulary * sizes.outputs_N, sizes.inputs_N * 0.0

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Return the operators of the head.

        On GPUs one kernel reads the logits, and another overwrites them with their gradient. On
        CPUs long rows in half precision are cast chunk by chunk, and again in backward, unless
        gradients are computed with the loss.
        """
        size = setting.element_bytes
        tensor = setting.execution.tensor
        hidden, vocabulary = self.linear
        norm = norm_operators(self.norm, sizes.units_N * hidden, 1, setting)
        product = matmul(sizes.outputs_N, hidden, vocabulary / tensor, setting)
        fused = self._fuses_loss(setting)
        chunks_N = np.ceil(sizes.outputs_N / self._chunk(setting)) if self.rows else 1
        product = product._replace(calls=product.calls * chunks_N)
        # All ranks have all logits, or each those of its part of the vocabulary.
        logits_N = sizes.outputs_N * vocabulary / (tensor if self.rows else 1)
        picked_N = sizes.outputs_N * hidden
        casts = 4 + size if size < 4 else 0
        loss = Operator(
            "activation", memory_bytes=(8 + casts) * logits_N, calls=(2 + (casts > 0)) * chunks_N
        )
        pick = Operator("copy", memory_bytes=2 * size * picked_N)
        unpicked_bytes = size * (2 * sizes.units_N * hidden + picked_N)
        unpick = Operator("copy", memory_bytes=unpicked_bytes, calls=2)
        # Gradient of the picked log-probabilities: zeros, then softmax times their sum.
        calls_N = (3 + (casts > 0)) * chunks_N
        back = Operator("activation", memory_bytes=(16 + casts) * logits_N, calls=calls_N)
        if fused:
            loss = Operator("activation", memory_bytes=size * logits_N, calls=2 * chunks_N)
            back = Operator("activation", memory_bytes=2 * size * logits_N, calls=chunks_N)
        forward = [*norm.forward, pick, product, loss]
        inputs = [*norm.inputs, unpick, product, back]
        weights = [*norm.weights, product, accumulate(hidden * vocabulary / tensor, setting, 1)]
        if tensor > 1:
            link = setting.tensor_link
            if not self.rows:
                gathered = size * logits_N * (tensor - 1) / tensor
                forward.append(Operator("all_gather", network_bytes=gathered, link=link))
            sent = all_reduce_bytes(size * picked_N, tensor)
            inputs.append(Operator("all_reduce", network_bytes=sent, link=link))
        again = []
        if size < 4 and not self.rows and not fused:  # chunks of logits are cast again
            many_N = (sizes.outputs_N > LOSS_CHUNK).astype(float)
            again.append(
                loss._replace(memory_bytes=loss.memory_bytes * many_N, calls=loss.calls * many_N)
            )
        return Operators(forward, inputs, weights, again)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """Final norm, picked positions, float32 log-probabilities or long rows' logits."""
        size = setting.element_bytes
        hidden, vocabulary = self.linear
        kept_N = norm_kept_bytes(self.norm, sizes.units_N * hidden, size, weights)
        picked_N = size * sizes.outputs_N * hidden
        if self.rows:  # gradients of what is picked and of the weight
            tensor = setting.execution.tensor
            return kept_N + picked_N + weights * size * hidden * vocabulary / tensor
        kept_N = kept_N + weights * picked_N
        chunked_N = ((sizes.outputs_N > LOSS_CHUNK) & (size < 4)) | self._fuses_loss(setting)
        return kept_N + np.where(chunked_N, size, 4) * sizes.outputs_N * vocabulary

    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """Of the logits."""
        return (self.rows == 0) * setting.element_bytes * sizes.outputs_N * self.linear[1]

    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """Logits and their gradients; of long rows in half precision chunk by chunk."""
        size = setting.element_bytes
        rows_N = sizes.outputs_N
        hidden, vocabulary = self.linear
        if self.rows:  # log-probabilities, their gradients and those of the logits, in float32
            logit_bytes = size if self._fuses_loss(setting) else LOGIT_BYTES
            chunk_N = np.minimum(rows_N, self._chunk(setting))
            return logit_bytes * chunk_N * vocabulary / setting.execution.tensor
        found_N = 2 * size * rows_N * vocabulary
        if size < 4 and not self._fuses_loss(setting):
            found_N = found_N + 8 * np.minimum(rows_N, LOSS_CHUNK) * vocabulary
        return found_N + self.trained * size * hidden * vocabulary

    def _fuses_loss(self, setting: Setting) -> bool:
        """Return True if gradients overwrite logits: on GPUs, unless ranks share a vocabulary."""
        return setting.on_gpu and not (self.rows and setting.execution.tensor > 1)

    def _chunk(self, setting: Setting) -> float:
        """Return the number of targets whose logits are computed at a time."""
        fused = self._fuses_loss(setting)
        ranks = setting.execution.tensor
        return self.rows * (LOGIT_BYTES // setting.element_bytes if fused else ranks)


def stage_blocks(module: ModuleDescription, start: int, stop: int) -> list[Block]:
    """The chain of the stage with layers [start, stop) of a whole module."""
    blocks: list[Block] = []
    if start == 0:
        blocks += _before(module)
    blocks += (
        Layers(module.trainable or bool(layer.adapters), len(list(equal)), layer=layer)
        for layer, equal in groupby(module.layers[start:stop])
    )
    if stop == len(module.layers):
        blocks += _after(module)
    return blocks


def gradients(blocks: Sequence[Block], arrives: Flag) -> Iterator[tuple[Block, Flag, bool]]:
    """(block, whether it needs input gradients, whether weight gradients).

    Args:
        arrives: whether a gradient goes back to the stage before; an array: by task.
    """
    needed = arrives
    for block in blocks:
        # Inside a trained layer gradients pass from product to product, whatever is before it.
        inputs = needed | (isinstance(block, Layers) and block.trained)
        if isinstance(block, Projection) and block.after_norm:
            inputs = inputs | block.trained
        yield block, inputs & (not block.leaf), block.trained
        needed = needed | block.trained


def _before(module: ModuleDescription) -> list[Block]:
    blocks: list[Block] = []
    if module.latents is not None:
        blocks.append(Encoding(trained=False, leaf=True, of=module.latents))
    if module.kind == "generator" and module.context_flops_per_unit:
        size = sqrt(module.context_flops_per_unit / 4)  # two linears, taken as equally large
        trained = module.connector_trainable
        blocks += [
            Projection(trained, role="context", linear=(size, size), first=i == 0) for i in (0, 1)
        ]
    linears: Sequence[Linear] = module.pre_linears
    if module.pre_flops_per_unit and not linears:
        linears = [_square(module.pre_flops_per_unit)]
    if module.kind == "llm":
        hidden = module.layers[0].hidden_size
        return [Table(module.trainable, parameters=module.pre_parameters, hidden=hidden)]
    per_image = module.flops_per_image
    if not linears:
        parameters = module.pre_parameters
        return [*blocks, Inputs(module.trainable, 1, True, parameters, per_image)]
    for index, linear in enumerate(linears):
        leaf = index == 0
        blocks.append(
            Projection(
                module.trainable,
                leaf=leaf,
                role="embedding",
                linear=linear,
                flops_per_image=per_image if leaf else 0,
                normed=_norm(module, "layer") if leaf else None,
            )
        )
    return blocks


def _after(module: ModuleDescription) -> list[Block]:
    linears: Sequence[Linear] = module.post_linears
    if not linears and module.post_flops_per_unit:
        # A connector has two linears, taken as equally large.
        halves = 2 if module.kind == "encoder" else 1
        linears = [_square(module.post_flops_per_unit / halves)] * halves
    if module.kind == "llm":
        norm = module.layers[-1].norm
        rows = module.loss_rows
        return [Head(module.trainable, linear=sizes, norm=norm, rows=rows) for sizes in linears]
    found: list[Block] = []
    own = len(linears) - module.connector_linears  # the tower's
    for index, linear in enumerate(linears):
        of_connector = module.kind == "encoder" and index >= own
        first = index == 0
        opens_connector = of_connector and index == own
        whole = not module.connector_adapters
        adapter = None if whole or not of_connector else module.connector_adapters[index - own]
        trained = module.connector_trainable and (whole or adapter is not None)
        found.append(
            Projection(
                trained if of_connector else module.trainable,
                role="output",
                linear=linear,
                first=first,
                last=index == len(linears) - 1,
                normed=_norm(module, "layer", "rms") if first else None,
                after_norm=opens_connector and module.connector_norm and whole,
                divided=module.kind != "generator",
                adapter=adapter,
            )
        )
    return found


def _norm(module: ModuleDescription, *kinds: str) -> tuple[str, int] | None:
    """Kind and width of the norm that encoders of these kinds may have around their layers."""
    layer = module.layers[0]
    if module.kind != "encoder" or layer.norm not in kinds:
        return None
    return layer.norm, layer.hidden_size


def _square(flops: float) -> Linear:
    size = sqrt(flops / 2)
    return size, size
