"""Steps planned by one process for many: where samples' sizes are known to it alone.

Two kinds of ranks do not plan for themselves: those whose machine has neither the data nor their
index (`torchmm.extensions.remote.producers.planning`), and those of a machine on which one process
reads a stream for all (`torchmm.data.shared_reader`). Both ask for the step *after a state*, the
one that checkpoints keep, and get the packs that they need of it:

    rank ── after this state, packs 8 to 15 ──> SharedSteps ── finds or plans the step ──> packs

So who plans needs to remember nothing. It keeps the latest steps, which all ranks ask for at about
the same time, and goes on with a sequence that stands where it is asked. Anybody else with the same
samples can go on from the same state: after a failure no step is lost, and none is another one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from torchmm.data.items import PackItems
from torchmm.data.steps.balanced import balanced_step
from torchmm.data.steps.shuffling import Int64s
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
"""Stands for the digest of a state before the first step."""


class Asked(NamedTuple):
    """A question for a part of a step.

    Attributes:
        after: digest of the state that the step comes after (`digest_of`).
        state: this state, from which a sequence can be begun; None: not sent, or the start.
        resume_changed: go on from it even if it is of other data.
        packs: numbers of the packs that are wanted, in natural order; None: all.
        records: whether samples come with their records, where they are streamed.
    """

    after: str
    state: dict[str, Any] | None
    resume_changed: bool
    packs: Sequence[int] | None
    records: bool


class StepPart(NamedTuple):
    """What was asked for.

    Attributes:
        packs: by number.
        skipped, state, epoch: as of `StepSamples`.
        notice: what to report about the state it began after.
    """

    packs: dict[int, PackItems]
    skipped: list[str]
    state: dict[str, Any]
    epoch: float
    notice: str = ""


Ask = Callable[[Asked], StepPart | None]
"""Answers, or None at the end of the data."""


class AskPacks(Protocol):
    """Requests packs of one step by number; None: all of them."""

    def __call__(
        self, packs: Sequence[int] | None, *, records: bool = False
    ) -> StepPart | None: ...


class UnknownStateError(Exception):
    """Only a digest was sent, of a state that is not known here; the state has to be sent."""


def digest_of(state: dict[str, Any] | None) -> str:
    """Names a state."""
    if state is None:
        return START
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


class SharedSteps:
    """Plans steps for all who ask; may be called by several threads.

    Args:
        make: begins a sequence after a state; whether that may be of other data.
        kept: steps that are remembered.
        sequences: most that can go on; 1 where all of them would read the same streams.
    """

    def __init__(
        self,
        make: Callable[[dict[str, Any] | None, bool], Steps],
        kept: int,
        sequences: int,
    ) -> None:
        self._make = make
        self._kept = kept
        self._most = sequences
        self._lock = threading.Lock()
        # Both by the digest of the state they come after; used least recently first.
        self._steps: OrderedDict[str, tuple[StepSamples | None, str]] = OrderedDict()
        self._sequences: OrderedDict[str, Steps] = OrderedDict()

    def part(self, asked: Asked) -> StepPart | None:
        """What was asked for; None at the end of the data.

        Raises:
            UnknownStateError: the state has to be sent.
            CheckpointError, DataError: as of `StepSequence`.
        """
        with self._lock:
            step, notice = self._find(asked)
        if step is None:
            return None
        wanted = range(step.places_RMB.size) if asked.packs is None else asked.packs
        packs = {number: step.pack(number) for number in wanted}
        if not asked.records:
            packs = {n: [i._replace(record=None) for i in pack] for n, pack in packs.items()}
        return StepPart(packs, step.skipped, step.state, step.epoch, notice)

    def _find(self, asked: Asked) -> tuple[StepSamples | None, str]:
        if asked.after not in self._steps:
            self._steps[asked.after] = self._plan(asked)
        self._steps.move_to_end(asked.after)
        while len(self._steps) > self._kept:
            self._steps.popitem(last=False)
        return self._steps[asked.after]

    def _plan(self, asked: Asked) -> tuple[StepSamples | None, str]:
        notice = ""
        sequence = self._sequences.pop(asked.after, None)
        if sequence is None:
            if asked.state is None and asked.after != START:
                raise UnknownStateError
            while len(self._sequences) >= self._most:
                self._sequences.popitem(last=False)
            sequence = self._make(asked.state, asked.resume_changed)
            notice = sequence.notice
        step = next(sequence, None)
        if step is not None:
            self._sequences[digest_of(step.state)] = sequence
        return step, notice


class StepsElsewhere:
    """Iterator over the steps that somebody else plans, as `StepSequence` is over its own.

    Args:
        ask: who plans them.
        training: batch sizes, sequence length.
        position: where they begin, which packs are asked for, how packs and images are assigned.
        streamed: whether samples come with their records.
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
        """Do nothing: the process that plans also serves others."""

    def __iter__(self) -> StepsElsewhere:
        return self

    @property
    def notice(self) -> str:
        """What to report about the starting position; asks for the first step.

        Raises:
            CheckpointError, DataError: as of `StepSequence`.
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
        self._resume_changed = False  # states that come from there are of the data there
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
        needed = set(self._own(plan.places_RMB))
        needed |= {n for n, pack in packs.known.items() if read & set(map(name_of, pack))}
        if (part := ask(sorted(needed), records=True)) is not None:
            packs.known.update(part.packs)
        if plan.encoded is None:
            return plan
        items = {name_of(item): item for n in needed for item in packs(n)}
        found = [
            images._replace(
                samples=[s._replace(item=items[name_of(s.item)]) for s in images.samples]
            )
            for images in encoded
        ]
        others = plan.encoded
        return replace(plan, encoded=lambda rank: found if rank == self._rank else others(rank))

    def _next_part(self) -> StepPart | None:
        """Return all packs of a step without records, or the packs of this rank with records."""
        ask = partial(self._part, self._state, self._resume_changed)
        if self._needs_all:
            return ask(None)
        return ask(self._own(self._places_RMB), records=self._streamed)

    def _own(self, places_RMB: Int64s) -> list[int]:
        packs: list[int] = places_RMB[self._rank].ravel().tolist()
        return packs

    def _part(
        self,
        after: dict[str, Any] | None,
        resume_changed: bool,
        packs: Sequence[int] | None,
        records: bool = False,
    ) -> StepPart | None:
        asked = Asked(digest_of(after), None, resume_changed, packs, records)
        try:
            return self._ask(asked)
        except UnknownStateError:
            return self._ask(asked._replace(state=after))


class PartlyKnown:
    """Packs of a step, of which the others are asked for, all at once, when one is needed."""

    def __init__(
        self,
        known: dict[int, PackItems],
        ask: AskPacks,
    ) -> None:
        self.known = known
        self._ask = ask

    def __call__(self, number: int) -> PackItems:
        if number not in self.known and (part := self._ask(None)) is not None:
            self.known = part.packs | self.known
        return self.known[number]
