"""Runs a function on the ranks of a gloo world, and times what they do together.

Processes are forked from one that has only imported: starting eight costs no eight imports.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankFailedError(Exception):
    """A rank ended with an error."""


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Calls `function(*args)` on every rank, with one thread each; what rank 0 returned.

    Raises:
        RankFailedError: with the traceback of the first rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    world = [
        context.Process(target=_main, args=(function, rank, ranks, port, results, args))
        for rank in range(ranks)
    ]
    for process in world:
        process.start()
    found = {}
    try:
        for _ in world:
            rank, passed, value = results.get()
            if not passed:
                raise RankFailedError(f"rank {rank}:\n{value}")
            found[rank] = value
        for process in world:
            process.join()
    finally:
        for process in world:
            process.kill()
    return found[0]


def _main(
    function: Callable, rank: int, ranks: int, port: int, results: Any, args: Sequence[Any]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        value = function(*args)
        results.put((rank, True, value if rank == 0 else None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # raised again by `run_ranks`
        results.put((rank, False, traceback.format_exc()))


class Program(Protocol):
    """One way to run the steps of a benchmark."""

    name: str

    def step(self, index: int) -> float:
        """Runs a step on this rank; the seconds in which the rank computed."""


class StepTime(NamedTuple):
    """Of one step or several, over all ranks."""

    wall_s: float
    """Until the last rank was done."""
    busy_s: float
    """Computing, summed over ranks."""


def time_steps(program: Program, steps: Sequence[int]) -> StepTime:
    """Runs steps one after the other, all ranks beginning each together."""
    wall_s = busy_s = 0.0
    for index in steps:
        dist.barrier()
        begin_s = time.perf_counter()
        busy = program.step(index)
        wall = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
        total = torch.tensor(busy, dtype=torch.float64)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        wall_s += wall.item()
        busy_s += total.item()
    return StepTime(wall_s, busy_s)


def fastest(programs: Sequence[Program], steps: Sequence[int], repetitions: int = 1) -> Program:
    """The program with the least time of several repetitions, after one to warm up."""
    best = [float("inf")] * len(programs)
    for turn in range(repetitions + 1):
        for i, program in enumerate(programs):
            wall_s = time_steps(program, steps).wall_s
            if turn:
                best[i] = min(best[i], wall_s)
    return programs[best.index(min(best))]


@dataclass(frozen=True)
class Comparison:
    """Times of several programs, run by run; in each, all programs ran all steps."""

    times: dict[str, list[StepTime]]
    ranks: int

    def wall_s(self, name: str) -> float:
        """Median over runs."""
        return median(t.wall_s for t in self.times[name])

    def idle_share(self, name: str) -> float:
        """Share of the ranks' time in which they did not compute; median over runs."""
        return median(1 - t.busy_s / (self.ranks * t.wall_s) for t in self.times[name])

    def speed_ratio(self, ours: str, baseline: str) -> float:
        """Median over runs of baseline time / our time: above 1, ours is faster."""
        pairs = zip(self.times[ours], self.times[baseline], strict=True)
        return median(b.wall_s / a.wall_s for a, b in pairs)


def compare(programs: Sequence[Program], steps: Sequence[int], runs: int) -> Comparison:
    """Times all programs in turns, in an order that is reversed from run to run; all are warm."""
    times: dict[str, list[StepTime]] = {program.name: [] for program in programs}
    for run in range(runs):
        for program in programs if run % 2 == 0 else reversed(programs):
            times[program.name].append(time_steps(program, steps))
    return Comparison(times, dist.get_world_size())
