"""Run a script of the repository on emulated CUDA devices: python emulate.py SCRIPT [ARGUMENTS].

A `TrainServer` that imports this module first runs it many times.

Environment:
    FAKECUDA_DEVICES: Number of devices. The default is 8.
    FAKECUDA_LOG: Directory for the logged device operations of each rank, see `fakecuda.records`.
    FAKECUDA_STEPS: Logged steps. The default is 3, when caches and memory pools are warm.
    FAKECUDA_PORTION: Number of parameters per update chunk with low-precision states.
    FAKECUDA_OFFLOAD: If set, plans offload all layer inputs, as with little memory.
    FAKECUDA_DEFECT: Names in `defects.DEFECTS`, joined by "+", to test their detection.
"""

import importlib
import json
import os
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fakecuda

if fakecuda.ext is None:
    fakecuda.install()

import torch
from defects import DEFECTS
from fakecuda.flash import as_one

from torchmm.balance import step_plans
from torchmm.balance.measurement import operators
from torchmm.balance.optimus.encoder_overlap import EncoderOverlap
from torchmm.extensions.low_precision import low_precision_optimizer
from torchmm.models.layers import loss
from torchmm.parallel import compilation
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.health import preflight
from torchmm.pipelining.run.step_state import StepState
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.trainer import Trainer

device = fakecuda.ext
for name in (
    "torch._functorch.aot_autograd",
    "torch._inductor.lowering",
    "torch._dynamo.repro.after_dynamo",
):
    importlib.import_module(name)  # otherwise each rank imports them when it compiles


def watch(directory: Path, steps: set[int]) -> None:
    """Log selected steps of a training run, with the actions of the plan as labels."""
    directory.mkdir(parents=True, exist_ok=True)
    original_step, original_handlers, original_finish = (
        Trainer.run_step,
        StepState.handlers,
        StepState.finish,
    )
    label = ["", ""]  # labels of the step and of launched encoder work, of which one runs at a time

    def set_label(text):
        label[0] = text
        device.set_label(text)

    original_switch = EncoderOverlap._run_thread

    def switch(self, pieces):
        step_label = label[0]
        set_label(label[1])
        try:
            return original_switch(self, pieces)
        finally:
            label[1] = label[0]
            set_label(step_label)

    def run_step(self, batches):
        step = self.step + 1
        if step not in steps:
            return original_step(self, batches)
        device.drain()
        set_label("before the plan")
        device.start_log()
        try:
            return original_step(self, batches)
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

        return {kind: labelled(handler) for kind, handler in original_handlers(self).items()}

    def finish(self):
        original_finish(self)
        set_label("after the plan")

    original_save = CheckpointManager.save

    def save(self, step, *args, **options):
        """Log saves of selected steps into separate files."""
        if step not in steps:
            return original_save(self, step, *args, **options)
        device.set_label("saving")
        device.start_log()
        try:
            return original_save(self, step, *args, **options)
        finally:
            device.stop_log()
            file = directory / f"save-{step}-rank-{os.environ.get('RANK', '0')}.json"
            file.write_text(json.dumps(device.drain()))

    Trainer.run_step, StepState.handlers, StepState.finish = run_step, handlers, finish
    CheckpointManager.save = save
    EncoderOverlap._run_thread = switch


def offload_all() -> None:
    """Offload layer inputs in all plans."""

    def tuned(plan, *_: object, **__: object) -> types.SimpleNamespace:
        stages = plan.graph.layout.stages
        modes = {
            task: ("offload",) * (stages[task.stage].stop - stages[task.stage].start)
            for task in plan.graph.tasks()
            if plan.graph.needs_backward(task.stage, task.microbatch)
        }
        return types.SimpleNamespace(plan=replace(plan, recompute=modes))

    step_plans.tune_layers = tuned


def trace_only() -> None:
    """Make torch.compile trace forward and backward, without generating code."""
    original = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **options: original(
        self, **{**options, "backend": "aot_eager"}
    )
    original_init = Compilation.__init__
    Compilation.__init__ = lambda self, backend="", **options: original_init(
        self, "aot_eager", **options
    )
    compilation.find_missing_compiler = lambda device: ""


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
    """Run the script."""
    fakecuda.set_device_count(int(os.environ.get("FAKECUDA_DEVICES", "8")))
    trace_only()
    fuse_loss()
    # The default splits the states of small models into several chunks.
    low_precision_optimizer.CHUNK_ELEMENTS = int(os.environ.get("FAKECUDA_PORTION", "4096"))
    # Milliseconds on a GPU are minutes on a CPU without bfloat16 matmuls.
    operators.DELAY_WIDTH, operators.PACKED_TOKENS = 64, 256
    operators.GPU_SIZES = operators.CPU_SIZES
    for sizes in (preflight.MATMUL_SIZE, preflight.COPIED_ELEMENTS, preflight.GATHERED_ELEMENTS):
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
