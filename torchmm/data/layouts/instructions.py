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
from torchmm.data.layouts.columns import list_of, optional_text, text_of
from torchmm.data.layouts.conversation import Conversation
from torchmm.data.layouts.messages import chat_of
from torchmm.data.layouts.sample import Record


def read_instruction(record: Record) -> Conversation:
    """Read instruction, input and output. Raise CorruptSampleError if they are malformed."""
    asked = optional_text(record.columns, "instruction")
    more = optional_text(record.columns, "input")
    return _chat(record, "\n".join(text for text in (asked, more) if text), "output")


def read_query(record: Record) -> Conversation:
    """Read query and response. Raise CorruptSampleError if they are malformed."""
    return _chat(record, optional_text(record.columns, "query"), "response")


def _chat(record: Record, asked: str, answer_column: str) -> Conversation:
    answer = text_of(record.columns[answer_column], f"column {answer_column}")
    if optional_text(record.columns, "context").strip():  # name of `input` in Dolly
        raise CorruptSampleError(
            "column context is ambiguous next to instruction or query; map it in the recipe: "
            'columns = { input = "context" }, or columns = { unused = "context" }'
        )
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(list_of(record.columns, "history"), start=1):
        name = f"history entry {number}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            size = f" of {len(pair)}" if isinstance(pair, list | tuple) else ""
            raise CorruptSampleError(
                f"{name} is {type(pair).__name__}{size}, not [question, answer]"
            )
        messages += turn_messages(text_of(pair[0], name), text_of(pair[1], name))
    messages += turn_messages(asked, answer)
    return chat_of(record, messages, placeholders=True)


def turn_messages(asked: Any, answered: Any) -> list[dict[str, Any]]:
    """Return a user message and an assistant message."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
