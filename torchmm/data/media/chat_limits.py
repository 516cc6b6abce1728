"""Limits on the processor time and the memory of chat templates.

A chat template is a program that comes with a tokenizer. Its sandbox has no access to files, but a
template may loop without end or build values that fill the memory. Rejected: a child process with
limits of the operating system, because a template may also loop for single samples only.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.nodes import Const
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.conversation import Conversation
from torchmm.data.layouts.sample import Sample, SampleOptions
from torchmm.data.media.chat import ChatTemplate

LIMIT_S = 30.0
"""Processor time per chat. Long chats with tools use less than 1 s."""
MAX_EXCEEDED = 5
"""Chats of one process beyond `LIMIT_S` before the template counts as unusable."""
MAX_SIZE = 10_000_000
"""Largest integer, and most characters or list items that one operator may produce."""
POLL_S = 0.5


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with limits on integers and on results of operators.

    Each of `10 ** (10**8)`, `'a' * 10**10` and `'a'.ljust(10**10)` is a single operation of C code,
    which no time limit interrupts. No published template has integers beyond thousands.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def compile(self, source: Any, *args: Any, **options: Any) -> Any:
        """Compile a template, as Jinja does.

        Raises:
            SecurityError: it has an integer beyond `MAX_SIZE`.
        """
        template = self.parse(source) if isinstance(source, str) else source
        for constant in template.find_all(Const):
            if isinstance(constant.value, int) and constant.value > MAX_SIZE:
                raise SecurityError(
                    f"the integer {constant.value} is above the limit of {MAX_SIZE:,}"
                )
        return super().compile(source, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an intercepted operator.

        Raises:
            SecurityError: the result exceeds `MAX_SIZE`.
        """
        size = 0
        if operator == "%":
            size = _max_width(left) if isinstance(left, str) else 0
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                size = MAX_SIZE + 1 if left.bit_length() * right > 64 else left**right
        else:
            count, items = (left, right) if isinstance(left, int) else (right, left)
            size = len(items) if isinstance(items, str | list | tuple) else items
            size = size * count if isinstance(size, int) and isinstance(count, int) else 0
        if size > MAX_SIZE:
            raise SecurityError(
                f"the result of operator {operator} is above the limit of {MAX_SIZE:,}"
            )
        return super().call_binop(context, operator, left, right)


# transformers has no option for the class of the environment.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]


def _max_width(text: str) -> int:
    """Return the largest number in a format string."""
    digits = "".join(letter if letter.isdigit() else " " for letter in text)
    return max((int(number[:18]) for number in digits.split()), default=0)


class CpuLimitError(Exception):
    """A block used more processor time than `CpuLimit` allows."""


class CpuLimit:
    """A limit on the processor time of blocks of Python code, in any thread; picklable.

    A context manager, which does not nest. A background thread raises `CpuLimitError` in the thread
    of the block, between two bytecodes. Rejected: wall-clock time, because results would depend on
    other processes of the machine.

    Args:
        limit_s: processor time of a block.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._begins: dict[int, float | None] = {}
        """By thread: its processor time when the background thread first saw the block."""
        self._raised: set[int] = set()
        self._watcher: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CpuLimit, (self._limit_s,)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._raised.discard(thread)
            self._begins[thread] = None
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, daemon=True)
                self._watcher.start()

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._begins.pop(thread, None)
            if thread in self._raised:  # an exception that has not arrived must not do so later
                self._raised.discard(thread)
                _set_exception(thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                if not self._begins:
                    self._watcher = None
                    return
                for thread, begin_s in list(self._begins.items()):
                    now_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
                    if begin_s is None:
                        self._begins[thread] = now_s
                    elif now_s - begin_s > self._limit_s:
                        del self._begins[thread]
                        self._raised.add(thread)
                        _set_exception(thread, CpuLimitError)


def _set_exception(thread: int, kind: type[Exception] | None) -> None:
    """Raise an exception in another thread at its next bytecode; None cancels it."""
    value = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


class LimitedTemplate:
    """A chat template with a limit on the processor time per chat.

    Args:
        template: renders chats.
        limit_s: processor time per chat.
    """

    def __init__(self, template: ChatTemplate, limit_s: float = LIMIT_S) -> None:
        self._template = template
        self._limit_s = limit_s
        self._limit = CpuLimit(limit_s)
        self._exceeded = 0

    def __call__(self, conversation: Conversation, options: SampleOptions) -> Sample:
        """Return the segments of a conversation.

        Raises:
            CorruptSampleError: the template rejects the conversation or exceeds the limit.
            DataError: the template exceeded the limit for `MAX_EXCEEDED` conversations.
        """
        try:
            with self._limit:
                return self._template(conversation, options)
        except CpuLimitError:
            self._exceeded += 1
            problem = f"the chat template used more than {self._limit_s:g} s of CPU time"
            if self._exceeded < MAX_EXCEEDED:
                raise CorruptSampleError(problem) from None
            name = self._template.tokenizer.name_or_path
            raise DataError(
                f"{problem} for {self._exceeded} chats; use a tokenizer with another chat template "
                f"(model.tokenizer, now {name!r})"
            ) from None
