"""Split a record with a chosen and a rejected answer into two records of other formats.

    {"prompt": ..., "chosen": ..., "rejected": ...}                      TRL, with images
    {"chosen": ..., "rejected": ...}                                     TRL, both with the prompt
    {"question": ..., "chosen": ..., "rejected": ..., "image": ...}      RLAIF-V
    {"image": ..., "text": '{"question": ..., "chosen": ..., ...}'}      RLHF-V
    {"conversations": [...], "chosen": {...}, "rejected": {...}}         LLaMA-Factory
    {"instruction": ..., "input": ..., "chosen": ..., "rejected": ...}   LLaMA-Factory
    {"messages": [..., {"role": "assistant", ...}], "rejected_response": "..."}   ms-swift

Only the answer is included in the loss. Both records have the files of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.sample_files import read_value
from torchmm.data.record_formats.chat_keys import is_empty
from torchmm.data.record_formats.columns import get_list, truncate_repr, with_json_columns
from torchmm.data.record_formats.json_text import parse_json
from torchmm.data.record_formats.sample import Record
from torchmm.data.record_formats.sharegpt import CONVERSATION_COLUMNS

_ANSWER_COLUMNS = {
    "prompt": "completion",
    "question": "answer",
    "instruction": "output",
    "query": "response",
}
"""Column of the answer by column of the question, in formats with one answer."""
_PAIR_COLUMNS = ("chosen", "rejected", "rejected_response")
_OWN_FILES = ("rejected_images", "rejected_videos", "rejected_audios")
"""Columns of ms-swift with other files for the rejected answer."""


def has_pair(record: Record) -> bool:
    """Return True if a record has the columns of a preference pair."""
    columns = with_json_columns(record.columns)
    in_text = isinstance(text := columns.get("text"), str) and '"rejected"' in text
    return in_text or any(not is_empty(columns.get(name)) for name in _PAIR_COLUMNS[1:])


def split_pair(record: Record) -> tuple[Record, Record]:
    """Return the records of the chosen and of the rejected answer.

    Raises:
        CorruptSampleError: The record has no pair, or a value is malformed.
    """
    columns = with_json_columns(record.columns)
    text = columns.get("text")
    if isinstance(text, str) and text.lstrip().startswith("{") and '"rejected"' in text:
        columns = {**columns, "text": None, **parse_json(text, "column text")}
    chosen, rejected, rejected_response = (read_value(columns.get(n)) for n in _PAIR_COLUMNS)
    columns = {name: value for name, value in columns.items() if name not in _PAIR_COLUMNS}
    for name in filter(columns.get, _OWN_FILES):
        raise CorruptSampleError(
            f"column {name} is not supported: both answers have the files of the prompt; "
            "remove such records"
        )
    options = replace(record.options, train_on="last")
    if not is_empty(rejected_response):
        pairs = _replace_response(columns, rejected_response)
        return _with_columns(replace(record, options=options), pairs)
    if missing := [n for n, a in (("chosen", chosen), ("rejected", rejected)) if is_empty(a)]:
        raise CorruptSampleError(
            f"the record has columns {sorted(record.columns)}, but no {missing[0]} answer, which "
            'training.loss = "preference" requires; map it in the recipe: columns = '
            f'{{ {missing[0]} = "NAME" }}'
        )
    for name in ("messages", *CONVERSATION_COLUMNS):
        if not is_empty(columns.get(name)):
            context = get_list(columns, name)
            chats = [{name: [*context, *_messages(answer, name)]} for answer in (chosen, rejected)]
            return _with_columns(replace(record, options=options), [columns | c for c in chats])
    prompt = read_value(columns.get("prompt"))
    is_implicit = isinstance(chosen, list) and not isinstance(prompt, list)
    if is_implicit or not any(columns.get(name) is not None for name in _ANSWER_COLUMNS):
        prompt, chosen, rejected = _split_common_prompt(chosen, rejected)
        columns["prompt"] = prompt
    question = next(name for name in _ANSWER_COLUMNS if columns.get(name) is not None)
    if question != "prompt":  # responses in the history are not compared
        record = replace(record, options=options)
    answer_column = _ANSWER_COLUMNS[question]
    return _with_columns(record, [{**columns, answer_column: a} for a in (chosen, rejected)])


def _with_columns(record: Record, columns: list[dict[str, Any]]) -> tuple[Record, Record]:
    first, second = columns
    return replace(record, columns=first), replace(record, columns=second)


def _messages(answer: Any, column: str) -> list[Any]:
    """Return an answer as messages in the format of a column of messages."""
    if isinstance(answer, str):
        by_role = column == "messages"
        return [
            {"role": "assistant", "content": answer}
            if by_role
            else {"from": "gpt", "value": answer}
        ]
    return answer if isinstance(answer, list) else [answer]


def _replace_response(columns: dict[str, Any], rejected: Any) -> list[dict[str, Any]]:
    """Return the columns with the response, and with the rejected response instead."""
    if not isinstance(rejected, str):
        raise CorruptSampleError(
            f"column rejected_response is {truncate_repr(rejected)}, not a string"
        )
    if columns.get("response") is not None:
        return [columns, {**columns, "response": rejected}]
    messages = get_list(columns, "messages")
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise CorruptSampleError(
            "column rejected_response exists, but the last of the messages is not an assistant "
            "message, which is the chosen answer"
        )
    other = {"role": "assistant", "content": rejected}
    return [columns, {**columns, "messages": [*messages[:-1], other]}]


def _split_common_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the common start of two answers, and both remaining parts, as `extract_prompt` of TRL.

    Answers are lists of messages, or strings.
    """
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise CorruptSampleError(
            f"chosen is {type(chosen).__name__} and rejected is {type(rejected).__name__}; both "
            "must be strings, or both lists of messages"
        )
    pairs = zip(chosen, rejected, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and common and chosen[common - 1] == " ":
        common -= 1  # tokens of answers start with the space
    if common == 0:
        raise CorruptSampleError(
            "the record has no prompt, and the chosen and the rejected answer have no common "
            "start; add a column prompt"
        )
    return chosen[:common], chosen[common:], rejected[common:]
