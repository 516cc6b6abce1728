"""Runs a program some of whose functions take longer than it is quiet, and notes when each did.

    python slowed.py NOTES.jsonl SECONDS FUNCTION ... -- SCRIPT ARGUMENTS ...

A FUNCTION is "module:name" or "module:Class.name"; its first call takes so many seconds longer.
`IMPORTS` stands for the first import of what takes seconds; the program ends with it.
The program tells what takes long after a twentieth of them. After its end comes as long a silence,
noted as `SILENT`: what looks for silences has to find it.
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
"""What takes seconds to import."""


def note(file: Path, name: str, seconds: float) -> None:
    """Takes so long, and writes down from when to when."""
    begin = time.time()
    time.sleep(seconds)
    with file.open("a") as notes:
        notes.write(json.dumps([name, begin, time.time()]) + "\n")


class SlowImports:
    """Takes long to find a heavy module, and ends the program."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """What `sys.meta_path` asks; finds nothing."""
        if name in HEAVY:
            note(self._file, IMPORTS, self._seconds)
            raise SystemExit


def owner_of(function: str) -> tuple[object, str]:
    """The module or class that has a function, and its name there."""
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def slow(function: str, file: Path, seconds: float) -> None:
    """Lets the first call of a function take longer."""
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
    """The program's exit code."""
    place = sys.argv.index("--")
    file, seconds, functions = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:place]
    log = importlib.import_module("torchmm.common.log")
    log.QUIET_S, log.POLL_S = seconds / 20, seconds / 40
    for function in functions:
        if function == IMPORTS:
            sys.meta_path.insert(0, SlowImports(file, seconds))
        else:
            slow(function, file, seconds)
    sys.argv = sys.argv[place + 1 :]
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
