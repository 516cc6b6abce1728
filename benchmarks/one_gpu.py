"""Measure training on one GPU: speed against other programs, predictions, and where time goes.

    python benchmarks/one_gpu.py --out DIR [--seconds 560] [--parts NAME ...] [--small]

The program is one process. Every row is appended to DIR/rows.jsonl as soon as it is measured, and
DIR/one_gpu_<card>.md is written after every part. Errors, out-of-memory and exceeded time limits
are rows. The parts run in an order that puts the most valuable rows first:

    start       device and versions
    ceilings    matmul, memory bandwidth, host time per call
    small       SigLIP2-so400m + Qwen3-1.7B: torchmm, and the compiled Hugging Face loops
    trace       kernels and idle time of one step (recorded in "small" if that runs)
    large       Qwen3-VL-8B, Qwen2.5-7B, Qwen3-8B and Qwen3-1.7B
    attention   attention kernels by shape
    layers      calibration; predicted and measured time per module and step
    stages      each rank of a pipeline of 4 ranks alone; the simulated step
    switches    one change turned off at a time, torchmm again, further programs

With `--save-kernels`, the part "attention" stores the faster kernel of encoders with images of one
size in `torchmm/models/layers/attention_kernels.json`, from where training reads it.

With `--parts second` it runs checks that need a second, shorter command instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support.harness import describe_machine, make_parser
from support.one_gpu.ceilings import (
    choose_image_kernels,
    measure_attention,
    measure_ceilings,
    save_image_kernels,
)
from support.one_gpu.comparison import Bench, run_large, run_small, run_switches, run_trace
from support.one_gpu.predictions import run_layers, run_stages
from support.one_gpu.rows import LimitError, Recorder
from support.one_gpu.second import run_second
from support.one_gpu.steps import record_kernels

from torchmm.common.dtypes import DTYPES
from torchmm.parallel.mesh import select_device, start_process_group, use_expandable_segments
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.metrics import peak_flops

SECONDS, SMALL_SECONDS, QUICK_SECONDS = 560.0, 3600.0, 30.0
SMALL_PATIENCE = 20.0
"""Factor of the limits of parts with `--small`, as CPUs may be shared."""
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "trl", "torchao", "accelerate")


def _start(bench: Bench) -> None:
    recorder, device = bench.recorder, bench.device
    note = describe_machine(device)
    recorder.add("start", "machine", "torchmm", "peak", bench.peak / 1e12, "TFLOP/s", note=note)
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        recorder.add("start", "versions", platform.python_version(), name, note=version)
    if device.type == "cuda":
        # The profiler slows later launches down: all sides run after its start.
        kernels = record_kernels(lambda: torch.ones(8, device=device) + 1, device) or []
        recorder.add("start", "machine", "profiler", "kernels", len(kernels), "")
        properties = torch.cuda.get_device_properties(device)
        recorder.add(
            "start", "machine", "torchmm", "memory", properties.total_memory / 2**30, "GiB"
        )


def _ceilings(bench: Bench) -> None:
    measure_ceilings(bench.recorder, bench.device, DTYPES[bench.dtype], bench.small)


def _attention(bench: Bench) -> None:
    measure_attention(bench.recorder, bench.device, DTYPES[bench.dtype], bench.small)
    kernels = choose_image_kernels(bench.recorder.rows)
    for width, kernel in kernels.items():
        bench.recorder.add("attention", f"heads of {width}", kernel, "faster for images")
    if bench.saves_kernels and kernels:
        save_image_kernels(torch.cuda.get_device_name(bench.device), kernels)


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "start": (_start, 25),
    "ceilings": (_ceilings, 25),
    "small": (run_small, 130),
    "trace": (run_trace, 40),
    "large": (run_large, 185),
    "attention": (_attention, 30),
    "layers": (run_layers, 40),
    "stages": (run_stages, 45),
    "switches": (run_switches, 300),
    "second": (run_second, 145),
}
"""Function and time limit in seconds of each part, in the order in which they run."""
DEFAULT_PARTS = tuple(name for name in PARTS if name != "second")


def main() -> int:
    """Run the parts; return 0 whatever they find."""
    begin_s = time.monotonic()
    options = _parse()
    small = options.small or options.quick
    device = select_device(options.device)
    use_expandable_segments(device, ParallelConfig())
    if small:
        torch.set_num_threads(1)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        patience = SMALL_PATIENCE if small else 1.0
        recorder = Recorder(options.out or Path(scratch), card, options.seconds, patience)
        peak = peak_flops(device) or 1.0
        bench = Bench(recorder, device, peak, small, options.quick)
        bench.dtype = "float32" if device.type == "cpu" else "bfloat16"
        bench.traces = "trace" in options.parts
        bench.saves_kernels = options.save_kernels
        start_process_group(ParallelConfig(), device)
        try:
            for name in options.parts:
                _run_part(bench, name)
                recorder.write_markdown()
        finally:
            recorder.add("end", "program", "torchmm", "time", time.monotonic() - begin_s, "s",
                         note=f"{recorder.errors} errors")  # fmt: skip
            recorder.close()
            print(recorder.write_markdown().read_text())
            if options.json:
                rows = [json.loads(x) for x in (recorder.directory / "rows.jsonl").open()]
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
            dist.destroy_process_group()
    return 0


def _run_part(bench: Bench, name: str) -> None:
    run, limit_s = PARTS[name]
    recorder = bench.recorder
    if recorder.left_s < 1:
        recorder.skip(name, "part", "all", "no time left")
        return
    try:
        with recorder.attempt(name, "part", "all", limit_s):
            run(bench)
    except LimitError:  # expired while an attempt ended
        recorder.reset()
        recorder.skip(name, "part", "all", "time limit")


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="directory of the results")
    add("--seconds", type=float, help=f"time limit of the program in s, default {SECONDS:.0f}")
    add("--parts", nargs="+", choices=PARTS, default=list(DEFAULT_PARTS), metavar="NAME")
    add("--small", action="store_true", help="use tiny sizes, to test every part")
    add(
        "--save-kernels", action="store_true", help="store the faster attention kernels of the card"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    if options.save_kernels and (options.small or "attention" not in options.parts):
        parser.error('--save-kernels needs the part "attention" without --small')
    limit_s = SMALL_SECONDS if options.small else SECONDS
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else limit_s)
    options.parts = [name for name in PARTS if name in options.parts]
    return options


if __name__ == "__main__":
    sys.exit(main())
