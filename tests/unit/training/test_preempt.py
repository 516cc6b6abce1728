import errno
import json
import os
import signal
import threading
import time

import pytest

from torchmm.common.errors import PreemptedError, TorchmmError
from torchmm.common.files import allocated_bytes
from torchmm.training import shutdown as preempt
from torchmm.training.shutdown import (
    STOP_SIGNALS,
    Status,
    StopRequested,
    StopSignal,
    read_status,
    write_status,
)

LOST_PEER = Status("failed", 3, 1, 6, "rank 1 lost a peer")
CULPRIT = Status("failed", 3, 2, 3, "bad sample")


@pytest.fixture
def handlers():
    """Yield the handlers of stop signals and restore them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield before
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def ignore_exit(error: TorchmmError) -> None:
    """Do not end the process, which still exists `EXIT_GRACE_S` after the test."""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_flag_only(handlers, number):
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_first_signal_is_recorded(handlers):
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGTERM


def test_signal_handlers_are_restored(handlers):
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
        with stop.interrupt_main_thread(ignore_exit):
            pass
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_second_signal_after_exit_is_ignored(handlers):
    with StopSignal():
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("swallowed", [False, True])
def test_early_signal_raises_preempted(handlers, swallowed):
    early = pytest.raises(PreemptedError, match="stopped by SIGINT before the first step")
    with early, StopSignal() as stop, stop.interrupt_main_thread(ignore_exit):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the handler raised nothing")
        except StopRequested:
            if not swallowed:
                raise


def test_signal_before_interrupting_raises_preempted(handlers):
    with pytest.raises(PreemptedError), StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with stop.interrupt_main_thread(ignore_exit):
            pytest.fail("the block was entered")


def test_early_error_without_signal_is_raised(handlers):
    with pytest.raises(ValueError, match="mine"), StopSignal() as stop:  # noqa: SIM117
        with stop.interrupt_main_thread(ignore_exit):
            raise ValueError("mine")


def test_blocked_early_stop_calls_exit(handlers, monkeypatch):
    monkeypatch.setattr(preempt, "EXIT_GRACE_S", 0.1)
    ended = []
    with (
        pytest.raises(PreemptedError),
        StopSignal() as stop,
        stop.interrupt_main_thread(ended.append),
    ):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            deadline = time.monotonic() + 10
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
    assert [error.exit_code for error in ended] == [75]


def test_signal_after_interrupting_sets_flag(handlers, monkeypatch):
    monkeypatch.setattr(preempt, "EXIT_GRACE_S", 0.1)
    exits: list[TorchmmError] = []
    with StopSignal() as stop:
        with stop.interrupt_main_thread(exits.append):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert stop.received == signal.SIGTERM and not exits


def test_status_round_trips(tmp_path):
    status = Status("preempted", 7, 0, 75, "SIGTERM")
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert read_status(tmp_path / "missing") is None


@pytest.mark.parametrize("order", [[LOST_PEER, CULPRIT], [CULPRIT, LOST_PEER]])
def test_first_failure_replaces_lost_peer_in_any_order(tmp_path, order):
    write_status(tmp_path, Status("running", 0, 0))
    for status in order:
        write_status(tmp_path, status)
    assert read_status(tmp_path) == CULPRIT


@pytest.mark.parametrize("ended", [Status("done", 9, 0, 0), Status("preempted", 9, 0, 75)])
def test_lost_peer_does_not_replace_successful_end(tmp_path, ended):
    write_status(tmp_path, ended)
    write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) == ended


def test_lost_peer_of_rank_zero_has_precedence(tmp_path):
    rank_zero_status = Status("failed", 3, 0, 6, "rank 2 is gone")
    for status in (LOST_PEER, rank_zero_status, LOST_PEER):
        write_status(tmp_path, status)
    assert read_status(tmp_path) == rank_zero_status


def test_new_start_replaces_old_status(tmp_path):
    write_status(tmp_path, CULPRIT)
    write_status(tmp_path, Status("running", 0, 0))
    assert read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    "content",
    [
        b"", b'{"state": "run', b"\xff\x00", b"[" * 100_000, b"[1]", b"null", b"{}",
        b'{"state": "paused", "step": 1, "rank": 0}',
        b'{"state": "failed", "step": "1", "rank": 0}',
        b'{"state": ["failed"], "step": 1, "rank": 0, "time": 1.0}',
    ],
)  # fmt: skip
def test_unreadable_old_status_is_ignored(tmp_path, content):
    (tmp_path / "STATUS.json").write_bytes(content)
    assert read_status(tmp_path) is None
    assert write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) == LOST_PEER


def test_status_of_newer_version_ignores_unknown_fields(tmp_path):
    write_status(tmp_path, CULPRIT)
    file = tmp_path / "STATUS.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "host": "a", "version": 2}))
    assert read_status(tmp_path) == CULPRIT
    file.write_text('{"state": "done", "step": 9, "rank": 0}')
    assert read_status(tmp_path) == Status("done", 9, 0)


class FullDisk:
    """Disk on which no file can be created.

    If `blocks` is False, files cannot be overwritten either.
    """

    def __init__(self, monkeypatch, blocks: bool = True) -> None:
        def fail(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(preempt, "replace_atomically", fail)
        if not blocks:
            monkeypatch.setattr(preempt, "overwrite_in_place", fail)


@pytest.mark.parametrize("message", ["", "short", "long " * 50_000])
def test_status_is_written_on_full_disk(tmp_path, monkeypatch, message):
    write_status(tmp_path, Status("running", 0, 0, None, "x" * 100))
    FullDisk(monkeypatch)
    assert write_status(tmp_path, Status("failed", 7, 0, 4, message))
    actual = read_status(tmp_path)
    assert (actual.state, actual.step, actual.exit_code) == ("failed", 7, 4)
    assert actual.message == message or (message.startswith(actual.message) and actual.message)
    assert allocated_bytes(tmp_path / "STATUS.json") <= 8192


def test_status_that_cannot_be_replaced_is_removed(tmp_path, monkeypatch):
    """Check this because an outdated status would show a running run."""
    write_status(tmp_path, Status("running", 0, 0))
    FullDisk(monkeypatch, blocks=False)
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) is None
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path, LOST_PEER)


def test_readers_never_read_incomplete_status(tmp_path):
    write_status(tmp_path, Status("running", 0, 0))
    writers = [
        threading.Thread(
            target=lambda rank: [
                write_status(tmp_path, Status("running", s, rank, None, "x" * 5000))
                for s in range(40)
            ],
            args=(rank,),
        )
        for rank in range(3)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_status(tmp_path).message in ("", "x" * 5000)
    assert [p.name for p in tmp_path.iterdir()] == ["STATUS.json"]
