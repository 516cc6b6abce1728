"""scripts/launch/slurm.sh on a local Slurm with one controller and two nodes.

Skipped if Slurm is not installed (Debian: slurmd, slurmctld, slurm-client, munge), or without root.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ports import free_port
from tiny_recipe import ROOT, arguments
from undisturbed_run import COMMON, STEPS, assert_same_end, wait_for_step

from torchmm.training.shutdown import read_status

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
        reason="needs Slurm and munge (Debian: slurmd slurmctld slurm-client munge), and root",
    ),
]
CONFIG = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/control.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobRequeue=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start Slurm with two local nodes, and return the environment of its commands."""
    root = tmp_path_factory.mktemp("slurm")
    root.chmod(0o755)
    key, munge = root / "munge.key", root / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = {name: free_port() for name in ("control", "first", "second")}
    config = root / "slurm.conf"
    config.write_text(
        CONFIG.format(host=socket.gethostname().split(".")[0], root=root, munge=munge, **ports)
    )
    (root / "state").mkdir()
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
         f"--pid-file={root}/munge.pid", f"--seed-file={root}/munge.seed"],
        ["slurmctld", "-D", "-f", str(config)],
        *(["slurmd", "-D", "-f", str(config), "-N", node] for node in ("n1", "n2")),
    ]  # fmt: skip
    with ExitStack() as stack:
        for number, command in enumerate(daemons):
            log = stack.enter_context((root / f"{command[0]}{number}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGKILL)
            time.sleep(0.5)
        yield {**os.environ, "SLURM_CONF": str(config)}


def call(environment: dict[str, str], *command: object) -> str:
    """Run a command and return its output."""
    words = list(map(str, command))
    process = subprocess.run(
        words,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()


def test_preempted_slurm_job_is_requeued_exactly(slurm, tmp_path, real_data, undisturbed):
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data, **{**COMMON, "checkpoint__interval": STEPS})
    environment = {**slurm, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "job.log"
    sizes = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
    script = ROOT / "scripts" / "launch" / "slurm.sh"
    job = call(environment, "sbatch", "--parsable", *sizes, f"--output={log}", script, *command)
    wait_for_step(run_dir, 4)
    call(environment, "scancel", "--signal=USR1", job)
    _wait_until(lambda: "queued again" in log.read_text(), log)
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("preempted", 75) and status.step < STEPS
    # Slurm delays requeued jobs by two minutes. Start after 5 s: nodes reject credentials of the
    # second in which they revoked those of the first attempt.
    _wait_until(lambda: "PENDING" in call(environment, "squeue", "-h", "-j", job, "-o", "%T"), log)
    call(environment, "scontrol", "update", f"JobId={job}", "StartTime=now+5")
    _wait_until(lambda: read_status(run_dir).state == "done", log, 200)
    # Wait for Slurm as well: processes of running jobs would outlive its daemons.
    _wait_until(lambda: "COMPLETED" in call(environment, "scontrol", "show", "job", job), log)
    assert "Restarts=1" in call(environment, "scontrol", "show", "job", job)
    assert_same_end(run_dir, undisturbed)


def _wait_until(condition, log: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
