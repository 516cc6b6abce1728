"""Run directories that belong to another run, are full, or cannot be written."""

import logging
from pathlib import Path

import pytest
from tiny_recipe import arguments

from torchmm.checkpoint_directory import CheckpointDirectory
from torchmm.preempt import Status, read_status, write_status

pytestmark = pytest.mark.slow
IMPATIENT = Path(__file__).with_name("impatient_train.py")
MISTAKE = {"model__llm__config__hiden_size": 64}


@pytest.fixture
def live_run(tmp_path) -> Path:
    """Directory of a run that is alive, as far as another process can tell."""
    run_dir = tmp_path / "run"
    directory = CheckpointDirectory(run_dir / "checkpoints", logging.getLogger(__name__))
    directory.claim()
    write_status(run_dir, Status("running", 7, 0))
    (run_dir / "recipe.toml").write_text("what it trains\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    yield run_dir
    directory.release()


def contents(run_dir: Path) -> dict[Path, bytes]:
    """All but the lock, which this process would give up by closing it."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mistake", [False, True])
def test_a_run_in_the_directory_of_another_touches_nothing(
    live_run, tmp_path, real_data, train_server, ranks, mistake
):
    before = contents(live_run)
    changes = {"training__steps": 2, "optimizer__lr": 0.5, **(MISTAKE if mistake else {})}
    command = arguments(live_run, real_data, **changes)
    run = train_server.start(command, tmp_path / "logs", ranks, script=IMPATIENT)
    codes = run.wait()
    told = "".join(run.output(rank) for rank in range(ranks))
    assert codes == [2 if mistake else 4] * ranks, told
    assert "Traceback" not in told
    if not mistake:
        assert told.count("in use by another run") == 1
    assert contents(live_run) == before
    assert read_status(live_run) == Status("running", 7, 0)


def test_mistakes_found_before_ranks_meet_are_the_status(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    write_status_of_before(run_dir)
    command = arguments(run_dir, real_data, **MISTAKE)
    assert train_server.run(command, tmp_path / "logs", ranks=2)[0] == [2, 2]
    assert read_status(run_dir).exit_code == 2


def write_status_of_before(run_dir: Path) -> None:
    run_dir.mkdir()
    write_status(run_dir, Status("failed", 5, 0, 3, "what happened last time"))
