"""Data workers exit with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "unit" / "data"
SCRIPT = """
import sys, time
sys.path.insert(0, {cases!r})
from pathlib import Path
from data_cases import data_config, training, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from torchmm.common.batch import TextSpec
from torchmm.recipe.data_section import SourceConfig
from torchmm.data.build import build_loader

if __name__ == "__main__":
    directory = Path({directory!r})
    path = write_jsonl(directory / "a.jsonl", [{{"text": "a b c d"}}] * 50)
    words = {{w: i for i, w in enumerate("0 a b c d".split())}}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    loader = build_loader(
        data_config(directory, SourceConfig(path=str(path)), workers=2),
        training(),
        text_spec=TextSpec(5, None),
        image_specs={{}},
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )
    batches = iter(loader)
    next(batches)
    print(*(w.pid for w in loader._steps.processes), flush=True)
    time.sleep({sleep_s})
"""


def start(tmp_path, sleep_s):
    script = tmp_path / "script.py"
    values = {"cases": str(CASES), "directory": str(tmp_path), "sleep_s": sleep_s}
    script.write_text(SCRIPT.format(**values))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(pids, within_s):
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} are still running"
        time.sleep(0.05)


@pytest.mark.slow
def test_workers_exit_with_killed_process(tmp_path):
    process, workers = start(tmp_path, sleep_s=60)
    assert len(workers) == 2 and all(alive(pid) for pid in workers)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert_gone(workers, within_s=10)


@pytest.mark.slow
def test_process_with_idle_workers_exits(tmp_path):
    process, workers = start(tmp_path, sleep_s=0)
    assert process.wait(timeout=15) == 0
    assert_gone(workers, within_s=10)


@pytest.mark.slow
def test_process_with_stopped_workers_exits(tmp_path):
    process, workers = start(tmp_path, sleep_s=1)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    assert process.wait(timeout=60) == 0
    assert_gone(workers, within_s=10)
