"""Steps that share the packs of several global batches: a window (DistTrain §6, with look-ahead).

One global batch may have packs that no deal to ranks makes even: a pack that takes longer than a
rank's fair share, or fewer packs than it takes. Over the packs of W steps there are more ways, so
they are dealt anew to these W steps, as even as they can be (`balance.reordering.window`):

    natural steps 5 6 7 8 ── all of their packs ── deal ──> steps 5 6 7 8, each arranged by itself

Every step has as many packs as before, and after the window every sample was seen that would have
been. The deal depends on costs and ranks, and so is *recorded*: the state after a step inside a
window is the one before the window, with the numbers of the packs of all its steps. Whoever goes on
from there, on whatever ranks, does the steps that are left as they were dealt; the next window is
dealt by, and for, those ranks. A window ends where weights change (`data.stages`) and with the run.

Rejected: a deal by FLOPs alone, which would be the same for all ranks, but cannot know what is even
on them; samples instead of packs, which would not fill sequences as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torchmm.common.errors import CheckpointError
from torchmm.data.items import PackItems, microbatch_meta
from torchmm.data.steps.step_packs import (
    Arrange,
    Position,
    Steps,
    StepSamples,
    arranged,
    natural_places,
)
from torchmm.recipe.training_section import TrainingConfig

WINDOW_VERSION = 3
"""Of a state inside a window, which versions of torchmm without windows refuse."""

Begin = Callable[[dict[str, Any] | None, Arrange | None], Steps]
"""Natural steps after a state."""


def window_of(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a state says of the window it is in; None: it is in none.

    Raises:
        CheckpointError: it says it in another way.
    """
    found = None if state is None else state.get("window")
    if found is not None and state is not None and state.get("version") != WINDOW_VERSION:
        raise CheckpointError(
            f"the checkpoint's data position is inside a window of version {state.get('version')}, "
            f"this version of torchmm reads {WINDOW_VERSION}"
        )
    return found


@dataclass(frozen=True)
class _Window:
    """Packs of several natural steps, numbered one step after another."""

    natural: Sequence[StepSamples]
    packs: int
    """Of each step."""

    def pack(self, number: int) -> PackItems:
        step, own = divmod(number, self.packs)
        return self.natural[step].pack(own)


@dataclass(frozen=True)
class _DealtPacks:
    """The packs of one of its steps."""

    window: _Window
    numbers: Sequence[int]

    def __call__(self, number: int) -> PackItems:
        return self.window.pack(self.numbers[number])


class WindowedSteps:
    """Iterator over steps, window after window.

    Args:
        begin: natural steps after a state.
        training: batch sizes, number of steps.
        position: where it begins, and how packs are dealt and arranged.
        size: steps of a window.
        ends: steps after which another window begins in any case.

    Raises:
        CheckpointError: the position belongs to other data.
    """

    def __init__(
        self,
        begin: Begin,
        training: TrainingConfig,
        position: Position,
        size: int,
        ends: Sequence[int],
    ) -> None:
        self._training, self._position, self._size = training, position, size
        self._ends = sorted({*ends, training.steps})
        recorded = window_of(position.state)
        self._before = position.state if recorded is None else recorded["before"]
        self._inner = begin(self._before, None)
        self._done = 0
        """Steps before the window."""
        if self._before is not None:
            self._done = int(self._before.get("steps") or 0)
        self._dealt: deque[StepSamples] = deque()
        if recorded is not None:
            self._open(recorded["steps"])
            for _ in range(recorded["done"]):
                self._dealt.popleft()

    @property
    def notice(self) -> str:
        """What to report about the state it began after."""
        return self._inner.notice

    def __iter__(self) -> WindowedSteps:
        return self

    def __next__(self) -> StepSamples:
        if not self._dealt:
            self._open()
        step = self._dealt.popleft()
        arrange = self._position.arrange
        return step if arrange is None else arranged(step, arrange, self._training)

    def _open(self, dealt: Sequence[Sequence[int]] | None = None) -> None:
        """The next window, as it was dealt before, or dealt now."""
        size = len(dealt) if dealt is not None else self._length()
        natural = list(islice(iter(self._inner.__next__, None), size))
        if not natural:
            raise StopIteration
        packs = self._training.global_batch_size
        window = _Window(natural, packs)
        if dealt is None:
            dealt = self._deal(window)
        places_RMB = natural_places(self._training, self._position.data_parallel_size)
        for number, (own, numbers) in enumerate(zip(natural, dealt, strict=True), 1):
            state = own.state
            if number < len(natural):
                record = {"before": self._before, "done": number, "steps": dealt}
                state = {"version": WINDOW_VERSION, "window": record}
            # What is corrupt is told once, with the first of them.
            skipped = [] if number > 1 else [text for each in natural for text in each.skipped]
            step = replace(
                own,
                pack=_DealtPacks(window, numbers),
                places_RMB=places_RMB,
                skipped=skipped,
                state=state,
            )
            self._dealt.append(step)
        self._before = natural[-1].state
        self._done += len(natural)

    def _length(self) -> int:
        """Steps of the next window."""
        if self._position.deal is None:
            return 1
        left = next((end - self._done for end in self._ends if end > self._done), self._size)
        return min(self._size, left)

    def _deal(self, window: _Window) -> Sequence[Sequence[int]]:
        """Numbers of packs by step.

        Raises:
            ValueError: packs were left out.
        """
        steps = len(window.natural)
        count = window.packs
        natural = [[*range(n * count, (n + 1) * count)] for n in range(steps)]
        deal = self._position.deal
        if steps == 1 or deal is None:
            return natural
        length = self._training.sequence_length
        numbers = range(steps * count)
        found = deal([microbatch_meta([window.pack(n)], length) for n in numbers], steps)
        if [len(own) for own in found] != [count] * steps or sorted(
            n for own in found for n in own
        ) != [*numbers]:
            raise ValueError(f"{len(numbers)} packs of {steps} steps were dealt as {found}")
        return found
