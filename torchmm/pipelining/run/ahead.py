"""Runs encoder actions ahead of their places, as a plan launches them (`schedules.launches`).

    program     L1            L2            E1        SEND E1    E2
    E1          pieces 1, 2   pieces 3, 4   the rest

An encoder action begins in a thread of its own (`torchmm.parallel.tensor.bubbles.Turns`) while an
LLM action communicates, and stops at the end of each piece. At its place in the program it runs to
its end, there or, if nothing was launched of it, in the program's own thread. One at a time: the
next begins when it is done. What an action hands over or sends, it does as ever: everything of a
step is kept by task and message, never by order (`StepState`).

Its record has the time that all of its pieces took, and that of the LLM action is without it,
though the pieces ran inside: durations are what planning learns from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmm.parallel.tensor.bubbles import TensorBubbles, Turns
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.fillers import encoder_stages

Handler = Callable[[Action], Any]
UNTIL_IT_RESTS = 1 << 30


class Span(NamedTuple):
    """Pieces of one action that ran one after the other."""

    llm: Action
    """During which."""
    encoder: Action
    begin: Any
    """As `mark` gives it."""
    end: Any


class Ahead:
    """One step of one rank.

    Args:
        handlers: what runs each kind of action.
        bubbles: to which the rank's modules were tied.
        mark: a moment of the stream that computes, for `spans`; None: nothing is timed.

    Attributes:
        spans: of what was launched.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        handlers: dict[ActionType, Handler],
        bubbles: TensorBubbles,
        device: torch.device,
        mark: Callable[[], Any] | None,
    ) -> None:
        self._plan = plan
        self._handlers = handlers
        self._bubbles = bubbles
        self._mark = mark
        self._encoders = encoder_stages(plan.graph)
        self._ready: deque[Action] = deque()
        """Encoder actions that may begin."""
        self._running: Action | None = None
        self._done: set[Action] = set()
        self._due: Action | None = None
        """What the program has come to the place of."""
        self._llm: Action | None = None
        self._since: Any = None
        self.spans: list[Span] = []
        self._turns = bubbles.turns = Turns(self._work, device, self._go, self._stop)

    def handlers(self) -> dict[ActionType, Handler]:
        """The same, of which computing launches and is launched."""
        return {**self._handlers, **dict.fromkeys(COMPUTE, self._compute)}

    def close(self) -> None:
        """Ends the thread, wherever it is."""
        self._turns.close()
        self._bubbles.turns = None

    def _compute(self, action: Action) -> Any:
        if action.stage in self._encoders:
            return self._complete(action)
        launch = self._plan.launches.get(action)
        if launch is None:
            return self._handlers[action.type](action)
        self._ready += launch.begins
        self._llm = action
        with self._bubbles.launching(launch.pieces):
            found = self._handlers[action.type](action)
        self._llm = None
        return found

    def _complete(self, action: Action) -> Any:
        """Runs what is left of an encoder action."""
        if action == self._running:
            self._due = action
            self._turns.launch(UNTIL_IT_RESTS)
            self._due = None
        if action in self._done:
            self._done.remove(action)
            return None
        if self._ready:
            assert self._ready[0] == action, "launch_problems finds that"
            self._ready.popleft()
        return self._handlers[action.type](action)

    def _work(self) -> None:
        """What the thread does."""
        while True:
            if not self._ready:
                self._turns.rest()
                continue
            action = self._running = self._ready.popleft()
            self._go()
            try:
                self._handlers[action.type](action)
            except (RuntimeError, ValueError) as error:
                error.add_note(f"in action {action}, which is launched")
                raise
            self._stop()
            self._running = None
            self._done.add(action)
            if action == self._due:
                self._turns.rest()
            else:
                self._turns.pause()

    def _go(self) -> None:
        if self._mark is not None:
            self._since = self._mark()

    def _stop(self) -> None:
        if self._mark is not None and self._llm is not None and self._running is not None:
            self.spans.append(Span(self._llm, self._running, self._since, self._mark()))
