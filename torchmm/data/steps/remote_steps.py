"""Plan steps in one process for several ranks.

Some ranks cannot plan steps: ranks without the data and its index
(`torchmm.extensions.remote.producers.step_plans`), and ranks of a node on which one process reads a
stream (`torchmm.data.shared_reader`). They request the step that follows a loader state, and
receive the sequences that they need:

    rank ── state, sequences 8 to 15 ──> StepPlanServer ── find or plan the step ──> sequences

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
from torchmm.data.steps.image_balance import balance_images
from torchmm.data.steps.plan_steps import (
    StepIterator,
    StepPosition,
    StepSamples,
    arrange_step,
    item_key,
    packing_order,
    packs_from_items,
)
from torchmm.recipe.training_section import TrainingConfig

START_DIGEST = "start"
"""Digest of the state before the first step."""


class StepRequest(NamedTuple):
    """Request for a part of a step.

    Attributes:
        after: Digest of the state before the step (`digest_state`).
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


RequestStep = Callable[[StepRequest], StepPart | None]
"""Function that returns a part of a step, or None at the end of the data."""
RequestPacks = Callable[[Sequence[int] | None, bool], StepPart | None]
"""Function that returns some or all sequences of a step, with or without records."""


class UnknownStateError(Exception):
    """Error if the process has no state with this digest. The request must include the state."""


def digest_state(state: dict[str, Any] | None) -> str:
    """Return the digest of a loader state. None is the start."""
    if state is None:
        return START_DIGEST
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


class StepPlanServer:
    """Planner of steps for several ranks. It is thread-safe.

    Args:
        make_steps: Returns the steps after a state. The second argument is
            `StepRequest.resume_changed`.
        max_steps: Maximum number of cached steps.
        max_iterators: Maximum number of step iterators. Use 1 if they read one stream.
    """

    def __init__(
        self,
        make_steps: Callable[[dict[str, Any] | None, bool], StepIterator],
        max_steps: int,
        max_iterators: int,
    ) -> None:
        self._make_steps = make_steps
        self._max_steps = max_steps
        self._max_iterators = max_iterators
        self._lock = threading.Lock()
        # The keys are digests of the preceding state. The least recently used entry is first.
        self._steps: OrderedDict[str, tuple[StepSamples | None, str]] = OrderedDict()
        self._iterators: OrderedDict[str, StepIterator] = OrderedDict()

    def part(self, request: StepRequest) -> StepPart | None:
        """Return a part of a step, or None at the end of the data.

        Raises:
            UnknownStateError: The request must include the state.
            CheckpointError: See `StepPlanner`.
            DataError: See `StepPlanner`.
        """
        with self._lock:
            if request.after not in self._steps:
                self._steps[request.after] = self._plan(request)
            self._steps.move_to_end(request.after)
            while len(self._steps) > self._max_steps:
                self._steps.popitem(last=False)
            step, notice = self._steps[request.after]
        if step is None:
            return None
        numbers = range(step.sequences_RMB.size) if request.packs is None else request.packs
        packs = {number: step.pack(number) for number in numbers}
        if not request.records:
            packs = {n: [i._replace(record=None) for i in pack] for n, pack in packs.items()}
        return StepPart(packs, step.skipped, step.state, step.epoch, notice)

    def _plan(self, request: StepRequest) -> tuple[StepSamples | None, str]:
        notice = ""
        iterator = self._iterators.pop(request.after, None)
        if iterator is None:
            if request.state is None and request.after != START_DIGEST:
                raise UnknownStateError
            while len(self._iterators) >= self._max_iterators:
                self._iterators.popitem(last=False)
            iterator = self._make_steps(request.state, request.resume_changed)
            notice = iterator.notice
        step = next(iterator, None)
        if step is not None:
            self._iterators[digest_state(step.state)] = iterator
        return step, notice


class RemoteSteps:
    """Iterator over steps that another process plans.

    Args:
        request_part: Requests a part of a step.
        training: Batch sizes and sequence length.
        position: Position of the first step, with the assignment of sequences and images.
        streamed: Whether samples include their records.
    """

    def __init__(
        self,
        request_part: RequestStep,
        training: TrainingConfig,
        position: StepPosition,
        *,
        streamed: bool = False,
    ) -> None:
        self._request = request_part
        self._training = training
        self._rank = position.rank
        self._places_RMB = packing_order(training, position.data_parallel_size)
        self._arrange = position.arrange
        self._balance = position.balance
        self._needs_all = position.arrange is not None or position.balance is not None
        self._streamed = streamed
        self._state = position.state
        self._resume_changed = position.resume_changed
        self._first_part: StepPart | None = None
        self._has_started = False

    def close(self) -> None:
        """Do nothing, because the planning process also serves the remaining ranks."""

    def __iter__(self) -> RemoteSteps:
        return self

    @property
    def notice(self) -> str:
        """Message about the starting position. It requires the first step.

        Raises:
            CheckpointError: See `StepPlanner`.
            DataError: See `StepPlanner`.
        """
        if not self._has_started:
            self._has_started = True
            self._first_part = self._next_part()
        return self._first_part.notice if self._first_part else ""

    def __next__(self) -> StepSamples:
        self._has_started = True
        part = self._first_part or self._next_part()
        self._first_part = None
        if part is None:
            raise StopIteration
        request_part = partial(self._request_part, self._state, self._resume_changed)
        packs = LazyPacks(part.packs, request_part)
        plan = StepSamples(packs, self._places_RMB, part.skipped, part.state, part.epoch)
        self._state = part.state
        self._resume_changed = False  # The process returned this state for its own data.
        if self._arrange is not None:
            plan = arrange_step(plan, self._arrange, self._training)
        if self._balance is not None:
            known = packs_from_items([packs(number) for number in range(self._places_RMB.size)])
            plan = replace(balance_images(replace(plan, pack=known), self._balance), pack=packs)
        if self._streamed and self._needs_all:
            plan = self._with_records(plan, packs, request_part)
        return plan

    def _with_records(
        self, plan: StepSamples, packs: LazyPacks, request_part: RequestPacks
    ) -> StepSamples:
        """Return a step with the records of the samples that this rank decodes."""
        rank_images = [] if plan.rank_images is None else plan.rank_images(self._rank)
        read = {item_key(sample.item) for images in rank_images for sample in images.samples}
        needed = set(plan.sequences_RMB[self._rank].ravel().tolist())
        needed |= {n for n, pack in packs.known.items() if read & set(map(item_key, pack))}
        if (part := request_part(sorted(needed), True)) is not None:
            packs.known.update(part.packs)
        if plan.rank_images is None:
            return plan
        items = {item_key(item): item for n in needed for item in packs(n)}
        local = [
            images._replace(
                samples=[s._replace(item=items[item_key(s.item)]) for s in images.samples]
            )
            for images in rank_images
        ]
        images_of_rank = plan.rank_images
        return replace(
            plan, rank_images=lambda rank: local if rank == self._rank else images_of_rank(rank)
        )

    def _next_part(self) -> StepPart | None:
        """Return all sequences of a step without records, or local sequences with records."""
        if self._needs_all:
            return self._request_part(self._state, self._resume_changed, None, False)
        local = self._places_RMB[self._rank].ravel().tolist()
        return self._request_part(self._state, self._resume_changed, local, self._streamed)

    def _request_part(
        self,
        after: dict[str, Any] | None,
        resume_changed: bool,
        packs: Sequence[int] | None,
        records: bool,
    ) -> StepPart | None:
        request = StepRequest(digest_state(after), None, resume_changed, packs, records)
        try:
            return self._request(request)
        except UnknownStateError:
            return self._request(request._replace(state=after))


class LazyPacks:
    """Sequences of a step by number. The first missing sequence requests all sequences."""

    def __init__(self, known: dict[int, PackItems], request_part: RequestPacks) -> None:
        self.known, self._request = known, request_part

    def __call__(self, number: int) -> PackItems:
        if number not in self.known and (part := self._request(None, False)) is not None:
            self.known = part.packs | self.known
        return self.known[number]
