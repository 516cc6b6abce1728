"""Run a program with functions that exceed the time without log output, and record when they ran.

    python slowed.py NOTES.jsonl SECONDS FUNCTION ... -- SCRIPT ARGUMENTS ...

A FUNCTION is "module:name" or "module:Class.name"; its first call is delayed by SECONDS. `IMPORTS`
is the first import of a slow module; the program ends after it.

The program reports a slow function after a twentieth of SECONDS. After its end there is a silence
of SECONDS, recorded as `SILENT`, which a check for silences must detect.
"""

import importlib
import json
import runpy
import sys
import time
from functools import wraps
from pathlib import Path

SILENT = "nobody tells this"
IMPORTS = "imports"
HEAVY = ("torch", "transformers", "datasets", "scipy")
"""Modules that take seconds to import."""


def note(file: Path, name: str, seconds: float) -> None:
    """Sleep and record the start and the end."""
    begin = time.time()
    time.sleep(seconds)
    with file.open("a") as notes:
        notes.write(json.dumps([name, begin, time.time()]) + "\n")


class SlowImports:
    """Delays the search for a heavy module, and ends the program."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Find nothing; `sys.meta_path` calls this method."""
        if name in HEAVY:
            note(self._file, IMPORTS, self._seconds)
            raise SystemExit


def owner_of(function: str) -> tuple[object, str]:
    """Return the module or class of a function, and its name there."""
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def slow(function: str, file: Path, seconds: float) -> None:
    """Delay the first call of a function."""
    owner, name = owner_of(function)
    wrapped = getattr(owner, name)
    called = []

    @wraps(wrapped)
    def slowed(*args, **kwargs):
        if not called:
            called.append(True)
            note(file, function, seconds)
        return wrapped(*args, **kwargs)

    setattr(owner, name, slowed)


def main() -> int:
    """Run the program and return its exit code."""
    separator = sys.argv.index("--")
    file, seconds, functions = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:separator]
    log = importlib.import_module("torchmm.common.log")
    log.QUIET_S, log.POLL_S = seconds / 20, seconds / 40
    for function in functions:
        if function == IMPORTS:
            sys.meta_path.insert(0, SlowImports(file, seconds))
        else:
            slow(function, file, seconds)
    sys.argv = sys.argv[separator + 1 :]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    note(file, SILENT, seconds)
    return code


if __name__ == "__main__":
    sys.exit(main())
