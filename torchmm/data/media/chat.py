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
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.conversation import Conversation
from torchmm.data.layouts.sample import (
    AudioSegment,
    ImageSegment,
    Sample,
    SampleOptions,
    TextSegment,
    VideoSegment,
)

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

    def __call__(self, conversation: Conversation, options: SampleOptions) -> Sample:
        """Segments of a conversation.

        Raises:
            CorruptSampleError: the template refuses it, or leaves something out.
        """
        parts: list[Part] = []
        marked: list[tuple[str, list[str]]] = []
        for turn in conversation.turns:
            first = len(parts)
            parts.extend(
                TextSegment(part, loss=turn.role == "assistant") if isinstance(part, str) else part
                for part in turn.parts
            )
            marked.append((turn.role, [f"\ue000{i}\ue001" for i in range(first, len(parts))]))
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
