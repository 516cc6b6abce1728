"""Before the first step: whether a rank's device, memory or network is slower than the others'.

One device that is throttled, or one cable that fell back to half its rate, makes all ranks as slow,
and nothing in a step says so: whoever waits looks like whoever is waited for. So every rank times a
matrix product, a copy in its memory and a gather in each group that it will communicate in, all
ranks compare, and what is out of line is named with its machine. Before all that: whether every
rank has a GPU of its own.

The best of a few runs counts, since neighbours only ever make a run slower. Ranks are compared with
the median of those with the same task, not with a data sheet: what is the same everywhere is for
`scripts/gpu_check.py`. Rejected: messages between all pairs of ranks, for which NCCL builds a
communicator each, with buffers that the run then lacks.
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
from torchmm.recipe.sizes import AXES

RUNS = 5
WIDTH = {"cuda": 8192, "cpu": 384}
"""Of the square matrices that are multiplied: milliseconds."""
COPIED = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Elements that are copied: more than caches hold."""
GATHERED = {"cuda": 1 << 23, "cpu": 1 << 18}
"""Elements of a rank's share in a gather."""
TESTS = ("matmuls", "copies", *(f"all-gather over {axis}" for axis in AXES))
UNITS = ("TFLOP/s", *("GB/s",) * (len(TESTS) - 1))
SHOWN = 8
"""Slow ranks that are listed."""


def check_ranks(
    mesh: ParallelMesh, dtype: torch.dtype, tolerance: float, logger: logging.Logger
) -> None:
    """Measures all ranks and warns of those that are slow; collective, and on all ranks alike.

    Args:
        dtype: of the matrix product.
        tolerance: how many times slower than the median a rank has to be; 0: nothing is measured.
    """
    if not tolerance or mesh.world_size == 1:
        return
    rates_RT = gather_floats(_rates(mesh, dtype))
    if mesh.device.type == "cuda":  # the peak that a run reports is that of training
        torch.cuda.reset_peak_memory_stats(mesh.device)
    hosts_R = gather_texts(socket.gethostname())
    if mesh.rank:
        return
    for line in slow_ranks(rates_RT, hosts_R, _blocks(mesh), tolerance):
        logger.warning("preflight: %s", line)
    medians = [_median(column) for column in zip(*rates_RT, strict=True)]
    shown = [
        f"{test} {value:.3g} {unit}"
        for test, value, unit in zip(TESTS, medians, UNITS, strict=True)
        if not math.isnan(value)
    ]
    logger.info("preflight: %s", "; ".join(shown))


def check_own_device(device: torch.device) -> None:
    """Collective on CUDA.

    Raises:
        ConfigError: two ranks compute on the same GPU, which NCCL refuses in the middle of a step.
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


def slow_ranks(
    rates_RT: Sequence[Sequence[float]],
    hosts_R: Sequence[str],
    blocks: Sequence[range],
    tolerance: float,
) -> list[str]:
    """A line for each rank and test that is out of line.

    Args:
        rates_RT: by rank and one of `TESTS`; NaN where a rank has no such group.
        hosts_R: their machines.
        blocks: ranks with the same task.
        tolerance: see `check_ranks`.
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
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"]
    return lines


def _median(values: Sequence[float]) -> float:
    """The upper one of an even number, so that one of two can be slow; NaN of none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


def _blocks(mesh: ParallelMesh) -> list[range]:
    """Ranks of each module that has ranks of its own, or all ranks."""
    sizes = [unit.ranks for unit in mesh.units.values()] or [mesh.world_size]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _rates(mesh: ParallelMesh, dtype: torch.dtype) -> list[float]:
    """What this rank reaches, by test."""
    device = mesh.device
    width = WIDTH[device.type]
    square = torch.ones(width, width, dtype=dtype, device=device)
    product_s = _best_s(lambda: square @ square, device)
    source = torch.ones(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    rates = [2 * width**3 / product_s / 1e12, 2 * source.nbytes / copy_s / 1e9]
    share = source[: GATHERED[device.type]]
    for axis in AXES:
        group = mesh.own.mesh[axis].get_group()
        size = dist.get_world_size(group)
        if size == 1:  # alike on all ranks of the group
            rates.append(math.nan)
            continue
        whole = share.new_empty(size * len(share))
        gather = partial(dist.all_gather_into_tensor, whole, share, group)
        gather_s = _best_s(gather, device)
        rates.append((size - 1) * share.nbytes / gather_s / 1e9)
    return rates


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    times_s = []
    for _ in range(RUNS + 1):  # the first has buffers and communicators to make
        begin_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s[1:])
