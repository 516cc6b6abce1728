"""Kill saves repeatedly and check the remaining files. Prints one JSON line per kill.

usage: kill_saver.py RUN_DIR KILLS

Importing torch takes seconds and a save takes milliseconds. Therefore this process imports torch
once and forks two ranks per attempt. It starts no threads, because a forked child would wait for
them forever.
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
    """Run `function` in a child process that exits afterwards, and return its process id."""
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
    """Build a model and an optimizer whose values depend only on `step`."""
    torch.manual_seed(step)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.0), fused=True)
    model.weight.grad = model.weight.detach() * step
    optimizer.step()
    return model, optimizer


def save(
    run_dir: Path, step: int, rank: int, store: Path, ready_pipe: int, asynchronous: bool
) -> None:
    """Resume one rank, signal that it is ready, and save `step`."""
    shared = dist.FileStore(str(store), RANKS)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    model, optimizer = build(step)
    config = CheckpointConfig(async_save=asynchronous)
    checkpoints = CheckpointManager(config, run_dir, logger, {}, "recipe")
    dist.barrier()
    os.write(ready_pipe, b"x")
    with contextlib.suppress(PeerError, RuntimeError):  # the other rank was killed first
        checkpoints.save(step, model, optimizer, {"step": step})
        checkpoints.wait()
        os.write(ready_pipe, b"y")
        dist.barrier()


def attempt(run_dir: Path, step: int, delay_s: float | None, generator: random.Random) -> float:
    """Save on two ranks, kill them after `delay_s`, and return the duration of the save."""
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
        first = generator.randrange(RANKS)
        os.kill(children[first], signal.SIGKILL)
        # In half of the attempts the other rank continues for a moment.
        time.sleep(generator.choice([0.0, 0.05]))
        os.kill(children[1 - first], signal.SIGKILL)
    saved_s = time.monotonic() - start
    for child in children:
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    store.unlink(missing_ok=True)
    return saved_s


def report(run_dir: Path, step: int) -> None:
    """Resume in a new process and compare all values bitwise with those of the step."""
    torn = len(list((run_dir / "checkpoints").glob("*.tmp-*")))
    model, optimizer = build(10_000)
    checkpoints = CheckpointManager(CheckpointConfig(), run_dir, logger, {}, "recipe")
    restored = checkpoints.resume(model, optimizer)
    assert restored is not None and restored.state == {"step": restored.step}
    expected, expected_optimizer = build(restored.step)
    actual, optimizer_state = (
        optimizer.state[model.weight],
        expected_optimizer.state[expected.weight],
    )
    equal = torch.equal(model.weight, expected.weight) and all(
        torch.equal(actual[key], optimizer_state[key]) for key in optimizer_state
    )
    outcome = {"killed_at": step, "resumed": restored.step, "equal": equal, "torn": torn}
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure the duration of an undisturbed save, then kill saves."""
    run_dir, kills = Path(sys.argv[1]), int(sys.argv[2])
    run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    build(0)  # the first optimizer step imports modules that children inherit
    generator = random.Random(0)
    attempt(run_dir, 1, None, generator)
    usual_s = attempt(run_dir, 2, None, generator)
    for step in range(3, 3 + kills):
        attempt(run_dir, step, generator.uniform(0, 1.1 * usual_s), generator)
        os.waitpid(fork(lambda s=step: report(run_dir, s)), 0)


if __name__ == "__main__":
    main()
