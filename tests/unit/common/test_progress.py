"""Tests of progress messages of long operations, in files and on terminals."""

import gc
import io
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from torchmm.common import log
from torchmm.common.log import (
    ProgressReport,
    iterate_with_progress,
    log_to_console,
    report_imports,
    report_progress,
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "QUIET_S", 0.05)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    logger = logging.getLogger("torchmm")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


def wait_for_text(text: io.StringIO, expected: str) -> None:
    """Wait until the text contains the expected part."""
    deadline = time.monotonic() + 30
    while expected not in text.getvalue():
        assert time.monotonic() < deadline, text.getvalue()
        time.sleep(0.01)


def test_file_gets_plain_lines_with_counts():
    text = io.StringIO()
    log_to_console(Console(file=text), rank=0)
    with report_progress("reading weights", total=1200, unit="tensors") as work:
        work.advance(700)
        wait_for_text(text, "reading weights: 700 of 1,200 tensors")
        work.set_completed(1200)
    lines = text.getvalue().splitlines()
    assert lines[-1].startswith("[rank 0] INFO reading weights: 1,200 of 1,200 tensors")
    assert lines[-1].endswith("done") and "\x1b" not in text.getvalue()


def test_program_progress_has_growing_intervals(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    text = io.StringIO()
    log_to_console(Console(file=text), only_progress=True)
    work = ProgressReport("planning")
    for now_s[0] in (3.0, 4.0, 5.0, 8.0, 9.0, 12.0):
        work.report_now()
    seconds = [line.split()[-2] for line in text.getvalue().splitlines()]
    assert seconds == ["3", "5", "8", "12"]


def test_run_progress_has_growing_intervals_after_ten_seconds(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    text = io.StringIO()
    log_to_console(Console(file=text), rank=0)
    work = ProgressReport("loading torch")
    for now_s[0] in (3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 30.0, 33.0, 36.0, 41.0):
        work.report_now()
    seconds = [line.split()[-2] for line in text.getvalue().splitlines()]
    assert seconds == ["3", "6", "9", "12", "15", "18", "30", "41"]


def test_progress_can_be_measured_on_request():
    text = io.StringIO()
    log_to_console(Console(file=text))
    with report_progress("fetching", unit="MB", count_completed=lambda: 1700):
        wait_for_text(text, "fetching: 1,700 MB, 0 s")


def test_short_operations_are_not_logged(monkeypatch):
    monkeypatch.setattr(log, "QUIET_S", 60.0)
    text = io.StringIO()
    log_to_console(Console(file=text))
    assert list(iterate_with_progress("counting", range(3), 3, "numbers")) == [0, 1, 2]
    assert text.getvalue() == ""


def test_failed_operation_is_logged_as_stopped():
    text = io.StringIO()
    log_to_console(Console(file=text))
    with pytest.raises(OSError, match="gone"), report_progress("fetching"):
        wait_for_text(text, "fetching: ")
        raise OSError("gone")
    assert text.getvalue().splitlines()[-1].endswith("stopped")


def test_progress_threads_exit_with_the_operation():
    before = threading.active_count()
    for _ in iterate_with_progress("counting", range(3)):
        break
    with report_progress("waiting"):
        pass
    assert threading.active_count() == before


def test_ranks_other_than_0_log_no_progress():
    text = io.StringIO()
    log_to_console(Console(file=text), rank=1)
    with report_progress("reading"):
        time.sleep(0.2)
    assert text.getvalue() == ""


def test_programs_show_only_progress_and_errors():
    text = io.StringIO()
    log_to_console(Console(file=text), only_progress=True)
    logging.getLogger("torchmm.data").info("unrequested")
    logging.getLogger("torchmm").error("wrong")
    with report_progress("reading"):
        wait_for_text(text, "reading: ")
    assert "unrequested" not in text.getvalue() and "wrong" in text.getvalue()


def test_terminal_shows_one_panel_below_the_steps():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    log_to_console(console)
    with Progress(console=console, auto_refresh=False) as steps:
        steps.add_task("steps", total=3)
        with report_progress("planning"), report_progress("reading"):
            wait_for_text(text, "planning: 0 s\nreading: 0 s")
        logging.getLogger("torchmm").info("afterwards")
    assert "planning" not in text.getvalue().rpartition("afterwards")[2]


def test_nested_operations_are_shown_below_outer_operations():
    text = io.StringIO()
    log_to_console(Console(file=text, force_terminal=True, width=80))
    outer, inner = ProgressReport("planning"), ProgressReport("reading")
    time.sleep(0.1)
    inner.report()
    outer.report()
    assert "planning: 0 s\nreading: 0 s" in text.getvalue()
    inner.end("done")
    outer.end("done")


def test_current_operation_changes_without_a_message():
    text = io.StringIO()
    log_to_console(Console(file=text))
    work = ProgressReport("step 1")
    time.sleep(0.1)
    work.set_operation("step 2, waiting for data")
    work.report()
    assert "step 2, waiting for data: 0 s" in text.getvalue() and "step 1" not in text.getvalue()
    work.mark_reported()
    work.report()
    work.end()
    assert len(text.getvalue().splitlines()) == 1


def test_imported_objects_are_excluded_from_garbage_collection():
    """Check that objects created later are tracked by the garbage collector."""
    with report_imports():
        assert not gc.isenabled()
        imported = [[]]
    assert gc.isenabled()
    created = [[]]
    tracked = gc.get_objects()  # objects that the garbage collector tracks
    assert any(each is created for each in tracked)
    assert not any(each is imported for each in tracked)


def test_failed_imports_reenable_garbage_collection():
    with pytest.raises(ImportError), report_imports():
        raise ImportError
    assert gc.isenabled()
