"""Chat templates of LLMs that have never seen a picture, for models that see.

Programs hand over a chat's contents as parts, `{"type": "image"}` and `{"type": "text", ...}`, and
a text-only template writes their list as Python does, or fails. A prelude joins the parts to the
text that our own data are rendered from, with the placeholder where a picture is; strings stay as
they are, so chats without pictures are rendered as before.
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


def template_for_parts(tokenizer: PreTrainedTokenizerBase, placeholder: str) -> str | None:
    """The tokenizer's chat template, so that it takes parts; None: it does already, or there is
    none that could.

    Args:
        placeholder: token of a picture, as Hugging Face's processor looks for it.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return None
    expected = _rendered(tokenizer, template, placeholder + _QUESTION)
    parts = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    if expected is None or _rendered(tokenizer, template, parts) == expected:
        return None
    text = placeholder.replace("\\", "\\\\").replace("'", "\\'")
    joining = _PRELUDE.replace("PLACEHOLDER", f"'{text}'") + template
    same = _rendered(tokenizer, joining, placeholder + _QUESTION) == expected
    return joining if same and _rendered(tokenizer, joining, parts) == expected else None


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str, content: object) -> str | None:
    """A question with this content; None: the template refuses it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TEMPLATE_ERRORS:
        return None
    return str(text)
