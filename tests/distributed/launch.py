"""Runs a function on N gloo processes and returns what each rank returned."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 200


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Calls `function(*args)` on every rank of a fresh gloo world; results in rank order.

    The function must be importable (defined at module level). A failing rank fails the call with
    its traceback, and the others are stopped.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_main, args=(function, rank, ranks, port, results, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
    outcomes: dict[int, tuple[bool, Any]] = {}
    while not results.empty():
        rank, passed, value = results.get()
        outcomes[rank] = (passed, value)
    failures = [f"rank {r}:\n{v}" for r, (passed, v) in sorted(outcomes.items()) if not passed]
    assert not failures and not hung, "\n".join([*failures, f"ranks still running: {hung}"])
    missing = [rank for rank in range(ranks) if rank not in outcomes]
    assert not missing, f"ranks {missing} ended without a result"
    return [outcomes[rank][1] for rank in range(ranks)]


def _main(function: Callable, rank: int, ranks: int, port: int, results: Any, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        results.put((rank, True, function(*args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
