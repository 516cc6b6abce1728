"""Steps that a background process computes, if computing them takes long.

With `data.reorder`, each rank arranges the complete global batch of a step: 50 ms of CPU time for
1,920 sequences. The loader requests a step before the next batch, so training would wait for this
in every step. If a step takes long, a process computes it one step ahead (`RestartingProcess`), and
sends the part of its rank.

The process computes the same steps, because a step depends only on the preceding state. If the
process exits, or has no step for `PATIENCE_S`, this process computes the steps after the last
received state.

Rejected: one process for all ranks of a machine, as for streams. All ranks would wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from torchmm.common.errors import TorchmmError
from torchmm.common.step_process import END, Progress, RestartingProcess, StepProcess
from torchmm.data.items import EncodedImages
from torchmm.data.steps.step_packs import Position, Steps, StepSamples

PATIENCE_S = 20.0
"""Time after which a process without a step is considered hung. It starts in about a second."""

logger = logging.getLogger(__name__)

Begin = Callable[[Position], Steps]
"""Returns the steps after a position. Picklable."""


class _ShareWork:
    """Work of the process: each request gets the rank's part of the next step."""

    def __init__(self, begin: Begin, position: Position) -> None:
        self._begin, self._position = begin, position
        self._steps: Steps | None = None

    def __call__(
        self, request: None, progress: Progress
    ) -> StepSamples | Literal["end"] | Exception:
        try:
            if self._steps is None:
                self._steps = self._begin(self._position)
            step = next(self._steps, None)
        except TorchmmError as error:
            return error
        if step is None:
            return END
        rank = self._position.rank
        own = {n for packs in step.places_RMB[rank].tolist() for n in packs}
        encoded = None if step.encoded is None else partial(_same, step.encoded(rank))
        return replace(step, pack={n: step.pack(n) for n in own}.__getitem__, encoded=encoded)


def _same(encoded: list[EncodedImages], rank: int) -> list[EncodedImages]:
    return encoded


class StepsBeside:
    """Iterator over steps. It returns only the packs of its rank if a process computes a step.

    Args:
        begin: returns the steps after a position.
        position: position of the first step.
    """

    def __init__(self, begin: Begin, position: Position) -> None:
        self._begin, self._position = begin, position
        self._number = 0
        """Number of the last step, counted from `position`."""
        self._steps: Steps | None = begin(position)
        self.notice = self._steps.notice
        """Report about the state that the first step follows."""
        self._process = RestartingProcess[StepSamples | Literal["end"]](
            lambda: StepProcess(_ShareWork(self._begin, self._position), "reordering"),
            logger,
            task="reordering a step",
            fallback="steps are reordered in the training process",
            final_fallback="steps are reordered in the training process",
            max_deaths=1,
        )

    def __iter__(self) -> StepsBeside:
        return self

    def __next__(self) -> StepSamples:
        found = self._process.take(self._number + 1, PATIENCE_S)
        if found == END:
            raise StopIteration
        if isinstance(found, StepSamples):
            step = found
            self._advance(step)
        else:
            if self._steps is None:
                self._steps = self._begin(self._position)
            with self._process.compute_here():
                step = next(self._steps)
                self._advance(step)
        self._number += 1
        if self._process.accepts(self._number + 1):
            self._steps = None  # The process continues from here.
            self._process.submit(self._number + 1, None)
        return step

    def close(self) -> None:
        """Kill the process."""
        self._process.close()

    def _advance(self, step: StepSamples) -> None:
        """Set the position after a step, from which a process or this process continues."""
        self._position = self._position._replace(state=step.state, resume_changed=False)
