"""Questions about files: FineVision pairs, VQA, and multiple choice.

    {"images": [...], "texts": [{"user": "What is it?", "assistant": "A cat."}], "source": "ai2d"}
    {"image": ..., "question": "What is it?", "answers": ["cat", "cat", "kitten"]}
    {"image": ..., "question": "What is it?", "choices": ["a dog", "a cat"], "answer": 1}

Files precede the question. Further columns (ratings, ids, lectures) are not read.
"""

from __future__ import annotations

from collections import Counter
from string import ascii_uppercase
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import (
    get_list,
    get_text,
    read_files,
    to_answer,
    to_text,
    truncate_repr,
    with_json_columns,
)
from torchmm.data.record_formats.contents import has_file_placeholders, prepend_files
from torchmm.data.record_formats.instructions import make_turn
from torchmm.data.record_formats.messages import record_to_conversation
from torchmm.data.record_formats.sample import Record

CHOICE_COLUMNS = ("choices", "options")
ANSWER_COLUMNS = ("answer", "answers", "correct_choice_idx")
CHOICE_INSTRUCTION = "Answer with the option's letter from the given choices directly."
"""Instruction of LLaVA-1.5, which benchmarks use as well."""


def has_question_pairs(record: Record) -> bool:
    """Return True if `texts` contains objects instead of strings."""
    texts = record.columns.get("texts")
    return isinstance(texts, list) and any(isinstance(text, dict) for text in texts)


def read_question_pairs(record: Record) -> Conversation:
    """Read a record of FineVision or the Cauldron: images, then questions with answers.

    Raises:
        CorruptSampleError: An entry lacks a question or answer, or the chat is not valid.
    """
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(record.columns["texts"], start=1):
        for key in ("user", "assistant"):
            if not isinstance(pair, dict) or not isinstance(pair.get(key), str):
                raise CorruptSampleError(
                    f"column `texts` exists, but entry {number} has no {key} text"
                )
        messages += make_turn(pair["user"], pair["assistant"])
    # nanoVLM, the loader of FineVision, also puts images first. It removes placeholders from text,
    # which are kept here.
    files = read_files(record.columns, record.root)
    messages[0]["content"] = prepend_files(messages[0]["content"], files)
    return record_to_conversation(record, messages, placeholders=False, files=files)


def read_question(record: Record) -> Conversation:
    """Read a question with optional choices, and one or several answers.

    Raises:
        CorruptSampleError: There is no answer, it matches no choice, or the chat is not valid.
    """
    columns = record.columns
    question = to_text(columns["question"], "column question")
    # Many questions of ScienceQA require the hint.
    for name in ("hint", "context"):
        if get_text(columns, name).strip():
            question = f"Context: {get_text(columns, name)}\n{question}"
    column, choices = _read_choices(columns)
    if choices:
        letters = ascii_uppercase[: len(choices)]
        answer = letters[_read_choice_index(columns, choices, column)]
        listed = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        question = "\n".join((question, *listed, CHOICE_INSTRUCTION))
    else:
        # The most common answer, or the first of several equally common answers.
        counts = Counter(_read_open_answers(columns))
        answer = max(counts, key=counts.__getitem__)
    files = read_files(columns, record.root)
    marked = has_file_placeholders([question], files)
    content = question if marked else prepend_files(question, files)
    return record_to_conversation(
        record, make_turn(content, answer), placeholders=False, files=files
    )


def _read_choices(columns: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the name of the column with choices, and the choices, which may be empty."""
    column = next(
        (name for name in CHOICE_COLUMNS if columns.get(name) is not None), CHOICE_COLUMNS[0]
    )
    choices = get_list(columns, column)
    if len(choices) > len(ascii_uppercase):
        raise CorruptSampleError(
            f"column {column} has {len(choices)} choices, but at most {len(ascii_uppercase)} "
            "are supported"
        )
    return column, [to_text(choice, f"a choice in column {column}") for choice in choices]


def _read_choice_index(columns: dict[str, Any], choices: list[str], column: str) -> int:
    """Return the index of the correct choice, given as an index, a letter or the text."""
    names = ("answer", "correct_choice_idx")
    name = next((n for n in names if columns.get(n) is not None), None)
    if name is None:
        raise CorruptSampleError(f"column `{column}` exists, but none of {', '.join(names)}")
    value = columns[name]
    meant = set()
    if isinstance(value, int) and not isinstance(value, bool):
        meant = {value}
    elif isinstance(value, str):
        letter = value.strip("(). ")
        if value in choices:
            meant.add(choices.index(value))
        if len(letter) == 1 and letter in ascii_uppercase[: len(choices)]:
            meant.add(ascii_uppercase.index(letter))
        if len(letter) <= 2 and letter.isdecimal() and int(letter) < len(choices):
            meant.add(int(letter))
    if len(meant) > 1:
        raise CorruptSampleError(
            f"{name} = {truncate_repr(value)} is ambiguous: it matches choices "
            f"{' and '.join(map(str, sorted(meant)))} of {len(choices)} (counted from 0), by "
            "number, letter or text"
        )
    if not meant or not 0 <= min(meant) < len(choices):
        raise CorruptSampleError(
            f"{name} = {truncate_repr(value)} matches none of {len(choices)} choices; use a number "
            f"from 0 to {len(choices) - 1}, a letter, or the text of a choice"
        )
    return meant.pop()


def read_references(record: Record) -> tuple[str, ...]:
    """Return all reference texts of a sample, or an empty tuple if it has only one text.

    They are the column `references`, or several answers to a question without choices.

    Raises:
        CorruptSampleError: A reference is not a string.
    """
    columns = with_json_columns(record.columns)
    if columns.get("references") is not None:
        references = get_list(columns, "references")
        return tuple(to_text(text, "a text in column references") for text in references)
    several = isinstance(columns.get(_answers_column(columns)), list)
    if columns.get("question") is None or not several or _read_choices(columns)[1]:
        return ()
    return tuple(_read_open_answers(columns))


def _answers_column(columns: dict[str, Any]) -> str:
    return next((n for n in ANSWER_COLUMNS if columns.get(n) is not None), ANSWER_COLUMNS[0])


def _read_open_answers(columns: dict[str, Any]) -> list[str]:
    name = _answers_column(columns)
    value = columns.get(name)
    # With a column for choices, a number is an index.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_answer = is_number and all(columns.get(column) is None for column in CHOICE_COLUMNS)
    if isinstance(value, str) or is_answer:
        return [to_answer(value, f"column {name}")]
    if not isinstance(value, list):
        raise CorruptSampleError(
            f"column {name} is {type(value).__name__}, not a string or a list, and there are "
            "no choices"
        )
    if not value:
        raise CorruptSampleError(f"column {name} is an empty list")
    # VQA has objects with "answer", "answer_confidence" and "answer_id".
    answers = []
    for item in value:
        answer = item.get("answer") if isinstance(item, dict) else item
        answers.append(to_answer(answer, f"an answer in column {name}"))
    return answers
