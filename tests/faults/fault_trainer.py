"""Run a small training loop with all safety mechanisms, for fault injection.

usage: fault_trainer.py RUN_DIR STEPS [FAULT]

FAULT is KIND:RANK:STEP with KIND "nan" (loss), "hang" (sleeps), "stop" (SIGSTOP), "kill" (SIGKILL
to itself, on the first start only) or "raise".

Prints "step N" on every rank and "final HASH" at the end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchmm.common.errors import TorchmmError
from torchmm.common.rng import restore_rng, seed_everything
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.health.peers import HealthMonitor, check_finite
from torchmm.parallel.mesh import start_process_group
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.shutdown import Status, StopSignal, write_status

TIMEOUT_S = int(os.environ.get("TIMEOUT_S", "10"))


def print_line(*values: object) -> None:
    """Print a line that tests wait for."""
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a sharded model with dropout, so that exact resuming requires the random state."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def digest(model: nn.Module) -> str:
    """Return the SHA-256 hash of all parameters."""
    full = [p.full_tensor().detach() for p in model.parameters()]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in full)).hexdigest()


class Trainer:
    """State of the training loop that the exit path needs."""

    def __init__(self, run_dir: Path, steps: int, fault: str) -> None:
        self.run_dir, self.steps = run_dir, steps
        self.rank = dist.get_rank()
        kind, rank, step = [*fault.split(":"), "-1", "-1"][:3]
        self.fault = kind if int(rank) == self.rank else ""
        self.fault_step = int(step)
        self.step = 0
        self.health = HealthMonitor(run_dir / "heartbeats", TIMEOUT_S, 1, 0.5)
        self.logger = logging.getLogger("fault_trainer")

    def run(self, stop: StopSignal) -> str:
        """Train and return the final state."""
        model, optimizer = build()
        config = CheckpointConfig(interval=1)
        with CheckpointManager(config, self.run_dir, self.logger, {"shard": 2}, "r") as checkpoints:
            seed_everything(0, self.rank)
            restored = checkpoints.resume(model, optimizer, restarted())
            if restored is not None:
                self.step = restored.step
                if restored.rng is not None:
                    restore_rng(restored.rng)
            state = "running"
            while state == "running":
                state = self.train(model, optimizer, checkpoints, stop)
        print_line("final", digest(model))
        return state

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoints: CheckpointManager,
        stop: StopSignal,
    ) -> str:
        """Train one step, save it, and return the state."""
        step = self.step + 1
        self.health.check(step)
        with self.health.phase(step, "forward"):
            self.do_fault(step)
            loss = model(torch.full((4, 8), float(step))).square().mean()
            loss.backward()
        if self.fault == "nan" and step == self.fault_step:
            loss = loss * float("nan")
        with self.health.phase(step, "agreement"):
            shared = [loss.item(), float(stop.received is not None), float(checkpoints.failed)]
            values_RN = gather_floats(shared)
        self.show_digest("before", model)
        check_finite(step, ("loss",), values_RN)
        optimizer.step()
        optimizer.zero_grad()
        self.show_digest("after", model)
        self.step = step
        if any(row[2] for row in values_RN):
            checkpoints.wait()  # raises the reason
        checkpoints.save(step, model, optimizer, {"data": step})
        print_line("step", step)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if any(row[1] for row in values_RN):
            return "preempted"
        return "done" if step == self.steps else "running"

    def show_digest(self, when: str, model: nn.Module) -> None:
        """Print the hash of the parameters, for tests that compare them around an update."""
        if os.environ.get("SHOW_DIGEST"):
            print_line(when, "update", digest(model))

    def do_fault(self, step: int) -> None:
        """Inject the fault if the rank and step match."""
        if step != self.fault_step:
            return
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "kill" and not restarted():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise":
            raise KeyError("bad sample")


def restarted() -> bool:
    """Return True if torchrun restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def main() -> int:
    """Run the trainer and map errors to exit codes like train.py."""
    logging.basicConfig(level=logging.INFO)
    start_process_group(ParallelConfig(timeout_s=TIMEOUT_S), torch.device("cpu"))
    run_dir = Path(sys.argv[1])
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(run_dir, int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
    write_status(run_dir, Status("running", 0, trainer.rank))
    print_line("started")
    code, message = 1, ""
    try:
        with StopSignal() as stop:
            state = trainer.run(stop)
        code = {"done": 0, "preempted": 75}[state]
    except TorchmmError as error:
        state, code, message = "failed", error.exit_code, str(error)
    except Exception as error:
        state, message = "failed", repr(error)
    print_line(message)
    write_status(run_dir, Status(state, trainer.step, trainer.rank, code, message))
    return code


if __name__ == "__main__":
    os._exit(main())
