"""Which functions of `torchmm/` each unit test calls.

`record_calls` runs the tests once and writes a file. `Calls` reads it and selects the tests of a
changed line.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

UNTRACEABLE = {"test_chat_limits.py"}
"""Tests that raise exceptions in running functions. They would be raised in the trace function."""


class CallRecorder:
    """A pytest plugin that writes a line per test: its name, CPU seconds and called functions."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root = f"{root}/"
        self.out = out

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Trace calls while a test runs."""
        called: dict[int, CodeType] = {}

        def trace(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if id(code) not in called:  # the hash of a code object takes longer
                called[id(code)] = code

        begin_s = time.process_time()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            names = {
                f"{code.co_filename.removeprefix(self.root)}:{code.co_qualname}"
                for code in list(called.values())  # threads may still add some
                if code.co_filename.startswith(f"{self.root}torchmm/")
            }
            seconds = round(time.process_time() - begin_s, 3)
            with self.out.open("a") as file:
                file.write(json.dumps([item.nodeid, seconds, sorted(names)]) + "\n")


def record_calls(root: Path, folders: list[str], out: Path, jobs: int) -> None:
    """Run the tests of folders in several processes and write the functions that each test calls.

    Args:
        root: Root of the repository.
        folders: Folders of tests.
        out: File to write.
        jobs: Number of processes.
    """
    files = sorted(
        str(file.relative_to(root))
        for folder in folders
        for file in (root / folder).rglob("test_*.py")
        if file.name not in UNTRACEABLE
    )
    children = []
    for job in range(jobs):
        child = os.fork()
        if not child:
            part = out.with_suffix(f".{job}")
            part.unlink(missing_ok=True)
            options = ["-q", "-m", "not campaign and not survey", "-p", "no:cacheprovider"]
            pytest.main([*options, *files[job::jobs]], plugins=[CallRecorder(root, part)])
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    with out.open("w") as merged:
        for job in range(jobs):
            merged.write(out.with_suffix(f".{job}").read_text())


class Calls:
    """Tests by the functions that they call.

    Args:
        file: File of `record_calls`.
    """

    def __init__(self, file: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.tests: defaultdict[str, set[str]] = defaultdict(set)
        for line in file.read_text().splitlines():
            test, seconds, functions = json.loads(line)
            self.seconds[test] = seconds
            for function in functions:
                self.tests[function].add(test)

    def select_tests(self, root: Path, path: str, line: int) -> list[str]:
        """Return the tests that call the function with a line, fastest first.

        A fixture that several tests share is recorded for the first of them. Therefore the
        other tests of the files follow.

        Args:
            root: Root of the repository.
            path: Path of the file of the function, relative to the root.
            line: A line of the function. The list is empty for lines outside of functions.
        """
        functions = functions_at(root / path, line)
        callers = set().union(*(self.tests.get(f"{path}:{name}", ()) for name in functions))
        files = {test.partition("::")[0] for test in callers}
        tests = [test for test in self.seconds if test.partition("::")[0] in files]
        return sorted(tests, key=lambda test: (test not in callers, self.seconds[test]))


def functions_at(path: Path, line: int) -> set[str]:
    """Return the qualified names of the functions, lambdas and comprehensions on a line."""

    def nested(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from nested(constant)

    return {
        code.co_qualname
        for code in nested(compile(path.read_bytes(), str(path), "exec"))
        if code.co_flags & inspect.CO_NEWLOCALS
        and line in {number for *_, number in code.co_lines()}
    }
