"""train.py with kills, stop signals, bad recipes, data and checkpoints, and non-finite values."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_harness import TorchrunJob
from ports import free_port
from tiny_recipe import ROOT, arguments, records
from train_server import CLIENT, TRAIN, has_traceback
from undisturbed_run import COMMON, STEPS, assert_same_end, wait_for_step

from torchmm.training.checkpoint.manifest import find_problems, list_steps, step_of
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
KILLS = 5


def process_of(run_dir: Path, rank: int) -> int:
    """Return the process id of a rank from its heartbeat."""
    return json.loads((run_dir / f"heartbeats/rank-{rank:05}.json").read_text())["process"]


def parent_of(process: int) -> int:
    """Return the parent process id."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_torchrun_recovers_from_five_kills_exactly(tmp_path, real_data, undisturbed, train_server):
    # Uses the rendezvous of torchrun and no environment variables, like a user.
    run_dir = tmp_path / "run"
    generator = random.Random(0)
    command = [train_server.address, *arguments(run_dir, real_data, **COMMON)]
    killed: set[int] = set()
    with TorchrunJob(CLIENT, command, 2, tmp_path / "logs", restarts=KILLS) as job:
        for kill in range(KILLS):
            wait_for_step(run_dir, 2 + 4 * kill + generator.randrange(2))
            time.sleep(generator.uniform(0, 0.05))
            while (processes := {process_of(run_dir, rank) for rank in range(2)}) & killed:
                time.sleep(0.01)
            os.kill(process_of(run_dir, generator.randrange(2)), signal.SIGKILL)
            killed |= processes
        assert job.wait(120) == [0], job.output()
        assert job.output().count("resumed from") == KILLS
    assert_same_end(run_dir, undisturbed)


@pytest.mark.campaign
def test_remaining_node_continues_after_node_loss(tmp_path, real_data, undisturbed):
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data, **COMMON)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    rendezvous += ["--rdzv-id=two-nodes", "--nnodes=1:2"]
    quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

    def start(node: int) -> TorchrunJob:
        options = [*rendezvous, f"--rdzv-conf=is_host={int(node == 0)},{quick}"]
        logs = tmp_path / f"node{node}"
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return TorchrunJob(TRAIN, command, 1, logs, restarts=2, options=options, **environment)

    with start(0) as remaining, start(1) as lost:
        wait_for_step(run_dir, 4)
        # A lost node has neither its launcher nor its rank.
        launcher = lost.processes[0].pid
        ranks = [process_of(run_dir, rank) for rank in range(2)]
        for process in [launcher, *(r for r in ranks if parent_of(r) == launcher)]:
            os.kill(process, signal.SIGKILL)
        assert remaining.wait(200) == [0], remaining.output()
    after = remaining.output().partition("resumed from")
    assert "ranks             2" in after[0] and "ranks             1" in after[0]
    assert read_status(run_dir).state == "done"
    actual, expected = records(run_dir), records(undisturbed)
    assert [r["step"] for r in actual] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in actual] == pytest.approx([r["loss"] for r in expected], rel=1e-5)


def test_sigterm_to_torchrun_saves_and_resumes_exactly(
    tmp_path, real_data, undisturbed, train_server
):
    run_dir = tmp_path / "run"
    changes = {**COMMON, "data__workers": 2, "checkpoint__interval": STEPS}
    command = arguments(run_dir, real_data, **changes)
    with TorchrunJob(TRAIN, command, 2, tmp_path / "logs") as job:
        wait_for_step(run_dir, 4)
        job.signal(0, signal.SIGTERM)
        job.wait(40)
        assert job.output().count("PreemptedError: ") == 1
    assert_preempted(run_dir)
    rerun = arguments(run_dir, real_data, **COMMON)
    codes, output = train_server.run(rerun, tmp_path / "again", ranks=2)
    assert codes == [0, 0], output
    assert_same_end(run_dir, undisturbed)


def test_sigterm_to_one_rank_stops_all_together(tmp_path, real_data, undisturbed, train_server):
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data, **{**COMMON, "checkpoint__interval": STEPS})
    run = train_server.start(command, tmp_path / "logs", ranks=2)
    wait_for_step(run_dir, 4)
    run.kill(1, signal.SIGTERM)
    assert run.wait() == [75, 75]
    output = run.output(0) + run.output(1)
    assert output.count("PreemptedError: ") == 1 and "Traceback" not in output
    assert_preempted(run_dir)
    assert train_server.run(command, tmp_path / "again", ranks=2)[0] == [0, 0]
    assert_same_end(run_dir, undisturbed)


def assert_preempted(run_dir: Path) -> None:
    """Check that STATUS.json, metrics.jsonl and the newest checkpoint have the same step."""
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("preempted", 75)
    newest = list_steps(run_dir / "checkpoints")[0]
    assert not find_problems(newest)
    assert step_of(newest) == status.step == records(run_dir)[-1]["step"] < STEPS


def test_kill_during_async_save_loses_that_save(tmp_path, real_data, undisturbed, train_server):
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data, **COMMON)
    incomplete: list[Path] = []
    for first_step in range(3, STEPS, 4):
        run = train_server.start(command, tmp_path / "logs", ranks=2)
        wait_for_step(run_dir, first_step)
        deadline = time.monotonic() + 60
        while not (incomplete := list(run_dir.glob("checkpoints/*.tmp-*"))):
            assert time.monotonic() < deadline, "no save was seen"
            time.sleep(0.0005)
        run.kill(0, signal.SIGKILL)
        assert run.wait() == [-9, 6], run.output(1)
        if incomplete[0].exists():
            break
    assert incomplete and incomplete[0].exists(), "no kill hit a save"
    assert find_problems(incomplete[0])
    assert train_server.run(command, tmp_path / "again", ranks=2)[0] == [0, 0]
    assert not incomplete[0].exists()
    assert_same_end(run_dir, undisturbed)


def test_bad_recipe_lists_all_errors(tmp_path):
    recipe = tmp_path / "bad.toml"
    recipe.write_text(
        f'base = "{ROOT}/recipes/quickstart.toml"\n[optimizer]\nlearning_rate = 1.0\n'
        '[training]\nsteps = "many"\n[[data.sources]]\npath = "nowhere/at/all"\n'
    )
    run = subprocess.run(
        [sys.executable, TRAIN, "--config", recipe, "--parallel.pipeline=1",
         "--training.microbatch_size=3"],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert "4 problems" in run.stderr and "Traceback" not in run.stderr
    for part in ("learning_rate", "training.steps", "nowhere/at/all", "global_batch_size"):
        line = next(line for line in run.stderr.splitlines() if part in line)
        assert str(recipe) in line or "command line" in line or "quickstart.toml" in line


def test_plain_python_trains_and_exits_with_0(tmp_path, real_data):
    command = arguments(tmp_path / "run", real_data, training__steps=2)
    run = subprocess.run(
        [sys.executable, TRAIN, *command],
        capture_output=True, text=True, check=False, timeout=90, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "step 2/2 | loss" in run.stdout
    # If torchao is installed, transformers imports it, and torchao logs missing libraries.
    torchao_paths = ("torchao", "torch/utils/_pytree.py")
    messages = [
        line for line in run.stderr.splitlines() if not any(t in line for t in torchao_paths)
    ]
    assert messages == []
    assert read_status(tmp_path / "run").state == "done"


def test_model_errors_fail_before_rendezvous(tmp_path, real_data, train_server):
    changes = {"model__llm__config__hiden_size": 64, "model__tokenizer": tmp_path}
    command = arguments(tmp_path / "run", real_data, **changes)
    run = train_server.start(command, tmp_path, ranks=2, MASTER_ADDR="192.0.2.1")
    assert run.wait() == [2, 2]
    outputs = run.output(0), run.output(1)
    # A rank that fails before rank 0 has claimed the run directory also prints the error.
    assert max(output.count("2 problems in the recipe") for output in outputs) == 1
    output = "".join(outputs)
    assert "Traceback" not in output
    assert "did you mean 'hidden_size'" in output and "model.tokenizer" in output


@pytest.fixture
def broken_images(tmp_path) -> Path:
    """Write a JSON Lines source of 100 captions: 5 files are not images, 5 are truncated."""
    from PIL import Image  # noqa: PLC0415

    Image.effect_noise((32, 32), 50).save(tmp_path / "good.png")
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "text.png").write_bytes(b"no image")
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    names = {0: "text.png", 10: "cut.png"}
    rows = [{"image": names.get(i % 20, "good.png"), "text": f"noise {i}"} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "a.jsonl"


def test_too_many_corrupt_samples_stop_all_ranks(tmp_path, real_data, broken_images, train_server):
    changes = {"data__max_corrupt_samples": 7, "data__workers": 1, "training__steps": 20}
    command = arguments(tmp_path / "run", real_data, **changes)
    command.append(f'--data.sources=[{{path="{broken_images}"}}]')
    run = train_server.start(command, tmp_path / "logs", ranks=2)
    assert run.wait() == [3, 3]
    output = run.output(0) + run.output(1)
    assert output.count("DataError: ") == 1 and not has_traceback(output)
    assert "data.max_corrupt_samples = 7" in output
    assert read_status(tmp_path / "run").exit_code == 3


def test_corrupt_samples_within_the_limit_are_named(
    tmp_path, real_data, broken_images, train_server
):
    changes = {"data__max_corrupt_fraction": 0.5, "training__steps": 4}
    command = arguments(tmp_path / "run", real_data, **changes)
    command.append(f'--data.sources=[{{path="{broken_images}"}}]')
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [0], output
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    for index in range(0, 100, 10):
        assert log.count(f"a.jsonl[{index}]: ") == 1
    assert records(tmp_path / "run")[-1]["skipped_samples"] == 10


@pytest.mark.parametrize("section", ["sources", "validation"])
def test_unusable_source_fails_before_weights_load(tmp_path, real_data, train_server, section):
    llm = tmp_path / "llm"
    llm.mkdir()
    (llm / "config.json").write_text('{"model_type": "llama", "vocab_size": 4000}')
    (llm / "model.safetensors").write_bytes(b"no weights")
    rows = [{"picture": "a.png", "alt": f"a cat, number {i}"} for i in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f'--data.{section}=[{{path="{file}"}}]'
    changes = {"model__llm__source": llm, "validation__interval": 1}
    command = arguments(tmp_path / "run", real_data, **changes)
    run = train_server.start([*command, source], tmp_path / "logs", ranks=2)
    assert run.wait() == [3, 3], run.output()
    output = run.output(0) + run.output(1)
    assert (
        "none of its 12 samples are usable: 12 are corrupt" in output and "Traceback" not in output
    )
    assert f"{file}:10: no record format matches the columns" in output and "and 2 more" in output
    assert read_status(tmp_path / "run").exit_code == 3
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [4] and "model.safetensors" in output, "weights are loaded after the sources"


def test_damaged_checkpoint_error_names_file(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    changes = {"checkpoint__interval": 1, "training__steps": 2}
    assert train_server.run(arguments(run_dir, real_data, **changes), tmp_path)[0] == [0]
    damaged = run_dir / "checkpoints/step-2"
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = {**changes, "training__steps": 4, "checkpoint__resume": damaged}
    run = train_server.start(arguments(run_dir, real_data, **resumed), tmp_path, ranks=2)
    assert run.wait() == [4, 4]
    output = run.output(0) + run.output(1)
    assert output.count("CheckpointError: ") == 1 and "Traceback" not in output
    assert f"{file} was modified" in output
    resumed["checkpoint__resume"] = "auto"
    codes, output = train_server.run(arguments(run_dir, real_data, **resumed), tmp_path)
    assert codes == [0] and "resumed from" in output and "checkpoints/step-1" in output


def test_non_finite_loss_stops_all_ranks(tmp_path, real_data, undisturbed, train_server):
    """Step 3 makes the weights huge, so that step 4 overflows. The checkpoint is valid."""
    run_dir = tmp_path / "run"

    def run(**changes):
        command = arguments(run_dir, real_data, **{**COMMON, **changes})
        return train_server.start(command, tmp_path, ranks=2)

    assert run(training__steps=2).wait() == [0, 0]
    overflowing = run(optimizer__lr="1e30", checkpoint__interval=10)
    assert overflowing.wait() == [5, 5]
    output = overflowing.output(0) + overflowing.output(1)
    assert output.count("NonFiniteError: step 4: loss = nan on rank 0") == 1
    first = "first non-finite output is that of encoders.vision.tower.encoder.layers.0."
    assert f"Where: after running the step again, the {first}" in output
    assert "Traceback" not in output
    status = read_status(run_dir)
    assert (status.state, status.step, status.exit_code) == ("failed", 3, 5)
    assert run().wait() == [0, 0]
    assert_same_end(run_dir, undisturbed)


def test_lost_peer_is_named(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    run = train_server.start(arguments(run_dir, real_data, **COMMON), tmp_path, ranks=2)
    wait_for_step(run_dir, 3)
    run.kill(1, signal.SIGSEGV)
    assert run.wait() == [6, -signal.SIGSEGV]
    last_output = run.output(1)
    assert "Fatal Python error: Segmentation fault" in last_output and " in _train" in last_output
    assert "PeerError: rank 0 lost a peer at step " in run.output()
    assert f"rank 1 (process {run.processes[1].pid} on " in run.output()
    assert "Traceback" not in run.output()
    assert read_status(run_dir).exit_code == 6


def test_missing_peer_times_out(tmp_path, real_data, train_server):
    command = arguments(tmp_path / "run", real_data, **{**COMMON, "parallel__timeout_s": 2})
    run = train_server.start(command, tmp_path, ranks=1, WORLD_SIZE="2", RANK="0",
                             MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # fmt: skip
    assert run.wait() == [6]
    assert "PeerError: rank 0 lost a peer, or could not connect to it" in run.output()
    assert "parallel.timeout_s" in run.output() and "Traceback" not in run.output()


def test_finished_run_rejects_changed_model(tmp_path, real_data, train_server):
    """A finished run exits with 0 and a message."""
    changes = {"training__steps": 2, "checkpoint__interval": 1}
    command = arguments(tmp_path / "run", real_data, **changes)
    assert train_server.run(command, tmp_path)[0] == [0]
    codes, output = train_server.run(command, tmp_path)
    assert codes == [0] and "all 2 steps are complete" in output
    assert read_status(tmp_path / "run").state == "done"
    for change in (["--model.llm.config.hidden_size=96"], ['--freeze.modules=["vision"]']):
        codes, output = train_server.run([*command, *change], tmp_path)
        assert codes == [4] and "does not match the model" in output
        assert "Restore [model] and [freeze]" in output and "Traceback" not in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a CUDA device")
def test_missing_device_is_config_error(tmp_path, real_data, train_server):
    command = arguments(tmp_path / "run", real_data, training__device="cuda")
    codes, output = train_server.run(command, tmp_path)
    assert codes == [2]
    assert 'training.device = "cuda": no CUDA device' in output and "Traceback" not in output


def test_changed_data_require_recipe_permission(tmp_path, real_data, train_server):
    rows = [{"text": f"stamp number {i} of a green bird"} for i in range(60)]
    file = tmp_path / "a.jsonl"
    source = f'--data.sources=[{{path="{file}"}}]'

    def run(**changes):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {"checkpoint__interval": 1, **changes}
        command = [*arguments(tmp_path / "run", real_data, **recipe), source]
        return train_server.run(command, tmp_path / "logs")

    assert run(training__steps=2)[0] == [0]
    codes, output = run(training__steps=3, data__prefetch=3)
    assert codes == [0] and "data changed" not in output
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert "a different recipe: data.prefetch 2 -> 3; training.steps 2 -> 3\n" in log
    rows.reverse()
    codes, output = run(training__steps=5)
    assert codes == [4] and "Traceback" not in output
    assert "belongs to different data: samples of source " in output
    codes, output = run(training__steps=5, checkpoint__allow_data_change="true")
    assert codes == [0], output
    assert "data changed since the checkpoint" in (tmp_path / "run/logs/rank-0.log").read_text()
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
