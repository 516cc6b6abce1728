"""CUDA graphs: a capture records the operators of the block, and a replay runs them again.

As on a GPU, a capture computes nothing (its results are NaN), must not wait for the device, and
needs a separate stream. A replay writes to the captured memory. A graph can use memory of its pool
that was free at the capture, so that tensors of two graphs share memory. A replay of one graph
fills these tensors of the other graph with NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::equal")
_numbers = itertools.count(1)
_pools: dict[int, dict[int, list[Tensor]]] = {}
"""Tensors of graphs, by pool and storage that was allocated in captures."""
_capturing: list[CUDAGraph] = []
_owners: dict[int, CUDAGraph] = {}
"""Graph that allocated a storage."""


def reject_while_capturing(call: str) -> None:
    """Raise the error of CUDA for calls that wait for the device."""
    if _capturing:
        raise RuntimeError(f"CUDA error: {call}: operation not permitted when stream is capturing")


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        moves = len({t.device.type for t in tensors if t.ndim}) > 1
        if name in WAITING or (moves and "copy" in name):
            reject_while_capturing(name)
        self.graph.record(func, args, kwargs, result)
        return result


class CUDAGraph:
    """Emulation of `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._operators: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._pool = next(_numbers)
        self._shared: list[Tensor] = []
        """Tensors of other graphs that can use the same memory."""
        self.replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if torch.cuda.current_stream().stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = self._pool if pool is None else pool
        self._shared = self._unused_tensors()
        self._earlier = set(_pools.setdefault(self._pool, {}))
        _capturing.append(self)
        self._recorder = _Recorder(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        _capturing.remove(self)
        for storage, aliases in _pools[self._pool].items():
            if storage not in self._earlier:
                _owners[storage] = self
                _unfilled_marker(aliases[0])
                for other in {_owners[_storage(tensor)] for tensor in self._shared}:
                    other._shared.append(aliases[0])

    def record(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Record an operator, with aliases of its tensors that do not keep autograd graphs."""
        args, kwargs, results = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs, results))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        input_storages = {_storage(t) for t in tensors}
        outputs = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        storages = _pools[self._pool]
        for tensor in outputs:
            if _storage(tensor) not in input_storages:
                storages[_storage(tensor)] = []
        for tensor in (*tensors, *outputs):
            if _storage(tensor) in storages:
                storages[_storage(tensor)].append(tensor)
        is_view = bool(outputs) and all(_storage(t) in input_storages for t in outputs)
        if func._schema.is_mutable or not is_view:
            self._operators.append((func, args, kwargs, outputs))

    def _unused_tensors(self) -> list[Tensor]:
        """Return a tensor of each storage of the pool that only graphs refer to."""
        return [
            aliases[0]
            for storage, aliases in _pools.get(self._pool, {}).items()
            # Python has an additional reference to a storage that it has accessed.
            if torch._C._storage_Use_Count(storage) <= len({id(t) for t in aliases}) + 1
        ]

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for tensor in self._shared:
            _unfilled_marker(tensor)
        for func, args, kwargs, outputs in self._operators:
            results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, new in zip(outputs, results, strict=True):
                if _storage(old) != _storage(new):
                    old.copy_(new)

    def pool(self) -> int:
        return self._pool

    def reset(self) -> None:
        self._operators.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def _unfilled_marker(tensor: Tensor) -> None:
    storage_values = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage()
    )
    if storage_values.is_floating_point():
        storage_values.fill_(torch.nan)


def install() -> None:
    """Make `torch.cuda` use these graphs."""
    torch.cuda.CUDAGraph = CUDAGraph  # type: ignore[misc]
    torch.cuda.graph_pool_handle = lambda: next(_numbers)
    torch.cuda.is_current_stream_capturing = lambda: bool(_capturing)
