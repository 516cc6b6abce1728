"""Plan steps in a background process if reordering is slow.

With `data.reorder`, each rank reorders the global batch of a step, which uses 50 ms of CPU time for
1,920 sequences. Training would wait for this in every step. If a step is slow, a process computes
it one step ahead (`RestartingProcess`), and sends the sequences of its rank.

A step depends only on the preceding state, so the process computes the same steps. If the process
exits, or returns no step within `TIMEOUT_S`, the training process continues after the last state.

Each rank has its own process, because with one process per node all ranks would wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from torchmm.common.errors import TorchmmError
from torchmm.common.step_process import END_OF_STEPS, RequestStatus, RestartingProcess, StepProcess
from torchmm.data.items import RankImages
from torchmm.data.steps.plan_steps import StepIterator, StepPosition, StepSamples

TIMEOUT_S = 20.0
"""Seconds after which a process without a result is considered hung."""

logger = logging.getLogger(__name__)

MakeSteps = Callable[[StepPosition], StepIterator]
"""Picklable function that returns the steps after a position."""


class _RankStepHandler:
    """Request handler of the process, which returns the next step for its rank."""

    def __init__(self, make_steps: MakeSteps, position: StepPosition) -> None:
        self._make_steps, self._position = make_steps, position
        self._steps: StepIterator | None = None

    def __call__(
        self, request: None, progress: RequestStatus
    ) -> StepSamples | Literal["end"] | Exception:
        try:
            if self._steps is None:
                self._steps = self._make_steps(self._position)
            step = next(self._steps, None)
        except TorchmmError as error:
            return error
        if step is None:
            return END_OF_STEPS
        rank = self._position.rank
        local = {n for packs in step.sequences_RMB[rank].tolist() for n in packs}
        rank_images = (
            None if step.rank_images is None else partial(_return_images, step.rank_images(rank))
        )
        return replace(
            step, pack={n: step.pack(n) for n in local}.__getitem__, rank_images=rank_images
        )


def _return_images(rank_images: list[RankImages], rank: int) -> list[RankImages]:
    return rank_images


class BackgroundSteps:
    """Iterator over steps that may be planned in a background process.

    A step from the process has only the sequences of its rank.

    Args:
        make_steps: Returns the steps after a position.
        position: Position of the first step.
    """

    def __init__(self, make_steps: MakeSteps, position: StepPosition) -> None:
        self._make_steps, self._position = make_steps, position
        self._number = 0
        """Number of the last step, counted from `position`."""
        self._steps: StepIterator | None = make_steps(position)
        self.notice = self._steps.notice
        """Message about the state before the first step."""
        self._process = RestartingProcess[StepSamples | Literal["end"]](
            lambda: StepProcess(_RankStepHandler(self._make_steps, self._position), "reordering"),
            logger,
            task="reordering a step",
            fallback="steps are reordered in the training process",
            final_fallback="steps are reordered in the training process",
            max_deaths=1,
        )

    def __iter__(self) -> BackgroundSteps:
        return self

    def __next__(self) -> StepSamples:
        result = self._process.take(self._number + 1, TIMEOUT_S)
        if result == END_OF_STEPS:
            raise StopIteration
        if isinstance(result, StepSamples):
            step = result
            self._advance(step)
        else:
            if self._steps is None:
                self._steps = self._make_steps(self._position)
            with self._process.compute_locally():
                step = next(self._steps)
                self._advance(step)
        self._number += 1
        if self._process.accepts(self._number + 1):
            self._steps = None  # The background process continues.
            self._process.submit(self._number + 1, None)
        return step

    def close(self) -> None:
        """Kill the process."""
        self._process.close()

    def _advance(self, step: StepSamples) -> None:
        """Set the position after a step, at which planning continues."""
        self._position = self._position._replace(state=step.state, resume_changed=False)
