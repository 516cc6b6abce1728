"""A process that plans the next step while this one trains: PipeWeaver §7.1.

    process = PlanningProcess(setup)
    process.submit(PlanRequest(step=8, ...))     as soon as the metadata of step 8 are there
    ...                                          step 7 trains
    planned = process.take(8)                    the best order so far; None if there is none
    process.close()

The process sends what it has as soon as it is better than what it sent before: natural and static
orders first, then what the search finds, so that whoever takes a plan never waits. A new request
ends the search for an older one. It runs at the lowest priority: where cores are scarce, training
goes first and plans are less good.

Rejected: a thread, which would share Python's lock with the training step it must not slow down.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from torchmm.balance.compiled import Int32s
from torchmm.balance.drift import Kind, scaled
from torchmm.balance.layer_costs import task_durations
from torchmm.balance.planners import search_costs
from torchmm.balance.search import Budget, Found, search
from torchmm.balance.searched import SearchedOrder, StepSearch, encode_order
from torchmm.batch import MicrobatchMeta, ModuleDescription
from torchmm.config import ParallelConfig
from torchmm.data.workers import fork_server, ignore_signals
from torchmm.pipelining.graph import StageGraph, StageLayout
from torchmm.pipelining.separated import Durations
from torchmm.step_plan import Gathering, step_graph

NICENESS = 19
SEND_EVERY_S = 0.05
"""Improvements that come faster are sent together."""
CLOSING_S = 5.0


class PlanningProcessError(Exception):
    """The process is gone; the message says how."""


@dataclass(frozen=True)
class PlanningSetup:
    """What stays the same during a run."""

    layout: StageLayout
    config: ParallelConfig
    modules: tuple[ModuleDescription, ...]
    sharding: Gathering


@dataclass(frozen=True)
class PlanRequest:
    """A step to be planned.

    Attributes:
        step: its number.
        microbatches: of this data-parallel rank.
        rates: milliseconds per FLOP, of all kinds of actions; empty: nothing was measured yet.
        seconds: to plan in; None: as long as all evaluations take.
    """

    step: int
    microbatches: tuple[MicrobatchMeta, ...]
    rates: Mapping[Kind, float]
    seconds: float | None


@dataclass(frozen=True)
class PlannedStep:
    """An order for a step, and what it is worth.

    Attributes:
        step: its number.
        counts: microbatches and sub-microbatches that it is for.
        numbers: `encode_order`.
        predicted, natural: time of the step in this and in natural order, in the unit of the
            durations planned with: milliseconds, or FLOPs before anything was measured.
        evaluations: of the search.
        planner: see `SearchedOrder`.
        planner_ms: since the request came.
        finished: whether the search was done.
    """

    step: int
    counts: Mapping[str, tuple[int, ...]]
    numbers: Int32s
    predicted: float
    natural: float
    evaluations: int
    planner: str
    planner_ms: float
    finished: bool
    in_ms: bool
    """Whether measured times were known."""


class PlanningProcess:
    """This side of it. Not to be shared between threads.

    Args:
        setup: of the run.
    """

    def __init__(self, setup: PlanningSetup) -> None:
        context = fork_server()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=plan_until_closed, args=(theirs, setup), name="planning", daemon=True
        )
        self._process.start()
        theirs.close()
        # Whoever exits without `close` must not wait for a process that ignores signals.
        atexit.register(self._connection.close)
        self._newest: PlannedStep | None = None

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def submit(self, request: PlanRequest) -> None:
        """Asks for the plan of a step, and for no other from now on.

        Raises:
            PlanningProcessError: it is gone.
        """
        self._call(self._connection.send, request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        """The best plan of a step so far; None if there is none.

        Args:
            wait_s: how long to wait for the finished plan.

        Raises:
            PlanningProcessError: it is gone.
        """
        deadline = time.monotonic() + wait_s
        while self._call(self._connection.poll, max(0.0, deadline - time.monotonic())):
            planned = self._call(self._connection.recv)
            if isinstance(planned, str):
                raise PlanningProcessError(planned)
            self._newest = planned
            if planned.step == step and planned.finished:
                break
        newest = self._newest
        return newest if newest is not None and newest.step == step else None

    def close(self) -> None:
        """Ends the process."""
        atexit.unregister(self._connection.close)
        self._connection.close()
        self._process.join(CLOSING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(CLOSING_S)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (EOFError, OSError) as error:
            self._process.join(CLOSING_S)
            code = self._process.exitcode
            raise PlanningProcessError(
                f"the planning process ended with code {code} ({type(error).__name__})"
            ) from error


def plan_until_closed(connection: Connection, setup: PlanningSetup) -> None:
    """What the process does: plans the newest request, until the other side is closed."""
    ignore_signals()  # launchers send them to whole groups; the training process ends this one
    os.nice(NICENESS)
    while True:
        try:
            request = connection.recv()
            while connection.poll():
                request = connection.recv()
            plan_request(connection, setup, request)
        except (EOFError, OSError):
            return
        except ValueError as error:
            connection.send(f"the planning process cannot plan a step: {error}")
            return


def plan_request(connection: Connection, setup: PlanningSetup, request: PlanRequest) -> None:
    """Plans one step and sends what it finds, until a newer request comes."""
    sender = _Sender(connection, setup, request)
    sender.send(None, finished=False)
    section = setup.config.search
    seconds = None
    if request.seconds is not None:
        seconds = max(1e-3, request.seconds - sender.elapsed_s)
    found = search(
        sender.step.dispatcher,
        Budget(section.evaluations, seconds),
        strategy=section.strategy,
        seed=section.seed,
        workers=section.workers,
        on_round=sender.on_round,
    )
    if not connection.poll():
        sender.send(found, finished=True)


class _Sender:
    """Sends a step's best orders."""

    def __init__(self, connection: Connection, setup: PlanningSetup, request: PlanRequest) -> None:
        self._connection, self._request = connection, request
        self._begin_s = time.perf_counter()
        metas = request.microbatches
        self.graph = step_graph(setup.layout, setup.config, metas, setup.sharding)
        flops = task_durations(self.graph, setup.modules, metas)
        durations = scaled(flops, self.graph, request.rates)
        costs = search_costs(self.graph, durations)
        self.unit = unit_of(costs.compute_ms, durations)
        self.step = StepSearch(self.graph, costs)
        self._sent, self._sent_s = inf, 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def on_round(self, found: Found) -> bool:
        """Whether the search may go on."""
        if found.makespan_ms < self._sent and self.elapsed_s - self._sent_s > SEND_EVERY_S:
            self.send(found, finished=False)
        return not self._connection.poll()

    def send(self, found: Found | None, *, finished: bool) -> None:
        best: SearchedOrder = self.step.best(found)
        self._sent, self._sent_s = best.predicted_ms, self.elapsed_s
        self._connection.send(
            PlannedStep(
                self._request.step,
                step_counts(self.graph),
                encode_order(self.graph, best.order),
                best.predicted_ms * self.unit,
                best.natural_ms * self.unit,
                best.evaluations,
                best.planner,
                self.elapsed_s * 1e3,
                finished,
                bool(self._request.rates),
            )
        )


def step_counts(graph: StageGraph) -> dict[str, tuple[int, ...]]:
    """What decides which tasks a step has."""
    return {"": (graph.microbatches,), **graph.sub_microbatches}


def unit_of(compute_ms: Mapping[Any, float], durations: Durations) -> float:
    """What a millisecond of scaled costs is in the unit of the durations they come from."""
    longest = max(compute_ms, key=lambda action: compute_ms[action])
    if compute_ms[longest] == 0:
        return 0.0
    return float(np.float64(durations(longest)) / compute_ms[longest])
