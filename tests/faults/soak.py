"""Measure whether memory, files or threads grow in a long run.

    python tests/faults/soak.py --steps 2000 --json soak.json

The run has data workers, a background planner, checkpoints and uploads. The program measures all
its processes, including the launcher, every few seconds. Memory is the proportional set size, in
which shared pages are divided among processes. This is not a test, because it takes long and has no
limit for the growth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EVERY_S = 5.0
PERIODS = 10


class Use(NamedTuple):
    """Resource use of all processes of a run."""

    step: int
    processes: int
    threads: int
    files: int
    memory_mb: float


def command(steps: int, directory: Path) -> list[str]:
    """Return the command of a run with two ranks, small steps and many checkpoints."""
    overrides = {
        "training.steps": steps,
        "training.global_batch_size": 4,
        "data.workers": 1,
        "checkpoint.interval": 50,
        "checkpoint.remote_dir": directory / "store",
        "validation.interval": 100,
        "output_dir": directory / "outputs",
    }
    options = [option for key, value in overrides.items() for option in (f"--{key}", str(value))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    config = ["--config", "recipes/quickstart_searched.toml", "--name", "soak"]
    return [*launch, "--standalone", "train.py", *config, *options]


def descendants(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    pids = [root]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def use_of(pids: list[int], step: int) -> Use:
    """Return the current resource use of processes, without those that exit during the call."""
    threads = files = memory_kb = count = 0
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
            process_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            threads += sum(1 for _ in (folder / "task").iterdir())
            files += sum(1 for _ in (folder / "fd").iterdir())
        except (OSError, StopIteration):
            continue
        memory_kb += process_kb
        count += 1
    return Use(step, count, threads, files, memory_kb / 1e3)


def last_step(metrics: Path) -> int:
    """Return the last step in metrics.jsonl, or 0."""
    try:
        lines = metrics.read_text().splitlines()
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def main() -> int:
    """Run the recipe, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        metrics = directory / "outputs/soak/metrics.jsonl"
        with (directory / "log").open("w") as log:
            run = subprocess.Popen(
                command(arguments.steps, directory), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
            samples: list[Use] = []
            while run.poll() is None:
                time.sleep(EVERY_S)
                step = last_step(metrics)
                if 0 < step < arguments.steps:
                    samples.append(use_of(descendants(run.pid), step))
        if run.returncode:
            print((directory / "log").read_text()[-4000:], file=sys.stderr)
            return run.returncode
    print(f"{'steps':>14} {'processes':>9} {'threads':>8} {'files':>6} {'memory MB':>10}")
    size = arguments.steps / PERIODS
    for period in range(PERIODS):
        in_period = [use for use in samples if period * size < use.step <= (period + 1) * size]
        if in_period:
            means = [mean(column) for column in list(zip(*in_period, strict=True))[1:]]
            print(
                "{:>14} {:>9.1f} {:>8.1f} {:>6.1f} {:>10.1f}".format(
                    f"to {in_period[-1].step}", *means
                )
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([use._asdict() for use in samples]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
