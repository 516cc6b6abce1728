"""Which characters of a rendered chat each turn says, its tokens of structure included.

A template with `{% generation %}` tags says it itself. For others: an answer begins after the
prompt that asks the model for one (the role's header), and ends with its end token, if any.
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
    epilogue: str = ""
    """Text after the end of the last answer, which ends the chat and not the answer."""


def find_ends(header: str, last: str, followed: Sequence[str], special: re.Pattern[str]) -> Habits:
    """Return the habits of a template, given the text that it writes after a plain answer.

    The end of an answer is the text that the template writes both after the last answer and
    between an answer and the next message, up to its last special token. So a token that ends the
    chat (Phi-3.5 writes `<|end|>` and then `</s>`), or begins the next message (`<|user|>` of
    GLM-4.6), is not learned with the answer.

    Args:
        header: see `Habits`.
        last: text after the last answer.
        followed: text between an answer and the next message, for several roles of that message.
        special: matches special tokens.
    """
    same = _whole(_common(last, followed[0]), last, special) if followed else last
    if tokens := list(special.finditer(same)):
        return Habits(header, (tokens[-1]["token"],), last[tokens[-1].end("token") :])
    tokens = list(special.finditer(last))
    if not tokens:
        return Habits(header, ())
    # GPT-OSS ends the last answer with another token than earlier ones.
    ends = [tokens[-1]["token"]]
    if len(followed) > 1 and (first := special.search(_common(*followed))) is not None:
        ends.append(first["token"])
    return Habits(header, tuple(ends))


def _whole(begin: str, text: str, special: re.Pattern[str]) -> str:
    """Return the beginning of a text without a special token that it would cut."""
    for match in special.finditer(text):
        if match.start("token") < len(begin) < match.end("token"):
            return begin[: match.start("token")]
    return begin


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
                    f"the chat template does not show where the assistant message {turn + 1} "
                    "starts; it requires a generation prompt or generation tags"
                )
            closing = ""
        begin += len(closing)
        return begin + len(_common(before[len(closing) :], header))

    def _end(self, turn: int, number: int) -> int:
        begin, end = self.rendering.between(number + 1)
        after = self.rendering.text[begin:end]
        if number + 1 == len(self.rendering.marks):
            after = after.removesuffix(self.habits.epilogue)
        found = [at + len(e) for e in self.habits.ends if (at := after.find(e)) >= 0]
        if found:
            return begin + min(found)
        closing = _whole(_common(self.tail(turn + 1) or "", after), after, self.special)
        tokens = [match.end("token") for match in self.special.finditer(closing)]
        return begin + (tokens[-1] if tokens else len(closing.rstrip()))


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]
