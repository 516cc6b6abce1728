"""What takes long says so, in a file and on a terminal, and ends."""

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
from torchmm.common.log import Work, loading, log_to_console, worked, working


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


def shown(text: io.StringIO, wanted: str) -> None:
    """Waits until it is."""
    deadline = time.monotonic() + 30
    while wanted not in text.getvalue():
        assert time.monotonic() < deadline, text.getvalue()
        time.sleep(0.01)


def test_a_file_gets_plain_lines_with_counts():
    text = io.StringIO()
    log_to_console(Console(file=text), rank=0)
    with working("reading weights", total=1200, unit="tensors") as work:
        work.advance(700)
        shown(text, "reading weights: 700 of 1,200 tensors")
        work.at(1200)
    lines = text.getvalue().splitlines()
    assert lines[-1].startswith("[rank 0] INFO reading weights: 1,200 of 1,200 tensors")
    assert lines[-1].endswith("done") and "\x1b" not in text.getvalue()


def test_program_progress_has_growing_intervals(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    text = io.StringIO()
    log_to_console(Console(file=text), only_progress=True)
    work = Work("planning")
    for now_s[0] in (3.0, 4.0, 5.0, 8.0, 9.0, 12.0):
        work.tell_now()
    seconds = [line.split()[-2] for line in text.getvalue().splitlines()]
    assert seconds == ["3", "5", "8", "12"]


def test_run_progress_has_growing_intervals_after_ten_seconds(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    text = io.StringIO()
    log_to_console(Console(file=text), rank=0)
    work = Work("loading torch")
    for now_s[0] in (3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 30.0, 33.0, 36.0, 41.0):
        work.tell_now()
    seconds = [line.split()[-2] for line in text.getvalue().splitlines()]
    assert seconds == ["3", "6", "9", "12", "15", "18", "30", "41"]


def test_how_much_is_done_may_be_asked():
    text = io.StringIO()
    log_to_console(Console(file=text))
    with working("fetching", unit="MB", measured=lambda: 1700):
        shown(text, "fetching: 1,700 MB, 0 s")


def test_short_work_is_never_mentioned(monkeypatch):
    monkeypatch.setattr(log, "QUIET_S", 60.0)
    text = io.StringIO()
    log_to_console(Console(file=text))
    assert list(worked("counting", range(3), 3, "numbers")) == [0, 1, 2]
    assert text.getvalue() == ""


def test_work_that_fails_does_not_say_that_it_is_done():
    text = io.StringIO()
    log_to_console(Console(file=text))
    with pytest.raises(OSError, match="gone"), working("fetching"):
        shown(text, "fetching: ")
        raise OSError("gone")
    assert text.getvalue().splitlines()[-1].endswith("stopped")


def test_threads_end_with_the_work_also_where_nobody_goes_on():
    before = threading.active_count()
    for _ in worked("counting", range(3)):
        break
    with working("waiting"):
        pass
    assert threading.active_count() == before


def test_ranks_but_the_first_are_silent():
    text = io.StringIO()
    log_to_console(Console(file=text), rank=1)
    with working("reading"):
        time.sleep(0.2)
    assert text.getvalue() == ""


def test_programs_may_show_progress_and_errors_alone():
    text = io.StringIO()
    log_to_console(Console(file=text), only_progress=True)
    logging.getLogger("torchmm.data").info("unasked")
    logging.getLogger("torchmm").error("wrong")
    with working("reading"):
        shown(text, "reading: ")
    assert "unasked" not in text.getvalue() and "wrong" in text.getvalue()


def test_a_terminal_gets_one_panel_below_the_bar_of_steps():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    log_to_console(console)
    with Progress(console=console, auto_refresh=False) as steps:
        steps.add_task("steps", total=3)
        with working("planning"), working("reading"):
            shown(text, "planning: 0 s\nreading: 0 s")
        logging.getLogger("torchmm").info("afterwards")
    assert "planning" not in text.getvalue().rpartition("afterwards")[2]


def test_work_inside_other_work_stands_below_it_whoever_speaks_first():
    text = io.StringIO()
    log_to_console(Console(file=text, force_terminal=True, width=80))
    outer, inner = Work("planning"), Work("reading")
    time.sleep(0.1)
    inner.tell()
    outer.tell()
    assert "planning: 0 s\nreading: 0 s" in text.getvalue()
    inner.end("done")
    outer.end("done")


def test_what_is_under_way_changes_without_a_word():
    text = io.StringIO()
    log_to_console(Console(file=text))
    work = Work("step 1")
    time.sleep(0.1)
    work.now("step 2, waiting for data")
    work.tell()
    assert "step 2, waiting for data: 0 s" in text.getvalue() and "step 1" not in text.getvalue()
    work.said()
    work.tell()
    work.end()
    assert len(text.getvalue().splitlines()) == 1


def test_what_is_imported_is_not_looked_through_for_garbage():
    """Neither meanwhile nor later; what is made later is."""
    with loading():
        assert not gc.isenabled()
        made = [[]]
    assert gc.isenabled()
    later = [[]]
    found = gc.get_objects()  # where garbage is looked for
    assert any(each is later for each in found)
    assert not any(each is made for each in found)


def test_imports_that_fail_leave_the_search_for_garbage_on():
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
