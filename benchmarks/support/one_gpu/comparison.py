"""Parts "small", "large" and "switches": training steps of torchmm and of other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import torch

from support.one_gpu.cases import SMALL_VLM, VL_FULL, Case, large_cases
from support.one_gpu.ours import (
    SWITCHES,
    MissingSwitchError,
    OurSide,
    StepSizes,
    build_side,
    switched_off,
)
from support.one_gpu.rows import Recorder
from support.one_gpu.steps import Side, Timed, merged_ns, record_kernels, synchronize, time_steps
from support.one_gpu.theirs import VARIANTS, HfSide, TrlSide, Variant, smaller
from support.one_gpu.trace import trace_step
from torchmm.data.loader import StepBatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model

TOLERANCE = 1e-2
"""Relative difference of the first losses of two programs in bf16."""
FIRST_VARIANTS = ("HF compiled", "HF compiled, packed, liger-kernel")
"""Variants that goals refer to. The others come last."""
RATIO_MUST, RATIO_AIM = 1.10, 1.30
MEMORY_ERROR = 5.0
MIN_LEFT_S = 8.0
"""Time below which no side is built."""
"""Goal: difference between predicted and measured peak memory in %."""


@dataclass(frozen=True)
class MeasuredStep:
    """A timed step that the cost model predicts later."""

    case: str
    side: str
    sizes: StepSizes
    step_ms: float
    update_ms: float
    module_ms: Mapping[str, float]


@dataclass
class Bench:
    """State of the program that all parts use.

    Attributes:
        peak: peak of the card in FLOP/s for MFU.
        small: whether sizes are tiny.
        quick: whether only the first sides run.
        traces: whether the first side of "small" is traced.
        saves_kernels: whether the part "attention" stores the faster kernels.
    """

    recorder: Recorder
    device: torch.device
    peak: float
    small: bool
    quick: bool = False
    traces: bool = True
    saves_kernels: bool = False
    dtype: str = "bfloat16"
    measured: list[MeasuredStep] = field(default_factory=list)
    speed: dict[tuple[str, str], float] = field(default_factory=dict)
    """Tokens/s by case and side."""
    flops: dict[str, list[float]] = field(default_factory=dict)
    """FLOPs of each batch by case, as torchmm counts them."""
    first_loss: dict[str, float] = field(default_factory=dict)
    """First loss of torchmm by case."""

    def case(self, case: Case) -> Case:
        """Return the case, with tiny sizes if requested."""
        return case.small() if self.small else case

    @property
    def changes(self) -> dict[str, Any]:
        """Recipe tables for all sides."""
        training = {"dtype": self.dtype}
        if self.dtype == "float32":  # the CPU of a rehearsal has no fast bf16
            training["parameter_dtype"] = self.dtype
        return {"training": training}

    def inputs(self, case: Case) -> tuple[MultimodalModel, list[StepBatch]]:
        """Return the model on the meta device, and the batches."""
        model = recipe_model(case.recipe(Path(), self.device, self.changes))
        return model, case.batches(model, self.device)


def run_small(bench: Bench) -> None:
    """Compare torchmm with the compiled Hugging Face loops on the small VLM."""
    with bench.recorder.attempt("small", SMALL_VLM.name, "inputs", 120):
        case = bench.case(SMALL_VLM)
        model, batches = bench.inputs(case)
        _run_torchmm(bench, "small", case, batches, "torchmm", 60)
        for name in FIRST_VARIANTS:
            _run_baseline(bench, "small", case, model, batches, VARIANTS[name], 45)
        _add_ratio(bench, case, FIRST_VARIANTS)


def run_large(bench: Bench) -> None:
    """Time torchmm on the large models."""
    cases = list(large_cases(bench.device))
    for case in cases[:1] if bench.quick else cases:
        if bench.recorder.left_s < 20:
            bench.recorder.skip("large", case.name, "torchmm", "no time left")
            continue
        with bench.recorder.attempt("large", case.name, "inputs", 80):
            tiny = bench.case(case)
            _, batches = bench.inputs(tiny)
            _run_torchmm(bench, "large", tiny, batches, "torchmm", 80 if case is VL_FULL else 55)


def run_switches(bench: Bench) -> None:
    """Turn off one change after the other, run the remaining programs, and torchmm again."""
    case, update_case = bench.case(SMALL_VLM), bench.case(VL_FULL)
    with bench.recorder.attempt("switches", case.name, "inputs", 90):
        _, batches = bench.inputs(case)
        _run_torchmm(bench, "switches", case, batches, "with FSDP2", 40)
        _run_torchmm(bench, "switches", case, batches, "without fused loss", 40)
    with bench.recorder.attempt("switches", update_case.name, "inputs", 70):
        _, batches = bench.inputs(update_case)
        _run_torchmm(bench, "switches", update_case, batches, "without fused update", 60)
    if bench.quick:
        return
    with bench.recorder.attempt("switches", case.name, "inputs", 300):
        model, batches = bench.inputs(case)
        _run_torchmm(bench, "switches", case, batches, "without compile", 30)
        _run_torchmm(bench, "switches", case, batches, "with CUDA graphs", 40)
        if bench.device.type == "cuda":  # compiled code of a CPU takes minutes
            _run_torchmm(bench, "switches", case, batches, "all layers compiled", 45)
        _run_torchmm(bench, "switches", case, batches, "torchmm again", 30)
        for name, variant in VARIANTS.items():
            if name not in FIRST_VARIANTS:
                _run_baseline(bench, "switches", case, model, batches, variant, 40)


def run_trace(bench: Bench) -> None:
    """Trace a step of the small VLM, if part "small" has not done so."""
    if not bench.traces:
        return
    case = bench.case(SMALL_VLM)
    with bench.recorder.attempt("trace", case.name, "torchmm", 60):
        _, batches = bench.inputs(case)
        with open_torchmm(bench, case, batches) as side:
            for i in range(1 if bench.small else 3):
                side.step(i % len(batches))
            _trace(bench, case, side)


def _trace(bench: Bench, case: Case, side: OurSide) -> None:
    bench.traces = False
    trace_step(bench.recorder, case.name, side, bench.device, bench.peak)


@contextmanager
def open_torchmm(
    bench: Bench, case: Case, batches: list[StepBatch], changes: Mapping[str, Any] | None = None
) -> Iterator[OurSide]:
    """Build torchmm for a case and close it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        merged = {**bench.changes, **(changes or {})}
        side = build_side(case, batches, Path(folder), bench.device, merged)
        try:
            yield side
        finally:
            side.close()


def _run_torchmm(
    bench: Bench, part: str, case: Case, batches: list[StepBatch], name: str, limit_s: float
) -> None:
    """Time torchmm; `name` may be a switch."""
    recorder, device = bench.recorder, bench.device
    if recorder.left_s < MIN_LEFT_S:
        recorder.skip(part, case.name, name, "no time left")
        return
    with recorder.attempt(part, case.name, name, limit_s):
        switch = switched_off(name) if name in SWITCHES else _no_switch()
        try:
            with switch as changes, open_torchmm(bench, case, batches, changes) as side:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                timed = time_steps(side, device, _budget_s(bench, limit_s), bench.small)
                _add_rows(bench, part, case, name, side, timed)
                _add_torchmm_rows(bench, part, case, name, side, timed)
                _add_idle(bench, part, case, name, side, timed)
                if name == "torchmm" and part == "small" and bench.traces:
                    with recorder.attempt("trace", case.name, name, 25):
                        _trace(bench, case, side)
        except MissingSwitchError as error:
            recorder.skip(part, case.name, name, str(error))


@contextmanager
def _no_switch() -> Iterator[Mapping[str, Any]]:
    yield {}


def _run_baseline(
    bench: Bench,
    part: str,
    case: Case,
    model: MultimodalModel,
    batches: list[StepBatch],
    variant: Variant,
    limit_s: float,
) -> None:
    """Time another program; once more with half of the samples per pass if it does not fit."""
    recorder, device = bench.recorder, bench.device
    if variant.missing:
        recorder.skip(part, case.name, variant.name, f"{variant.missing} is not installed")
        return
    if recorder.left_s < MIN_LEFT_S:
        recorder.skip(part, case.name, variant.name, "no time left")
        return
    flops = bench.flops.get(case.name, [0.0] * len(batches))
    for attempt in (variant, smaller(variant)):
        before = len(recorder.rows)
        with (
            recorder.attempt(part, case.name, variant.name, limit_s),
            tempfile.TemporaryDirectory() as folder,
        ):
            recipe = case.recipe(Path(folder), device, bench.changes)
            backend = "aot_eager" if bench.small else "inductor"
            arguments = (recipe, model, batches, flops, device, attempt, backend)
            side = TrlSide(*arguments, folder=Path(folder)) if variant.trl else HfSide(*arguments)
            try:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                timed = time_steps(side, device, _budget_s(bench, limit_s), bench.small)
                _add_rows(bench, part, case, variant.name, side, timed, f"{attempt.passes} passes")
                _add_idle(bench, part, case, variant.name, side, timed)
            finally:
                side.close()
        if not any(row.metric == "out of memory" for row in recorder.rows[before:]):
            return


def _budget_s(bench: Bench, limit_s: float) -> float:
    """Return the time after which no step is started."""
    return max(1.0, min(0.8 * limit_s, bench.recorder.left_s - 5))


def _add_rows(
    bench: Bench, part: str, case: Case, name: str, side: Side, timed: Timed, note: str = ""
) -> None:
    recorder, ms = bench.recorder, timed.median_ms
    tokens = [side.tokens[i] for i in timed.steps]
    seconds = sum(timed.step_ms) / 1e3
    speed = sum(tokens) / seconds
    mfu = 100 * sum(side.flops[i] for i in timed.steps) / seconds / bench.peak
    bench.speed[case.name, name] = speed
    own = name == "torchmm"
    goals = {g.metric: (g.must, g.aim) for g in case.goals_of(bench.device)} if own else {}

    def add(metric: str, value: float, unit: str, note: str = "") -> None:
        must, aim = goals.get(metric, (None, None))
        recorder.add(part, case.name, name, metric, value, unit, must, aim, note=note)

    add("tokens/s", speed, "", "; ".join(filter(None, (note, own and case.anchor))))
    add("MFU", mfu, "%")
    add("step", ms, "ms", f"{len(timed.step_ms)} steps, fastest {min(timed.step_ms):.1f} ms")
    add("warm-up", timed.warm_up_s, "s")
    add("host", timed.host_ms, "ms")
    if bench.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(bench.device)
        add("peak memory", peak / 2**30, "GiB")
    expected = bench.first_loss.setdefault(case.name, timed.first_loss)
    off = abs(timed.first_loss / expected - 1)
    add("first loss", timed.first_loss, "", f"WRONG: {off:.1e} off" if off > TOLERANCE else "")


def _add_torchmm_rows(
    bench: Bench, part: str, case: Case, name: str, side: OurSide, timed: Timed
) -> None:
    """Add rows that only torchmm has, and note the step for the cost model."""
    bench.flops[case.name] = side.flops
    recorder = bench.recorder
    synchronize(bench.device)
    marks = side.updates[-len(timed.steps) - 1 : -1] or side.updates
    update_ms = sorted(begin.until(end) for begin, end in marks)[len(marks) // 2]
    recorder.add(part, case.name, name, "update", update_ms, "ms")
    if case.lora:
        parameters = sum(p.numel() for p in side.trainer.components.model.llm.parameters())
        share = 4 * parameters * bench.speed[case.name, name] / bench.peak
        recorder.add(part, case.name, name, "MFU at 4N", 100 * share, "%")
    predicted = side.predicted_peak_bytes()
    if bench.device.type == "cuda" and not isnan(predicted):
        measured = torch.cuda.max_memory_allocated(bench.device)
        error = 100 * abs(predicted / measured - 1)
        note = f"predicted {predicted / 2**30:.1f} GiB"
        goal = (MEMORY_ERROR, MEMORY_ERROR)
        recorder.add(part, case.name, name, "memory error", error, "%", *goal,
                     lower_is_better=True, note=note)  # fmt: skip
    side.step(0)
    synchronize(bench.device)
    modules = side.measured_module_ms()
    sizes = side.sizes(0)
    bench.measured.append(MeasuredStep(case.name, name, sizes, timed.first_ms, update_ms, modules))


def _add_idle(bench: Bench, part: str, case: Case, name: str, side: Side, timed: Timed) -> None:
    """Profile one more step for the time in which the GPU runs no kernel."""
    kernels = record_kernels(lambda: side.step(0), bench.device)
    if kernels is None:
        return
    busy_ms = merged_ns(kernel.span for kernel in kernels) / 1e6
    bench.recorder.add(part, case.name, name, "GPU busy", busy_ms, "ms")
    idle = 100 * max(0.0, 1 - busy_ms / timed.first_ms)
    bench.recorder.add(part, case.name, name, "GPU idle", idle, "%")


def _add_ratio(bench: Bench, case: Case, names: tuple[str, ...]) -> None:
    ours = bench.speed.get((case.name, "torchmm"))
    for name in names:
        theirs = bench.speed.get((case.name, name))
        if ours and theirs:
            bench.recorder.add("small", case.name, f"torchmm / {name}", "speedup",
                               ours / theirs, "x", RATIO_MUST, RATIO_AIM)  # fmt: skip
