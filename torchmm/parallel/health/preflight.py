"""Preflight check: find ranks with a slow device, memory or network before the first step.

A throttled device, or a link at half its rate, slows down all ranks, and a step does not show which
one: waiting ranks and slow ranks look the same. Each rank measures a matmul, a memory copy and an
all-gather in each of its process groups. All ranks compare the results, and warnings list slow
ranks with their host. `check_separate_devices` checks that each rank has a separate GPU.

The best of several runs is used, because other processes can only slow down a run. Ranks are
compared with the median of the ranks with the same task, not with a data sheet. Use
`scripts/gpu_check.py` to find problems that all ranks have. Pairs of ranks are not measured,
because NCCL would allocate communicator buffers for each pair.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from torchmm.common.errors import ConfigError
from torchmm.parallel.gather import gather_floats, gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.mesh_sizes import AXES

RUNS = 5
MATMUL_SIZE = {"cuda": 8192, "cpu": 384}
"""Size of the square matrices of the matmul, which takes a few milliseconds."""
COPIED_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Number of copied elements, more than caches store."""
GATHERED_ELEMENTS = {"cuda": 1 << 23, "cpu": 1 << 18}
"""Number of elements of each rank in an all-gather."""
TESTS = ("matmuls", "copies", *(f"all-gather over {axis}" for axis in AXES))
UNITS = ("TFLOP/s", *("GB/s",) * (len(TESTS) - 1))
MAX_LISTED = 8
"""Maximum number of slow ranks in the log."""


def check_ranks(
    mesh: ParallelMesh, dtype: torch.dtype, tolerance: float, logger: logging.Logger
) -> None:
    """Measure all ranks and log warnings for slow ranks. Collective.

    Args:
        mesh: Mesh of all ranks.
        dtype: Dtype of the matmul.
        tolerance: Minimum slowdown relative to the median for a warning. 0 disables the check.
        logger: Logger for warnings and medians.
    """
    if not tolerance or mesh.world_size == 1:
        return
    rates_RT = gather_floats(_rates(mesh, dtype))
    if mesh.device.type == "cuda":  # the reported peak is that of training
        torch.cuda.reset_peak_memory_stats(mesh.device)
    hosts_R = gather_texts(socket.gethostname())
    if mesh.rank:
        return
    for line in describe_slow_ranks(rates_RT, hosts_R, _blocks(mesh), tolerance):
        logger.warning("preflight: %s", line)
    medians = [_median(column) for column in zip(*rates_RT, strict=True)]
    shown = [
        f"{test} {value:.3g} {unit}"
        for test, value, unit in zip(TESTS, medians, UNITS, strict=True)
        if not math.isnan(value)
    ]
    logger.info("preflight: %s", "; ".join(shown))


def check_separate_devices(device: torch.device) -> None:
    """Check that no two ranks use the same GPU. Collective on CUDA.

    Raises:
        ConfigError: Two ranks use the same GPU, which NCCL rejects only during a step.
    """
    if device.type != "cuda" or dist.get_world_size() == 1:
        return
    first: dict[str, int] = {}
    names_R = gather_texts(str(torch.cuda.get_device_properties(device).uuid))
    for rank, name in enumerate(names_R):
        if first.setdefault(name, rank) != rank:
            raise ConfigError(
                f"ranks {first[name]} and {rank} use the same GPU, {name}; start one rank per "
                f"GPU, on this host --nproc-per-node={torch.cuda.device_count()}"
            )


def describe_slow_ranks(
    rates_RT: Sequence[Sequence[float]],
    hosts_R: Sequence[str],
    blocks: Sequence[range],
    tolerance: float,
) -> list[str]:
    """Return a line for each slow rank and test.

    Args:
        rates_RT: Rates by rank and by entry of `TESTS`. NaN if a rank has no such group.
        hosts_R: Host of each rank.
        blocks: Ranks with the same task.
        tolerance: See `check_ranks`.
    """
    lines = []
    for block in blocks:
        for test, unit, column in zip(TESTS, UNITS, zip(*rates_RT, strict=True), strict=True):
            usual = _median([column[rank] for rank in block])
            lines += [
                f"rank {rank} on {hosts_R[rank]}: {test} at {column[rank]:.3g} {unit}, "
                f"{usual / column[rank]:.1f} times slower than usual ({usual:.3g})"
                for rank in block
                if column[rank] * tolerance < usual
            ]
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
    return lines


def _median(values: Sequence[float]) -> float:
    """Return the upper median, so that one of two ranks can be slow. NaN without values."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


def _blocks(mesh: ParallelMesh) -> list[range]:
    """Return the ranks of each disaggregated module, or all ranks."""
    sizes = [unit.ranks for unit in mesh.units.values()] or [mesh.world_size]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _rates(mesh: ParallelMesh, dtype: torch.dtype) -> list[float]:
    """Return the rates of this rank, one for each test."""
    device = mesh.device
    width = MATMUL_SIZE[device.type]
    square = torch.ones(width, width, dtype=dtype, device=device)
    matmul_s = _best_s(lambda: square @ square, device)
    source = torch.ones(COPIED_ELEMENTS[device.type], device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    rates = [2 * width**3 / matmul_s / 1e12, 2 * source.nbytes / copy_s / 1e9]
    local = source[: GATHERED_ELEMENTS[device.type]]
    for axis in AXES:
        group = mesh.module_mesh.mesh[axis].get_group()
        size = dist.get_world_size(group)
        if size == 1:  # the same on all ranks of the group
            rates.append(math.nan)
            continue
        output = local.new_empty(size * len(local))
        gather = partial(dist.all_gather_into_tensor, output, local, group)
        gather_s = _best_s(gather, device)
        rates.append((size - 1) * local.nbytes / gather_s / 1e9)
    return rates


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    times_s = []
    for _ in range(RUNS + 1):  # the first run creates buffers and communicators
        begin_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s[1:])
