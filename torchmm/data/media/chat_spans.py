"""Find the characters of each turn in a rendered chat, for the loss mask.

    <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                  ^^^^^^^^^^^^   span of the assistant turn

With `{% generation %}` tags, the template defines the spans. Otherwise the span of an assistant
turn starts after the generation prompt and includes its end token. It contains reasoning, content
and the syntax of tool calls.

Some templates write text at the start of an answer that the model never has to generate, such as an
empty `<think></think>`. `skip_prefix` excludes it from a span:

    <|user|>Hi<|end|><|assistant|><think></think>Hello<|end|>
                     header        prefix        ^^^^^^^^^^^^
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.chat_markers import AlignedRendering
from torchmm.data.record_formats.chat_types import Turn

CharacterSpan = tuple[int, int]


@dataclass(frozen=True)
class AssistantDelimiters:
    """Text of a chat template around assistant messages."""

    header: str
    """Generation prompt, or the text between user and assistant message if there is none."""
    ends: tuple[str, ...]
    """Special tokens that end an assistant message."""
    epilogue: str = ""
    """Text after the last assistant message, which ends the chat."""
    prefix: str = ""
    """Empty reasoning block that the template writes before the content of an answer without
    reasoning, or ""."""
    writes_reasoning: bool = False
    """Whether the template writes the reasoning of the last answer."""


def find_prefix(written: str, reasoning_block: str) -> str:
    """Return the text before the content of an answer if it is an empty reasoning block, or "".

    Other text before the content, such as `<|channel|>final<|message|>` of GPT-OSS, is a choice of
    the model.

    Args:
        written: Text between the header and the content of an answer without reasoning.
        reasoning_block: Text around the reasoning of an answer, up to its content.
    """
    blocks = ("".join(block.split()) for block in (reasoning_block, "<think></think>"))
    return written if "".join(written.split()) in filter(None, blocks) else ""


def skip_prefix(
    text: str, span: CharacterSpan, first_string: int, delimiters: AssistantDelimiters
) -> CharacterSpan:
    """Return a span of an assistant turn without the header and the prefix of the template.

    Args:
        text: Rendered text.
        span: Span of the turn.
        first_string: Start of the first string of the turn in the text.
        delimiters: Text of the template around assistant messages.
    """
    start, end = span
    for written in (delimiters.header, delimiters.prefix):
        if text.startswith(written, start) and start + len(written) <= first_string:
            start += len(written)
    return start, end


def find_delimiters(
    header: str, last: str, followed: Sequence[str], special: re.Pattern[str]
) -> AssistantDelimiters:
    """Return the text of a template around assistant messages.

    The end of an assistant message is the common text after the last message and between messages,
    up to its last special token. This excludes tokens that end the chat (Phi-3.5 writes `<|end|>`
    and then `</s>`) or start the next message (`<|user|>` of GLM-4.6).

    Args:
        header: See `AssistantDelimiters`.
        last: Text after the last assistant message.
        followed: Text between an assistant message and the next message, for several roles.
        special: Pattern of special tokens.
    """
    common = (
        _trim_partial_token(_common_prefix(last, followed[0]), last, special) if followed else last
    )
    if tokens := list(special.finditer(common)):
        return AssistantDelimiters(header, (tokens[-1]["token"],), last[tokens[-1].end("token") :])
    tokens = list(special.finditer(last))
    if not tokens:
        return AssistantDelimiters(header, ())
    # GPT-OSS ends the last answer with another token than earlier ones.
    ends = [tokens[-1]["token"]]
    if len(followed) > 1 and (first := special.search(_common_prefix(*followed))) is not None:
        ends.append(first["token"])
    return AssistantDelimiters(header, tuple(ends))


def _trim_partial_token(begin: str, text: str, special: re.Pattern[str]) -> str:
    """Return a prefix of a text, shortened if it ends inside a special token."""
    for match in special.finditer(text):
        if match.start("token") < len(begin) < match.end("token"):
            return begin[: match.start("token")]
    return begin


def loss_mask(
    turns: Sequence[Turn],
    train_on: str,
    length: int,
    spans: Callable[[int], Sequence[CharacterSpan]],
) -> bytearray:
    """Return the loss mask of a rendered chat, with 1 for each character in the loss.

    Args:
        turns: Turns of the conversation.
        train_on: See `SourceConfig.train_on`.
        length: Length of the rendered text in characters.
        spans: Returns the spans of a turn.
    """
    all_in_loss = train_on == "all"
    answers = [k for k, turn in enumerate(turns) if turn.role == "assistant"]
    in_loss_turns = set(answers[-1:] if train_on == "last" else answers)
    mask = bytearray([all_in_loss]) * length
    for k, turn in enumerate(turns):
        in_loss = turn.train if turn.train is not None else all_in_loss or k in in_loss_turns
        if in_loss != all_in_loss:
            for start, end in spans(k):
                mask[start:end] = bytes([in_loss]) * (end - start)
    return mask


def group_spans_by_turn(
    rendering: AlignedRendering, generation_spans: Sequence[CharacterSpan]
) -> dict[int, list[CharacterSpan]]:
    """Assign the `{% generation %}` spans of a template to turns.

    A span belongs to the turn of its first string. An empty span belongs to the preceding turn.
    """
    turn_starts = [
        (begin, mark.turn)
        for mark, (begin, _), owned in zip(
            rendering.markers, rendering.positions, rendering.is_first, strict=True
        )
        if owned and mark.turn is not None
    ]
    begins = [begin for begin, _ in turn_starts]
    turns: dict[int, list[CharacterSpan]] = {}
    for span in generation_spans:
        first = bisect_left(begins, span[0])
        if first < len(turn_starts) and begins[first] < span[1]:
            turns.setdefault(turn_starts[first][1], []).append(span)
        elif first:
            turns.setdefault(turn_starts[first - 1][1], []).append(span)
    return turns


class TurnSpanFinder:
    """Callable that finds the spans of turns by the template text around them.

    Args:
        rendering: Rendered text.
        turns: Turns of the conversation.
        delimiters: Text of the template around assistant messages.
        special: Pattern of special tokens.
        start_token: BOS token, or "".
        tail: Returns the text after the first k turns if these are rendered alone, or None if the
            template rejects them.
    """

    def __init__(
        self,
        rendering: AlignedRendering,
        turns: Sequence[Turn],
        delimiters: AssistantDelimiters,
        special: re.Pattern[str],
        start_token: str,
        tail: Callable[[int], str | None],
    ) -> None:
        self.rendering = rendering
        self.turns = turns
        self.delimiters = delimiters
        self.special = special
        self.start_token = start_token
        self.tail = tail
        self._numbers: dict[int | None, list[int]] = {}
        for number, mark in enumerate(rendering.markers):
            if rendering.is_first[number]:
                self._numbers.setdefault(mark.turn, []).append(number)

    def __call__(self, turn: int) -> list[CharacterSpan]:
        """Return the spans of a turn. Raise CorruptSampleError if they are ambiguous."""
        numbers = self._numbers.get(turn)
        if not numbers:
            return []
        if self.turns[turn].role == "assistant":
            return [(self._start(turn, numbers[0]), self._end(turn, numbers[-1]))]
        start = self.rendering.positions[numbers[0]][0]
        end = self.rendering.positions[numbers[-1]][1]
        token = self.special.match(self.rendering.text, end)
        return [(start, token.end("token") if token else end)]

    def first_string(self, turn: int) -> int:
        """Return the start of the first string of a turn with strings."""
        return self.rendering.positions[self._numbers[turn][0]][0]

    def _start(self, turn: int, number: int) -> int:
        begin, end = self.rendering.template_range(number)
        before = self.rendering.text[begin:end]
        header = self.delimiters.header
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
        return begin + len(_common_prefix(before[len(closing) :], header))

    def _end(self, turn: int, number: int) -> int:
        begin, end = self.rendering.template_range(number + 1)
        after = self.rendering.text[begin:end]
        if number + 1 == len(self.rendering.markers):
            after = after.removesuffix(self.delimiters.epilogue)
        ends = [at + len(e) for e in self.delimiters.ends if (at := after.find(e)) >= 0]
        if ends:
            return begin + min(ends)
        closing = _trim_partial_token(
            _common_prefix(self.tail(turn + 1) or "", after), after, self.special
        )
        tokens = [match.end("token") for match in self.special.finditer(closing)]
        return begin + (tokens[-1] if tokens else len(closing.rstrip()))


def _common_prefix(one: str, other: str) -> str:
    """Return the common prefix of two strings."""
    length = next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]
