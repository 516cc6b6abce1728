"""Times collectives and messages as they are met in a step: between what ranks compute.

Called one after the other with nothing between them, collectives find buffers in caches, threads
awake and other ranks at the same place, none of which is so in training: on two ranks of a CPU with
gloo, small ones took 0.2 ms so, and 0.8 to 1.2 ms between what the ranks compute. So each rank
computes before each collective, writes what is sent, and only the collective itself is timed, with
the wait for a rank that comes later. On GPUs, whose links work while the cores do and whose work
is queued, they are timed one after the other.
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

from torchmm.costs.devices import NETWORK, NODE, Link
from torchmm.costs.operators import Kind, Operator, all_reduce_bytes

RUNS = 7
"""Of each collective, in each round."""
ELEMENTS = (1, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 22)
"""Of each rank's share; the first is the overhead of a call."""
PRODUCT = (128, 512)
"""Rows and width of the product before each collective: half a millisecond on a CPU."""


class NetworkCase(NamedTuple):
    """A collective, or a message there and back."""

    operator: Operator
    run: Callable[[], object]
    buffer: Tensor
    """What is sent: written anew before each run."""
    tiny: bool


def measure_network(
    device: torch.device, rounds: int, *, quick: bool
) -> list[tuple[NetworkCase, float]]:
    """Seconds of every collective and message, the mean over ranks; collective.

    Args:
        quick: few and small.
    """
    cases = list(_cases(device, quick))
    found = [[_seconds(case, device) for case in cases] for _ in range(rounds)]
    found_C = torch.tensor([median(times) for times in zip(*found, strict=True)]).to(device)
    dist.all_reduce(found_C)
    return list(zip(cases, (found_C / dist.get_world_size()).tolist(), strict=True))


def world_link() -> Link:
    """Return the placement of all ranks on hosts; collective."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = len(set(hosts))
    return Link(nodes, len(hosts) // nodes)


def _seconds(case: NetworkCase, device: torch.device) -> float:
    """Mean time of a run."""
    rows, width = PRODUCT
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
    """Collectives over all ranks, and a message there and back between the first two."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    link = world_link()
    neighbors = NODE if link.local > 1 else NETWORK
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
            # As DTensors do: into a copy.
            found = functional_collectives.all_reduce(whole, "sum", world)
            functional_collectives.wait_tensor(found)

        def message(whole: Tensor = whole) -> None:
            if rank < 2:
                (dist.send if rank == 0 else dist.recv)(whole, 1 - rank)
                (dist.recv if rank == 0 else dist.send)(whole, 1 - rank)

        runs: list[tuple[Kind, float, float, Callable[[], object], Tensor]] = [
            ("all_gather", sent, 1.0, gather, share),
            ("reduce_scatter", sent, 1.0, scatter, whole),
            ("all_reduce", all_reduce_bytes(nbytes, ranks), 1.0, reduce, whole),
            ("p2p", 2 * nbytes, 2.0, message, whole),
        ]
        for kind, bytes_, calls, run, buffer in runs:
            placed = neighbors if kind == "p2p" else link
            operator = Operator(kind, network_bytes=bytes_, calls=calls, link=placed)
            yield NetworkCase(operator, run, buffer, elements == 1)
