"""Waiting for data: time limits, and stop signals while a rank waits."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from data_cases import caption, data_config, training, write_jsonl

from torchmm.common.errors import DataError
from torchmm.data import loader as loader_module
from torchmm.data.build import build_loader
from torchmm.data.nodes import TimedCall, TimeoutResult
from torchmm.recipe.data_section import SourceConfig

LONG_S = 60.0


def build(tmp_path, tokenizer, text_spec, **changes):
    rows = [{"text": caption(i)} for i in range(40)]
    path = write_jsonl(tmp_path / "words.jsonl", rows)
    return build_loader(
        data_config(tmp_path, SourceConfig(path=str(path)), **changes),
        training(),
        text_spec=text_spec,
        image_specs={},
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )


def workers_of(loader):
    return loader._steps.processes


def assert_gone(workers):
    for worker in workers:
        worker.join(LONG_S)
        assert not worker.is_alive()


def test_stopped_worker_is_reported_and_killed(tmp_path, tokenizer, text_spec):
    loader = build(tmp_path, tokenizer, text_spec, workers=2, timeout_s=2.0)
    batches = iter(loader)
    next(batches)
    workers = workers_of(loader)
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(DataError) as caught:
        for _ in range(8):  # earlier results are still delivered
            next(batches)
    message = str(caught.value)
    assert "data.timeout_s = 2" in message and "words.jsonl[" in message and "stopped" in message
    assert any(
        f"data worker {n} (process {w.pid}, stopped)" in message for n, w in enumerate(workers)
    )
    assert_gone(workers)


class Silent:
    """A source on a file server that no longer responds."""

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> None:
        time.sleep(3600)


@pytest.mark.parametrize("workers", [0, 1])
def test_unresponsive_file_raises_after_timeout(tmp_path, tokenizer, text_spec, workers):
    loader = build(tmp_path, tokenizer, text_spec, workers=workers, timeout_s=2.0)
    loader._decoder._sources = [Silent()]
    who = "data worker 0" if workers else "this process"
    with pytest.raises(DataError, match=rf"{who}.* samples starting with .*words.jsonl\["):
        next(iter(loader))


def test_stop_signal_shortens_waiting(tmp_path, tokenizer, text_spec, monkeypatch):
    monkeypatch.setattr(loader_module, "STOP_GRACE_S", 1.0)
    loader = build(tmp_path, tokenizer, text_spec, workers=1, timeout_s=LONG_S)
    stop = threading.Event()
    batches = loader.batches(stop.is_set)
    assert next(batches) is not None
    stop.set()
    assert next(batches) is not None, "available data are delivered"
    workers = workers_of(loader)
    os.kill(workers[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    received = [next(batches) for _ in range(1)]
    while received[-1] is not None:
        received.append(next(batches))
    assert time.monotonic() - begin < LONG_S / 2
    assert "data worker 0" in loader.timeout_message
    assert_gone(workers)


def test_waiting_returns_results_errors_and_timeouts():
    results = iter([1, ValueError("bad"), 2])
    release = threading.Event()

    def produce():
        value = next(results, None)
        if value is None:
            release.wait(LONG_S)
        if isinstance(value, Exception):
            raise value
        return value

    waiting = TimedCall(produce)
    assert waiting.get(LONG_S) == 1
    with pytest.raises(ValueError, match="bad"):
        waiting.get(LONG_S)
    assert waiting.get(LONG_S) == 2
    overdue = waiting.get(0.05)
    assert isinstance(overdue, TimeoutResult) and not overdue.stopping and overdue.waited_s >= 0.05
    release.set()
    waiting.close()
