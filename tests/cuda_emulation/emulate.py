"""Runs a script of the project on emulated CUDA devices: python emulate.py SCRIPT [ARGUMENTS].

Environment:
    FAKECUDA_LOG: folder for what each rank would have done on its device, see `fakecuda.records`.
    FAKECUDA_STEPS: the steps that are logged; by default 3, when caches and pools are warm.
    FAKECUDA_PORTION: parameters that are updated together where states are not plain.
    FAKECUDA_OFFLOAD: if set, plans send all inputs of layers to the host, as with little memory.
    FAKECUDA_DEFECT: one of `defects.DEFECTS` or several, joined by "+", to see that they are found.
"""

import json
import os
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fakecuda

fakecuda.install(int(os.environ.get("FAKECUDA_DEVICES", "8")))

import torch
from defects import DEFECTS
from fakecuda.flash import as_one

from torchmm.balance import step_plans
from torchmm.balance.optimus.ahead import Ahead
from torchmm.extensions.low_precision import low_precision_optimizer
from torchmm.models.layers import loss
from torchmm.parallel import compilation
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.health import preflight
from torchmm.pipelining.run.step_state import StepState
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.trainer import Trainer

device = fakecuda.ext


def watch(directory: Path, steps: set[int]) -> None:
    """Logs chosen steps of a training run, with the plan's actions as labels."""
    directory.mkdir(parents=True, exist_ok=True)
    plain_step, plain_handlers, plain_finish = (
        Trainer.run_step,
        StepState.handlers,
        StepState.finish,
    )
    label = ["", ""]  # of the step, and of what it launches: one of them goes on at a time

    def set_label(text):
        label[0] = text
        device.set_label(text)

    plain_switch = Ahead._switch

    def switch(self, pieces):
        own = label[0]
        set_label(label[1])
        try:
            return plain_switch(self, pieces)
        finally:
            label[1] = label[0]
            set_label(own)

    def run_step(self, batches):
        step = self.step + 1
        if step not in steps:
            return plain_step(self, batches)
        device.drain()
        set_label("before the plan")
        device.start_log()
        try:
            return plain_step(self, batches)
        finally:
            device.stop_log()
            file = directory / f"step-{step}-rank-{os.environ.get('RANK', '0')}.json"
            file.write_text(json.dumps(device.drain()))

    def handlers(self):
        def labelled(handler):
            def call(action):
                set_label(str(action))
                try:
                    return handler(action)
                finally:
                    set_label("between actions")

            return call

        return {kind: labelled(handler) for kind, handler in plain_handlers(self).items()}

    def finish(self):
        plain_finish(self)
        set_label("behind the plan")

    plain_save = CheckpointManager.save

    def save(self, step, *args, **options):
        """Of a logged step; a file of its own, as steps and what follows are looked at apart."""
        if step not in steps:
            return plain_save(self, step, *args, **options)
        device.set_label("saving")
        device.start_log()
        try:
            return plain_save(self, step, *args, **options)
        finally:
            device.stop_log()
            file = directory / f"save-{step}-rank-{os.environ.get('RANK', '0')}.json"
            file.write_text(json.dumps(device.drain()))

    Trainer.run_step, StepState.handlers, StepState.finish = run_step, handlers, finish
    CheckpointManager.save = save
    Ahead._switch = switch


def offload_all() -> None:
    """Whatever a plan would recompute."""

    def tuned(plan, *_: object, **__: object) -> types.SimpleNamespace:
        stages = plan.graph.layout.stages
        every = {
            task: ("offload",) * (stages[task.stage].stop - stages[task.stage].start)
            for task in plan.graph.tasks()
            if plan.graph.needs_backward(task.stage, task.microbatch)
        }
        return types.SimpleNamespace(plan=replace(plan, recompute=every))

    step_plans.tune_layers = tuned


def trace_only() -> None:
    """torch.compile traces and splits into forward and backward, but generates no code."""
    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **options: plain(
        self, **{**options, "backend": "aot_eager"}
    )
    of_backend = Compilation.__init__
    Compilation.__init__ = lambda self, backend="", **options: of_backend(
        self, "aot_eager", **options
    )
    compilation.missing_compiler = lambda device: ""


def fuse_loss() -> None:
    """Log the compiled functions of the loss as one kernel each."""
    write = loss._write_gradient

    def write_gradient(logits_LV, *rest):
        write(logits_LV, *rest)
        return (logits_LV,)

    loss.uses_fused_loss = lambda device: device.type == "cuda"
    logged = {
        loss._loss_of_rows: as_one(loss._loss_of_rows, "loss_of_rows"),
        write: as_one(write_gradient, "write_gradient"),
    }
    loss._compiled = logged.__getitem__


def main() -> None:
    """Runs the script."""
    trace_only()
    fuse_loss()
    # By default small models have several portions of states, too.
    low_precision_optimizer.CHUNK_ELEMENTS = int(os.environ.get("FAKECUDA_PORTION", "4096"))
    # A GPU's milliseconds are minutes on a processor without products of bfloat16.
    for sizes in (preflight.WIDTH, preflight.COPIED, preflight.GATHERED):
        sizes["cuda"] = sizes["cpu"]
    if os.environ.get("FAKECUDA_OFFLOAD"):
        offload_all()
    for defect in filter(None, os.environ.get("FAKECUDA_DEFECT", "").split("+")):
        DEFECTS[defect]()
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    if "FAKECUDA_LOG" in os.environ:
        steps = {int(s) for s in os.environ.get("FAKECUDA_STEPS", "3").split(",")}
        watch(Path(os.environ["FAKECUDA_LOG"]), steps)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
