"""Encoders' work while the LLM's collectives are under way: two threads, of which one runs.

    LLM, caller's thread       product | collective begins          waits for it | product
    encoder, thread of its own             piece, piece, piece >

A tensor-parallel collective of the LLM lasts for less than a layer of an encoder (Optimus §2.2), so
encoders have to stop within their layers (§3.1, decision 3). What runs at once is a *piece*:
kernels between two places where a layer may stop, in front of and behind its products, and behind
the begin of a collective of its own (`pieces`). The LLM calls `fill` between the begin of a
collective and the wait for it; the encoder calls `pause` at the end of each piece, forward and
backward.

Who goes on is handed over, never raced for: everything happens in one order, which the plan
decides. So all ranks of a tensor-parallel group issue the collectives of both modules in the same
order, as they must. On CUDA both threads use one stream: pieces run where the LLM's computation
leaves a gap, and delay it where they are longer; nothing computes beside anything else, so there is
nothing to isolate but collectives (`groups`).

Rejected: layers written anew as lists of functions, a copy of Hugging Face's code for each family,
whose backward would have to be cut at the same places by hand; generators, which cannot be left
from within a module's forward or autograd's engine; greenlets, which can, but share autograd's
thread-local state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Meanwhile = Callable[[], None]
"""What is to be done between the begin of a collective and the wait for it."""


class _Closed(BaseException):
    """Ends work that nobody will let go on."""


class Turns:
    """Work in a thread of its own, which goes on only while its owner waits for it.

    Args:
        work: ends, or rests, when it has nothing to do; autograd runs its backwards there too.
        device: on which it computes, in the caller's current stream.
        going, stopping: called in its thread when it has got a turn, and before it gives it back.
    """

    def __init__(
        self,
        work: Callable[[], None],
        device: torch.device,
        going: Meanwhile = lambda: None,
        stopping: Meanwhile = lambda: None,
    ) -> None:
        self._work = work
        self._going = going
        self._stopping = stopping
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._grad = torch.is_grad_enabled()
        self._thread = threading.Thread(target=self._run, name="encoder pieces", daemon=True)
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._left = 0
        self._ended = self._closing = False
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether there is no work left."""
        return self._ended

    def launch(self, pieces: int) -> int:
        """Lets the work go on for so many pieces, or until it rests; how many were complete.

        Raises:
            Exception: what the work has raised.
        """
        if self._ended or pieces < 1:
            return 0
        self._left = pieces
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return pieces - max(0, self._left)

    def pause(self) -> None:
        """The end of a piece, where the work may have to stop; elsewhere than in its thread:
        nothing."""
        if threading.get_ident() != self._thread.ident:
            return
        self._left -= 1
        if self._left <= 0:
            self.rest()

    def rest(self) -> None:
        """Stops the work, whatever it is still allowed to do."""
        self._stopping()
        self._back.release()
        self._wait()
        self._going()

    def close(self) -> None:
        """Ends the work where it stands."""
        self._closing = True
        if self._thread.ident is not None:
            self._go.release()
            self._thread.join()
        self._ended = True

    def _wait(self) -> None:
        self._go.acquire()
        if self._closing:
            raise _Closed

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Device and stream of the caller; those of a new thread are the first of either."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def _run(self) -> None:
        try:
            self._wait()
            # In its own thread: autograd's thread of the device waits for a turn's end itself.
            engine = torch.autograd.set_multithreading_enabled(False)
            with torch.set_grad_enabled(self._grad), engine, self._on_device():
                self._work()
        except _Closed:
            pass
        except BaseException as error:  # raised again by who waits
            self._error = error
        finally:
            self._ended = True
            self._back.release()


class TensorBubbles:
    """Where the LLM's collectives and the encoders' pieces of one rank meet.

    Modules are given its methods when they are split; what is launched, each step decides.
    """

    def __init__(self) -> None:
        self.turns: Turns | None = None
        """Of the step that runs, if it launches anything."""
        self._counts: Iterator[int] = iter(())

    def fill(self) -> None:
        """A collective of the LLM has begun."""
        if self.turns is not None:
            self.turns.launch(next(self._counts, 0))

    def pause(self) -> None:
        """A piece of an encoder's action ends."""
        if self.turns is not None:
            self.turns.pause()

    @contextmanager
    def launching(self, pieces: Sequence[int]) -> Iterator[None]:
        """Says how many pieces are launched at each collective of what runs inside, which need not
        have as many."""
        self._counts = iter(pieces)
        try:
            yield
        finally:
            self._counts = iter(())
