"""Plan steps in one process for several ranks.

Some ranks cannot plan steps: ranks without the data and its index
(`torchmm.extensions.remote.producers.planning`), and ranks of a node on which one process reads a
stream (`torchmm.data.shared_reader`). They request the step that follows a loader state, and
receive the sequences that they need:

    rank ── state, sequences 8 to 15 ──> SharedSteps ── find or plan the step ──> sequences

The planning process caches the latest steps, because all ranks request a step at about the same
time. It is otherwise stateless. A process with the same samples can continue from any state, so a
failure does not lose or change steps.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torchmm.data.items import PackItems
from torchmm.data.steps.balanced import balanced_step
from torchmm.data.steps.step_packs import (
    Position,
    Steps,
    StepSamples,
    arranged,
    known_packs,
    name_of,
    natural_places,
)
from torchmm.recipe.training_section import TrainingConfig

START = "start"
"""Digest of the state before the first step."""


class Asked(NamedTuple):
    """Request for a part of a step.

    Attributes:
        after: Digest of the state before the step (`digest_of`).
        state: State before the step. None if it is not sent, or for the start.
        resume_changed: Whether to continue from the state of different data.
        packs: Numbers of the requested sequences in packing order. None for all sequences.
        records: Whether samples of streams include their records.
    """

    after: str
    state: dict[str, Any] | None
    resume_changed: bool
    packs: Sequence[int] | None
    records: bool


class StepPart(NamedTuple):
    """Part of a step.

    Attributes:
        packs: Sequences by number.
        skipped: See `StepSamples`.
        state: See `StepSamples`.
        epoch: See `StepSamples`.
        notice: Message about the state before the step.
    """

    packs: dict[int, PackItems]
    skipped: list[str]
    state: dict[str, Any]
    epoch: float
    notice: str = ""


Ask = Callable[[Asked], StepPart | None]
"""Function that returns a part of a step, or None at the end of the data."""
AskPacks = Callable[[Sequence[int] | None, bool], StepPart | None]
"""Function that returns some or all sequences of a step, with or without records."""


class UnknownStateError(Exception):
    """Error if the process has no state with this digest. The request must include the state."""


def digest_of(state: dict[str, Any] | None) -> str:
    """Return the digest of a loader state. None is the start."""
    if state is None:
        return START
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


class SharedSteps:
    """Planner of steps for several ranks. It is thread-safe.

    Args:
        make: Returns the steps after a state. The second argument is `Asked.resume_changed`.
        kept: Maximum number of cached steps.
        sequences: Maximum number of iterators to keep. Use 1 if they read one stream.
    """

    def __init__(
        self,
        make: Callable[[dict[str, Any] | None, bool], Steps],
        kept: int,
        sequences: int,
    ) -> None:
        self._make = make
        self._kept = kept
        self._max_sequences = sequences
        self._lock = threading.Lock()
        # The keys are digests of the preceding state. The least recently used entry is first.
        self._steps: OrderedDict[str, tuple[StepSamples | None, str]] = OrderedDict()
        self._sequences: OrderedDict[str, Steps] = OrderedDict()

    def part(self, asked: Asked) -> StepPart | None:
        """Return a part of a step, or None at the end of the data.

        Raises:
            UnknownStateError: The request must include the state.
            CheckpointError: See `StepSequence`.
            DataError: See `StepSequence`.
        """
        with self._lock:
            if asked.after not in self._steps:
                self._steps[asked.after] = self._plan(asked)
            self._steps.move_to_end(asked.after)
            while len(self._steps) > self._kept:
                self._steps.popitem(last=False)
            step, notice = self._steps[asked.after]
        if step is None:
            return None
        numbers = range(step.places_RMB.size) if asked.packs is None else asked.packs
        packs = {number: step.pack(number) for number in numbers}
        if not asked.records:
            packs = {n: [i._replace(record=None) for i in pack] for n, pack in packs.items()}
        return StepPart(packs, step.skipped, step.state, step.epoch, notice)

    def _plan(self, asked: Asked) -> tuple[StepSamples | None, str]:
        notice = ""
        sequence = self._sequences.pop(asked.after, None)
        if sequence is None:
            if asked.state is None and asked.after != START:
                raise UnknownStateError
            while len(self._sequences) >= self._max_sequences:
                self._sequences.popitem(last=False)
            sequence = self._make(asked.state, asked.resume_changed)
            notice = sequence.notice
        step = next(sequence, None)
        if step is not None:
            self._sequences[digest_of(step.state)] = sequence
        return step, notice


class StepsElsewhere:
    """Iterator over steps that another process plans.

    Args:
        ask: Requests a part of a step.
        training: Batch sizes and sequence length.
        position: Position of the first step, with the assignment of sequences and images.
        streamed: Whether samples include their records.
    """

    def __init__(
        self, ask: Ask, training: TrainingConfig, position: Position, *, streamed: bool = False
    ) -> None:
        self._ask = ask
        self._training = training
        self._rank = position.rank
        self._places_RMB = natural_places(training, position.data_parallel_size)
        self._arrange = position.arrange
        self._balance = position.balance
        self._needs_all = position.arrange is not None or position.balance is not None
        self._streamed = streamed
        self._state = position.state
        self._resume_changed = position.resume_changed
        self._first: StepPart | None = None
        self._began = False

    def close(self) -> None:
        """Do nothing, because the planning process also serves the remaining ranks."""

    def __iter__(self) -> StepsElsewhere:
        return self

    @property
    def notice(self) -> str:
        """Message about the starting position. It requires the first step.

        Raises:
            CheckpointError: See `StepSequence`.
            DataError: See `StepSequence`.
        """
        if not self._began:
            self._began = True
            self._first = self._next_part()
        return self._first.notice if self._first else ""

    def __next__(self) -> StepSamples:
        self._began = True
        part = self._first or self._next_part()
        self._first = None
        if part is None:
            raise StopIteration
        ask = partial(self._part, self._state, self._resume_changed)
        packs = PartlyKnown(part.packs, ask)
        plan = StepSamples(packs, self._places_RMB, part.skipped, part.state, part.epoch)
        self._state = part.state
        self._resume_changed = False  # The process returned this state for its own data.
        if self._arrange is not None:
            plan = arranged(plan, self._arrange, self._training)
        if self._balance is not None:
            known = known_packs([packs(number) for number in range(self._places_RMB.size)])
            plan = replace(balanced_step(replace(plan, pack=known), self._balance), pack=packs)
        if self._streamed and self._needs_all:
            plan = self._with_records(plan, packs, ask)
        return plan

    def _with_records(self, plan: StepSamples, packs: PartlyKnown, ask: AskPacks) -> StepSamples:
        """Return a step with the records of the samples that this rank decodes."""
        encoded = [] if plan.encoded is None else plan.encoded(self._rank)
        read = {name_of(sample.item) for images in encoded for sample in images.samples}
        needed = set(plan.places_RMB[self._rank].ravel().tolist())
        needed |= {n for n, pack in packs.known.items() if read & set(map(name_of, pack))}
        if (part := ask(sorted(needed), True)) is not None:
            packs.known.update(part.packs)
        if plan.encoded is None:
            return plan
        items = {name_of(item): item for n in needed for item in packs(n)}
        local = [
            images._replace(
                samples=[s._replace(item=items[name_of(s.item)]) for s in images.samples]
            )
            for images in encoded
        ]
        of_rank = plan.encoded
        return replace(plan, encoded=lambda rank: local if rank == self._rank else of_rank(rank))

    def _next_part(self) -> StepPart | None:
        """Return all sequences of a step without records, or local sequences with records."""
        if self._needs_all:
            return self._part(self._state, self._resume_changed, None, False)
        local = self._places_RMB[self._rank].ravel().tolist()
        return self._part(self._state, self._resume_changed, local, self._streamed)

    def _part(
        self,
        after: dict[str, Any] | None,
        resume_changed: bool,
        packs: Sequence[int] | None,
        records: bool,
    ) -> StepPart | None:
        asked = Asked(digest_of(after), None, resume_changed, packs, records)
        try:
            return self._ask(asked)
        except UnknownStateError:
            return self._ask(asked._replace(state=after))


class PartlyKnown:
    """Sequences of a step by number. The first missing sequence requests all sequences."""

    def __init__(self, known: dict[int, PackItems], ask: AskPacks) -> None:
        self.known, self._ask = known, ask

    def __call__(self, number: int) -> PackItems:
        if number not in self.known and (part := self._ask(None, False)) is not None:
            self.known = part.packs | self.known
        return self.known[number]
