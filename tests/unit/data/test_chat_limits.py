"""Chat templates and normalizers beyond limits of CPU time or memory cost one sample."""

from __future__ import annotations

import copy
import threading
import time

import pytest
from chat_templates import CHATML, with_template
from transformers.utils import chat_template_utils

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.media.chat_limits import (
    MAX_EXCEEDED_CHATS,
    BoundedEnvironment,
    CpuLimit,
    CpuLimitError,
    LimitedTemplate,
)
from torchmm.data.record_formats.messages import messages_to_conversation
from torchmm.data.record_formats.sample import SampleOptions

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def limited(tokenizer, before: str, limit_s: float = 0.3) -> LimitedTemplate:
    return LimitedTemplate(ChatTemplate(with_template(tokenizer, before + CHATML)), limit_s)


def render(template: LimitedTemplate):
    return template(messages_to_conversation(MESSAGES, {}), SampleOptions())


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        (LOOPS, "more than 0.3 s of CPU time"),
        ("{{ lipsum(n=10**6) }}", "more than 0.3 s of CPU time"),
        ("{{ 'a' * 10**10 }}", r"operator \*\* is above the limit of 10,000,000"),
        ("{{ 'a' * 9999 * 9999 }}", r"operator \* is above the limit of 10,000,000"),
        ("{% set n = 9999999 %}{{ n * 'ab' }}", r"operator \* is above the limit of 10,000,000"),
        ("{{ ([1, 2] * 9999999) | length }}", r"operator \* is above the limit of 10,000,000"),
        ("{{ 9999999 * 9999999 }}", r"operator \* is above the limit of 10,000,000"),
        ("{{ 10 ** (10**8) }}", r"operator \*\* is above the limit of 10,000,000"),
        ("{{ 10 ** 9999999 }}", r"operator \*\* is above the limit of 10,000,000"),
        ("{{ '%9999999999d' % 1 }}", "operator % is above the limit of 10,000,000"),
        ("{{ 'a'.ljust(9999999999) }}", "the integer 9999999999 is above the limit of 10,000,000"),
        ("{{ 'a' | center(10**10) }}", r"operator \*\* is above the limit of 10,000,000"),
        ("{{ strftime_now('%Y' * 10**8) }}", r"operator \*\* is above the limit of 10,000,000"),
    ],
)
def test_template_beyond_limits_is_corrupt(tokenizer, before, problem):
    begin = time.monotonic()
    with pytest.raises(CorruptSampleError, match=problem):
        render(limited(tokenizer, before))
    assert time.monotonic() - begin < 20


def test_template_within_limits_renders_equally(tokenizer):
    before = "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%03d' % 7 }}{{ 'a'.ljust(3) }}{{ 1.5 * 2 }}"
    plain = with_template(tokenizer, before + CHATML)
    text = plain.apply_chat_template(MESSAGES, tokenize=False)
    assert text.startswith("ababab10243007a  3.0")
    assert render(limited(tokenizer, before)) == ChatTemplate(plain)(
        messages_to_conversation(MESSAGES, {}), SampleOptions()
    )


def test_transformers_uses_bounded_environment():
    template = chat_template_utils._compile_jinja_template("never compiled before")
    assert isinstance(template.environment, BoundedEnvironment)


def test_template_that_never_ends_stops_run(tokenizer):
    template = limited(tokenizer, LOOPS, 0.01)
    for _ in range(MAX_EXCEEDED_CHATS - 1):
        with pytest.raises(CorruptSampleError):
            render(template)
    with pytest.raises(DataError, match="for 5 chats; use a tokenizer with another chat template"):
        render(template)


def test_limited_template_copy_renders_equally(tokenizer):
    template = limited(tokenizer, "")
    expected = render(template)
    assert render(copy.deepcopy(template)) == expected


def test_cpu_limit_interrupts_only_its_thread():
    limit = CpuLimit(0.2)
    results = {}

    def loop(name: str, seconds: float) -> None:
        end = time.thread_time() + seconds
        try:
            with limit:
                while time.thread_time() < end:
                    pass
            results[name] = "done"
        except CpuLimitError:
            results[name] = "interrupted"

    threads = [
        threading.Thread(target=loop, args=(name, seconds))
        for name, seconds in (("long", 60.0), ("short", 0.01))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {"long": "interrupted", "short": "done"}


def test_cpu_limit_ignores_waiting():
    with CpuLimit(0.05):
        time.sleep(1.2)
