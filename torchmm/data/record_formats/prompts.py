"""Prompts and completions in the format of TRL: two strings, or two lists of messages.

    {"prompt": "The sky is", "completion": " blue."}
    {"prompt": [{"role": "user", "content": "What is it?"}], "images": [...],
     "completion": [{"role": "assistant", "content": "A cat."}]}

Only the completion is included in the loss, also if the prompt has assistant messages. Strings are
concatenated without a chat template.
"""

from __future__ import annotations

from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.sample_files import read_value
from torchmm.data.record_formats.chat_keys import check_chat_columns, is_empty
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import read_files, to_text
from torchmm.data.record_formats.contents import has_file_placeholders, prepend_files, read_contents
from torchmm.data.record_formats.messages import record_to_conversation
from torchmm.data.record_formats.sample import Record, Sample, Segment, TextSegment


def read_prompt(record: Record) -> Sample | Conversation:
    """Read a prompt and its completion. Raise CorruptSampleError if they are malformed."""
    prompt, completion = (read_value(record.columns[name]) for name in ("prompt", "completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        return _read_messages(record, prompt, completion)
    if isinstance(prompt, str | bytes) and isinstance(completion, str | bytes):
        return _read_texts(record, to_text(prompt), to_text(completion))
    raise CorruptSampleError(
        f"prompt is {type(prompt).__name__} and completion is {type(completion).__name__}; "
        "both must be strings, or both lists of messages"
    )


def _read_texts(record: Record, prompt: str, completion: str) -> Sample:
    if not completion.strip():
        raise CorruptSampleError("completion is empty")
    check_chat_columns(record.columns)
    for name in ("system", "tools", "functions"):
        if not is_empty(record.columns.get(name)):
            raise CorruptSampleError(
                f"column {name} requires a chat, but prompt and completion are strings "
                "without a chat template; write both as lists of messages"
            )
    files = read_files(record.columns, record.root)
    content = prompt if has_file_placeholders([prompt], files) else prepend_files(prompt, files)
    (parts,) = read_contents([("user", content)], files, record.root, placeholders=False)
    segments: list[Segment] = [
        TextSegment(part, loss=False) if isinstance(part, str) else part for part in parts
    ]
    return Sample((*segments, TextSegment(completion, loss=True)))


def _read_messages(record: Record, prompt: list[Any], completion: list[Any]) -> Conversation:
    messages = [*prompt, *completion]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise CorruptSampleError(
                f"message {number} of {len(messages)} of prompt and completion is "
                f"{type(message).__name__}, not an object"
            )
    if not any(message.get("role") == "assistant" for message in completion):
        raise CorruptSampleError(
            f"{len(completion)} messages in completion, but no assistant message"
        )
    files = read_files(record.columns, record.root)
    if any(files.values()) and not has_file_placeholders(
        [m.get("content") for m in messages], files
    ):
        # As in TRL, files without placeholders precede the first user message.
        first = next((n for n, m in enumerate(messages) if m.get("role") == "user"), None)
        if first is None:
            raise CorruptSampleError(
                f"{sum(map(len, files.values()))} files but no user message that could contain them"
            )
        content = prepend_files(messages[first].get("content"), files)
        messages[first] = {**messages[first], "content": content}
    return record_to_conversation(
        record, messages, placeholders=False, num_context_messages=len(prompt), files=files
    )
