"""Measurement of the peak memory of a training step from its allocations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchmm.common.batch import Microbatch


class CountPeak(TorchDispatchMode):
    """Dispatch mode that records the maximum number of allocated bytes after any operator.

    Args:
        held: Tensors that are allocated before the first operator and are never freed.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[int, weakref.ref]] = {}
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}
        self._held = set(storages)
        self.bytes = self.peak_bytes = sum(s.nbytes() for s in storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and key not in self._held:
            self.bytes += size
            self._sizes[key] = size, weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)[0]


def traced_peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak CPU memory of a function in bytes, in addition to memory allocated before.

    Includes allocations of compiled code, which dispatch modes cannot observe.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        function()
    events = traced.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))


def held_in_a_step(model: nn.Module, batch: Sequence[Microbatch]) -> list[Tensor]:
    """Return parameters, gradients, buffers and all tensors of the microbatches."""
    tensors = [*model.buffers(), *model.parameters()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for m in batch:
        tensors += [m.input_ids_T, m.targets_T, m.position_ids, m.target_positions_L]
        tensors += [t for e in m.encoders.values() for t in (e.pixels, e.positions_K)]
        if (generated := m.generator) is not None:
            tensors += [generated.patches_PV, generated.noise_PV, generated.context_positions_K]
    return tensors
