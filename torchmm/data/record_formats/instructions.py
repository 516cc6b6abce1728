"""Instructions and responses in columns, in the formats of Alpaca, LLaMA-Factory and ms-swift.

    {"instruction": "Translate.", "input": "Ein Hund.", "output": "A dog.", "system": "Be brief.",
     "history": [["Hello", "Hi."]]}
    {"query": "<image>What is it?", "response": "A cat.", "images": ["a.jpg"]}

The chat template is applied, as in LLaMA-Factory and ms-swift. The Alpaca prompt "Below is an
instruction that describes a task" is not used. Responses in the history are included in the loss.
"""

from __future__ import annotations

from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import get_list, get_text, to_answer, to_text
from torchmm.data.record_formats.messages import record_to_conversation
from torchmm.data.record_formats.sample import Record


def read_instruction(record: Record) -> Conversation:
    """Read instruction, input and output. Raise CorruptSampleError if they are malformed."""
    question = get_text(record.columns, "instruction")
    more = get_text(record.columns, "input")
    return _chat(record, "\n".join(text for text in (question, more) if text), "output")


def read_query(record: Record) -> Conversation:
    """Read query and response. Raise CorruptSampleError if they are malformed."""
    return _chat(record, get_text(record.columns, "query"), "response")


def _chat(record: Record, question: str, answer_column: str) -> Conversation:
    answer = to_answer(record.columns[answer_column], f"column {answer_column}")
    if get_text(record.columns, "context").strip():  # name of `input` in Dolly
        raise CorruptSampleError(
            "column context is ambiguous next to instruction or query; map it in the recipe: "
            'columns = { input = "context" }, or columns = { unused = "context" }'
        )
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(get_list(record.columns, "history"), start=1):
        name = f"history entry {number}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            size = f" of {len(pair)}" if isinstance(pair, list | tuple) else ""
            raise CorruptSampleError(
                f"{name} is {type(pair).__name__}{size}, not [question, answer]"
            )
        messages += make_turn(to_text(pair[0], name), to_text(pair[1], name))
    messages += make_turn(question, answer)
    return record_to_conversation(record, messages, placeholders=True)


def make_turn(question: Any, answer_text: Any) -> list[dict[str, Any]]:
    """Return a user message and an assistant message."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer_text}]
