"""Limits on the CPU time and the memory of chat templates.

A chat template is a program in a tokenizer. Its sandbox has no access to files, but a template may
run forever or allocate too much memory, also for single samples only.
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
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.sample import Sample, SampleOptions

CPU_LIMIT_S = 30.0
"""Maximum CPU time per chat in seconds. Long chats with tools use less than 1 s."""
MAX_EXCEEDED_CHATS = 5
"""Number of chats beyond `CPU_LIMIT_S` in one process after which the run stops."""
MAX_RESULT_SIZE = 10_000_000
"""Maximum integer, and maximum length of a string or list that an operator returns."""
POLL_S = 0.5
"""Seconds between checks of the CPU time."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox of chat templates with limits on integers and on results of operators.

    `10 ** (10**8)`, `'a' * 10**10` and `'a'.ljust(10**10)` are single operations in native code,
    which a time limit cannot interrupt. Published templates have no integers above thousands.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def compile(self, source: Any, *args: Any, **options: Any) -> Any:
        """Compile a template, as Jinja does.

        Raises:
            SecurityError: The template has an integer above `MAX_RESULT_SIZE`.
        """
        template = self.parse(source) if isinstance(source, str) else source
        for constant in template.find_all(Const):
            if isinstance(constant.value, int) and constant.value > MAX_RESULT_SIZE:
                raise SecurityError(
                    f"the integer {constant.value} is above the limit of {MAX_RESULT_SIZE:,}"
                )
        return super().compile(source, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an intercepted operator.

        Raises:
            SecurityError: The result exceeds `MAX_RESULT_SIZE`.
        """
        size = 0
        if operator == "%":
            size = _max_width(left) if isinstance(left, str) else 0
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                size = MAX_RESULT_SIZE + 1 if left.bit_length() * right > 64 else left**right
        else:
            count, items = (left, right) if isinstance(left, int) else (right, left)
            size = len(items) if isinstance(items, str | list | tuple) else items
            size = size * count if isinstance(size, int) and isinstance(count, int) else 0
        if size > MAX_RESULT_SIZE:
            raise SecurityError(
                f"the result of operator {operator} is above the limit of {MAX_RESULT_SIZE:,}"
            )
        return super().call_binop(context, operator, left, right)


# transformers has no option for the class of the environment.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


def _max_width(text: str) -> int:
    """Return the largest number in a format string."""
    digits = "".join(letter if letter.isdigit() else " " for letter in text)
    return max((int(number[:18]) for number in digits.split()), default=0)


class CpuLimitError(Exception):
    """Error of a block that used more CPU time than `CpuLimit` allows."""


class CpuLimit:
    """Context manager that limits the CPU time of a block of Python code.

    It is picklable and thread-safe, and does not nest. A background thread raises `CpuLimitError`
    in the thread of the block, between two bytecodes. With wall-clock time, results would depend
    on other processes of the node.

    Args:
        limit_s: Maximum CPU time of a block in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._begins: dict[int, float | None] = {}
        """CPU time of each thread when the background thread first saw its block."""
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
            if thread in self._raised:  # cancel a pending exception
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
    """Raise an exception in another thread at its next bytecode. None cancels it."""
    value = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


class LimitedTemplate:
    """Chat template with a limit on the CPU time per chat.

    Args:
        template: Template that renders chats.
        limit_s: Maximum CPU time per chat in seconds.
    """

    def __init__(self, template: ChatTemplate, limit_s: float = CPU_LIMIT_S) -> None:
        self._template = template
        self._limit_s = limit_s
        self._limit = CpuLimit(limit_s)
        self._exceeded = 0

    def __call__(self, conversation: Conversation, options: SampleOptions) -> Sample:
        """Return the segments of a conversation.

        Raises:
            CorruptSampleError: The template rejects the conversation or exceeds the limit.
            DataError: The template exceeded the limit for `MAX_EXCEEDED_CHATS` conversations.
        """
        try:
            with self._limit:
                return self._template(conversation, options)
        except CpuLimitError:
            self._exceeded += 1
            problem = f"the chat template used more than {self._limit_s:g} s of CPU time"
            if self._exceeded < MAX_EXCEEDED_CHATS:
                raise CorruptSampleError(problem) from None
            name = self._template.tokenizer.name_or_path
            raise DataError(
                f"{problem} for {self._exceeded} chats; use a tokenizer with another chat template "
                f"(model.tokenizer, now {name!r})"
            ) from None
