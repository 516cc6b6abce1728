"""Saves, is killed, looks what is left; again and again. Prints one JSON line per kill.

usage: kill_saver.py RUN_DIR KILLS

Importing torch takes seconds and a save milliseconds, so this process imports once and forks two
ranks per attempt. It starts no threads itself: a forked child would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchmm.common.errors import PeerError
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager

RANKS = 2
WIDTH = 1024  # 4 MiB per tensor
logger = logging.getLogger("kill_saver")


def fork(function: Callable[[], None]) -> int:
    """Process id of a child that runs `function` and exits."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def build(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer whose every value follows from `step`."""
    torch.manual_seed(step)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.0), fused=True)
    model.weight.grad = model.weight.detach() * step
    optimizer.step()
    return model, optimizer


def save(run_dir: Path, step: int, rank: int, store: Path, ready: int, asynchronous: bool) -> None:
    """One rank: resumes, says that it is ready, and saves `step`."""
    shared = dist.FileStore(str(store), RANKS)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    model, optimizer = build(step)
    config = CheckpointConfig(async_save=asynchronous)
    checkpoints = CheckpointManager(config, run_dir, logger, {}, "recipe")
    dist.barrier()
    os.write(ready, b"x")
    with contextlib.suppress(PeerError, RuntimeError):  # the other rank was killed first
        checkpoints.save(step, model, optimizer, {"step": step})
        checkpoints.wait()
        os.write(ready, b"y")
        dist.barrier()


def attempt(run_dir: Path, step: int, delay_s: float | None, random_: random.Random) -> float:
    """Lets two ranks save, kills one or both after `delay_s`; returns how long they saved."""
    read, write = os.pipe()
    store = run_dir / f"store-{step}"
    asynchronous = bool(step % 2)
    children = [
        fork(lambda r=rank: save(run_dir, step, r, store, write, asynchronous))
        for rank in range(RANKS)
    ]
    for _ in range(RANKS):
        assert os.read(read, 1) == b"x"
    start = time.monotonic()
    if delay_s is None:
        for _ in range(RANKS):
            assert os.read(read, 1) == b"y"
    else:
        time.sleep(delay_s)
        first = random_.randrange(RANKS)
        os.kill(children[first], signal.SIGKILL)
        # In half of the attempts the other rank continues for a moment.
        time.sleep(random_.choice([0.0, 0.05]))
        os.kill(children[1 - first], signal.SIGKILL)
    saved_s = time.monotonic() - start
    for child in children:
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    store.unlink(missing_ok=True)
    return saved_s


def report(run_dir: Path, step: int) -> None:
    """Resumes in a fresh process and compares every bit with what that step must hold."""
    torn = len(list((run_dir / "checkpoints").glob("*.tmp-*")))
    model, optimizer = build(10_000)
    checkpoints = CheckpointManager(CheckpointConfig(), run_dir, logger, {}, "recipe")
    restored = checkpoints.resume(model, optimizer)
    assert restored is not None and restored.state == {"step": restored.step}
    expected, expected_optimizer = build(restored.step)
    found, wanted = optimizer.state[model.weight], expected_optimizer.state[expected.weight]
    equal = torch.equal(model.weight, expected.weight) and all(
        torch.equal(found[key], wanted[key]) for key in wanted
    )
    outcome = {"killed_at": step, "resumed": restored.step, "equal": equal, "torn": torn}
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()


def main() -> None:
    """One undisturbed save to learn how long it takes, then the kills."""
    run_dir, kills = Path(sys.argv[1]), int(sys.argv[2])
    run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    build(0)  # the first optimizer step imports much; children inherit that
    random_ = random.Random(0)
    attempt(run_dir, 1, None, random_)
    usual_s = attempt(run_dir, 2, None, random_)
    for step in range(3, 3 + kills):
        attempt(run_dir, step, random_.uniform(0, 1.1 * usual_s), random_)
        os.waitpid(fork(lambda s=step: report(run_dir, s)), 0)


if __name__ == "__main__":
    main()
