"""Convert chats to segments with the chat template of the tokenizer.

The template is rendered with the strings of the sample, and with markers instead
(`chat_markers.py`). Comparing both shows the position of each string. A sample is rejected if the
template omits, moves, repeats or changes a string.

Strings of the sample are tokenized as plain text, together with adjacent template text without
special tokens. Token ids are those of the full text, and a message cannot forge a turn.
`chat_spans.py` finds the characters of each turn for the loss mask. Rendering each prefix of the
messages would have quadratic cost, and fails for templates that drop earlier reasoning. It is used
only if the boundaries of a turn are ambiguous otherwise.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from torchmm.common.errors import TEMPLATE_ERRORS
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.chat_markers import (
    AlignedRendering,
    MarkerWriter,
    MessageStyle,
    PlainWriter,
    align_rendering,
    split_at_markers,
    template_messages,
    template_tools,
    unmarked_strings,
)
from torchmm.data.media.chat_spans import (
    AssistantDelimiters,
    CharacterSpan,
    TurnSpanFinder,
    find_delimiters,
    find_prefix,
    group_spans_by_turn,
    loss_mask,
    skip_prefix,
)
from torchmm.data.record_formats.chat_keys import is_empty
from torchmm.data.record_formats.chat_types import (
    Conversation,
    Turn,
    match_tool_results,
    split_reasoning,
)
from torchmm.data.record_formats.sample import (
    AudioSegment,
    FileSegment,
    Sample,
    SampleOptions,
    Segment,
    TextSegment,
)

FALLBACK_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}"
    "{{ eos_token or '' if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt else '' }}"
)
"""Chat template for tokenizers without one."""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PYTHON_LITERAL_MARKER = re.compile(r"(?:[({[]|': )'\\ue000(\d{6})\\ue001'")
"""Pattern of a marker in an object or list that a template wrote without `tojson`."""
_JSON_INDENTS = (None, 2, 4)
_MAX_CACHED_DELIMITERS = 64
_RESERVED_OPTIONS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
}
"""Variables that transformers passes to a template or reads."""

logger = logging.getLogger(__name__)


class TemplateRejectionError(CorruptSampleError):
    """Error if the template rejects messages."""


class ChatTemplate:
    """Picklable renderer of chat samples.

    Args:
        tokenizer: Tokenizer with a chat template. Without one, "role: content" is written.
        around_sounds: Text before and after each audio file. {} is its number in the chat.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, around_sounds: tuple[str, str] = ("", "")
    ) -> None:
        self.tokenizer = tokenizer
        self.around_sounds = around_sounds
        self.template = None if tokenizer.chat_template else FALLBACK_TEMPLATE
        self._special = _special_token_pattern(tokenizer)
        self._delimiters: dict[tuple[MessageStyle, bool, str], AssistantDelimiters] = {}
        self._warned = False

    def __call__(self, conversation: Conversation, options: SampleOptions) -> Sample:
        """Return the segments of a conversation.

        Raises:
            CorruptSampleError: The template rejects the conversation, or omits a string.
        """
        for string in unmarked_strings(conversation):
            if self._special.search(string):
                raise CorruptSampleError(
                    f"{string!r:.80} in tools, ids of calls or chat_template_kwargs contains "
                    "a special token"
                )
        self._check_options(conversation)
        calls = any(turn.tool_calls for turn in conversation.turns)
        problems: list[CorruptSampleError] = []
        for json_arguments in (False, True) if calls else (False,):
            for parts in (False, True):
                style = MessageStyle(parts, json_arguments)
                try:
                    with_reasoning = self._with_reasoning(conversation, style)
                    return _RenderedConversation(self, with_reasoning, style).sample(options)
                except CorruptSampleError as error:
                    problems.append(error)
        content_errors = [e for e in problems if not isinstance(e, TemplateRejectionError)]
        # With an unsupported style, the template omits contents. Prefer the error of another style.
        raise min(content_errors or problems, key=lambda error: " content of" in str(error))

    def _with_reasoning(self, conversation: Conversation, style: MessageStyle) -> Conversation:
        """Split reasoning from contents, if the template writes reasoning.

        Other templates write "<think>" in a content as ordinary text.
        """
        turns = tuple(split_reasoning(turn) for turn in conversation.turns)
        if all(new is old for new, old in zip(turns, conversation.turns, strict=True)):
            return conversation
        delimiters = self.assistant_delimiters(
            style, bool(conversation.tools), conversation.template_options
        )
        return replace(conversation, turns=turns) if delimiters.writes_reasoning else conversation

    def _check_options(self, conversation: Conversation) -> None:
        """Raise CorruptSampleError for a template option that is reserved or has no effect."""
        options = conversation.template_options
        if not options:
            return
        template = self.tokenizer.get_chat_template(self.template, list(conversation.tools))
        for key, value in options.items():
            if key in _RESERVED_OPTIONS or key in self.tokenizer.special_tokens_map:
                raise CorruptSampleError(
                    f"chat_template_kwargs contains {key}, which is reserved; remove it"
                )
            if not is_empty(value) and not re.search(rf"\b{re.escape(key)}\b", template):
                raise CorruptSampleError(
                    f"chat_template_kwargs contains {key}, which the chat template does not "
                    "use; if it has no effect, set columns = { unused = "
                    '"chat_template_kwargs" }}'
                )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        options: Mapping[str, Any],
        prompt: bool = False,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: Messages in the format of the template.
            tools: Descriptions of tools, or None.
            options: Further variables of the template.
            prompt: Whether to add the generation prompt.

        Raises:
            TemplateRejectionError: The template rejects the messages.
        """
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **options,
            )
        except TEMPLATE_ERRORS as error:
            raise TemplateRejectionError(
                f"the chat template rejects the messages: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def generation_spans(
        self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]
    ) -> list[CharacterSpan] | None:
        """Return the spans of `{% generation %}` tags, or None if the template has no tags."""
        template = self.tokenizer.get_chat_template(self.template, tools)
        if not GENERATION_TAG.search(template):
            return None
        tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokens,
            **options,
        )
        return [(start, end) for start, end in rendered[1][0]]

    @property
    def special(self) -> re.Pattern[str]:
        """Pattern of special tokens (group "token") with the whitespace that they strip."""
        return self._special

    def assistant_delimiters(
        self, style: MessageStyle, with_tools: bool, options: Mapping[str, Any]
    ) -> AssistantDelimiters:
        """Return the text of the template around assistant messages."""
        key = (style, with_tools, json.dumps(options, sort_keys=True))
        if key not in self._delimiters:
            if len(self._delimiters) >= _MAX_CACHED_DELIMITERS:  # options may differ per record
                self._delimiters.clear()
            self._delimiters[key] = self._find_delimiters(style, options)
        return self._delimiters[key]

    def end_token_ids(self) -> set[int]:
        """Return the ids of special tokens that the template writes after an assistant message."""
        styles = [MessageStyle(parts, json_arguments=False) for parts in (False, True)]
        tokens = {
            token for style in styles for token in self.assistant_delimiters(style, False, {}).ends
        }
        vocabulary = self.tokenizer.get_vocab()
        return {vocabulary[token] for token in tokens if token in vocabulary}

    def _find_delimiters(
        self, style: MessageStyle, options: Mapping[str, Any]
    ) -> AssistantDelimiters:
        """Render plain chats to find the text before and after assistant messages."""
        plain = (Turn("user", ("a",)), Turn("assistant", ("b",)))

        def render(turns: Sequence[Turn], prompt: bool = False) -> str:
            messages = template_messages(Conversation(tuple(turns)), style, MarkerWriter())
            return self.render(messages, None, options, prompt)

        def after_header(text: str) -> str:
            return text.partition(header)[2] if header else ""

        eos = self.tokenizer.eos_token
        try:
            question = render(plain[:1])
            with_prompt = render(plain[:1], prompt=True)
            answered = render(plain)
        except TemplateRejectionError:
            return AssistantDelimiters("", (str(eos),) if eos else ())
        prompt = with_prompt.removeprefix(question) if with_prompt.startswith(question) else ""
        # Without a generation prompt, use the text between user and assistant message.
        between = "".join(split_at_markers(answered)[1:2])
        header = prompt or between.removeprefix(split_at_markers(question)[-1])
        header = header if header.strip() else ""  # whitespace is part of the message
        followed = []
        for turns in ((*plain, *plain), (*plain, plain[1])):
            try:
                followed.append(split_at_markers(render(turns))[2])
            except (TemplateRejectionError, IndexError):
                continue  # a template may accept one answer only, or no two in a row
        delimiters = find_delimiters(
            header, split_at_markers(answered)[-1], followed, self._special
        )
        try:
            texts = split_at_markers(render((plain[0], replace(plain[1], reasoning="r"))))
        except TemplateRejectionError:
            texts = []
        # Text before the question, and after the question, the reasoning and the answer.
        writes_reasoning = len(texts) == 4
        block = after_header("".join(texts[1:3])) if writes_reasoning else ""
        prefix = find_prefix(after_header(between), block)
        return replace(delimiters, prefix=prefix, writes_reasoning=writes_reasoning)

    def warn_missing_end_token(self) -> None:
        """Warn once that assistant messages have no end token."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "the chat template writes no special token after the last assistant message, "
                "so the model would not learn to stop. Add {{ eos_token }} after each "
                "assistant message in the chat template of the tokenizer"
            )


class _RenderedConversation:
    """Rendered conversation in one message style. May raise CorruptSampleError."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, style: MessageStyle
    ) -> None:
        self.template = template
        self.conversation = conversation
        self.style = style
        markers = MarkerWriter()
        self.marked = template_messages(conversation, style, markers)
        self.marked_tools = template_tools(conversation.tools, markers)
        self.messages = template_messages(conversation, style, PlainWriter())
        self.tools = template_tools(conversation.tools, PlainWriter())
        self.options = conversation.template_options
        marked = template.render(self.marked, self.marked_tools, self.options)
        marker_types = (
            markers.markers[int(match[1])].kind for match in PYTHON_LITERAL_MARKER.finditer(marked)
        )
        if any(kind in ("arguments", "content") for kind in marker_types):
            raise TemplateRejectionError(
                "the chat template writes objects in Python syntax, not as JSON; use the "
                "tojson filter in the template"
            )
        answered = match_tool_results(conversation.turns)
        named = {
            k
            for k, (call, _) in answered.items()
            if call is not None and call["function"]["name"] == conversation.turns[k].name
        }
        plain = template.render(self.messages, self.tools, self.options)
        users = [k for k, turn in enumerate(conversation.turns) if turn.role == "user"]
        self.rendering = align_rendering(
            marked, plain, markers.markers, named, range(max(users, default=0))
        )
        self._check_ids([k for k, (_, in_order) in answered.items() if not in_order])
        self._check_tools()

    def sample(self, options: SampleOptions) -> Sample:
        """Return the segments of the conversation."""
        turns = self.conversation.turns
        rendering = self.rendering
        generation_spans = self.template.generation_spans(self.messages, self.tools, self.options)
        by_turn = group_spans_by_turn(rendering, generation_spans or ())
        assistant_delimiters = self.template.assistant_delimiters(
            self.style, self.tools is not None, self.options
        )
        if (
            generation_spans is None
            and not assistant_delimiters.ends
            and any(t.role == "assistant" for t in turns)
        ):
            self.template.warn_missing_end_token()

        def tail(count: int) -> str | None:
            try:
                marked = self.template.render(self.marked[:count], self.marked_tools, self.options)
                return split_at_markers(marked)[-1]
            except TemplateRejectionError:
                return None

        start_token = str(self.template.tokenizer.bos_token or "")
        around = TurnSpanFinder(
            rendering, turns, assistant_delimiters, self.template.special, start_token, tail
        )

        keeps_prefix = options.train_template_prefix or options.train_on == "all"

        def spans(turn: int) -> Sequence[CharacterSpan]:
            if turns[turn].role != "assistant":
                return around(turn)
            full = around(turn) if generation_spans is None else by_turn.get(turn, [])
            if keeps_prefix or not full:
                return full
            first = skip_prefix(
                rendering.text, full[0], around.first_string(turn), assistant_delimiters
            )
            return [first, *full[1:]]

        mask = loss_mask(turns, options.train_on, len(rendering.text), spans)
        template = self.template
        segments = _split_segments(rendering, mask, template.special, template.around_sounds)
        return Sample(tuple(segments), False, False)

    def _check_ids(self, out_of_order: Sequence[int]) -> None:
        """Check that the rendered text depends on the ids of tool results that are out of order.

        Only ids match such results to their calls.
        """
        for turn in out_of_order:
            name = self.conversation.turns[turn].tool_call_id or ""
            other = "".join("1" if letter == "0" else "0" for letter in name)
            answer = {**self.messages[turn], "tool_call_id": other}
            calls = []
            for message in self.messages:
                renamed = [
                    {**call, "id": other} if call.get("id") == name else call
                    for call in message.get("tool_calls") or ()
                ]
                calls.append({**message, "tool_calls": renamed} if renamed else message)
            for messages in ([*self.messages[:turn], answer, *self.messages[turn + 1 :]], calls):
                if self.template.render(messages, self.tools, self.options) == self.rendering.text:
                    raise CorruptSampleError(
                        f"the chat template omits tool_call_id of message {turn + 1}, whose "
                        "result is not in the order of the calls"
                    )

    def _check_tools(self) -> None:
        """Check that the rendered text depends on values of tools without markers."""
        for number, tool in enumerate(self.tools or ()):
            full_texts = (
                json.dumps(t, ensure_ascii=False, indent=i)
                for t in (tool, tool["function"])
                for i in _JSON_INDENTS
            )
            if any(text in self.rendering.text for text in full_texts):
                continue
            assert self.tools is not None
            for path, value, changed in _changed_scalars(tool):
                tools = [*self.tools[:number], changed, *self.tools[number + 1 :]]
                if self.template.render(self.messages, tools, self.options) == self.rendering.text:
                    raise CorruptSampleError(f"the chat template omits {path} = {value} of tools")


def _changed_scalars(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path and value of each scalar, and a copy of `value` with this scalar changed."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        here = f"{path}.{key}".lstrip(".")
        if isinstance(item, dict | list):
            changes = _changed_scalars(item, here)
        elif item is None or isinstance(item, bool | int | float):
            changes = iter([(here, item, not item if isinstance(item, bool) else (item or 0) + 1)])
        else:
            continue
        for where, scalar, changed in changes:
            copy: Any = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield where, scalar, copy


def _split_segments(
    rendering: AlignedRendering,
    mask: bytearray,
    special: re.Pattern[str],
    around_sounds: tuple[str, str],
) -> list[Segment]:
    """Split a rendered text into segments with equal loss flags, special tokens, and files."""
    segments: list[Segment] = []
    audio_count = 0
    for number in range(len(rendering.markers) + 1):
        begin, end = rendering.template_range(number)
        for match in special.finditer(rendering.text, begin, end):
            _append_plain_text(segments, rendering.text, mask, begin, match.start())
            loss = bool(mask[match.start("token")])
            segments.append(TextSegment(match.group(), loss, is_template=True))
            begin = match.end()
        _append_plain_text(segments, rendering.text, mask, begin, end)
        if number < len(rendering.markers):
            value = rendering.markers[number].value
            if isinstance(value, AudioSegment):
                audio_count += 1
                _append_joined(
                    segments, around_sounds[0].replace("{}", str(audio_count)), loss=False
                )
                segments.append(value)
                _append_joined(segments, around_sounds[1], loss=False)
            elif isinstance(value, FileSegment):
                segments.append(value)  # type: ignore[arg-type]
            else:
                _append_plain_text(segments, rendering.text, mask, *rendering.positions[number])
    return segments


def _append_plain_text(
    segments: list[Segment], text: str, mask: bytearray, begin: int, end: int
) -> None:
    """Append text without special tokens."""
    while begin < end:
        loss = mask[begin]
        change = mask.find(1 - loss, begin, end)
        piece = text[begin : change if change >= 0 else end]
        begin += len(piece)
        _append_joined(segments, piece, bool(loss))


def _append_joined(segments: list[Segment], text: str, loss: bool) -> None:
    """Append plain text, joined to preceding plain text with the same loss flag."""
    last = segments[-1] if segments else None
    if isinstance(last, TextSegment) and not last.is_template and last.loss == loss:
        segments[-1] = TextSegment(last.text + text, loss)
    elif text:
        segments.append(TextSegment(text, loss))


def _special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    tokens = sorted((t for t in added if t.special), key=lambda t: len(t.content), reverse=True)
    before = "|".join(re.escape(t.content) for t in tokens if t.lstrip)
    every = "|".join(re.escape(t.content) for t in tokens) or "(?!)"
    lead = rf"(?:\s+(?={before}))?" if before else ""
    trail = "".join(rf"(?:(?<={re.escape(t.content)})\s+)?" for t in tokens if t.rstrip)
    return re.compile(f"{lead}(?P<token>{every}){trail}")
