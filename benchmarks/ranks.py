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
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

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


P = TypeVar("P", bound=Program)


class StepTime(NamedTuple):
    """Of one step or several, over all ranks."""

    wall_s: float
    """Until the last rank was done."""
    busy_s: float
    """Computing, summed over ranks."""
    others: float
    """Share of the machine's CPU time that other programs took meanwhile."""


@dataclass(frozen=True)
class Comparison:
    """Times of several programs, run by run; in each, all programs ran all steps."""

    times: dict[str, list[StepTime]]
    ranks: int
    disturbed: int
    """Runs that were left out, or, if all were disturbed, are in."""

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

    def __str__(self) -> str:
        first = next(iter(self.times.values()))
        others = max(t.others for times in self.times.values() for t in times)
        return (
            f"{len(first)} runs, in which other programs took at most {others:.0%} of the CPU; "
            f"{self.disturbed} runs were disturbed"
        )


class Stopwatch:
    """Times programs on a machine that others use too. All methods are collective.

    The more often ranks wait for each other, the more a program suffers when others take a core
    from one of them. So timing starts when the machine is quiet, as long as there is patience
    left, and runs in which others took more than `QUIET` of the CPU are left out, of all programs
    alike.
    """

    QUIET = 0.05
    SAMPLE_S = 0.5

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s

    def time(self, program: Program, steps: Sequence[int]) -> StepTime:
        """Runs steps one after the other, all ranks beginning each together."""
        self._wait_until_quiet()
        wall_s = busy_s = 0.0
        others = _OtherPrograms()
        for index in steps:
            dist.barrier()
            begin_s = time.perf_counter()
            busy = program.step(index)
            wall_s += _over_ranks(time.perf_counter() - begin_s, dist.ReduceOp.MAX)
            busy_s += _over_ranks(busy)
        return StepTime(wall_s, busy_s, others.share())

    def fastest(self, programs: Sequence[P], steps: Sequence[int]) -> P:
        """The program with the least time of two, after one to warm up; a lone one does not run."""
        if len(programs) == 1:
            return programs[0]
        best = [float("inf")] * len(programs)
        for turn in range(3):
            for i, program in enumerate(programs):
                wall_s = self.time(program, steps).wall_s
                if turn:
                    best[i] = min(best[i], wall_s)
        return programs[best.index(min(best))]

    def compare(self, programs: Sequence[Program], steps: Sequence[int], runs: int) -> Comparison:
        """Times all programs in turns, in an order that is reversed from run to run."""
        for program in programs:
            self.time(program, steps)  # warm
        quiet: list[list[StepTime]] = []
        disturbed: list[list[StepTime]] = []
        while len(quiet) < runs and (self.patience_s > 0 or len(quiet) + len(disturbed) < runs):
            order = list(range(len(programs)))
            if (len(quiet) + len(disturbed)) % 2:
                order.reverse()
            taken = {i: self.time(programs[i], steps) for i in order}
            noisy = any(t.others > self.QUIET for t in taken.values())
            if noisy:
                self.patience_s -= sum(t.wall_s for t in taken.values())
            (disturbed if noisy else quiet).append([taken[i] for i in range(len(programs))])
        kept = quiet or disturbed
        times = {p.name: [t[i] for t in kept] for i, p in enumerate(programs)}
        return Comparison(times, dist.get_world_size(), len(disturbed))

    def _wait_until_quiet(self) -> None:
        while self.patience_s > 0:
            others = _OtherPrograms()
            time.sleep(self.SAMPLE_S)
            if others.share() <= self.QUIET:
                return
            self.patience_s -= self.SAMPLE_S


class _OtherPrograms:
    """CPU time that programs other than the ranks take from now on. Linux only: elsewhere 0."""

    def __init__(self) -> None:
        self.begin_s, self.begin_cpu_s = time.perf_counter(), _machine_cpu_s()
        self.begin_own_s = time.process_time()

    def share(self) -> float:
        """Of the machine's CPU time since creation; the same on all ranks."""
        own_s = _over_ranks(time.process_time() - self.begin_own_s)
        all_s = _over_ranks(_machine_cpu_s() - self.begin_cpu_s, dist.ReduceOp.MAX)
        elapsed_s = _over_ranks(time.perf_counter() - self.begin_s, dist.ReduceOp.MAX)
        return max(0.0, all_s - own_s) / (elapsed_s * (os.cpu_count() or 1))


def _machine_cpu_s() -> float:
    """CPU time of all programs since the machine started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _over_ranks(value: float, operation: Any = dist.ReduceOp.SUM) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()
