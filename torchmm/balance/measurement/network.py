"""Measurement of collectives and P2P messages between computations, as in a training step.

Collectives in a tight loop have warm caches, running threads and synchronized ranks, which is not
the case in training. Small collectives on two CPU ranks with gloo took 0.2 ms in a loop, and 0.8 to
1.2 ms between computations. Each rank therefore computes and writes the sent buffer before each
collective. Only the collective is timed, including the wait for the last rank.

On GPUs, links and cores work at the same time, and work is queued. Collectives are therefore timed
in a loop.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor

from torchmm.costs.devices import BETWEEN_NODES, WITHIN_NODE, LinkRanks
from torchmm.costs.operators import Operator, OperatorKind, all_reduce_bytes

RUNS = 7
"""Number of runs of each collective per round."""
ELEMENTS = (1, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 22)
"""Numbers of elements of the shard of a rank. The first one measures the overhead of a call."""
MATMUL_SHAPE = (128, 512)
"""Rows and width of the matmul before each collective, which takes 0.5 ms on a CPU."""


class NetworkCase(NamedTuple):
    """Collective, or a message in both directions."""

    operator: Operator
    run: Callable[[], object]
    buffer: Tensor
    """Sent buffer, which is written before each run."""
    tiny: bool
    """Whether the time is only the overhead of a call."""


def measure_network(
    device: torch.device, rounds: int, *, quick: bool
) -> list[tuple[NetworkCase, float]]:
    """Measure collectives and messages (collective).

    Args:
        device: Device to measure.
        rounds: Number of rounds. Results are medians over rounds.
        quick: Whether to measure only a few small sizes.

    Returns:
        Each case with its time in seconds, as a mean over ranks.
    """
    cases = list(_cases(device, quick))
    times = [[_seconds(case, device) for case in cases] for _ in range(rounds)]
    times_C = torch.tensor([median(of_case) for of_case in zip(*times, strict=True)]).to(device)
    dist.all_reduce(times_C)
    return list(zip(cases, (times_C / dist.get_world_size()).tolist(), strict=True))


def world_link() -> LinkRanks:
    """Return the placement of all ranks on hosts (collective)."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = len(set(hosts))
    return LinkRanks(nodes, len(hosts) // nodes)


def _seconds(case: NetworkCase, device: torch.device) -> float:
    """Return the mean time of a run in seconds."""
    rows, width = MATMUL_SHAPE
    x, weight = (torch.ones(n, width, device=device) for n in (rows, width))
    case.run()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(RUNS):
            case.run()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin_s) / RUNS
    took_s = 0.0
    for _ in range(RUNS):
        x @ weight.t()
        case.buffer.mul_(1.0)
        begin_s = time.perf_counter()
        case.run()
        took_s += time.perf_counter() - begin_s
    return took_s / RUNS


def _cases(device: torch.device, quick: bool) -> Iterator[NetworkCase]:
    """Yield collectives over all ranks, and a message from rank 0 to 1 and back."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    link = world_link()
    neighbors = WITHIN_NODE if link.ranks_per_node > 1 else BETWEEN_NODES
    for elements in ELEMENTS[: 3 if quick else None]:
        whole = torch.ones(elements * ranks, device=device)
        share = torch.ones(elements, device=device)
        nbytes = float(whole.nbytes)
        sent = nbytes * (ranks - 1) / ranks

        def gather(whole: Tensor = whole, share: Tensor = share) -> None:
            dist.all_gather_into_tensor(whole, share)

        def scatter(whole: Tensor = whole, share: Tensor = share) -> None:
            dist.reduce_scatter_tensor(share, whole)

        def reduce(whole: Tensor = whole) -> None:
            # DTensor also reduces into a copy.
            reduced = functional_collectives.all_reduce(whole, "sum", world)
            functional_collectives.wait_tensor(reduced)

        def message(whole: Tensor = whole) -> None:
            if rank < 2:
                (dist.send if rank == 0 else dist.recv)(whole, 1 - rank)
                (dist.recv if rank == 0 else dist.send)(whole, 1 - rank)

        runs: list[tuple[OperatorKind, float, float, Callable[[], object], Tensor]] = [
            ("all_gather", sent, 1.0, gather, share),
            ("reduce_scatter", sent, 1.0, scatter, whole),
            ("all_reduce", all_reduce_bytes(nbytes, ranks), 1.0, reduce, whole),
            ("p2p", 2 * nbytes, 2.0, message, whole),
        ]
        for kind, bytes_, calls, run, buffer in runs:
            placed = neighbors if kind == "p2p" else link
            operator = Operator(kind, network_bytes=bytes_, calls=calls, link=placed)
            yield NetworkCase(operator, run, buffer, elements == 1)
