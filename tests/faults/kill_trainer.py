"""Trains with copies of checkpoints, is killed, goes on; again and again, on changing machines.

usage: kill_trainer.py DIRECTORY KILLS [SEED]

Two ranks train a small model with dropout; every step is saved in the background and copied to a
store. They are killed at random moments, one a little before the other or both. Then they start
again where they were, or on a machine that has nothing but the store. Each start says what it
resumed; every bit of it must be that of the same step of a run that nothing happened to, and no
start may find less than an earlier one had. In between, everything the store has committed is
fetched and compared. Prints one JSON line per kill, and a last one for the end.

Importing torch takes seconds and a step milliseconds, so this process imports once and forks the
ranks. It starts no threads itself: a forked child would wait for them for ever.
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
from torchmm.extensions.remote.checkpoints.remote import RemoteCheckpoints
from torchmm.parallel.health.peers import is_peer_trouble
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.checkpoint.store import step_of_upload_folder

RANKS = 2
WIDTH = 192
MOST_STEPS, MOST_WAIT_S = 5, 0.2
"""How long a run is left alone."""
OBJECT_S = 0.03
STEPS_PER_KILL = 12
"""More than it can do in that time."""
TAIL_STEPS = 3
START_S = 60.0
logger = logging.getLogger("kill_trainer")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model with dropout, so that resuming exactly needs the random state."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 8))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One update."""
    model(torch.full((2, WIDTH), 1.0 / step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and moments, on every rank."""
    values = [p.detach() for p in model.parameters()]
    values += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    full = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in full)).hexdigest()


def meet(directory: Path, rank: int) -> None:
    """Joins the other rank."""
    store = dist.FileStore(str(directory / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def reference(directory: Path, rank: int, pipe: int, steps: int) -> None:
    """The digests of an undisturbed run, step by step."""
    meet(directory, rank)
    model, optimizer = build()
    seed_everything(0, rank)
    for step in range(1, steps + 1):
        train_step(model, optimizer, step)
        line = f"{step} {digest(model, optimizer)}\n"
        if rank == 0:
            os.write(pipe, line.encode())


def train(directory: Path, rank: int, pipe: int, machine: str, last: int) -> None:
    """Resumes, says what, and trains to step `last`, saving and copying every step."""
    meet(directory, rank)
    slow_down_the_store()
    model, optimizer = build()
    config = CheckpointConfig(remote_dir=str(directory / "store"), keep_latest=3)
    run_dir = directory / machine / "run"
    with ignoring_lost_peers():
        with CheckpointManager(config, run_dir, logger, {"shard": RANKS}, "recipe") as manager:
            seed_everything(0, rank)
            restored = manager.resume(model, optimizer)
            step = restored.step if restored else 0
            found = digest(model, optimizer) if restored else "nothing"
            if restored is not None:
                restore_rng(restored.rng)
            if rank == 0:
                os.write(pipe, f"{step} {found}\n".encode())
            while step < last:
                step += 1
                train_step(model, optimizer, step)
                manager.save(step, model, optimizer, {"step": step})
                if rank == 0:
                    os.write(pipe, f"{step} saves\n".encode())
        found = digest(model, optimizer)
        if rank == 0:
            os.write(pipe, f"{step} {found}\n".encode())


def slow_down_the_store() -> None:
    """To as many milliseconds per object as one over a network takes."""
    put = RemoteCheckpoints.put

    def slowly(remote: RemoteCheckpoints, folder: str, file: Path) -> int:
        time.sleep(OBJECT_S)
        return put(remote, folder, file)

    RemoteCheckpoints.put = slowly


@contextlib.contextmanager
def ignoring_lost_peers() -> Iterator[None]:
    """The other rank is killed a little earlier."""
    try:
        yield
    except (PeerError, RuntimeError) as error:
        if not isinstance(error, PeerError) and not is_peer_trouble(error):
            raise


def read_line(pipe: int, timeout_s: float = START_S) -> tuple[int, str]:
    """Step and digest that a rank has told."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([pipe], [], [], timeout_s)[0], "no word from the ranks"
        byte = os.read(pipe, 1)
        assert byte, "the ranks ended without a word"
        line += byte
    step, found = line.decode().split()
    return int(step), found


def start(function: Callable[..., None], directory: Path, *args: object) -> tuple[list[int], int]:
    """Processes of the ranks, and where they write."""
    (directory / "meeting").unlink(missing_ok=True)
    read, write = os.pipe()
    children = [fork(lambda r=rank: function(directory, r, write, *args)) for rank in range(RANKS)]
    os.close(write)
    return children, read


def end(children: list[int], pipe: int) -> None:
    """Waits for processes that end."""
    for child in children:
        os.waitpid(child, 0)
    os.close(pipe)


def examine(directory: Path, expected: dict[int, str], pipe: int) -> None:
    """Fetches every committed copy in a process that has nothing, and compares all bits.

    Tells the newest step.
    """
    remote = RemoteCheckpoints(str(directory / "store" / "run"), 5.0, logger)
    folders = remote.committed()
    for number, folder in enumerate(folders):
        place = directory / "examined" / f"{os.getpid()}-{number}" / "run"
        model, optimizer = plain()
        config = CheckpointConfig(resume="none")
        with CheckpointManager(config, place, logger, {}, "recipe") as manager:
            manager._remote = remote
            path, problems = manager._fetch(remote, folder)
            assert not problems, problems
            restored = manager.load(path, model, optimizer)
        assert digest(model, optimizer) == expected[restored.step], f"{folder} has other bits"
    newest = step_of_upload_folder(folders[0]) if folders else 0
    os.write(pipe, f"{newest} whole\n".encode())


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model in one process, with other values."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def in_child(function: Callable[..., None], *args: object) -> tuple[int, str]:
    """What a forked process tells."""
    read, write = os.pipe()
    child = fork(lambda: function(*args, write))
    os.close(write)
    try:
        return read_line(read)
    finally:
        assert os.waitpid(child, 0)[1] == 0
        os.close(read)


def kill(children: list[int], random_: random.Random) -> None:
    """Both, one of them perhaps a moment earlier."""
    first = random_.randrange(RANKS)
    os.kill(children[first], signal.SIGKILL)
    time.sleep(random_.choice([0.0, 0.0, 0.05]))
    os.kill(children[1 - first], signal.SIGKILL)


def main() -> None:
    """The undisturbed run, the kills, and the last start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="for runs and copies; made")
    parser.add_argument("kills", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    directory, kills = arguments.directory, arguments.kills
    random_ = random.Random(arguments.seed)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    warm_up()
    steps = STEPS_PER_KILL * kills + TAIL_STEPS
    children, pipe = start(reference, directory, steps)
    expected = dict(read_line(pipe) for _ in range(steps))
    end(children, pipe)
    machine, machines, newest_here, newest_copy, reached = "machine0", 1, 0, 0, 0
    for number in range(kills):
        children, pipe = start(train, directory, machine, STEPS_PER_KILL * kills)
        resumed, found = read_line(pipe)
        assert resumed == 0 or found == expected[resumed], f"kill {number}: other bits resumed"
        assert resumed >= newest_here, f"kill {number}: {resumed} < {newest_here}, a step was lost"
        for _ in range(random_.randrange(MOST_STEPS)):
            read_line(pipe)
        time.sleep(random_.uniform(0, MOST_WAIT_S))
        kill(children, random_)
        end(children, pipe)
        torn_here = len(list((directory / machine / "run/checkpoints").glob("*.tmp-*")))
        folders = [path for path in (directory / "store/run").glob("step-*") if any(path.iterdir())]
        torn_there = sum(not (path / "MANIFEST.json").exists() for path in folders)
        if number % 5 == 0:
            copied, _ = in_child(examine, directory, expected)
            assert copied >= newest_copy, f"kill {number}: copy of {newest_copy} was lost"
            newest_copy = copied
        names = (directory / machine / "run/checkpoints").glob("step-*")
        here = [int(p.name[5:]) for p in names if p.name[5:].isdigit()]
        there = [step_of_upload_folder(p.name) for p in folders if (p / "MANIFEST.json").exists()]
        moves = random_.random() < 0.3
        reached = max(reached, *here, *there, 0)
        newest_here = max(there, default=0) if moves else max([*here, *there], default=0)
        tell(kill=number, resumed=resumed, torn_here=torn_here, torn_there=torn_there, moves=moves)
        if moves:
            machine, machines = f"machine{machines}", machines + 1
    # The last start trains on, on a machine that has nothing, and is not killed.
    last = newest_here + TAIL_STEPS
    children, pipe = start(train, directory, f"machine{machines}", last)
    resumed, found = read_line(pipe)
    assert resumed == 0 or found == expected[resumed]
    step, found = [read_line(pipe) for _ in range(last - resumed + 1)][-1]
    end(children, pipe)
    in_child(examine, directory, expected)
    tell(end=step, equal=found == expected[step], machines=machines + 1)


def tell(**what: object) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def warm_up() -> None:
    """The first optimizer step imports much; children inherit that."""
    model, optimizer = plain()
    train_step(model, optimizer, 1)


if __name__ == "__main__":
    main()
