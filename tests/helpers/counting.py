"""Counters of FLOPs, memory traffic, calls and allocated bytes of real modules."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch import _inductor as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import torchmm.models.layers.attention
import torchmm.models.layers.delta_ops  # noqa: F401 - both register their operators

VIEWS = {
    "view", "t", "transpose", "detach", "expand", "slice", "unsqueeze", "squeeze", "select",
    "_unsafe_view", "permute", "lift_fresh", "unbind", "alias", "split",
}  # fmt: skip


def _packed(query_THD: Tensor, value_TGD: Tensor, starts: Tensor, window: int) -> int:
    lengths = [b - a for a, b in pairwise(starts.tolist())]
    pairs = sum(length * min(length, window or length) for length in lengths)
    return 2 * query_THD.shape[1] * (query_THD.shape[2] + value_TGD.shape[2]) * pairs


def _window(options: tuple[Any, ...]) -> int:
    """Return the window, which is the third option after the starts of segments."""
    return options[2] if len(options) > 2 else 0


def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *options: Any, out_val: Any
) -> int:
    """Return the FLOPs of scores and their product with values.

    The counter of torch does not know the operator.
    """
    return _packed(query, value, starts, _window(options))


def _packed_attention_backward(
    grad: Tensor, inputs: list, outputs: list, starts: Tensor, *options: Any, out_val: Any
) -> int:
    return 2 * _packed(inputs[0], inputs[2], starts, _window(options))


def _capped_attention(inputs: list, starts: Tensor, *options: Any, out_val: Any) -> int:
    return _packed(inputs[0], inputs[2], starts, _window(options[1:]))


def _capped_attention_backward(
    grad: Tensor, inputs: list, starts: Tensor, *options: Any, out_val: Any
) -> int:
    return 2 * _packed(inputs[0], inputs[2], starts, _window(options[1:]))


def _dense(query_BHTD: Tensor, key_BHSD: Tensor) -> int:
    return 2 * 2 * query_BHTD.numel() * key_BHSD.shape[2]


def _dense_attention(query: Tensor, key: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    return _dense(query, key)


def _dense_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, *_: Any, out_val: Any, **__: Any
) -> int:
    return 2 * _dense(query, key)


def _grouped_mm(rows: Tensor, weights: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    """Return the FLOPs of experts.

    Forward: (S, I) x (E, I, O); gradients of weights: (I, S) x (S, O).
    """
    return 2 * rows.numel() * weights.shape[-1]


def _convolution_backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, *settings: Any, out_val: Any
) -> int:
    """Return the FLOPs of the forward once per gradient.

    The counter of torch ignores groups in gradients of weights.
    """
    needed: list[bool] = settings[-1]
    forward = 2 * (grad.numel() // grad.shape[1]) * weight.numel()
    return forward * sum(needed[:2])


def _delta(key: Tensor, value: Tensor, starts: Tensor) -> int:
    """Return the FLOPs of the delta rule in chunks of 64, as Hugging Face computes it.

    Chunks are shorter if no sample has more tokens.
    """
    lengths = [b - a for a, b in pairwise(starts.tolist())]
    size = next((s for s in (16, 32) if s >= max(lengths)), 64)
    chunks = sum(-(-length // size) for length in lengths)
    (heads, width), keys = value.shape[1:], key.shape[2]
    inside = 2 * size * keys * size + size * size * width
    return 2 * chunks * heads * (inside + 3 * size * keys * width)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, **_: Any
) -> int:
    return _delta(key, value, starts)


def _delta_rule_backward(grad: Tensor, inputs: list, starts: Tensor, *, out_val: Any) -> int:
    return 2 * _delta(inputs[1], inputs[2], starts)


_aten, _torchmm = torch.ops.aten, torch.ops.torchmm
_ATTENTION: dict[Any, Any] = {
    _torchmm.packed_attention: _packed_attention,
    _torchmm.packed_attention_backward: _packed_attention_backward,
    _aten._grouped_mm: _grouped_mm,
    _aten.convolution_backward: _convolution_backward,
    _torchmm.packed_delta_rule: _delta_rule,
    _torchmm.packed_delta_rule_backward: _delta_rule_backward,
    _torchmm.capped_attention: _capped_attention,
    _torchmm.capped_attention_backward: _capped_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _dense_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _dense_attention_backward,
}
for _formula in _ATTENTION.values():
    _formula._get_raw = True  # give it tensors, not shapes


def count_flops(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the FLOPs that torch counts, and the result of the function."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        result = function()
    return counter.get_total_flops(), result


class CountTraffic(TorchDispatchMode):
    """Counts computing calls and the bytes they read and write by operator; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name not in VIEWS:
            self.calls[name] += 1
            leaves = tree_leaves((args, out))
            self.nbytes[name] += sum(_storage_bytes(x) for x in leaves if isinstance(x, Tensor))
        return out


def _storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions count once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


class CountLive(TorchDispatchMode):
    """Counts bytes of memory that was allocated in the block and is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def live_bytes(self, without: list[Tensor]) -> int:
        """Return the bytes in use, except for the memory of the given tensors."""
        gc.collect(1)
        excluded = {t.untyped_storage()._cdata for t in without}
        return sum(
            size
            for key, (reference, size) in self._storages.items()
            if key not in excluded and not reference.expired()
        )


class CountFused:
    """Counts kernels that torch.compile makes of graphs, and the bytes that they read and write.

    Inductor plans its kernels as usual, but graphs run without generated code, so that nothing
    is compiled. Concatenations are fused as on GPUs.
    """

    def __init__(self) -> None:
        self.forward = FusedKernels()
        self.backward = FusedKernels()

    def __enter__(self) -> Self:
        self._changes = ExitStack()
        config = {"force_disable_caches": True, "force_pointwise_cat": True}
        self._changes.enter_context(inductor.config.patch(config))
        patched = mock.patch.object(GraphLowering, "compile_to_module", self._count_in())
        self._changes.enter_context(patched)
        return self

    def __exit__(self, *exception: object) -> None:
        self._changes.close()

    def _count_in(self) -> Callable[[GraphLowering], SimpleNamespace]:
        def count(graph: GraphLowering) -> SimpleNamespace:
            return self._count(graph)

        return count

    def _count(self, graph: GraphLowering) -> SimpleNamespace:
        graph.init_wrapper_code()
        graph._update_scheduler()
        kernels = self.backward if graph.is_backward else self.forward
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                kernels.calls += 1
                kernels.nbytes += node.get_read_write_buffers_sizes()
        module = graph.orig_gm

        def call(arguments: list[Any]) -> Any:
            inputs = list(arguments)
            arguments.clear()
            return module.forward(*inputs)

        return SimpleNamespace(call=call, __file__="", key="", runner=None)


@dataclass
class FusedKernels:
    """Number of fused kernels and their memory traffic."""

    calls: int = 0
    nbytes: int = 0
