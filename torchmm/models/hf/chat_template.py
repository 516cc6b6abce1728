"""Chat templates of text-only LLMs, extended for messages with images.

Programs pass the content of a message as parts, `{"type": "image"}` and `{"type": "text", ...}`. A
text-only template renders this list as a Python list, or fails. A prelude before the template joins
the parts to a string with placeholders for images, as in the training data of torchmm. String
contents do not change, so that chats without images are rendered as before.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import TEMPLATE_ERRORS

_PRELUDE = (
    "{%- set joined = namespace(messages=[]) %}"
    "{%- for message in messages %}"
    "{%- if message.content is string or message.content is not iterable %}"
    "{%- set joined.messages = joined.messages + [message] %}"
    "{%- else %}"
    "{%- set whole = namespace(text='') %}"
    "{%- for part in message.content %}"
    "{%- set whole.text = whole.text ~ (part.text if part.type == 'text' else PLACEHOLDER) %}"
    "{%- endfor %}"
    "{%- set joined.messages = joined.messages + [dict(message, content=whole.text)] %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- set messages = joined.messages %}"
)
_QUESTION = "What is this?"


def extend_chat_template(tokenizer: PreTrainedTokenizerBase, placeholder: str) -> str | None:
    """Return the chat template with support for content parts.

    Args:
        tokenizer: Tokenizer with the chat template.
        placeholder: Image token that the Hugging Face processor replaces.

    Returns:
        The template, or None if the template already supports parts or cannot be extended.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return None
    expected = _render_message(tokenizer, template, placeholder + _QUESTION)
    parts = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    if expected is None or _render_message(tokenizer, template, parts) == expected:
        return None
    text = placeholder.replace("\\", "\\\\").replace("'", "\\'")
    joining = _PRELUDE.replace("PLACEHOLDER", f"'{text}'") + template
    same = _render_message(tokenizer, joining, placeholder + _QUESTION) == expected
    return joining if same and _render_message(tokenizer, joining, parts) == expected else None


def _render_message(
    tokenizer: PreTrainedTokenizerBase, template: str, content: object
) -> str | None:
    """Return a rendered user message with this content, or None if the template rejects it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TEMPLATE_ERRORS:
        return None
    return str(text)
