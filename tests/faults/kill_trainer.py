"""Kill training with uploaded checkpoints repeatedly, on changing machines.

usage: kill_trainer.py DIRECTORY KILLS [SEED]

Two ranks train a small model with dropout. Every step is saved asynchronously and uploaded to an
object store. The ranks are killed at random times, together or one after a delay. They then restart
on the same machine, or on a machine that has only the object store. Each start prints the resumed
step. Its values must be bitwise equal to those of the same step in an undisturbed run, and no start
may find an older step than a previous start had. Between starts, all committed uploads are fetched
and compared. The program prints one JSON line per kill and a final line.

Importing torch takes seconds and a step takes milliseconds. Therefore this process imports torch
once and forks the ranks. It starts no threads, because a forked child would wait for them forever.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from kill_saver import fork
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchmm.common.errors import PeerError
from torchmm.common.rng import restore_rng, seed_everything
from torchmm.extensions.remote.checkpoints.checkpoint_store import StoredCheckpoints
from torchmm.extensions.remote.checkpoints.remote_checkpoints import RemoteCheckpoints
from torchmm.parallel.health.peers import is_peer_failure
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.checkpoint.store import step_of_upload_folder

RANKS = 2
WIDTH = 192
MAX_STEPS, MAX_WAIT_S = 5, 0.2
"""Maximum number of steps, and of additional seconds, before a kill."""
OBJECT_S = 0.03
STEPS_PER_KILL = 12
"""More steps than a run can finish before a kill."""
TAIL_STEPS = 3
START_S = 60.0
logger = logging.getLogger("kill_trainer")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a sharded model with dropout, so that exact resuming requires the random state."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 8))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run one update."""
    model(torch.full((2, WIDTH), 1.0 / step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 hash of all parameters and moments, on every rank."""
    values = [p.detach() for p in model.parameters()]
    values += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    full = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in full)).hexdigest()


def join_group(directory: Path, rank: int) -> None:
    """Create the process group of both ranks."""
    store = dist.FileStore(str(directory / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def reference(directory: Path, rank: int, pipe: int, steps: int) -> None:
    """Print the hash of each step of an undisturbed run."""
    join_group(directory, rank)
    model, optimizer = build()
    seed_everything(0, rank)
    for step in range(1, steps + 1):
        train_step(model, optimizer, step)
        line = f"{step} {digest(model, optimizer)}\n"
        if rank == 0:
            os.write(pipe, line.encode())


def train(directory: Path, rank: int, pipe: int, machine: str, last: int) -> None:
    """Resume, print the resumed step, and train to step `last` with saves and uploads."""
    join_group(directory, rank)
    slow_down_uploads()
    model, optimizer = build()
    config = CheckpointConfig(remote_dir=str(directory / "store"), keep_latest=3)
    run_dir = directory / machine / "run"
    with ignore_lost_peers():
        with CheckpointManager(config, run_dir, logger, {"shard": RANKS}, "recipe") as manager:
            seed_everything(0, rank)
            restored = manager.resume(model, optimizer)
            step = restored.step if restored else 0
            value = digest(model, optimizer) if restored else "nothing"
            if restored is not None:
                restore_rng(restored.rng)
            if rank == 0:
                os.write(pipe, f"{step} {value}\n".encode())
            while step < last:
                step += 1
                train_step(model, optimizer, step)
                manager.save(step, model, optimizer, {"step": step})
                if rank == 0:
                    os.write(pipe, f"{step} saves\n".encode())
        value = digest(model, optimizer)
        if rank == 0:
            os.write(pipe, f"{step} {value}\n".encode())


def slow_down_uploads() -> None:
    """Delay each upload by the latency of a network object store."""
    put = RemoteCheckpoints.put

    def slowly(remote: RemoteCheckpoints, folder: str, file: Path) -> int:
        time.sleep(OBJECT_S)
        return put(remote, folder, file)

    RemoteCheckpoints.put = slowly


@contextlib.contextmanager
def ignore_lost_peers() -> Iterator[None]:
    """Ignore the error if the other rank is killed first."""
    try:
        yield
    except (PeerError, RuntimeError) as error:
        if not isinstance(error, PeerError) and not is_peer_failure(error):
            raise


def read_line(pipe: int, timeout_s: float = START_S) -> tuple[int, str]:
    """Return a step and a hash that a rank has printed."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([pipe], [], [], timeout_s)[0], "no output of the ranks"
        byte = os.read(pipe, 1)
        assert byte, "the ranks exited without output"
        line += byte
    step, value = line.decode().split()
    return int(step), value


def start(function: Callable[..., None], directory: Path, *args: object) -> tuple[list[int], int]:
    """Start the ranks and return their process ids and the pipe of their output."""
    (directory / "meeting").unlink(missing_ok=True)
    read, write = os.pipe()
    children = [fork(lambda r=rank: function(directory, r, write, *args)) for rank in range(RANKS)]
    os.close(write)
    return children, read


def wait_for_exit(children: list[int], pipe: int) -> None:
    """Wait for processes and close their pipe."""
    for child in children:
        os.waitpid(child, 0)
    os.close(pipe)


def examine(directory: Path, expected: dict[int, str], pipe: int) -> None:
    """Fetch every committed upload in a new process, and compare all values bitwise.

    Prints the newest step.
    """
    remote = StoredCheckpoints(str(directory / "store" / "run"), DataConfig(), logger)
    folders = remote.committed()
    for number, folder in enumerate(folders):
        run_dir = directory / "examined" / f"{os.getpid()}-{number}" / "run"
        model, optimizer = build_single_process()
        config = CheckpointConfig(resume="none")
        with CheckpointManager(config, run_dir, logger, {}, "recipe") as manager:
            manager._remote = remote
            path, problems = manager._fetch(remote, folder)
            assert not problems, problems
            restored = manager.load(path, model, optimizer)
        assert digest(model, optimizer) == expected[restored.step], f"{folder} has different values"
    newest = step_of_upload_folder(folders[0]) if folders else 0
    os.write(pipe, f"{newest} whole\n".encode())


def build_single_process() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same model in one process with different values."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def run_in_child(function: Callable[..., None], *args: object) -> tuple[int, str]:
    """Run a function in a forked process and return the line that it prints."""
    read, write = os.pipe()
    child = fork(lambda: function(*args, write))
    os.close(write)
    try:
        return read_line(read)
    finally:
        assert os.waitpid(child, 0)[1] == 0
        os.close(read)


def kill(children: list[int], generator: random.Random) -> None:
    """Kill both ranks, possibly one after a delay."""
    first = generator.randrange(RANKS)
    os.kill(children[first], signal.SIGKILL)
    time.sleep(generator.choice([0.0, 0.0, 0.05]))
    os.kill(children[1 - first], signal.SIGKILL)


def main() -> None:
    """Run the reference, the kills and the final start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "directory", type=Path, help="directory of runs and uploads, which is created"
    )
    parser.add_argument("kills", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    directory, kills = arguments.directory, arguments.kills
    generator = random.Random(arguments.seed)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    warm_up()
    steps = STEPS_PER_KILL * kills + TAIL_STEPS
    children, pipe = start(reference, directory, steps)
    expected = dict(read_line(pipe) for _ in range(steps))
    wait_for_exit(children, pipe)
    machine, machines, newest_here, newest_copy, newest_step = "machine0", 1, 0, 0, 0
    for number in range(kills):
        children, pipe = start(train, directory, machine, STEPS_PER_KILL * kills)
        resumed, value = read_line(pipe)
        assert resumed == 0 or value == expected[resumed], (
            f"kill {number}: resumed with different values"
        )
        assert resumed >= newest_here, f"kill {number}: {resumed} < {newest_here}, a step was lost"
        for _ in range(generator.randrange(MAX_STEPS)):
            read_line(pipe)
        time.sleep(generator.uniform(0, MAX_WAIT_S))
        kill(children, generator)
        wait_for_exit(children, pipe)
        incomplete_saves = len(list((directory / machine / "run/checkpoints").glob("*.tmp-*")))
        folders = [path for path in (directory / "store/run").glob("step-*") if any(path.iterdir())]
        incomplete_uploads = sum(not (path / "MANIFEST.json").exists() for path in folders)
        if number % 5 == 0:
            copied, _ = run_in_child(examine, directory, expected)
            assert copied >= newest_copy, f"kill {number}: upload of {newest_copy} was lost"
            newest_copy = copied
        names = (directory / machine / "run/checkpoints").glob("step-*")
        local_steps = [int(p.name[5:]) for p in names if p.name[5:].isdigit()]
        uploaded_steps = [
            step_of_upload_folder(p.name) for p in folders if (p / "MANIFEST.json").exists()
        ]
        moves = generator.random() < 0.3
        newest_step = max(newest_step, *local_steps, *uploaded_steps, 0)
        newest_here = (
            max(uploaded_steps, default=0)
            if moves
            else max([*local_steps, *uploaded_steps], default=0)
        )
        print_json(
            kill=number,
            resumed=resumed,
            torn_here=incomplete_saves,
            torn_there=incomplete_uploads,
            moves=moves,
        )
        if moves:
            machine, machines = f"machine{machines}", machines + 1
    # The last start is not killed. It trains on an empty machine.
    last = newest_here + TAIL_STEPS
    children, pipe = start(train, directory, f"machine{machines}", last)
    resumed, value = read_line(pipe)
    assert resumed == 0 or value == expected[resumed]
    step, value = [read_line(pipe) for _ in range(last - resumed + 1)][-1]
    wait_for_exit(children, pipe)
    run_in_child(examine, directory, expected)
    print_json(end=step, equal=value == expected[step], machines=machines + 1)


def print_json(**values: object) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def warm_up() -> None:
    """Run an optimizer step, whose imports the children inherit."""
    model, optimizer = build_single_process()
    train_step(model, optimizer, 1)


if __name__ == "__main__":
    main()
