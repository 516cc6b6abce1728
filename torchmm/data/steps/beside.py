"""Steps planned in a process beside training, once planning them takes long.

With `data.reorder`, whoever plans a step weighs and arranges the whole global batch: 50 ms of
processor time for 1,920 sequences. The loader requests a step before the next batch, so training
would wait for that, on every rank, in every step. Once it is worth one (`StepWork`), a process
plans instead, a few steps ahead, and sends its rank the part that it needs of each step.

It plans the same steps, as they follow from the state that comes with each. So nothing is lost with
it: if it dies, or gives nothing for `PATIENCE_S`, the rank goes on planning here after the step it
had last.

Rejected: a thread, which shares Python's lock with the step; one process for all ranks of a
machine, as for streams: all would wait for it alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torchmm.common.errors import TorchmmError
from torchmm.common.processes import StepWork, fork_server, make_worker_setup
from torchmm.data.items import EncodedImages, PackItems
from torchmm.data.steps.shuffling import Int64s
from torchmm.data.steps.step_packs import Position, Steps, StepSamples

PATIENCE_S = 20.0
"""A process that has no step for so long is given up: it takes a second to start."""
AHEAD = 2
"""Steps that wait here; another one waits in the pipe."""

logger = logging.getLogger(__name__)

Begin = Callable[[Position], Steps]
"""Steps from a position on; can be handed to another process."""


class _Share(NamedTuple):
    """What a rank needs of a step."""

    packs: dict[int, PackItems]
    places_RMB: Int64s
    skipped: list[str]
    state: dict[str, Any]
    epoch: float
    encoded: list[EncodedImages] | None
    """Images that the rank encodes and generates, if they are balanced."""
    imbalance: Mapping[str, float]

    def step(self) -> StepSamples:
        """Return the step, of which only the part of this rank is known."""
        encoded = None if self.encoded is None else partial(_same, self.encoded)
        return StepSamples(
            self.packs.__getitem__,
            self.places_RMB,
            self.skipped,
            self.state,
            self.epoch,
            encoded,
            self.imbalance,
        )


def _same(encoded: list[EncodedImages], rank: int) -> list[EncodedImages]:
    return encoded


class StepsBeside:
    """Iterator over steps; only the packs of its own rank can be asked for.

    Args:
        begin: plans them.
        position: where they begin.
    """

    def __init__(self, begin: Begin, position: Position) -> None:
        self._begin, self._position = begin, position
        self._steps: Steps | None = begin(position)
        self.notice = self._steps.notice
        """What to report about the state it began after."""
        self._process: _Process | None = None
        self._given_up = False
        self._planning = StepWork()

    def __iter__(self) -> StepsBeside:
        return self

    def __next__(self) -> StepSamples:
        if self._process is not None:
            try:
                step = self._process.next()
            except _GoneError as error:
                self._take_over(error)
            else:
                return self._after(step)
        if self._steps is None:
            self._steps = self._begin(self._position)
        with self._planning.timed():
            step = next(self._steps)
        self._after(step)
        if self._planning.worth_a_process and not self._given_up:
            logger.info(
                "arranging a step takes %.0f ms: a process does so beside training",
                self._planning.cpu_ms,
            )
            self._process = _Process(self._begin, self._position)
            self._steps = None
        return step

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process, self._steps = None, None

    def _after(self, step: StepSamples) -> StepSamples:
        """From here on it goes on after this step."""
        self._position = self._position._replace(state=step.state, resume_changed=False)
        return step

    def _take_over(self, error: _GoneError) -> None:
        logger.warning(
            "the process that arranges steps %s: from here on they are arranged here, which takes "
            "%.0f ms of each step", error, self._planning.cpu_ms,
        )  # fmt: skip
        self._given_up = True
        self.close()


class _GoneError(Exception):
    """There will be no step of a process; the message says why."""


class _Process:
    """This side of it."""

    def __init__(self, begin: Begin, position: Position) -> None:
        context = fork_server()
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=plan_steps,
            args=(theirs, make_worker_setup(), begin, position),
            name="steps",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._found: queue.Queue[Any] = queue.Queue(AHEAD)
        threading.Thread(target=self._receive, name="steps", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self._process.pid

    def next(self) -> StepSamples:
        """The next step.

        Raises:
            StopIteration: there is none.
            TorchmmError: what planning it has raised.
            _GoneError: nobody will say.
        """
        try:
            found = self._found.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise _GoneError(f"has had no step for {PATIENCE_S:g} s") from None
        if found is None:
            raise StopIteration
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, _Share)
        return found.step()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> None:
        """In a thread: one that was stopped in the middle of a step lets it wait for ever."""
        found: Any = True
        while found is not None and not isinstance(found, Exception):
            try:
                found = self._connection.recv()
            except (EOFError, OSError) as error:
                found = _GoneError(f"has ended ({type(error).__name__})")
            self._found.put(found)


def plan_steps(
    connection: Connection, setup: Callable[[int], None], begin: Begin, position: Position
) -> None:
    """What the process does: sends a rank's part of every step, as fast as they are taken."""
    setup(0)  # and of the priority of data workers, who wait for it
    try:
        for step in iter(begin(position).__next__, None):
            own = {n for packs in step.places_RMB[position.rank].tolist() for n in packs}
            connection.send(
                _Share(
                    {number: step.pack(number) for number in own},
                    step.places_RMB,
                    step.skipped,
                    step.state,
                    step.epoch,
                    None if step.encoded is None else step.encoded(position.rank),
                    step.imbalance,
                )
            )
        connection.send(None)
    except TorchmmError as error:
        connection.send(error)
    except OSError:  # nobody listens any more
        return
