"""Chat messages to segments through the tokenizer's own chat template.

The template is rendered with a marker instead of every content part, and the result is split
at the markers: the text between them is scaffolding, where special tokens are special; the contents
are put back as plain text, so that no message can forge a turn. Answers of the assistant count in
the loss, and so does the special token that ends them.

Rejected: the template's own assistant mask (few templates have the `generation` tag it needs) and
rendering the first k messages for every k (templates that drop earlier thoughts break it).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from torchmm.data.media.chat_keys import check_part, check_turn
from torchmm.data.sources.corrupt import CorruptSampleError
from torchmm.data.sources.records import (
    AudioSegment,
    ImageSegment,
    Sample,
    TextSegment,
    VideoSegment,
)

ROLES = ("system", "user", "assistant", "tool")
FALLBACK_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}"
    "{{ eos_token or '' if m.role == 'assistant' else '' }}\n{% endfor %}"
)
"""Used if the tokenizer has no chat template."""
MARKER = re.compile("\ue000(\\d+)\ue001")
"""Private-use characters around a number: survives trimming, occurs in no template."""

Part = TextSegment | ImageSegment | AudioSegment | VideoSegment


class ChatTemplate:
    """Renders chat samples; picklable, so that workers can have it.

    Args:
        tokenizer: its `chat_template` is used, or a plain "role: content" one if it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = None if tokenizer.chat_template else FALLBACK_TEMPLATE
        backend = tokenizer.backend_tokenizer
        self.special = sorted(
            (t.content for t in backend.get_added_tokens_decoder().values() if t.special),
            key=len,
            reverse=True,
        )

    def __call__(
        self,
        messages: list[Any],
        images: Sequence[ImageSegment],
        audios: Sequence[AudioSegment] = (),
        videos: Sequence[VideoSegment] = (),
    ) -> Sample:
        """Segments of a conversation.

        Args:
            messages: {"role", "content"}; content is a string or a list of parts
                {"type": "text", "text": ...}, {"type": "image"}, {"type": "audio"} and
                {"type": "video"}.
            images, audios, videos: one per part of their kind, in order.

        Raises:
            CorruptSampleError: malformed messages, an empty answer, keys that would be lost (see
                `torchmm.data.media.chat_keys`), or other numbers of images and image parts.
        """
        remaining: dict[str, list[Any]] = {
            "image": list(images),
            "audio": list(audios),
            "video": list(videos),
        }
        parts: list[Part] = []
        marked: list[tuple[str, list[str]]] = []
        for message in messages:
            role, content = _role_and_content(message)
            first = len(parts)
            parts.extend(_parts(content, role, remaining))
            marked.append((role, [f"\ue000{i}\ue001" for i in range(first, len(parts))]))
        for kind, rest in remaining.items():
            if rest:
                raise CorruptSampleError(f"{len(rest)} {kind}s more than {kind} parts in messages")
        return Sample(tuple(self._split(self._render(marked), parts)), False, False)

    def _render(self, marked: list[tuple[str, list[str]]]) -> str:
        """The conversation as text with markers. Some templates want strings, others parts."""
        wanted = [m for _, markers in marked for m in markers]
        flat: list[dict[str, Any]] = [
            {"role": role, "content": "".join(markers)} for role, markers in marked
        ]
        nested: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": m} for m in markers]}
            for role, markers in marked
        ]
        problem = "leaves out a content"
        for conversation in (flat, nested):
            try:
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, chat_template=self.template
                )
            except (jinja2.TemplateError, TypeError) as error:
                problem = f"refuses the messages: {error}"
                continue
            assert isinstance(text, str)
            if [m.group(0) for m in MARKER.finditer(text)] == wanted:
                return text
        raise CorruptSampleError(f"the chat template {problem}")

    def _split(self, text: str, parts: list[Part]) -> list[Part]:
        segments: list[Part] = []
        answered = False
        pieces = MARKER.split(text)  # scaffold, number, scaffold, number, ..., scaffold
        for position, piece in enumerate(pieces):
            if position % 2:
                part = parts[int(piece)]
                segments.append(part)
                answered = isinstance(part, TextSegment) and part.loss
                continue
            end = next((t for t in self.special if answered and piece.startswith(t)), "")
            for scaffold, loss in ((end, True), (piece[len(end) :], False)):
                if scaffold:
                    segments.append(TextSegment(scaffold, loss, scaffold=True))
        return segments


def _role_and_content(message: Any) -> tuple[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise CorruptSampleError(f"message {str(message)[:80]} has no role of {ROLES}")
    check_turn(message)
    role = message["role"]
    content = message.get("content")
    # An empty answer would teach the model to end its turn at once. It is the mark of a record
    # that has lost something (a tool call, a refusal), never of one worth learning. Empty
    # instructions and questions do no harm: they are only read.
    if role == "assistant" and _says_nothing(content):
        raise CorruptSampleError("assistant message has no content; leave such conversations out")
    return role, content


def _says_nothing(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and _says_nothing(part.get("text"))
            for part in content
        )
    return content is None or (isinstance(content, str) and not content.strip())


def _parts(content: Any, role: str, remaining: dict[str, list[Any]]) -> list[Part]:
    """Content parts of one message; takes its files from the front of `remaining`."""
    loss = role == "assistant"
    if isinstance(content, str):
        return [TextSegment(content, loss)]
    if not isinstance(content, list):
        raise CorruptSampleError(f"content is {type(content).__name__}, not text or a list")
    parts: list[Part] = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text" or kind in remaining:
            check_part(item, role)
        if kind == "text" and isinstance(item.get("text"), str):
            parts.append(TextSegment(item["text"], loss))
        elif kind in remaining:
            if not remaining[kind]:
                raise CorruptSampleError(f"more {kind} parts in messages than {kind}s")
            parts.append(remaining[kind].pop(0))
        else:
            raise CorruptSampleError(
                f"content part {str(item)[:80]} is none of text, {', '.join(remaining)}"
            )
    return parts
