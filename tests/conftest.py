"""Fixtures and hooks that all tests share."""

import gc
import json
import logging
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import proofs
import pytest
from campaigns import CAMPAIGNS, EVERY_FIFTH
from object_server import ObjectServer
from tiny_recipe import SHARED_INDEX
from train_server import TrainServer, shared_server

ROOT = Path(__file__).parents[1]
CAMPAIGN_S = float(os.environ.get("CAMPAIGN_S", "inf"))
"""Seconds after the start in which campaign tests outside `tests/unit` may start.

Later ones are skipped. For machines with limited run times.
"""
BEGIN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for output files.

    See `proofs` for `--proofs`, `faults/write_page.py` for `--outcomes`, and
    `scripts/client_table.py` for `--clients`.
    """
    parser.addoption(
        "--proofs",
        type=Path,
        help="write the properties that passing tests prove for model families",
    )
    parser.addoption("--outcomes", type=Path, help="write the outcome of each test")
    parser.addoption(
        "--clients", type=Path, help="write the results of other programs with exports"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, object]:
    """Record proofs and outcomes."""
    report = yield
    file = item.config.getoption("--proofs")
    if file is not None and report.when == "call" and report.passed:
        proofs.note(item, file)
    outcomes = item.config.getoption("--outcomes")
    if outcomes is not None and (report.when == "call" or not report.passed):
        with outcomes.open("a") as out:
            line = {"test": item.nodeid, "outcome": report.outcome, "s": round(report.duration, 3)}
            out.write(json.dumps(line) + "\n")
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Make pytest-xdist start files in the order below, not those with the most tests first."""
    gc.disable()  # imports create hundreds of thousands of objects, none of which is garbage
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip campaign tests after the time limit."""
    is_limited = not item.nodeid.startswith("tests/unit/") and item.get_closest_marker("campaign")
    if is_limited and time.monotonic() - BEGIN_S > CAMPAIGN_S:
        pytest.skip(f"campaign tests start only in the first {CAMPAIGN_S:.0f} s (CAMPAIGN_S)")


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests, and sort files with slow tests first, so that all workers are busy at the end."""
    used = set()
    cases: Counter[str] = Counter()
    for item in items:
        if names := CAMPAIGNS & {item.path.name, f"{item.path.name}::{item.name}"}:
            item.add_marker("campaign")
            used |= names
        function = f"{item.path.name}::{item.name.partition('[')[0]}"
        if function in EVERY_FIFTH:
            used.add(function)
            if (cases[function] + len(function)) % 5:  # the first case depends on the name
                item.add_marker("survey")
            cases[function] += 1
    files = {item.path.name for item in items}
    missing = (CAMPAIGNS | EVERY_FIFTH) - used
    missing = {name for name in missing if name.partition("::")[0] in files}
    if missing and not any(
        "::" in argument for argument in config.args
    ):  # complete files are collected
        raise pytest.UsageError(f"campaigns.py names tests that do not exist: {sorted(missing)}")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Enable garbage collection, and exclude imported objects from it."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # the defaults take a few percent of the time
    gc.enable()


@pytest.fixture(autouse=True)
def _torchmm_logger() -> Iterator[None]:
    """Restore the logger after tests that run programs in this process."""
    logger = logging.getLogger("torchmm")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the directory of images with captions and tokenizers (see scripts/test.sh)."""
    directory = ROOT / "data"
    for name in ("tuxpaint_stamps", "emoji_scenes"):
        if not (directory / name / "train").is_dir():
            pytest.skip(f"no real data found; run: python scripts/prepare_data.py {name}")
    return directory


@pytest.fixture(scope="session", autouse=True)
def _shared_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set the directory of data indexes of training runs. Names are hashes of all inputs."""
    base = tmp_path_factory.getbasetemp()
    is_worker = hasattr(request.config, "workerinput")  # each has its own directory
    root = base.parent if is_worker else base
    os.environ[SHARED_INDEX] = str(root / "index")


@pytest.fixture(scope="session")
def train_server() -> TrainServer:
    """Return the server that runs train.py in forks of a preloaded process."""
    return shared_server()


@pytest.fixture(scope="session")
def _objects() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def object_server(_objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """Return a local S3 server without faults, and set its environment variables."""
    _objects.reset()
    for name, value in _objects.environment.items():
        monkeypatch.setenv(name, value)
    return _objects


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts or remounts a small disk with the given options."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = False

    def mount(options: str) -> Path:
        nonlocal mounted
        mount_options = (
            ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        )
        if subprocess.run(
            ["mount", *mount_options, str(path)], check=False, capture_output=True
        ).returncode:
            pytest.skip("cannot mount a tmpfs")
        mounted = True
        return path

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
