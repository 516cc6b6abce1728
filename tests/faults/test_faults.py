"""Effects of a fault on one rank on other ranks, checkpoints and STATUS.json."""

import re
import signal
import time
from pathlib import Path

import pytest
from fault_harness import Job, TorchrunJob

from torchmm.training.checkpoint.manifest import find_problems, list_steps, step_of
from torchmm.training.shutdown import read_status

TRAINER = Path(__file__).with_name("fault_trainer.py")
pytestmark = pytest.mark.slow


def final_hash(output: str) -> str:
    return re.findall(r"final (\w+)", output)[-1]


def newest(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint, which must be complete."""
    path = list_steps(run_dir / "checkpoints")[0]
    assert not find_problems(path)
    return step_of(path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, train_server) -> str:
    """Return the hash of the parameters after 12 steps on 2 ranks."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    with Job(train_server, TRAINER, [run_dir, 12], 2, run_dir / "logs") as job:
        assert job.wait() == [0, 0]
        assert read_status(run_dir).state == "done"
        return final_hash(job.output())


def test_killed_rank_is_named_and_run_resumes(tmp_path, uninterrupted, train_server):
    with Job(train_server, TRAINER, [tmp_path, 12], 2, tmp_path / "logs", STEP_S="0.1") as job:
        job.wait_for("step 4")
        job.signal(1, signal.SIGKILL)
        assert job.wait(20) == [6, -9]
        assert "rank 1 (process" in job.output(0)
    status = read_status(tmp_path)
    assert (status.state, status.exit_code) == ("failed", 6) and "rank 1" in status.message
    assert newest(tmp_path) >= 3
    with Job(train_server, TRAINER, [tmp_path, 12], 2, tmp_path / "again") as job:
        assert job.wait() == [0, 0]
        assert final_hash(job.output()) == uninterrupted


def test_torchrun_restarts_killed_rank_exactly(tmp_path, uninterrupted):
    with TorchrunJob(TRAINER, [tmp_path, 12, "kill:1:6"], 2, tmp_path / "logs", restarts=1) as job:
        assert job.wait() == [0], job.output()
        assert final_hash(job.output()) == uninterrupted
    assert read_status(tmp_path).state == "done"


def test_sigterm_saves_same_step_on_all_ranks(tmp_path, uninterrupted, train_server):
    with Job(train_server, TRAINER, [tmp_path, 12], 2, tmp_path / "logs", STEP_S="0.1") as job:
        job.wait_for("step 4")
        job.signal(1, signal.SIGTERM)
        time.sleep(0.02)
        job.signal(1, signal.SIGTERM)  # a second signal, most likely during the save
        assert job.wait(20) == [75, 75]
        last = [re.findall(r"step (\d+)\n", job.output(rank))[-1] for rank in range(2)]
    assert last[0] == last[1] == str(newest(tmp_path))
    status = read_status(tmp_path)
    assert (status.state, status.exit_code, status.step) == ("preempted", 75, int(last[0]))
    with Job(train_server, TRAINER, [tmp_path, 12], 2, tmp_path / "again") as job:
        assert job.wait() == [0, 0]
        assert final_hash(job.output()) == uninterrupted


@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_stalled_rank_is_named_within_timeout(tmp_path, fault, train_server):
    """A sleeping rank writes heartbeats and misses a barrier. A stopped rank does neither."""
    timeout_s = 2.0
    with Job(
        train_server, TRAINER, [tmp_path, 99, f"{fault}:1:4"], 2, tmp_path, TIMEOUT_S="2"
    ) as job:
        job.wait_for("step 3")
        start = time.monotonic()
        job.processes[0].wait(30)
        assert time.monotonic() - start < 2 * timeout_s + 5
        assert job.processes[0].returncode == 6
        assert re.search(r"rank 0 lost a peer at step 4 in \w+.*: rank 1 \(process", job.output(0))
    assert "rank 1" in read_status(tmp_path).message


def test_exception_on_one_rank_is_reported_cause(tmp_path, train_server):
    with Job(train_server, TRAINER, [tmp_path, 99, "raise:1:4"], 2, tmp_path) as job:
        assert job.wait(25) == [6, 1]
    status = read_status(tmp_path)
    assert (status.rank, status.exit_code, status.message) == (1, 1, "KeyError('bad sample')")


def test_nan_on_one_rank_keeps_parameters(tmp_path, train_server):
    with Job(train_server, TRAINER, [tmp_path, 99, "nan:1:4"], 2, tmp_path, SHOW_DIGEST="1") as job:
        assert job.wait() == [5, 5]
        for rank in range(2):
            digests = re.findall(r"(before|after) update (\w+)", job.output(rank))
            assert len(digests) == 7, "three complete steps, and the fourth until the check"
            assert digests[-1] == ("before", digests[-2][1])
            assert "step 4: loss = nan on rank 1;" in job.output(rank)
    assert read_status(tmp_path).exit_code == 5
    assert newest(tmp_path) == 3
