import errno
import json
import os
import signal
import threading

import pytest

from torchmm.common.files import allocated_bytes
from torchmm.training import ending as preempt
from torchmm.training.ending import Status, StopSignal, read_status, write_status

LOST_PEER = Status("failed", 3, 1, 6, "rank 1 lost a peer")
CULPRIT = Status("failed", 3, 2, 3, "bad sample")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_only_sets_a_flag(number):
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_the_first_signal_counts():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGTERM


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_status_comes_back(tmp_path):
    status = Status("preempted", 7, 0, 75, "SIGTERM")
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert read_status(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("order", [[LOST_PEER, CULPRIT], [CULPRIT, LOST_PEER]])
def test_the_culprit_is_told_from_its_victims_in_any_order(tmp_path, order):
    write_status(tmp_path, Status("running", 0, 0))
    for status in order:
        write_status(tmp_path, status)
    assert read_status(tmp_path) == CULPRIT


@pytest.mark.parametrize("ended", [Status("done", 9, 0, 0), Status("preempted", 9, 0, 75)])
def test_a_lost_peer_does_not_undo_a_good_end(tmp_path, ended):
    write_status(tmp_path, ended)
    write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) == ended


def test_rank_0_has_the_word_on_lost_peers(tmp_path):
    of_rank_0 = Status("failed", 3, 0, 6, "rank 2 is gone")
    for status in (LOST_PEER, of_rank_0, LOST_PEER):
        write_status(tmp_path, status)
    assert read_status(tmp_path) == of_rank_0


def test_a_new_start_replaces_the_old_end(tmp_path):
    write_status(tmp_path, CULPRIT)
    write_status(tmp_path, Status("running", 0, 0))
    assert read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    "left",
    [
        b"", b'{"state": "run', b"\xff\x00", b"[" * 100_000, b"[1]", b"null", b"{}",
        b'{"state": "paused", "step": 1, "rank": 0}',
        b'{"state": "failed", "step": "1", "rank": 0}',
        b'{"state": ["failed"], "step": 1, "rank": 0, "time": 1.0}',
    ],
)  # fmt: skip
def test_an_unreadable_status_of_before_is_none(tmp_path, left):
    (tmp_path / "STATUS.json").write_bytes(left)
    assert read_status(tmp_path) is None
    assert write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) == LOST_PEER


def test_a_status_of_a_newer_version_is_read_without_what_is_new(tmp_path):
    write_status(tmp_path, CULPRIT)
    file = tmp_path / "STATUS.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "host": "a", "version": 2}))
    assert read_status(tmp_path) == CULPRIT
    file.write_text('{"state": "done", "step": 9, "rank": 0}')
    assert read_status(tmp_path) == Status("done", 9, 0)


class FullDisk:
    """No new file can be written; with `blocks`, not even over an old one."""

    def __init__(self, monkeypatch, blocks: bool = True) -> None:
        def fail(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(preempt, "replace_atomically", fail)
        if not blocks:
            monkeypatch.setattr(preempt, "overwrite", fail)


@pytest.mark.parametrize("message", ["", "short", "long " * 50_000])
def test_a_status_gets_onto_a_full_disk(tmp_path, monkeypatch, message):
    write_status(tmp_path, Status("running", 0, 0, None, "x" * 100))
    FullDisk(monkeypatch)
    assert write_status(tmp_path, Status("failed", 7, 0, 4, message))
    found = read_status(tmp_path)
    assert (found.state, found.step, found.exit_code) == ("failed", 7, 4)
    assert found.message == message or (message.startswith(found.message) and found.message)
    assert allocated_bytes(tmp_path / "STATUS.json") <= 8192


def test_a_status_that_cannot_be_replaced_does_not_stay(tmp_path, monkeypatch):
    """Nothing is better than a run that is said to be running for ever."""
    write_status(tmp_path, Status("running", 0, 0))
    FullDisk(monkeypatch, blocks=False)
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path, LOST_PEER)
    assert read_status(tmp_path) is None
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path, LOST_PEER)


def test_readers_never_see_half_a_status(tmp_path):
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
