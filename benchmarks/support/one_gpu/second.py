"""Part "second": what a second, shorter command shows, the most valuable check first.

float8 against bf16, the same step twice with `deterministic`, optimizer states and layer inputs in
host memory, and a checkpoint written during training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from support.one_gpu.cases import FLOAT8, TEXT_1_7B, Case
from support.one_gpu.comparison import Bench, open_torchmm
from support.one_gpu.ours import OurSide
from support.one_gpu.steps import Mark, synchronize, time_steps
from torchmm.models.hf.load import local_tensor
from torchmm.training.hooks.checkpoints import CheckpointHook

FLOAT8_MUST, FLOAT8_AIM = 1.15, 1.25
LOSS_TOLERANCE = 0.05
"""Relative difference of losses after some steps between float8 and bf16."""
OFFLOAD_MUST = 1.10
SAVING_MUST = 1.25
LAYERS = 8
STEPS = 4
REPEATS = 20


def run_second(bench: Bench) -> None:
    """Run all checks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for check, limit_s in (
        (_compare_float8, 45),
        (_repeat_deterministic, 30),
        (_offload_states, 30),
        (_offload_inputs, 30),
        (_save_during_training, 35),
    ):
        name = check.__name__.strip("_").replace("_", " ")
        with bench.recorder.attempt("second", name, "torchmm", limit_s):
            check(bench, name)


def _shallow(bench: Bench) -> Case:
    """Return the text case with few layers."""
    config = {**TEXT_1_7B.settings["model"]["llm"]["config"], "num_hidden_layers": LAYERS}
    case = replace(TEXT_1_7B, settings={"model": {"llm": {"config": config}}}, goals=())
    return bench.case(case)


def _compare_float8(bench: Bench, name: str) -> None:
    case = bench.case(FLOAT8)
    _, batches = bench.inputs(case)
    float8: dict[str, Any] = {"scaling": "rowwise", "first_layers": 0, "last_layers": 0}
    if bench.small:
        float8["emulate"] = True
    speed, losses = {}, {}
    common = {"compile": {"enabled": bench.device.type == "cuda"}}
    for side_name, more in (("bf16", {}), ("float8", {"float8": float8})):
        changes = {**common, **more}
        with open_torchmm(bench, case, batches, changes) as side:
            timed = time_steps(side, bench.device, 15, bench.small)
            speed[side_name] = side.tokens[0] / timed.median_ms * 1e3
            losses[side_name] = side.step(0)
        bench.recorder.add("second", name, side_name, "tokens/s", speed[side_name])
        bench.recorder.add("second", name, side_name, "last loss", losses[side_name])
    off = abs(losses["float8"] / losses["bf16"] - 1)
    note = "" if off <= LOSS_TOLERANCE else f"WRONG: losses differ by {off:.1e}"
    bench.recorder.add("second", name, "float8 / bf16", "speedup",
                       speed["float8"] / speed["bf16"], "x", FLOAT8_MUST, FLOAT8_AIM,
                       note=note or case.anchor)  # fmt: skip


def _losses(
    bench: Bench, case: Case, changes: Mapping[str, Any]
) -> tuple[list[float], float, list[Tensor]]:
    """Return the losses of some steps, the time of the fastest, and samples of the weights."""
    _, batches = bench.inputs(case)
    with open_torchmm(bench, case, batches, changes) as side:
        losses, marks = [], [Mark(bench.device)]
        for i in range(STEPS):
            losses.append(side.step(i % len(batches)))
            marks.append(Mark(bench.device))
        synchronize(bench.device)
        pairs = pairwise(marks[1:])
        return losses, min(a.until(b) for a, b in pairs), _weights(side)


def _weights(side: OurSide) -> list[Tensor]:
    """Return the sum and the first values of each parameter."""
    model = side.trainer.components.model
    with torch.no_grad():
        return [
            torch.cat([p.double().sum()[None], p.flatten()[:64].double()]).cpu()
            for p in map(local_tensor, model.parameters())
        ]


def _add_equality(
    bench: Bench, name: str, found: tuple[list[float], float, list[Tensor]],
    expected: tuple[list[float], float, list[Tensor]], tolerance: float,
) -> None:  # fmt: skip
    off = max(abs(a / b - 1) for a, b in zip(found[0], expected[0], strict=True))
    equal = all(map(torch.equal, found[2], expected[2]))
    note = "bitwise equal weights" if equal else "weights differ in some bits"
    bench.recorder.add("second", name, "torchmm", "loss difference", off, "relative", tolerance,
                       lower_is_better=True, note=note)  # fmt: skip


def _repeat_deterministic(bench: Bench, name: str) -> None:
    changes = {"training": {"dtype": bench.dtype, "deterministic": True}}
    try:
        first, second = (_losses(bench, _shallow(bench), changes) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    _add_equality(bench, name, second, first, 0.0)


def _offload_states(bench: Bench, name: str) -> None:
    kinds: dict[str, Any] = {"state_dtype": "int8"}
    training = {"dtype": bench.dtype, "parameter_dtype": bench.dtype}
    plain = {"training": training, "optimizer": kinds | {"offload": False}}
    expected = _losses(bench, _shallow(bench), plain)
    found = _losses(bench, _shallow(bench), plain | {"optimizer": kinds | {"offload": True}})
    _add_equality(bench, name, found, expected, 0.0)
    bench.recorder.add("second", name, "torchmm", "step time ratio", found[1] / expected[1], "x",
                       OFFLOAD_MUST, lower_is_better=True)  # fmt: skip


def _offload_inputs(bench: Bench, name: str) -> None:
    """Compare full recomputation with a plan that may offload layer inputs to host memory."""
    full = {"activation_checkpoint": {"mode": "full"}}
    expected = _losses(bench, _shallow(bench), full)
    limit = f"{(_tight_bytes(bench) >> 20) + 2} MiB"
    tuned = {"activation_checkpoint": {"mode": "auto", "memory_limit": limit}}
    found = _losses(bench, _shallow(bench), tuned)
    _add_equality(bench, name, found, expected, 1e-3)
    bench.recorder.add("second", name, "torchmm", "step time ratio", found[1] / expected[1], "x",
                       OFFLOAD_MUST, lower_is_better=True, note=f"limit {limit}")  # fmt: skip


def _tight_bytes(bench: Bench) -> int:
    """Return the predicted peak with full recomputation, plus a fifth."""
    case = _shallow(bench)
    _, batches = bench.inputs(case)
    with open_torchmm(bench, case, batches, {"activation_checkpoint": {"mode": "full"}}) as side:
        return round(1.2 * side.predicted_peak_bytes())


def _save_during_training(bench: Bench, name: str) -> None:
    case = _shallow(bench)
    _, batches = bench.inputs(case)
    with open_torchmm(bench, case, batches) as side:
        [hook] = [h for h in side.trainer.hooks if isinstance(h, CheckpointHook)]
        after, others = [], []
        with side.trainer.components.checkpoints:
            side.step(0)
            for i in range(2 * STEPS):
                saves = i % STEPS == 0
                if saves:
                    hook.save(None)
                begin = Mark(bench.device)
                side.step(i % len(batches))
                end = Mark(bench.device)
                synchronize(bench.device)
                (after if saves else others).append(begin.until(end))
    ratio = median(after) / median(others)
    bench.recorder.add("second", name, "torchmm", "step time ratio", ratio, "x", SAVING_MUST,
                       lower_is_better=True)  # fmt: skip
