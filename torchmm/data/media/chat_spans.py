"""Which characters of a rendered chat each turn says, its tokens of structure included.

A template with `{% generation %}` tags says it itself. For others: an answer begins after the
prompt that asks the model for one (the role's header), and ends with the special token after it.
Everything in between is the assistant's: thoughts, contents, the structure of calls.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.conversation import Turn
from torchmm.data.media.chat_marks import Rendering

Span = tuple[int, int]


@dataclass(frozen=True)
class Habits:
    """What a template does around plain answers."""

    header: str
    """Before an answer: its generation prompt, else what stands between question and answer."""
    ends: tuple[str, ...]
    """Special tokens that end an answer."""


def loss_mask(
    turns: Sequence[Turn], train_on: str, length: int, spans: Callable[[int], Sequence[Span]]
) -> bytearray:
    """1 for every character that counts in the loss.

    Args:
        turns: of the conversation.
        train_on: see `SourceConfig.train_on`.
        length: of the rendered text.
        spans: what a turn says.
    """
    everything = train_on == "all"
    answers = [k for k, turn in enumerate(turns) if turn.role == "assistant"]
    learnt = set(answers[-1:] if train_on == "last" else answers)
    mask = bytearray([everything]) * length
    for k, turn in enumerate(turns):
        counts = turn.train if turn.train is not None else everything or k in learnt
        if counts != everything:
            for start, end in spans(k):
                mask[start:end] = bytes([counts]) * (end - start)
    return mask


def tagged_by_turn(rendering: Rendering, tagged: Sequence[Span]) -> dict[int, list[Span]]:
    """A template's `{% generation %}` spans by the turn that says something in them.

    One without anything belongs to the turn before it.
    """
    said = [
        (begin, mark.turn)
        for mark, (begin, _), owned in zip(
            rendering.marks, rendering.places, rendering.owned, strict=True
        )
        if owned and mark.turn is not None
    ]
    begins = [begin for begin, _ in said]
    turns: dict[int, list[Span]] = {}
    for span in tagged:
        first = bisect_left(begins, span[0])
        if first < len(said) and begins[first] < span[1]:
            turns.setdefault(said[first][1], []).append(span)
        elif first:
            turns.setdefault(said[first - 1][1], []).append(span)
    return turns


class Spans:
    """Finds what turns say by what stands around them.

    Args:
        rendering: the rendered text.
        turns: of the conversation.
        habits: of the template.
        special: matches special tokens.
        start_token: the text's own, "" if there is none.
        tail: what the template writes after the last of the first k turns; None if it cannot
            render them alone.
    """

    def __init__(
        self,
        rendering: Rendering,
        turns: Sequence[Turn],
        habits: Habits,
        special: re.Pattern[str],
        start_token: str,
        tail: Callable[[int], str | None],
    ) -> None:
        self.rendering = rendering
        self.turns = turns
        self.habits = habits
        self.special = special
        self.start_token = start_token
        self.tail = tail
        self._numbers: dict[int | None, list[int]] = {}
        for number, mark in enumerate(rendering.marks):
            if rendering.owned[number]:
                self._numbers.setdefault(mark.turn, []).append(number)

    def __call__(self, turn: int) -> list[Span]:
        """What a turn says; raises CorruptSampleError if that cannot be told."""
        numbers = self._numbers.get(turn)
        if not numbers:
            return []
        if self.turns[turn].role == "assistant":
            return [(self._start(turn, numbers[0]), self._end(turn, numbers[-1]))]
        start = self.rendering.places[numbers[0]][0]
        end = self.rendering.places[numbers[-1]][1]
        token = self.special.match(self.rendering.text, end)
        return [(start, token.end("token") if token else end)]

    def _start(self, turn: int, number: int) -> int:
        begin, end = self.rendering.between(number)
        before = self.rendering.text[begin:end]
        header = self.habits.header
        if header.strip() and (found := before.rfind(header)) >= 0:
            return begin + found + len(header)
        closing = self.tail(turn) if turn else self.start_token
        if closing is None or not before.startswith(closing):
            if turn:
                raise CorruptSampleError(
                    f"the chat template begins message {turn + 1} in a way that does not show "
                    "where the answer starts; it needs a generation prompt, or generation tags"
                )
            closing = ""
        begin += len(closing)
        return begin + len(_common(before[len(closing) :], header))

    def _end(self, turn: int, number: int) -> int:
        begin, end = self.rendering.between(number + 1)
        after = self.rendering.text[begin:end]
        found = [at + len(e) for e in self.habits.ends if (at := after.find(e)) >= 0]
        if found:
            return begin + min(found)
        closing = _common(self.tail(turn + 1) or "", after)
        tokens = [match.end("token") for match in self.special.finditer(closing)]
        if tokens:
            return begin + tokens[-1]
        begin += len(closing.rstrip())
        # Some models end a turn with the token that begins the next one.
        following = self.special.match(self.rendering.text, begin, end)
        return following.end("token") if following else begin


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]
