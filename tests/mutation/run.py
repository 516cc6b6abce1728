"""Measure how many small mistakes in `torchmm/` the unit tests detect.

The program applies each change to a copy of the repository. It runs the test files that are nearest
to the changed module by imports, then whole runs (`tests/goldens`), and then the tests of the
changed folder (`tests/unit/FOLDER`) or extension (`tests/unit/extensions/NAME`):

    python tests/mutation/run.py --changes 40 --seed 1
    python tests/mutation/run.py --changes 20 --seed 1 --under torchmm/data

With a file of the functions that each test calls, it runs the tests that call the changed function:

    python tests/mutation/run.py --record /tmp/calls.jsonl --jobs 2
    python tests/mutation/run.py --changes 40 --seed 1 --calls /tmp/calls.jsonl

An undetected change is either harmless, for example one of an error message, or shows what no test
checks.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from calls import Calls, record_calls

ROOT = Path(__file__).parents[2]
WARM = (
    *("numba", "pandas", "pyarrow.flight", "pyarrow.parquet", "datasets", "PIL.Image", "pydantic"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "matplotlib.pyplot"),
)
"""Modules that are imported once, not in the process of every change."""
FLIPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Operators with their text and the text that replaces it."""

CHECKS = {"strict", "frozen"}
"""Arguments of `zip` and `dataclass` that only add checks of the program itself."""
NEAREST = 6
"""Number of test files of any folder that run before the others of the changed folder."""
FIRST_TESTS = 30
"""Number of tests that call a changed function and run before the others."""
TIMEOUT_S = 90
"""Maximum duration of a test. A change that causes an endless loop is detected."""
GOLDENS = "tests/goldens/test_goldens.py"
PASSED = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


@dataclass(frozen=True)
class Change:
    """A replacement of one piece of a source file, given by byte offsets."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str


def main() -> int:
    """Draw changes, run the tests of each and print the undetected changes and the rate."""
    parser = argparse.ArgumentParser(description="Measure how many small mistakes tests detect.")
    parser.add_argument("--changes", type=int, default=200, help="number of changes")
    parser.add_argument("--first", type=int, default=0, help="number of the first change")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--under", default="torchmm", help="folder or file whose code is changed")
    parser.add_argument("--limit", type=float, default=200, help="CPU seconds of tests per change")
    parser.add_argument("--record", type=Path, help="only write the functions that tests call")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes of --record")
    parser.add_argument("--calls", type=Path, help="select tests by this file of --record")
    arguments = parser.parse_args()
    if arguments.record is not None:
        record_calls(ROOT, ["tests/unit", "tests/goldens"], arguments.record, arguments.jobs)
        return 0
    calls = None if arguments.calls is None else Calls(arguments.calls)
    end = arguments.first + arguments.changes
    changes = draw_changes(ROOT / arguments.under, end, arguments.seed)[arguments.first :]
    for name in WARM:
        importlib.import_module(name)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        copy = _copy_repository(Path(scratch) / "copy")
        imports = _read_imports(copy)
        for number, change in enumerate(changes, 1):
            file, start = copy / change.path, time.monotonic()
            source = file.read_bytes()
            file.write_bytes(source[: change.start] + change.text.encode() + source[change.end :])
            tests = calls.select_tests(ROOT, change.path, change.line) if calls else []
            tests = tests or order_tests(change.path, imports)
            result = _run_tests(copy, tests, Path(scratch) / "log", arguments.limit)
            shutil.copy2(ROOT / change.path, file)
            counts[result] += 1
            old = source[change.start : change.end].decode()
            seconds = f"{time.monotonic() - start:.0f} s"
            print(f"{number}/{len(changes)} {result} ({seconds}): {change.path}:{change.line}")
            print(f"    {change.operator}: {old!r} -> {change.text!r}", flush=True)
    print(f"detected {counts['detected']} of {len(changes)} changes; {dict(counts)}")
    return 0


def draw_changes(under: Path, count: int, seed: int) -> list[Change]:
    """Draw changes of which every operator has the same probability."""
    kinds: defaultdict[str, list[Change]] = defaultdict(list)
    for path in sorted(under.rglob("*.py")) if under.is_dir() else [under]:
        for change in find_changes(path.read_bytes(), str(path.relative_to(ROOT))):
            kinds[change.operator].append(change)
    generator, drawn = random.Random(seed), []
    while kinds and len(drawn) < count:
        name = generator.choice(sorted(kinds))
        drawn.append(kinds[name].pop(generator.randrange(len(kinds[name]))))
        if not kinds[name]:
            del kinds[name]
    return drawn


def find_changes(source: bytes, path: str) -> Iterator[Change]:  # noqa: C901
    """Yield the possible changes of a file."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def begin(node: ast.expr) -> int:
        return lines[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return lines[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[Change]:
        old, new = FLIPPED.get(type(op), ("", ""))
        gap = source[end(left) : begin(right)]
        if old and gap.count(old.encode()) == 1 and b"#" not in gap:
            start = end(left) + gap.index(old.encode())
            name = {ast.And: "and/or", ast.Or: "and/or"}.get(type(op), "arithmetic")
            name = "comparison" if isinstance(op, ast.cmpop) else name
            yield Change(path, left.lineno, name, start, start + len(old), new)

    for node in _code_of(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, op, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield from between(left, op, right)
        elif isinstance(node, ast.BinOp) and not isinstance(
            node.left, ast.Constant | ast.JoinedStr
        ):
            yield from between(node.left, node.op, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.op, node.values[1])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Change(path, node.lineno, "not", begin(node), begin(node) + len("not"), "")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Change(path, node.lineno, "constant", begin(node), end(node), repr(new))
        elif isinstance(node, ast.Return) and node.value is not None:
            span = begin(node.value), end(node.value)
            if source[slice(*span)] != b"None":
                yield Change(path, node.lineno, "return", *span, "None")


def _code_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without annotations, and without what f-strings contain.

    `CHECKS` are also excluded. They make no difference in correct programs.
    """
    for field, value in ast.iter_fields(tree):
        if field not in ("annotation", "returns"):
            for node in value if isinstance(value, list) else [value]:
                is_check = isinstance(node, ast.keyword) and node.arg in CHECKS
                if isinstance(node, ast.AST) and not (is_check or isinstance(node, ast.JoinedStr)):
                    yield node
                    yield from _code_of(node)


def order_tests(path: str, imports: dict[str, set[str]]) -> list[str]:
    """Return the unit test files nearest to a module, then the goldens and the module's folder.

    The distance of a file is the number of imports between it and the module. Of two files with the
    same distance, the file with fewer imports is nearer.
    """
    importers = defaultdict(set)
    for file, imported in imports.items():
        for each in imported:
            importers[each].add(file)
    distance, queue = {path: 0}, deque([path])
    while queue:
        file = queue.popleft()
        for importer in importers[file] - distance.keys():
            distance[importer] = distance[file] + 1
            queue.append(importer)
    parts = Path(path).parts
    folder = f"tests/unit/{'/'.join(parts[1:3] if parts[1] == 'extensions' else parts[1:2])}/"
    tests = [
        file
        for file in imports
        if file.startswith("tests/unit/") and Path(file).name.startswith("test_")
    ]
    tests.sort(key=lambda file: (distance.get(file, 1000), len(imports[file]), file))
    others = (file for file in tests[NEAREST:] if file.startswith(folder))
    return [*tests[:NEAREST], GOLDENS, *others]


def _read_imports(copy: Path) -> dict[str, set[str]]:
    """Map the files of the package and the tests to the files that they import."""
    files = [file for top in ("torchmm", "tests") for file in sorted((copy / top).rglob("*.py"))]
    named = {}
    for file in files:
        path = file.relative_to(copy)
        name = path.with_suffix("").parts if path.parts[0] == "torchmm" else (path.stem,)
        named[".".join(name).removesuffix(".__init__")] = str(path)
    found: dict[str, set[str]] = {}
    for file in files:
        names = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[str(file.relative_to(copy))] = {named[name] for name in names & named.keys()}
    return found


def _copy_repository(copy: Path) -> Path:
    """Copy the files of the working tree that git does not ignore; link to the data."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for cache in (ROOT / "torchmm").rglob("__pycache__"):  # has compiled loops
        shutil.copytree(cache, copy / cache.relative_to(ROOT))
    if (ROOT / "data").exists():
        (copy / "data").symlink_to((ROOT / "data").resolve())
    return copy


def _run_tests(copy: Path, tests: list[str], log: Path, limit: float) -> str:
    """Run test files until one fails or the limit is reached; return how they ended.

    The first tests run alone: collecting all files takes longer than most of them.
    """
    first = FIRST_TESTS if "::" in tests[0] else NEAREST
    for part in filter(None, (tests[:first], tests[first:])):
        child = os.fork()
        if not child:
            _test_and_exit(copy, part, log)
        process, ended = psutil.Process(child), 0
        while not ended:
            time.sleep(0.2)
            spent_s = sum(process.cpu_times()[:4])
            if spent_s > limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "UNDETECTED within the limit"
            ended, status = os.waitpid(child, os.WNOHANG)
        exit_code = os.waitstatus_to_exitcode(status)
        if "file or directory not found" in log.read_text():
            raise FileNotFoundError(log.read_text())
        if exit_code not in PASSED:
            return "detected"
        limit -= spent_s
    return "UNDETECTED"


def _test_and_exit(copy: Path, tests: list[str], log: Path) -> None:
    """Run tests in this process, in the order given, and exit with the code of pytest."""

    class InOrder:
        """Undoes the order that is best for several workers."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            """Sort tests by their places, or those of their files, in `tests`."""
            places = {test: place for place, test in enumerate(tests)}
            files = {copy / test: place for test, place in places.items()}
            items.sort(key=lambda item: places.get(item.nodeid, files.get(item.path, len(tests))))

    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path != str(ROOT))]
    os.environ["PYTHONPATH"] = str(copy)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    options = ["-q", "-x", "-m", "not campaign", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}"]
    os._exit(pytest.main([*options, *tests], plugins=[InOrder()]))


if __name__ == "__main__":
    sys.exit(main())
