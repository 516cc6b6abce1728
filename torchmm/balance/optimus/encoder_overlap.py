"""Execution of encoder pieces during collectives of the LLM, as launched by a plan.

    caller    LLM: matmul | collective starts            waits | matmul
    thread                  encoder: piece, piece, stop

Encoder actions that start early (`torchmm.balance.optimus.launches`) run in a separate thread,
which stops at the end of each piece. The two threads pass control explicitly, so one of them runs
at a time. The order depends only on the plan, so all tensor-parallel ranks issue the collectives of
both modules in the same order. On CUDA both threads use one stream: a piece that is longer than the
collective delays the LLM, and streams need no synchronization.

Why a thread: layers as lists of functions would copy the Hugging Face code of each family and need
a separate backward pass. Generators cannot yield from a forward pass or from the autograd engine.
Greenlets share the thread-local state of autograd. Complete encoder actions on a second CUDA stream
need encoders without tensor parallelism, and saved no time in simulated steps of the models in the
paper.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from torchmm.parallel.tensor.collectives import LayerHooks
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.colocated import encoder_stages

ActionHandlers = Mapping[ActionType, Callable[[Action], Any]]
UNLIMITED_PIECES = 1 << 30


class PieceRun(NamedTuple):
    """Pieces of an encoder action that ran during one collective."""

    llm: Action
    encoder: Action
    begin: Any
    end: Any


class _StepEnded(BaseException):
    """Exception that ends the thread at the end of the step."""


class EncoderOverlap:
    """Early encoder actions of one step on one rank.

    Args:
        plan: Plan with launches.
        handlers: Functions that run each type of action.
        hooks: Hooks of the layers of this rank.
        device: Device of this rank.
        mark: Function that records a time on the compute stream, for `spans`.

    Attributes:
        spans: Times of the pieces, if there is a `mark`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        handlers: ActionHandlers,
        hooks: LayerHooks,
        device: torch.device,
        mark: Callable[[], Any] | None = None,
    ) -> None:
        self.spans: list[PieceRun] = []
        self._plan = plan
        self._handlers = handlers
        self._hooks = hooks
        self._mark = mark
        self._encoders = encoder_stages(plan.graph)
        self._llm: Action | None = None  # the LLM action that runs, and its pieces by collective
        self._pieces: Iterator[int] = iter(())
        self._ready: deque[Action] = deque()  # encoder actions that may start
        self._running: Action | None = None  # encoder action that the thread has started
        self._requested: Action | None = None  # encoder action that the program waits for
        self._finished: set[Action] = set()
        self._begin: Any = None
        self._remaining_pieces = 0  # remaining pieces until the thread stops
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._grad = torch.is_grad_enabled()
        self._thread = threading.Thread(target=self._run, name="encoder layers", daemon=True)
        self._control_given = threading.Semaphore(0)
        self._control_returned = threading.Semaphore(0)
        self._is_closing = False
        self._error: BaseException | None = None

    @contextmanager
    def activate(self) -> Iterator[ActionHandlers]:
        """Yield handlers that also run pieces. The thread ends with the context."""
        self._hooks.on_collective = self._run_pieces
        self._hooks.on_yield = self._end_piece
        try:
            yield {**self._handlers, **dict.fromkeys(COMPUTE, self._compute)}
        finally:
            self._hooks.on_collective = self._hooks.on_yield = None
            self._is_closing = True
            if self._thread.ident is not None:
                self._control_given.release()
                self._thread.join()

    def _compute(self, action: Action) -> Any:
        if action.stage in self._encoders:
            return self._finish_action(action)
        if (launch := self._plan.launches.get(action)) is None:
            return self._handlers[action.type](action)
        self._ready += launch.encoder_actions
        self._llm = action
        self._pieces = iter(launch.pieces_per_collective)
        result = self._handlers[action.type](action)
        self._llm = None
        self._pieces = iter(())
        return result

    def _finish_action(self, action: Action) -> Any:
        """Run the rest of an encoder action at its position in the program."""
        if action == self._running:
            self._requested = action
            self._run_thread(UNLIMITED_PIECES)
        if action in self._finished:
            self._finished.remove(action)
            return None
        if self._ready:
            assert self._ready[0] == action, (
                "invalid launch; launch_problems should have rejected this"
            )
            self._ready.popleft()
        return self._handlers[action.type](action)

    def _run_pieces(self) -> None:
        """Run the planned pieces after a collective of the LLM has started."""
        if count := next(self._pieces, 0):
            self._run_thread(count)

    def _run_thread(self, pieces: int) -> None:
        """Run the thread until it has finished a number of pieces or all of its actions."""
        self._remaining_pieces = pieces
        if self._thread.ident is None:
            self._thread.start()
        self._control_given.release()
        self._control_returned.acquire()
        if self._error is not None:
            raise self._error

    # The thread.

    def _run(self) -> None:
        try:
            self._wait_for_control()
            with ExitStack() as settings:
                settings.enter_context(torch.set_grad_enabled(self._grad))
                # The autograd thread of the device may be the caller, which waits for this thread.
                settings.enter_context(torch.autograd.set_multithreading_enabled(False))
                if self._stream is not None:
                    settings.enter_context(torch.cuda.device(self._stream.device))
                    settings.enter_context(torch.cuda.stream(self._stream))
                while True:
                    self._run_next()
        except _StepEnded:
            pass
        except BaseException as error:  # raised again by the caller, which waits for this thread
            self._error = error
        finally:
            self._control_returned.release()

    def _run_next(self) -> None:
        if not self._ready:
            self._pause()
            return
        action = self._running = self._ready.popleft()
        self._begin = self._mark and self._mark()
        try:
            self._handlers[action.type](action)
        except (RuntimeError, ValueError) as error:
            error.add_note(f"in action {action}, which is launched")
            raise
        self._add_span()
        self._running = None
        self._finished.add(action)
        self._remaining_pieces -= 1
        if self._remaining_pieces <= 0 or action == self._requested:
            self._pause()

    def _end_piece(self) -> None:
        """End a piece. Actions that run at their position, in the other thread, do not stop."""
        if threading.get_ident() == self._thread.ident:
            self._remaining_pieces -= 1
            if self._remaining_pieces <= 0:
                self._add_span()
                self._pause()
                self._begin = self._mark and self._mark()

    def _pause(self) -> None:
        self._control_returned.release()
        self._wait_for_control()

    def _wait_for_control(self) -> None:
        self._control_given.acquire()
        if self._is_closing:
            raise _StepEnded

    def _add_span(self) -> None:
        if self._mark is not None and self._llm is not None and self._running is not None:
            self.spans.append(PieceRun(self._llm, self._running, self._begin, self._mark()))


@contextmanager
def run_encoder_overlap(
    hooks: LayerHooks,
    plan: PipelinePlan,
    handlers: ActionHandlers,
    device: torch.device,
    clock: Any | None,
) -> Iterator[ActionHandlers]:
    """Yield handlers that run the launches of a plan.

    This is an `Interleave` of `PipelineRuntime`.
    """
    if not plan.launches:
        yield handlers
        return
    ahead = EncoderOverlap(plan, handlers, hooks, device, clock and clock.mark)
    with ahead.activate() as active_handlers:
        yield active_handlers
    if clock is not None:
        clock.spans = ahead.spans
