"""Select the backend of async tensor parallelism and its number of blocks at startup.

Symmetric memory is selected if a test on this host returns correct numbers. Otherwise a ring is
selected if the process group supports sends and receives in the background (NCCL, gloo), or else
collectives. Ranks of a group must have the same backend, so they vote. One log line has the
selection and the reason. The number of blocks per slice is measured with one MLP of the module:
small blocks overlap more of the first and the last transfer, and large blocks multiply faster.
"""

from __future__ import annotations

import logging
import socket
import time
import zlib
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.extensions.async_tp.backends import CollectiveBackend, SymmetricMemoryBackend
from torchmm.extensions.async_tp.linear import Overlap, gather_linear, linear_scatter
from torchmm.extensions.async_tp.styles import AsyncStyles
from torchmm.models.layered import LayeredModule
from torchmm.parallel import torch_compat
from torchmm.recipe.parallel_section import ParallelConfig

CANDIDATES = (1, 2, 4, 8)
"""Numbers of blocks per slice that are measured."""
UNTUNED = 2
"""Number of blocks per slice if the number of tokens is unknown."""
REPETITIONS = 3

logger = logging.getLogger(__name__)


def choose_styles(
    module: LayeredModule,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    tokens: int,
) -> AsyncStyles:
    """Return the styles of a module. Collective. See `torchmm.parallel.tensor.apply`."""
    return AsyncStyles(choose_overlap(module, mesh, parallel, dtype, tokens))


def choose_overlap(
    module: LayeredModule,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    tokens: int,
) -> Overlap:
    """Return the communication settings of a module, identical on all ranks. Collective.

    Args:
        module: Module to parallelize.
        mesh: 1-D mesh of the tensor-parallel ranks.
        parallel: Section [parallel] of the recipe.
        dtype: Dtype of activations.
        tokens: Number of tokens for which the number of blocks is selected. 0 if unknown.

    Raises:
        ConfigError: The backend of the recipe does not work on this machine.
    """
    group = mesh.get_group()
    device = _device_of(mesh)
    backend, reason = choose_backend(group, device, parallel.async_tensor_backend)
    overlap = Overlap(backend, group.group_name, parallel.async_tensor_chunks or UNTUNED)
    blocks = "full matmuls"
    if backend == "symmetric_memory":
        blocks = "one block per rank"
    elif backend == "ring":
        blocks = f"blocks per slice: {overlap.chunks}"
        if parallel.async_tensor_chunks == 0 and tokens:
            times_ms = time_chunks(overlap, module.layer_sizes()[0], device, dtype, tokens)
            overlap = overlap._replace(chunks=min(times_ms, key=lambda c: times_ms[c]))
            tried = ", ".join(f"{chunks}: {ms:.2f}" for chunks, ms in times_ms.items())
            blocks = f"blocks per slice: {overlap.chunks} (ms by number: {tried})"
    logger.info("async tensor parallelism of %s: %s, %s; %s", module.name, backend, blocks, reason)
    return overlap


def choose_backend(
    group: dist.ProcessGroup, device: torch.device, requested: str = "auto"
) -> tuple[str, str]:
    """Return a key of `BACKENDS` and the reason. Collective over the group.

    Raises:
        ConfigError: Symmetric memory is requested and does not work.
    """
    if requested in ("ring", "collective"):
        return requested, "set in the recipe"
    trouble = symmetric_memory_problem(group, device)
    if trouble is None:
        return "symmetric_memory", "a test run returned correct values"
    if requested == "symmetric_memory":
        raise ConfigError(
            f'parallel.async_tensor_backend = "symmetric_memory": {trouble}; use "auto"'
        )
    name = dist.get_backend(group)
    if name in ("nccl", "gloo"):
        return "ring", f"no symmetric memory: {trouble}"
    return (
        "collective",
        f"no symmetric memory: {trouble}; no point-to-point transfers with known overlap on {name}",
    )


def symmetric_memory_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why the group cannot use symmetric memory, or None. Identical on all ranks."""
    if device.type != "cuda":
        return f"it requires CUDA, but the device is {device.type}"
    if not _on_one_host(group, device):
        return "the ranks are on several hosts"
    return try_symmetric_memory(group, device)


def try_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Compare all operations on small numbers with collectives. Return the problem, or None."""
    trouble = None
    try:
        if not _matches_collectives(group, device):
            trouble = "a test run returned wrong values"
    except (RuntimeError, AttributeError) as error:
        trouble = f"a test run failed: {str(error).partition(chr(10))[0]}"
    passed = torch.tensor(int(trouble is None), device=device)
    dist.all_reduce(passed, dist.ReduceOp.MIN, group)
    if passed.item():
        return None
    return trouble or "a test run failed on another rank"


def time_chunks(
    overlap: Overlap,
    layer: LayerDescription,
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    candidates: Sequence[int] = CANDIDATES,
) -> dict[int, float]:
    """Measure the forward time of one MLP in ms, by blocks per slice.

    The time is that of the slowest rank, and identical on all ranks. It is the median of a few
    alternating runs, so that disturbances affect all candidates equally.
    """
    group = torch_compat.find_process_group(overlap.group)
    ranks = group.size()
    width, hidden, rows = layer.ffn_size // ranks, layer.hidden_size, -(-tokens // ranks)
    x_SD = torch.zeros(rows, hidden, device=device, dtype=dtype)
    columns = [x_SD.new_zeros(width, hidden)] * (2 if layer.gated_ffn else 1)
    row = x_SD.new_zeros(hidden, width)
    times_ms: dict[int, list[float]] = {chunks: [] for chunks in candidates}
    for _ in range(1 + REPETITIONS):
        for chunks, measured_ms in times_ms.items():
            tried = overlap._replace(chunks=chunks)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            begin_s = _now_s(device)
            products = gather_linear(x_SD, columns, [None] * len(columns), tokens, tried)
            linear_scatter(products[0], row, None, rows, tried)
            measured_ms.append((_now_s(device) - begin_s) * 1e3)
    medians = torch.tensor(
        [median(measured_ms[1:]) for measured_ms in times_ms.values()], device=device
    )
    dist.all_reduce(medians, dist.ReduceOp.MAX, group)
    return dict(zip(candidates, medians.tolist(), strict=True))


def _matches_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if small integers, whose sums are exact in any order, give equal results."""
    rows, features = 8, 16
    total = rows * group.size() - 1  # the last row is padding
    count = torch.arange(rows * features, device=device).view(rows, features)
    x_SD = ((count + group.rank()) % 5 - 2).to(torch.bfloat16)
    weight_FD = x_SD[:, :features].repeat(2, 1)
    tried, known = SymmetricMemoryBackend(group, 1), CollectiveBackend(group, 1)
    results = []
    for backend in (tried, known):
        whole_TD = backend.start_gather(x_SD, total).wait()
        hidden = backend.start_linear_scatter([whole_TD], [weight_FD], rows).wait()
        product, gathered_input = backend.gather_linear_and_input(x_SD, weight_FD, total)
        fresh = type(backend)(group, 1)
        fused = fresh.start_linear_scatter([whole_TD] * 2, [weight_FD] * 2, rows).wait()
        bias = weight_FD[:, 0].contiguous()
        products = fresh.gather_linear(x_SD, [weight_FD, weight_FD], [bias, None], total)
        results.append([whole_TD, hidden, product, gathered_input, fused, *products])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    local_hash = torch.tensor([zlib.crc32(socket.gethostname().encode())], device=device)
    all_hashes = [torch.zeros_like(local_hash) for _ in range(group.size())]
    dist.all_gather(all_hashes, local_hash, group)
    return all(torch.equal(host, local_hash) for host in all_hashes)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
