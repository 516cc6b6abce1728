"""Encoder, LLM and generator on ranks of their own: whichever of them is lost, in whatever way, is
named, and the run goes on from its checkpoint to the bits of one that nothing happened to.

By hand: the same command again. By restart: torchrun, with its own rendezvous. Where a node with a
replica of the encoder is lost for good, torchrun starts what is left on the other nodes, and the
encoder gets the ranks that the others leave.
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
"""By rank."""
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
    """Every picture is read from one source and drawn from the other."""
    path = f'path="{data}/tuxpaint_stamps/train"'
    sources = f'--data.sources=[{{{path}}},{{{path},target_image_column="image"}}]'
    return [*arguments(run_dir, data, **CHANGES), sources]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, real_data, train_server) -> Path:
    """The run directory of a run that nothing happens to."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    logs = run_dir.parent / "logs"
    codes, output = train_server.run(command(run_dir, real_data), logs, len(UNITS))
    assert codes == [0] * len(UNITS), output
    return run_dir


def assert_same_end(run_dir: Path, whole: Path) -> None:
    """No step missing or doubled, the same losses, every bit of the last checkpoint the same."""
    assert read_status(run_dir).state == "done"
    found, expected = records(run_dir), records(whole)
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    for name in ("loss", "loss_text", "loss_image"):
        assert [r[name] for r in found] == [r[name] for r in expected]
    ours, theirs = weights(run_dir), weights(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_lost_and_the_same_command_goes_on(
    tmp_path, real_data, train_server, whole, unit, fault
):
    run_dir, lost = tmp_path / "run", UNITS.index(unit)
    given, ranks = command(run_dir, real_data), len(UNITS)
    with Job(train_server, HANGING, given, ranks, tmp_path / "logs") as job:
        wait_for_step(run_dir, 4)  # saved: step 3
        since = time.monotonic()
        job.signal(lost, FAULTS[fault])
        others = [rank for rank in range(ranks) if rank != lost]
        for rank in others:
            left_s = since + 4 * PATIENCE_S - time.monotonic()
            assert job.processes[rank].wait(left_s) == PeerError.exit_code, job.output(rank)
        said = "".join(map(job.output, others))
        assert re.search(rf"rank {lost} \(process {job.processes[lost].pid}", said), said
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", PeerError.exit_code)
    assert len(records(run_dir)) < STEPS
    codes, output = train_server.run(given, tmp_path / "again", ranks)
    assert codes == [0] * ranks and "resumed from" in output, output
    assert_same_end(run_dir, whole)


def test_a_unit_that_is_stopped_in_a_save_is_missed_soon(tmp_path, real_data, train_server):
    """Ranks wait half an hour for the slowest disk, but not for one without a heartbeat."""
    run_dir = tmp_path / "run"
    given = [*command(run_dir, real_data), "--checkpoint.interval=1"]
    with Job(train_server, HANGING, given, len(UNITS), tmp_path / "logs") as job:
        wait_for_step(run_dir, 2)
        job.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            assert job.processes[rank].wait(90) == PeerError.exit_code, job.output(rank)
        assert f"rank 1 (process {job.processes[1].pid}" in job.output(0)


@pytest.mark.parametrize(
    ("unit", "fault"), [("vision", "killed"), ("llm", "hung"), ("generator", "stopped")]
)
def test_torchrun_restarts_all_units(tmp_path, real_data, whole, unit, fault):
    run_dir, lost = tmp_path / "run", UNITS.index(unit)
    given = command(run_dir, real_data)
    helpers = Path(__file__).parents[1] / "helpers"
    paths = os.pathsep.join(filter(None, [str(helpers), os.environ.get("PYTHONPATH")]))
    job = TorchrunJob(HANGING, given, len(UNITS), tmp_path / "logs", restarts=1, PYTHONPATH=paths)
    with job:
        wait_for_step(run_dir, 4)
        os.kill(process_of(run_dir, lost), FAULTS[fault])
        assert job.wait(300) == [0], job.output()
        assert "resumed from" in job.output()
    assert_same_end(run_dir, whole)


OPEN = {
    "parallel__placement": "disaggregated",
    "parallel__shard": 1,
    "parallel__vision__replicate": -1,
    "parallel__timeout_s": PATIENCE_S,
    "training__steps": 24,
    "training__global_batch_size": 4,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest": 24,
}
"""The encoder has the ranks that the LLM leaves."""
SIZES: dict[str, dict[str, object]] = {
    "remaining ranks": {},
    "chosen": {"parallel__auto_sizes": "true"},
}


def node(number: int, ranks: int, logs: Path, options: list[str], given: list[str]) -> TorchrunJob:
    """A launcher as on a machine of its own; that of number 0 has the rendezvous."""
    quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    own = [*options, f"--rdzv-conf=is_host={int(number == 0)},{quick}"]
    stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return TorchrunJob(TRAIN, given, ranks, logs / f"node{number}", 2, own, **stores)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_left_goes_on_when_a_node_of_the_encoder_is_lost(
    sizes, tmp_path, real_data, train_server
):
    """The encoder gets what the LLM leaves, or all sizes are chosen anew."""
    changes = OPEN | SIZES[sizes]
    run_dir, few = tmp_path / "run", tmp_path / "few"
    given = arguments(run_dir, real_data, **changes)
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=replicas", "--nnodes=1:2"]
    # Ranks follow the processes' numbers: that of the node which is to be lost is the first.
    with (
        node(1, 1, tmp_path, options, given) as lost,
        node(0, 2, tmp_path, options, given) as left,
    ):
        wait_for_step(run_dir, 4, timeout_s=400)
        launcher = lost.processes[0].pid
        rank = next(r for r in range(3) if parent_of(process_of(run_dir, r)) == launcher)
        assert sizes == "chosen" or rank < 2, "of the LLM"
        for process in (launcher, process_of(run_dir, rank)):
            os.kill(process, signal.SIGKILL)
        assert left.wait(400) == [0], left.output()
    before, _, after = left.output().partition("resumed from")
    first = "3 = [12] for vision" if sizes == "chosen" else r"3 = 2 for vision \+ 1 for llm"
    assert re.search(first, lost.output())
    assert "2 = 1 for vision + 1 for llm" in before
    assert read_status(run_dir).state == "done"
    found = records(run_dir)
    assert [r["step"] for r in found] == list(range(1, changes["training__steps"] + 1))

    # The sizes that were left, from that step: every bit. All sizes, from the first: to 1e-5.
    saved = int(after.partition("step-")[2].split()[0])
    shutil.copytree(run_dir / f"checkpoints/step-{saved}", few / f"checkpoints/step-{saved}")
    codes, output = train_server.run(arguments(few, real_data, **changes), tmp_path / "few-logs", 2)
    assert codes == [0, 0] and "resumed from" in output, output
    assert [r["loss"] for r in records(few)] == [r["loss"] for r in found[saved:]]
    assert [n for n, v in weights(few).items() if not torch.equal(v, weights(run_dir)[n])] == []
    whole = tmp_path / "whole"
    codes, output = train_server.run(
        arguments(whole, real_data, **changes), tmp_path / "whole-logs", 3
    )
    assert codes == [0] * 3, output
    losses = [r["loss"] for r in found]
    assert losses == pytest.approx([r["loss"] for r in records(whole)], rel=1e-5)
    # The control: a step left out or done twice would show.
    assert losses[saved:-1] != pytest.approx(losses[saved + 1 :], rel=1e-3)
