"""Disaggregated encoder, LLM and generator: lost ranks are named, and the run resumes exactly.

The run is resumed manually with the same command, or by torchrun with its rendezvous. If a node
with an encoder replica is lost permanently, torchrun restarts the remaining node, and the encoder
gets the ranks that the LLM does not use.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from fault_harness import Job, TorchrunJob
from ports import free_port
from test_train_faults import parent_of, process_of
from tiny_recipe import arguments, records, weights
from train_server import TRAIN
from undisturbed_run import wait_for_step

from torchmm.common.errors import PeerError
from torchmm.training.shutdown import read_status

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
HANGING = Path(__file__).with_name("hanging_train.py")
UNITS = ("vision", "llm", "generator")
"""Modules by rank."""
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hung": signal.SIGUSR2}
STEPS = 8
GENERATOR = (
    '{_class_name = "PixArtTransformer2DModel", num_attention_heads = 4, attention_head_dim = 8, '
    "num_layers = 2, sample_size = 16, patch_size = 8}"
)
PATIENCE_S = 15
CHANGES = {
    "parallel__placement": "disaggregated",
    "parallel__timeout_s": PATIENCE_S,
    "model__generator__config": GENERATOR,
    "training__steps": STEPS,
    "training__global_batch_size": 4,
    "checkpoint__interval": 3,
}


def command(run_dir: Path, data: Path) -> list[str]:
    """Return arguments with two sources: images as input, and images as target."""
    path = f'path="{data}/tuxpaint_stamps/train"'
    sources = f'--data.sources=[{{{path}}},{{{path},target_image_column="image"}}]'
    return [*arguments(run_dir, data, **CHANGES), sources]


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory, real_data, train_server) -> Path:
    """Return the run directory of an undisturbed run."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    logs = run_dir.parent / "logs"
    codes, output = train_server.run(command(run_dir, real_data), logs, len(UNITS))
    assert codes == [0] * len(UNITS), output
    return run_dir


def assert_same_end(run_dir: Path, undisturbed_run: Path) -> None:
    """Check that each step is recorded once, and losses and weights are bitwise equal."""
    assert read_status(run_dir).state == "done"
    steps, expected = records(run_dir), records(undisturbed_run)
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    for name in ("loss", "loss_text", "loss_image"):
        assert [r[name] for r in steps] == [r[name] for r in expected]
    actual, expected_weights = weights(run_dir), weights(undisturbed_run)
    assert actual.keys() == expected_weights.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected_weights[name])] == []


@pytest.mark.parametrize(
    ("unit", "fault"),
    [
        ("vision", "killed"),
        ("vision", "hung"),
        ("llm", "killed"),
        ("llm", "stopped"),
        ("generator", "stopped"),
    ],
)
def test_lost_module_resumes_with_same_command(
    tmp_path, real_data, train_server, undisturbed_run, unit, fault
):
    run_dir, lost = tmp_path / "run", UNITS.index(unit)
    arguments_of_run, ranks = command(run_dir, real_data), len(UNITS)
    with Job(train_server, HANGING, arguments_of_run, ranks, tmp_path / "logs") as job:
        wait_for_step(run_dir, 4)  # saved: step 3
        since = time.monotonic()
        job.signal(lost, FAULTS[fault])
        survivors = [rank for rank in range(ranks) if rank != lost]
        for rank in survivors:
            left_s = since + 4 * PATIENCE_S - time.monotonic()
            assert job.processes[rank].wait(left_s) == PeerError.exit_code, job.output(rank)
        output_of_others = "".join(map(job.output, survivors))
        assert re.search(rf"rank {lost} \(process {job.processes[lost].pid}", output_of_others), (
            output_of_others
        )
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", PeerError.exit_code)
    assert len(records(run_dir)) < STEPS
    codes, output = train_server.run(arguments_of_run, tmp_path / "again", ranks)
    assert codes == [0] * ranks and "resumed from" in output, output
    assert_same_end(run_dir, undisturbed_run)


def test_module_stopped_during_save_is_detected(tmp_path, real_data, train_server):
    """Ranks wait half an hour for a slow disk, but not for a rank without a heartbeat."""
    run_dir = tmp_path / "run"
    options = [*command(run_dir, real_data), "--checkpoint.interval=1"]
    with Job(train_server, HANGING, options, len(UNITS), tmp_path / "logs") as job:
        wait_for_step(run_dir, 2)
        job.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            assert job.processes[rank].wait(90) == PeerError.exit_code, job.output(rank)
        assert f"rank 1 (process {job.processes[1].pid}" in job.output(0)


@pytest.mark.parametrize(
    ("unit", "fault"), [("vision", "killed"), ("llm", "hung"), ("generator", "stopped")]
)
def test_torchrun_restarts_all_modules(tmp_path, real_data, undisturbed_run, unit, fault):
    run_dir, lost = tmp_path / "run", UNITS.index(unit)
    options = command(run_dir, real_data)
    helpers = Path(__file__).parents[1] / "helpers"
    paths = os.pathsep.join(filter(None, [str(helpers), os.environ.get("PYTHONPATH")]))
    job = TorchrunJob(HANGING, options, len(UNITS), tmp_path / "logs", restarts=1, PYTHONPATH=paths)
    with job:
        wait_for_step(run_dir, 4)
        os.kill(process_of(run_dir, lost), FAULTS[fault])
        assert job.wait(300) == [0], job.output()
        assert "resumed from" in job.output()
    assert_same_end(run_dir, undisturbed_run)


ENCODER_ON_REMAINING_RANKS = {
    "parallel__placement": "disaggregated",
    "parallel__shard": 1,
    "parallel__vision__replicate": -1,
    "parallel__timeout_s": PATIENCE_S,
    "training__steps": 24,
    "training__global_batch_size": 4,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest": 24,
}
"""Changes for an encoder that gets the ranks that the LLM does not use."""
SIZES: dict[str, dict[str, object]] = {
    "remaining ranks": {},
    "planned": {"parallel__auto_sizes": "true"},
}


def node(
    number: int, ranks: int, logs: Path, options: list[str], run_arguments: list[str]
) -> TorchrunJob:
    """Start a launcher like on a separate machine. Node 0 hosts the rendezvous."""
    quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    rendezvous = [*options, f"--rdzv-conf=is_host={int(number == 0)},{quick}"]
    stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return TorchrunJob(TRAIN, run_arguments, ranks, logs / f"node{number}", 2, rendezvous, **stores)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sizes", SIZES)
def test_remaining_node_continues_after_encoder_loss(sizes, tmp_path, real_data, train_server):
    """The encoder gets the remaining ranks, or all sizes are planned again."""
    changes = ENCODER_ON_REMAINING_RANKS | SIZES[sizes]
    run_dir, two_ranks = tmp_path / "run", tmp_path / "few"
    run_arguments = arguments(run_dir, real_data, **changes)
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=replicas", "--nnodes=1:2"]
    # Ranks are sorted by process id, so the node that is lost starts first.
    with (
        node(1, 1, tmp_path, options, run_arguments) as lost,
        node(0, 2, tmp_path, options, run_arguments) as remaining,
    ):
        wait_for_step(run_dir, 4, timeout_s=400)
        launcher = lost.processes[0].pid
        rank = next(r for r in range(3) if parent_of(process_of(run_dir, r)) == launcher)
        assert sizes == "planned" or rank < 2, "the lost rank belongs to the LLM"
        for process in (launcher, process_of(run_dir, rank)):
            os.kill(process, signal.SIGKILL)
        assert remaining.wait(400) == [0], remaining.output()
    before, _, after = remaining.output().partition("resumed from")
    first = "3 = [12] for vision" if sizes == "planned" else r"3 = 2 for vision \+ 1 for llm"
    assert re.search(first, lost.output())
    assert "2 = 1 for vision + 1 for llm" in before
    assert read_status(run_dir).state == "done"
    steps = records(run_dir)
    assert [r["step"] for r in steps] == list(range(1, changes["training__steps"] + 1))

    # Bitwise equal to a run with the remaining ranks from this step, and within 1e-5 of a run with
    # all ranks.
    saved = int(after.partition("step-")[2].split()[0])
    shutil.copytree(run_dir / f"checkpoints/step-{saved}", two_ranks / f"checkpoints/step-{saved}")
    codes, output = train_server.run(
        arguments(two_ranks, real_data, **changes), tmp_path / "few-logs", 2
    )
    assert codes == [0, 0] and "resumed from" in output, output
    assert [r["loss"] for r in records(two_ranks)] == [r["loss"] for r in steps[saved:]]
    assert [
        n for n, v in weights(two_ranks).items() if not torch.equal(v, weights(run_dir)[n])
    ] == []
    undisturbed_run = tmp_path / "undisturbed"
    codes, output = train_server.run(
        arguments(undisturbed_run, real_data, **changes), tmp_path / "undisturbed-logs", 3
    )
    assert codes == [0] * 3, output
    losses = [r["loss"] for r in steps]
    assert losses == pytest.approx([r["loss"] for r in records(undisturbed_run)], rel=1e-5)
    # Control: a missing or repeated step would differ.
    assert losses[saved:-1] != pytest.approx(losses[saved + 1 :], rel=1e-3)
