"""A process that plans the next step while this one trains: PipeWeaver §7.1.

    process = PlanningProcess(setup)
    process.submit(PlanRequest(step=8, ...))     as soon as the metadata of step 8 are there
    ...                                          step 7 trains
    planned = process.take(8)                    the best plan so far; None if there is none
    process.close()

The process leaves what it has where training finds it (`handover`) as soon as it is better than
what it left before: natural and static orders first, then what the search finds. They are whole:
lowered, validated and, where layers are tuned, with what they recompute; taking one is all that is
left for the training process. A search begins with what was good for steps like this one
(`remembered`) and ends with its share of the step's time; a new request ends it sooner, and so does
an order that none can be faster than. Neither waits for the other, however large requests and plans
are, even if the other one was stopped: plans are a file that is replaced, requests are sent by a
thread, which knows the newest one only.

The process runs only when nothing else wants its core: training goes first, and where cores are
scarce plans are less good. `KeptPlanning` starts another one in the place of a process that died,
and one with a share of the cores in the place of one that never found any.

Rejected: a thread, which would share Python's lock with the training step it must not slow down.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchmm.balance.bubbles.choice import StepOrder
from torchmm.balance.compiled import Int32s
from torchmm.balance.costs.model import CostModel
from torchmm.balance.order_search.best_order import LEAST_GAIN
from torchmm.balance.order_search.remembered import RememberedOrders
from torchmm.balance.planners import Improvements, PlannedOrder, Search, improve_order
from torchmm.balance.rates import ActionFit, ActionKind, RankKind
from torchmm.balance.recomputation.tuning import LayerTuning, Tuner
from torchmm.balance.transfer_times import Pair
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.common.files import Arrays, Handover
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import fork_server, ignore_signals, yield_to_others
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.numbers import encode_plan
from torchmm.pipelining.plan.plan import Gathering, MessageSpecs, PipelinePlan
from torchmm.pipelining.run.messages import MessageSizes, message_specs
from torchmm.planning.step import plan_step, searched_costs, step_graph
from torchmm.recipe.parallel_section import ParallelConfig

LEAVE_EVERY_S = 0.05
"""Improvements that come faster are left together."""
SEARCHING_SHARE = 0.8
"""Least share of the time that is spent searching rather than making plans of improvements."""
CLOSING_S = 5.0
MOST_DEATHS = 6
"""In a row, without a plan: the next would die too."""
STARVED_STEPS = 10
"""Steps in a row without a plan in time after which a process gets a share of the cores."""


class PlanningProcessError(Exception):
    """The process is gone; the message says how."""


@dataclass(frozen=True)
class PlanningSetup:
    """What stays the same during a run.

    Attributes:
        model: what actions cost on the run's device.
        sizes: of messages, by module.
        dtype: in which modules compute.
        tuning: how plans choose what layers recompute; None: they do not.
        planners: processes like this one on the machine: together they search on at most half of
            its cores.
        idle: whether the process runs only when nothing else wants its core; else it gets the
            little that others of the lowest priority get.
    """

    layout: StageLayout
    config: ParallelConfig
    modules: tuple[ModuleDescription, ...]
    sharding: Gathering
    model: CostModel
    sizes: Mapping[str, MessageSizes] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tuning: LayerTuning | None = None
    planners: int = 1
    idle: bool = True

    @property
    def workers(self) -> int:
        """Threads that search."""
        return min(self.config.search.workers, max(1, (os.cpu_count() or 1) // 2 // self.planners))


@dataclass(frozen=True)
class PlanRequest:
    """A step to be planned.

    Attributes:
        step: its number.
        microbatches: of this data-parallel rank.
        rates: milliseconds per FLOP, of all kinds of actions; empty: nothing was measured yet.
        seconds: to plan in; None: as long as all evaluations take.
        least_gain: share by which a searched order has to be faster than natural and static ones.
        fits: what actions of a rank take, as far as that was measured.
        between_ms: what messages take between two ranks, likewise.
    """

    step: int
    microbatches: tuple[MicrobatchMeta, ...]
    rates: Mapping[ActionKind, float]
    seconds: float | None
    least_gain: float = LEAST_GAIN
    fits: Mapping[RankKind, ActionFit] = field(default_factory=dict)
    between_ms: Mapping[Pair, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedStep:
    """A plan for a step, and what it is worth.

    Attributes:
        step: its number.
        numbers: `encode_plan`.
        planner: what the order comes from (`SearchedOrder`).
        predicted_ms: what forwards and backwards are to take in this order; None before anything
            was measured.
        gain_over_natural: how much longer they would take in natural order, as a share; None
            where that does not fit into memory.
        evaluations: of the search.
        planner_ms: since the request came.
        finished: whether the search was done.
    """

    step: int
    numbers: Int32s
    planner: str
    predicted_ms: float | None
    gain_over_natural: float | None
    evaluations: int
    planner_ms: float
    finished: bool


class PlanningProcess:
    """This side of it. Not to be shared between threads.

    Args:
        setup: of the run.
    """

    def __init__(self, setup: PlanningSetup) -> None:
        context = fork_server()
        self._directory = Path(tempfile.mkdtemp(prefix="torchmm-planning-"))
        self._plans = _plans_in(self._directory)
        # There: requests. Back: numbers of finished steps, or what went wrong.
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=plan_until_closed,
            args=(theirs, setup, self._directory),
            name="planning",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._newest: queue.Queue[PlanRequest | None] = queue.Queue(1)
        threading.Thread(target=self._send, name="requests", daemon=True).start()
        # A process that exits without `close` must not wait for a process that ignores signals.
        atexit.register(self._connection.close)

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def submit(self, request: PlanRequest) -> None:
        """Asks for the plan of a step, and for no other from now on."""
        self._hand_over(request)

    def _hand_over(self, request: PlanRequest | None) -> None:
        """To the thread, which ends with None."""
        with suppress(queue.Empty):
            self._newest.get_nowait()
        self._newest.put_nowait(request)

    def _send(self) -> None:
        """What the thread does; a process that was stopped lets it wait for ever."""
        with suppress(OSError):  # the process is gone, which `take` tells
            while (request := self._newest.get()) is not None:
                self._connection.send(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        """The best plan of a step so far; None if there is none.

        Args:
            wait_s: how long to wait for the finished plan.

        Raises:
            PlanningProcessError: it is gone.
        """
        deadline = time.monotonic() + wait_s
        while self._call(self._connection.poll, max(0.0, deadline - time.monotonic())):
            message = self._call(self._connection.recv)
            if isinstance(message, str):
                raise PlanningProcessError(message)
            if message == step:
                break
        found = self._call(self._plans.get)
        newest = None if found is None else _planned_step(found)
        return newest if newest is not None and newest.step == step else None

    def close(self, *, at_once: bool = False) -> None:
        """Ends the process.

        Args:
            at_once: without giving it time to end by itself, which one that was stopped never does.
        """
        atexit.unregister(self._connection.close)
        self._hand_over(None)
        self._connection.close()
        if not at_once:
            self._process.join(CLOSING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(CLOSING_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (EOFError, OSError) as error:
            self._process.join(CLOSING_S)
            code = self._process.exitcode
            raise PlanningProcessError(
                f"the planning process ended with code {code} ({type(error).__name__})"
            ) from error


class KeptPlanning:
    """A planning process that is started again: with pauses of more and more steps if it dies, and
    with a share of the cores if it never has a plan in time.

    Args:
        setup: of the run.
        start: makes a process.
        logger: is told what happens.
    """

    def __init__(
        self,
        setup: PlanningSetup,
        start: Callable[[PlanningSetup], PlanningProcess],
        logger: logging.Logger,
    ) -> None:
        self._setup, self._start, self._logger = setup, start, logger
        self._process: PlanningProcess | None = start(setup)
        self._deaths = 0
        self._again_at = 0
        """The step at which another process is started."""
        self._waits_for = 0
        """The step that was submitted last, once times were measured."""
        self._missed = 0
        """Steps in a row without a plan."""

    @property
    def lost(self) -> bool:
        """Whether there is no process and will be none."""
        return self._deaths >= MOST_DEATHS

    def take(self, step: int) -> PlannedStep | None:
        """The best plan of a step so far; None if there is none."""
        if self._process is None:
            if not self.lost and step >= self._again_at:
                self._process = self._start(self._setup)
            return None
        try:
            planned = self._process.take(step)
        except PlanningProcessError as error:
            self._died(step, error)
            return None
        if planned is not None:
            self._deaths = self._missed = 0
        elif step == self._waits_for:
            self._miss(step)
        return planned

    def submit(self, request: PlanRequest) -> None:
        """Asks for the plan of a step, and for no other from now on."""
        if self._process is not None:
            self._process.submit(request)
            self._waits_for = request.step if request.rates else 0

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _died(self, step: int, error: PlanningProcessError) -> None:
        self._end()
        self._deaths += 1
        self._again_at = step + 2**self._deaths
        what = f"step {self._again_at} begins with another one, until then orders are natural"
        if self.lost:
            what = "from here on each step is planned before it begins, which takes its time"
        self._logger.warning("%s; %s", error, what)

    def _miss(self, step: int) -> None:
        self._missed += 1
        self._logger.info("step %d: no plan in time; the natural order is used", step)
        if self._missed % STARVED_STEPS:
            return
        remedy = "give ranks fewer threads or data workers, or set parallel.search.background"
        self._logger.warning(
            "no plan was in time for %d steps: the planning process finds no free core, or hangs. "
            "Another one is started, which gets a share of the cores; if this goes on, %s = false",
            self._missed, remedy,
        )  # fmt: skip
        self._end()
        self._setup = replace(self._setup, idle=False)
        self._process = self._start(self._setup)

    def _end(self) -> None:
        assert self._process is not None
        self._process.close(at_once=True)
        self._process = None


def _plans_in(directory: Path) -> Handover:
    return Handover(directory / "plan.npz")


def _planned_step(found: Arrays) -> PlannedStep:
    """What `_Planning` left."""
    values: dict[str, Any] = {n: a if a.ndim else a.item() for n, a in found.items()}
    for name in ("predicted_ms", "gain_over_natural"):
        values[name] = None if isnan(values[name]) else values[name]
    return PlannedStep(**values)


def plan_until_closed(connection: Connection, setup: PlanningSetup, directory: Path) -> None:
    """What the process does: plans the newest request, until the other side is closed."""
    ignore_signals()  # launchers send them to whole groups; the training process ends this one
    yield_to_others(setup.idle)
    plans = _plans_in(directory)
    remembered = RememberedOrders()
    try:
        while True:
            request = connection.recv()
            while connection.poll():
                request = connection.recv()
            plan_request(connection, plans, setup, request, remembered)
    except (EOFError, ConnectionError):
        return
    except (OSError, ValueError, PlanError) as error:
        with suppress(ConnectionError):
            connection.send(f"the planning process cannot plan a step: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the other side may have been killed


def plan_request(
    connection: Connection,
    plans: Handover,
    setup: PlanningSetup,
    request: PlanRequest,
    remembered: RememberedOrders,
) -> None:
    """Plans one step and leaves what it finds, until a newer request comes."""
    planning = _Planning(connection, plans, setup, request)
    search = Search(request.least_gain, planning.tuner, remembered, setup.workers)
    best = improve_order(
        setup.config, planning.graph, planning.costs, setup.sharding, planning, search
    )
    if not connection.poll():
        planning.leave(best, finished=True)
        connection.send(request.step)


class _Planning(Improvements):
    """Leaves a step's best plans."""

    def __init__(
        self, connection: Connection, plans: Handover, setup: PlanningSetup, request: PlanRequest
    ) -> None:
        self._connection, self._plans = connection, plans
        self._setup, self._request = setup, request
        self._begin_s = time.perf_counter()
        metas = request.microbatches
        self.graph = step_graph(setup.layout, setup.config, metas, setup.sharding)
        self.costs = searched_costs(
            self.graph,
            setup.modules,
            metas,
            setup.model,
            layerwise=setup.sharding == "layer",
            rates=request.rates,
            fits=request.fits,
            between_ms=request.between_ms,
        )
        self.tuner: Tuner | None = None
        if setup.tuning is not None:
            specs = self._specs(self.graph)
            self.tuner = Tuner(self.graph, setup.modules, metas, setup.tuning, specs=specs)
        self._left_ms, self._left_s = inf, 0.0
        self._step: StepOrder | None = None
        self._made: Int32s | None = None
        self.making_s = 0.0
        """How long it took to make the last plan of an order."""

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def seconds_left(self) -> float | None:
        """For the search: what plans take to be made comes on top."""
        if self._request.seconds is None:
            return None
        return max(1e-3, self._request.seconds - self.elapsed_s - self.making_s)

    def seen(self, best_ms: float, make: Callable[[], PlannedOrder]) -> bool:
        """Whether the search may go on."""
        pause_s = max(LEAVE_EVERY_S, self.making_s * SEARCHING_SHARE / (1 - SEARCHING_SHARE))
        if best_ms < self._left_ms and self.elapsed_s - self._left_s > pause_s:
            self.leave(make())
            self._left_ms = best_ms
        return not self._connection.poll()

    def leave(self, best: PlannedOrder, *, finished: bool = False) -> None:
        numbers = self._make(best.step)
        self._left_ms = best.predicted_ms
        self._left_s = self.elapsed_s
        gain = best.gain_over_natural
        planned = {
            "step": self._request.step,
            "numbers": numbers,
            "planner": best.planner,
            "predicted_ms": best.predicted_ms if self._request.rates else nan,
            "gain_over_natural": nan if gain is None else gain,
            "evaluations": best.evaluations,
            "planner_ms": self.elapsed_s * 1e3,
            "finished": finished,
        }
        self._plans.put({name: np.asarray(value) for name, value in planned.items()})

    def _make(self, step: StepOrder) -> Int32s:
        """Its plan as numbers."""
        if self._made is None or step != self._step:
            begin_s = time.perf_counter()
            self._made = encode_plan(self._plan(step))
            self._step = step
            self.making_s = time.perf_counter() - begin_s
        return self._made

    def _specs(self, graph: StageGraph) -> MessageSpecs:
        sizes = self._setup.sizes
        metas = self._request.microbatches
        return message_specs(graph, sizes, metas, self._setup.dtype) if sizes else {}

    def _plan(self, step: StepOrder) -> PipelinePlan:
        setup = self._setup
        return plan_step(
            setup.layout,
            setup.config,
            setup.modules,
            self._request.microbatches,
            specs=self._specs,
            sharding=setup.sharding,
            factors=self._request.rates,
            search=lambda graph, durations: step,
            reduces_early=setup.model.profile.device.asynchronous,
            tuning=setup.tuning,
        )
