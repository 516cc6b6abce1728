"""Stop signals before the first step end a run within seconds."""

import json
import signal
import time
from pathlib import Path

import pytest
from tiny_recipe import arguments, new_index
from train_server import Run

from torchmm.training.shutdown import EXIT_GRACE_S, read_status

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("blocked_start_train.py")
MEASURING = "torchmm.data.sources.index.index_builder:measure_shard"
WEIGHTS = "torchmm.training.model_build:init_weights"
TOKENIZER = "torchmm.training.model_build:load_tokenizer"


def command(run_dir: Path, data: Path, **changes: object) -> list[str]:
    """Return the command line of a run that indexes its data."""
    return arguments(run_dir, data, **new_index(run_dir), **changes)


def wait_for_output(run: Run, rank: int, text: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in run.output(rank):
        assert time.monotonic() < deadline and run.processes[rank].poll() is None, run.output(rank)
        time.sleep(0.05)


def assert_stopped(run: Run, run_dir: Path, name: str, within_s: float) -> None:
    begin = time.monotonic()
    codes = [process.wait(60) for process in run.processes]
    assert codes == [75] * len(codes), run.output(0)
    assert time.monotonic() - begin < within_s
    status = read_status(run_dir)
    assert (status.state, status.exit_code, status.step) == ("preempted", 75, 0)
    assert status.message == f"stopped by {name} before the first step; no checkpoint is required"
    output = run.outputs()
    assert "Traceback" not in output, output


@pytest.mark.parametrize(
    ("blocked", "number"),
    [
        (MEASURING, signal.SIGTERM),
        (MEASURING, signal.SIGINT),
        (MEASURING, signal.SIGUSR1),
        (WEIGHTS, signal.SIGTERM),
        (TOKENIZER, signal.SIGTERM),
    ],
)
def test_early_signal_ends_blocked_start(tmp_path, real_data, train_server, blocked, number):
    run_dir = tmp_path / "run"
    env = {"BLOCKED": blocked, "BLOCKED_IN": "python"}
    run = train_server.start(command(run_dir, real_data), tmp_path / "logs", script=SCRIPT, **env)
    wait_for_output(run, 0, "blocked")
    run.kill(0, number)
    run.kill(0, signal.SIGTERM)  # launchers often send two
    assert_stopped(run, run_dir, signal.Signals(number).name, EXIT_GRACE_S - 2)


def test_early_signal_ends_blocked_c_code(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    env = {"BLOCKED": MEASURING, "BLOCKED_IN": "c"}
    run = train_server.start(command(run_dir, real_data), tmp_path / "logs", script=SCRIPT, **env)
    wait_for_output(run, 0, "blocked")
    time.sleep(0.5)
    run.kill(0, signal.SIGTERM)
    assert_stopped(run, run_dir, "SIGTERM", EXIT_GRACE_S + 4)


def test_early_signal_ends_waiting_peers(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    env = {"BLOCKED": WEIGHTS, "BLOCKED_IN": "python", "BLOCKED_RANK": "1"}
    run = train_server.start(
        command(run_dir, real_data), tmp_path / "logs", ranks=2, script=SCRIPT, **env
    )
    wait_for_output(run, 1, "blocked")
    time.sleep(2)  # rank 0 is in a collective by then
    for rank in range(2):
        run.kill(rank, signal.SIGTERM)
    assert_stopped(run, run_dir, "SIGTERM", EXIT_GRACE_S + 4)


def test_early_signal_ends_measuring_workers(tmp_path, train_server, real_data):
    run_dir = tmp_path / "run"
    texts = tmp_path / "texts.jsonl"
    lines = (json.dumps({"text": f"number {k} " * 200}) for k in range(30_000))
    texts.write_text("\n".join(lines))
    changes = {"data__workers": 2, "data__sources": f'[{{path="{texts}", name="texts"}}]'}
    run = train_server.start(command(run_dir, real_data, **changes), tmp_path / "logs")
    wait_for_output(run, 0, "indexing source texts")
    run.kill(0, signal.SIGTERM)
    assert_stopped(run, run_dir, "SIGTERM", EXIT_GRACE_S - 2)
    assert ", stopped" in run.output(), "nothing was interrupted"
