"""Which backend async tensor parallelism uses and in how many blocks: chosen once, at the start.

Capability decides: symmetric memory where it gives the right numbers in a trial, a ring where the
process group has sends and receives that run in the background (NCCL, gloo), else collectives. What
all ranks of a group do must be the same, so they vote. One line of the log says what was chosen and
why. The number of blocks per slice is timed on one MLP of the module: small blocks hide more of the
first and the last transfer, large ones multiply faster.
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
from torchmm.extensions.async_tp.backends import Collective, SymmetricMemory
from torchmm.extensions.async_tp.linear import Overlap, gather_linear, linear_scatter
from torchmm.extensions.async_tp.styles import AsyncStyles
from torchmm.models.layered import LayeredModule
from torchmm.parallel import torch_private
from torchmm.recipe.parallel_section import ParallelConfig

CANDIDATES = (1, 2, 4, 8)
"""Blocks per slice that are tried."""
UNTUNED = 2
"""Blocks per slice where nothing is known about the number of rows."""
REPETITIONS = 3

logger = logging.getLogger(__name__)


def choose_styles(
    module: LayeredModule,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    tokens: int,
) -> AsyncStyles:
    """Return the styles of a module; collective. See `torchmm.parallel.tensor.apply`."""
    return AsyncStyles(choose_overlap(module, mesh, parallel, dtype, tokens))


def choose_overlap(
    module: LayeredModule,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    tokens: int,
) -> Overlap:
    """How the ranks of the 1-D `mesh` communicate in `module`; collective, the same on all.

    Args:
        dtype: Of activations.
        tokens: Rows to choose the number of blocks for; 0: not known.

    Raises:
        ConfigError: The recipe asks for a backend that does not work here.
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
    group: dist.ProcessGroup, device: torch.device, wanted: str = "auto"
) -> tuple[str, str]:
    """A key of `BACKENDS` and why; collective over the group.

    Raises:
        ConfigError: Symmetric memory is wanted and does not work.
    """
    if wanted in ("ring", "collective"):
        return wanted, "set in the recipe"
    trouble = symmetric_memory_trouble(group, device)
    if trouble is None:
        return "symmetric_memory", "a test run returned correct values"
    if wanted == "symmetric_memory":
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


def symmetric_memory_trouble(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why symmetric memory cannot be used in the group, or None; the ranks agree."""
    if device.type != "cuda":
        return f"it requires CUDA, but the device is {device.type}"
    if not _on_one_host(group, device):
        return "the ranks are on several hosts"
    return try_symmetric_memory(group, device)


def try_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Compares all operations on small numbers with the collectives'; what went wrong, or None."""
    trouble = None
    try:
        if not _gives_equal_numbers(group, device):
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
    """Milliseconds of one MLP's forward, by blocks per slice: of the slowest rank, the same on all.

    The median of a few runs, in turns, so that a slow moment hits all candidates alike.
    """
    group = torch_private.group_named(overlap.group)
    ranks = group.size()
    width, hidden, rows = layer.ffn_size // ranks, layer.hidden_size, -(-tokens // ranks)
    x_SD = torch.zeros(rows, hidden, device=device, dtype=dtype)
    columns = [x_SD.new_zeros(width, hidden)] * (2 if layer.gated_ffn else 1)
    row = x_SD.new_zeros(hidden, width)
    times_ms: dict[int, list[float]] = {chunks: [] for chunks in candidates}
    for _ in range(1 + REPETITIONS):
        for chunks, found in times_ms.items():
            tried = overlap._replace(chunks=chunks)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            begin_s = _now_s(device)
            products = gather_linear(x_SD, columns, [None] * len(columns), tokens, tried)
            linear_scatter(products[0], row, None, rows, tried)
            found.append((_now_s(device) - begin_s) * 1e3)
    medians = torch.tensor([median(found[1:]) for found in times_ms.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX, group)
    return dict(zip(candidates, medians.tolist(), strict=True))


def _gives_equal_numbers(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Small whole numbers, which every order of summation adds up exactly."""
    rows, features = 8, 16
    total = rows * group.size() - 1  # one row of padding
    count = torch.arange(rows * features, device=device).view(rows, features)
    x_SD = ((count + group.rank()) % 5 - 2).to(torch.bfloat16)
    weight_FD = x_SD[:, :features].repeat(2, 1)
    tried, known = SymmetricMemory(group, 1), Collective(group, 1)
    results = []
    for backend in (tried, known):
        whole_TD = backend.start_gather(x_SD, total).wait()
        hidden = backend.start_linear_scatter([whole_TD], [weight_FD], rows).wait()
        product, kept = backend.gather_linear_keeping(x_SD, weight_FD, total)
        fresh = type(backend)(group, 1)
        fused = fresh.start_linear_scatter([whole_TD] * 2, [weight_FD] * 2, rows).wait()
        bias = weight_FD[:, 0].contiguous()
        products = fresh.gather_linear(x_SD, [weight_FD, weight_FD], [bias, None], total)
        results.append([whole_TD, hidden, product, kept, fused, *products])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _on_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    own = torch.tensor([zlib.crc32(socket.gethostname().encode())], device=device)
    every = [torch.zeros_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group)
    return all(torch.equal(host, own) for host in every)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
