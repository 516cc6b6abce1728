"""Runs a function on the ranks of a gloo world, and times what they do together.

Processes are forked from one that has only imported: starting eight costs no eight imports.
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
        """Run a step on this rank and return its compute time in seconds."""


P = TypeVar("P", bound=Program)


class StepTime(NamedTuple):
    """Of a step, over all ranks."""

    wall_s: float
    """Until the last rank was done."""
    busy_s: float
    """Computing, summed over ranks."""
    others: float
    """Share of the machine's CPU time that other programs used during a run."""


@dataclass(frozen=True)
class Comparison:
    """Times of several programs; in each run, all of them ran the same step."""

    times: dict[str, list[StepTime]]
    """By program: run after run."""
    steps: list[int]
    """Of each run."""
    ranks: int
    disturbed: int
    """Runs that were left out; none if no run was undisturbed."""

    def wall_s(self, name: str) -> float:
        """Mean over steps of the median over their runs."""
        walls = [
            [t.wall_s for t, s in zip(self.times[name], self.steps, strict=True) if s == step]
            for step in set(self.steps)
        ]
        return mean(map(median, walls))

    def idle_share(self, name: str) -> float:
        """Share of the ranks' time in which they did not compute; median over runs."""
        return median(1 - t.busy_s / (self.ranks * t.wall_s) for t in self.times[name])

    def speed_ratio(self, ours: str, baseline: str) -> float:
        """Median over runs of baseline time / torchmm time. Above 1, torchmm is faster."""
        pairs = zip(self.times[ours], self.times[baseline], strict=True)
        return median(b.wall_s / a.wall_s for a, b in pairs)

    def rows(self, case: str, ours: str, goals: Mapping[str, float | None]) -> list[Row]:
        """Ratio, step times and idle fractions of one program against others.

        Args:
            goals: by name of the other: for the ratio; None: no goal.
        """
        made = []
        for name, goal in goals.items():
            times = self.wall_s(ours), self.wall_s(name)
            idle = self.idle_share(ours), self.idle_share(name)
            ratio = self.speed_ratio(ours, name)
            made += [
                Row(case, f"speedup, {name}", "x", ratio, 1.0, goal=goal),
                Row(case, f"step time, {name}", "s", *times, better="lower"),
                Row(case, f"idle fraction, {name}", "fraction", *idle, better="lower"),
            ]
        return made

    def __str__(self) -> str:
        others = max(t.others for times in self.times.values() for t in times)
        return (
            f"{len(self.steps)} runs of a step, in which other programs took at most {others:.0%} "
            f"of the CPU; {self.disturbed} more were left out"
        )


def print_choices(case: str, found: Mapping[str, Any]) -> None:
    """Says what was compared, of the `images`, `choices` and `comparison` that were found."""
    print(f"{case}: images per microbatch, by step: {found['images']}")
    for name, choice in found["choices"].items():
        print(f"{case}: {name}: {choice}")
    print(f"{case}: {found['comparison']}")


class Stopwatch:
    """Times programs on a machine that others use too. All methods are collective.

    The more often ranks wait for each other, the more a program suffers when others take a core
    from one of them. So timing starts when the machine is quiet, as long as there is patience
    left, and runs that were disturbed are left out, of all programs alike.

    Args:
        patience_s: how long to wait, and to repeat, in all.
        quiet: share of the CPU that others may take.
    """

    SAMPLE_S = 0.5

    def __init__(self, patience_s: float, quiet: float) -> None:
        self.patience_s, self.quiet = patience_s, quiet

    def time(self, program: Program, index: int) -> StepTime:
        """Run a step, which all ranks begin together."""
        others = _OtherPrograms()
        dist.barrier()
        begin_s = time.perf_counter()
        busy = program.step(index)
        wall_s = _over_ranks(time.perf_counter() - begin_s, dist.ReduceOp.MAX)
        return StepTime(wall_s, _over_ranks(busy), others.share())

    def fastest(self, programs: Sequence[P], turns: int = 2) -> P:
        """The program with the least time of `turns` for step 0; a lone one does not run."""
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
        """Time all programs on one step after the other, until every step has had its runs.

        The order of programs is reversed from run to run.
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
            index, order = len(quiet) % steps, list(range(len(programs)))
            if done % 2:
                order.reverse()
            taken = {i: self.time(programs[i], index) for i in order}
            noisy = max(t.others for t in taken.values()) > self.quiet
            if noisy:
                self.patience_s -= sum(t.wall_s for t in taken.values())
            found = index, [taken[i] for i in range(len(programs))]
            (disturbed if noisy else quiet).append(found)
        kept, left_out = (quiet, len(disturbed)) if quiet else (disturbed, 0)
        times = {p.name: [found[i] for _, found in kept] for i, p in enumerate(programs)}
        return Comparison(times, [s for s, _ in kept], dist.get_world_size(), left_out)

    def _wait_until_quiet(self) -> None:
        while self.patience_s > 0:
            others = _OtherPrograms()
            time.sleep(self.SAMPLE_S)
            if others.share() <= self.quiet:
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
