"""`torchmm show`: the state of a run and its slowest ranks."""

import io
import os
import time

import pytest
from rich.console import Console

from torchmm.commands import show_run
from torchmm.extensions.reports.page.run_contents import RunContents
from torchmm.training.shutdown import Status, write_status
from torchmm.training.tracking.evaluations import Evaluation, append_evaluation


def straggler_table(slowest: list[int], fraction: float = 0.25) -> str:
    records = [
        {"step": step, "slowest_rank": rank, "straggler_fraction": fraction}
        for step, rank in enumerate(slowest, start=1)
    ]
    console = Console(file=io.StringIO(), width=120)
    show_run.show_stragglers(console, records)
    return console.file.getvalue()


def test_slowest_ranks_are_shown_over_time():
    text = straggler_table([3] * 4 + [0, 3, 0, 3] + [0] * 4 + [0, 0, 0, 5])
    rows = [line.replace("│", "").split() for line in text.splitlines()]
    assert ["0", "0%", "50%", "100%", "75%"] in rows
    assert ["3", "100%", "50%", "0%", "0%"] in rows
    assert ["5", "0%", "0%", "0%", "25%"] in rows
    assert "steps 13 to 16" in text and text.count("25%") == 5


def test_single_rank_has_no_straggler_table():
    assert straggler_table([0] * 8) == ""


def test_newest_scores_of_run_and_exports_are_shown(tmp_path):
    records = [
        {"step": 2, "scores": {"vqa/exact_match": 0.25}},
        {"step": 4, "scores": {"vqa/exact_match": 0.5}},
        {"step": 5, "scores": None},
    ]
    append_evaluation(tmp_path, Evaluation("hf-ema", 4, {"vqa/cider": 1.75}, {"vqa": 8}))
    console = Console(file=io.StringIO(), width=120)
    show_run._show_scores(console, RunContents(tmp_path, records, {}))
    rows = [line.replace("│", "").split() for line in console.file.getvalue().splitlines()]
    assert ["step", "4", "vqa/exact_match", "0.5000"] in rows
    assert ["hf-ema", "vqa/cider", "1.7500"] in rows
    assert "0.2500" not in console.file.getvalue()


@pytest.mark.parametrize(("age_s", "expected"), [(60, "running"), (3600, "no update for 60 min")])
def test_state_line_shows_killed_run(tmp_path, age_s, expected):
    write_status(tmp_path, Status("running", 3, 0))
    past_s = time.time() - age_s
    os.utime(tmp_path / "STATUS.json", (past_s, past_s))
    line = show_run.describe_state(RunContents(tmp_path, [], {"name": "mine"}))
    assert line.startswith("mine: running") and expected in line
    assert ("may have been killed" in line) == (age_s > 600)
