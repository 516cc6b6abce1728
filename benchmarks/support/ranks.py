"""Functions that run and time programs on the ranks of a gloo process group.

Rank processes are forked from a process that has already imported torch, so they start quickly.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.harness import Row


class RankFailedError(Exception):
    """Failure of a rank process."""


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Call `function(*args)` on every rank with one thread, and return the result of rank 0.

    Raises:
        RankFailedError: A rank failed. The message has the traceback of the first failed rank.
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
    values = {}
    try:
        for _ in world:
            rank, passed, value = results.get()
            if not passed:
                raise RankFailedError(f"rank {rank}:\n{value}")
            values[rank] = value
        for process in world:
            process.join()
    finally:
        for process in world:
            process.kill()
    return values[0]


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
    """Program that runs the steps of a benchmark."""

    name: str

    def step(self, index: int) -> float:
        """Run a step on this rank and return its compute time in seconds."""


P = TypeVar("P", bound=Program)


class StepTime(NamedTuple):
    """Times of one step over all ranks."""

    wall_s: float
    """Seconds until the last rank finishes."""
    busy_s: float
    """Compute time in seconds, summed over ranks."""
    others: float
    """Fraction of the CPU time of the host that other programs use during the step."""


@dataclass(frozen=True)
class Comparison:
    """Times of several programs. In each run, all programs run the same step."""

    times: dict[str, list[StepTime]]
    """Maps the name of a program to its times, one per run."""
    steps: list[int]
    """Index of the step of each run."""
    ranks: int
    disturbed: int
    """Number of omitted runs. 0 if all runs were disturbed, because then no run is omitted."""

    def wall_s(self, name: str) -> float:
        """Return the mean over steps of the median time over runs, in seconds."""
        walls = [
            [t.wall_s for t, s in zip(self.times[name], self.steps, strict=True) if s == step]
            for step in set(self.steps)
        ]
        return mean(map(median, walls))

    def idle_share(self, name: str) -> float:
        """Return the fraction of time in which ranks do not compute, as the median over runs."""
        return median(1 - t.busy_s / (self.ranks * t.wall_s) for t in self.times[name])

    def speed_ratio(self, ours: str, baseline: str) -> float:
        """Return baseline time / torchmm time, as the median over runs."""
        pairs = zip(self.times[ours], self.times[baseline], strict=True)
        return median(b.wall_s / a.wall_s for a, b in pairs)

    def rows(self, case: str, ours: str, goals: Mapping[str, float | None]) -> list[Row]:
        """Return speedup, step times and idle fractions of a program and its baselines.

        Args:
            case: Name of the case.
            ours: Name of the program of torchmm.
            goals: Maps the name of a baseline to the goal of the speedup. None means no goal.
        """
        table = []
        for name, goal in goals.items():
            times = self.wall_s(ours), self.wall_s(name)
            idle = self.idle_share(ours), self.idle_share(name)
            ratio = self.speed_ratio(ours, name)
            table += [
                Row(case, f"speedup, {name}", "x", ratio, 1.0, goal=goal),
                Row(case, f"step time, {name}", "s", *times, better="lower"),
                Row(case, f"idle fraction, {name}", "fraction", *idle, better="lower"),
            ]
        return table

    def __str__(self) -> str:
        others = max(t.others for times in self.times.values() for t in times)
        return (
            f"{len(self.steps)} runs of a step, in which other programs took at most {others:.0%} "
            f"of the CPU; {self.disturbed} more were left out"
        )


def print_choices(case: str, results: Mapping[str, Any]) -> None:
    """Print the `images`, `choices` and `comparison` of the results of a case."""
    print(f"{case}: images per microbatch, by step: {results['images']}")
    for name, choice in results["choices"].items():
        print(f"{case}: {name}: {choice}")
    print(f"{case}: {results['comparison']}")


class Stopwatch:
    """Timer for programs on a shared host. All methods are collective.

    Programs with many synchronizations slow down the most when other programs use a core. So
    timing starts when the host is quiet, and disturbed runs are omitted for all programs.

    Args:
        patience_s: Total time limit in seconds for waiting and for repeated runs.
        quiet: Fraction of CPU time that other programs may use in an undisturbed run.
    """

    SAMPLE_S = 0.5

    def __init__(self, patience_s: float, quiet: float) -> None:
        self.patience_s, self.quiet = patience_s, quiet

    def time(self, program: Program, index: int) -> StepTime:
        """Run a step, which all ranks start at the same time, and return its times."""
        others = _OtherPrograms()
        dist.barrier()
        begin_s = time.perf_counter()
        busy = program.step(index)
        wall_s = _over_ranks(time.perf_counter() - begin_s, dist.ReduceOp.MAX)
        return StepTime(wall_s, _over_ranks(busy), others.share())

    def fastest(self, programs: Sequence[P], turns: int = 2) -> P:
        """Return the program with the lowest time for step 0. A single program is not run."""
        if len(programs) == 1:
            return programs[0]
        best = [float("inf")] * len(programs)
        for turn in range(1 + turns):
            for i, program in enumerate(programs):
                self._wait_until_quiet()
                wall_s = self.time(program, 0).wall_s
                if turn:  # the first warms up
                    best[i] = min(best[i], wall_s)
        return programs[best.index(min(best))]

    def compare(self, programs: Sequence[Program], steps: int, runs: int) -> Comparison:
        """Time all programs until every step has `runs` undisturbed runs or patience is used up.

        The order of the programs is reversed in every second run.
        """
        for program in programs:
            self.time(program, 0)  # warm
        quiet: list[tuple[int, list[StepTime]]] = []
        disturbed: list[tuple[int, list[StepTime]]] = []
        while len(quiet) < runs * steps:
            done = len(quiet) + len(disturbed)
            if self.patience_s <= 0 and done >= runs * steps:
                break
            self._wait_until_quiet()
            index, program_order = len(quiet) % steps, list(range(len(programs)))
            if done % 2:
                program_order.reverse()
            timed = {i: self.time(programs[i], index) for i in program_order}
            noisy = max(t.others for t in timed.values()) > self.quiet
            if noisy:
                self.patience_s -= sum(t.wall_s for t in timed.values())
            run = index, [timed[i] for i in range(len(programs))]
            (disturbed if noisy else quiet).append(run)
        counted, omitted = (quiet, len(disturbed)) if quiet else (disturbed, 0)
        times = {p.name: [run[i] for _, run in counted] for i, p in enumerate(programs)}
        return Comparison(times, [s for s, _ in counted], dist.get_world_size(), omitted)

    def _wait_until_quiet(self) -> None:
        while self.patience_s > 0:
            others = _OtherPrograms()
            time.sleep(self.SAMPLE_S)
            if others.share() <= self.quiet:
                return
            self.patience_s -= self.SAMPLE_S


class _OtherPrograms:
    """CPU time of programs other than the ranks since creation. Always 0 except on Linux."""

    def __init__(self) -> None:
        self.begin_s, self.begin_cpu_s = time.perf_counter(), _machine_cpu_s()
        self.begin_process_s = time.process_time()

    def share(self) -> float:
        """Return the fraction of the CPU time of the host since creation, equal on all ranks."""
        ranks_s = _over_ranks(time.process_time() - self.begin_process_s)
        all_s = _over_ranks(_machine_cpu_s() - self.begin_cpu_s, dist.ReduceOp.MAX)
        elapsed_s = _over_ranks(time.perf_counter() - self.begin_s, dist.ReduceOp.MAX)
        return max(0.0, all_s - ranks_s) / (elapsed_s * (os.cpu_count() or 1))


def _machine_cpu_s() -> float:
    """Return the CPU time of all programs in seconds since the host started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _over_ranks(value: float, operation: Any = dist.ReduceOp.SUM) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()
