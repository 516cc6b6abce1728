"""Parts "layers" and "stages": measured times and memory against the cost model and simulator."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from support.one_gpu.cases import VL_FULL, Case, make_microbatch
from support.one_gpu.comparison import MEMORY_ERROR, Bench
from support.one_gpu.ours import draw_weights, predict
from torchmm.balance.costs.calibration import fit_profile
from torchmm.balance.costs.profiles import load_profile, save_profile
from torchmm.balance.measurement.operators import describe_device, measure
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.run_costs import build_cost_model
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.costs.devices import DEVICES
from torchmm.costs.operators import DeviceProfile
from torchmm.models.multimodal import materialize
from torchmm.parallel.p2p import PendingTransfer, ShapeAndDtype
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import make_stage
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import ResolvedRecipe, resolve_recipe
from torchmm.planning.step import plan_layout, plan_step

CALIBRATION_S, ROUNDS = 12.0, 2
STEP_ERROR = 5.0
"""Goals: difference between prediction and measurement in %."""
RANKS, STAGE_STEPS = 4, 3


def run_layers(bench: Bench) -> None:
    """Calibrate the cost model on this card, and predict all steps that were timed."""
    recorder, device = bench.recorder, bench.device
    profile = known_profile(device)
    with recorder.attempt("layers", "calibration", "operators", 60):
        base = profile
        found = measure(
            device, DTYPES[bench.dtype], CALIBRATION_S, rounds=ROUNDS, quick=bench.small
        )
        is_known = device.type == "cuda" and known_name(device) is not None
        profile = fit_profile(
            found, base, bench.dtype, describe_device(device), use_measured_peaks=not is_known
        )
        save_profile(recorder.directory / "profile.json", profile)
        flops = profile.device.peak_flops[bench.dtype]
        recorder.add("layers", "calibration", "operators", "peak", flops / 1e12, "TFLOP/s")
    for step in bench.measured:
        with recorder.attempt("layers", step.case, step.side, 20):
            predicted = predict(step.sizes, profile)
            _add_error(bench, step.case, step.side, "step", predicted.step_ms, step.step_ms)
            _add_error(bench, step.case, step.side, "update", predicted.update_ms, step.update_ms)
            for name, ms in predicted.module_ms.items():
                measured = step.module_ms.get(name, 0.0)
                _add_error(bench, step.case, step.side, name, ms, measured)


def known_name(device: torch.device) -> str | None:
    """Return the name of the card in the table of devices."""
    found = torch.cuda.get_device_name(device).lower()
    return next((name for name in DEVICES if name in found), None)


def known_profile(device: torch.device) -> DeviceProfile:
    """Return the profile of the card without a measurement."""
    return load_profile(known_name(device) or "a100" if device.type == "cuda" else "cpu")


def _add_error(
    bench: Bench, case: str, side: str, metric: str, predicted: float, measured: float
) -> None:
    note = f"predicted {predicted:.1f}, measured {measured:.1f} ms"
    if measured <= 0:
        bench.recorder.skip("layers", case, side, f"{metric}: {note}")
        return
    error = 100 * abs(predicted / measured - 1)
    goal = (STEP_ERROR, STEP_ERROR) if metric == "step" else (None, None)
    bench.recorder.add("layers", case, side, f"{metric} error", error, "%", *goal,
                       lower_is_better=True, note=note)  # fmt: skip


class LoneChannels:
    """Channels to ranks that do not exist: sends have no effect, receives return random values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(
        self, tensors: Sequence[Tensor], specs: object, peer: int, action: object, cuts: object = ()
    ) -> PendingTransfer:
        """Return a finished transfer."""
        return PendingTransfer(tuple(tensors), [], 0)

    def receive(
        self, specs: Sequence[ShapeAndDtype], peer: int, action: object, cuts: object = ()
    ) -> PendingTransfer:
        """Return random tensors."""
        tensors = (torch.randn(s.shape, dtype=s.dtype, device=self.device) for s in specs)
        return PendingTransfer(tuple(tensors), [], 0)


def run_stages(bench: Bench) -> None:
    """Run each pipeline rank of Qwen3-VL-8B alone, and compose the step from the actions."""
    recorder, device = bench.recorder, bench.device
    with recorder.attempt("stages", VL_FULL.name, "plan", 30):
        ranks = 2 if bench.small else RANKS
        parallel = {"pipeline": ranks, "schedule": "1f1b", "placement": "interleaved"}
        case = replace(VL_FULL, microbatches=4 if bench.small else 8)
        run, plan, metas = plan_pipeline(bench, parallel, case)
    measured: dict[Action, float] = {}
    modules = [m.describe() for m in recipe_model(run.recipe).modality_modules()]
    costs = compute_plan_costs_with_recompute(
        plan, modules, metas, build_cost_model(run, modules, _profile(bench))
    )
    predicted = simulate(plan, costs)
    for rank in range(plan.graph.layout.rank_count):
        with recorder.attempt("stages", VL_FULL.name, f"rank {rank}", 20):
            times, resident, peak = _run_rank(bench, run, plan, metas, rank)
            measured |= times
            if device.type == "cuda":
                # Optimizer states do not exist here: weights and gradients are taken as measured.
                static = {**dict(enumerate(costs.static_bytes)), rank: resident}
                static_bytes = tuple(static[i] for i in range(len(static)))
                kept = simulate(plan, replace(costs, static_bytes=static_bytes, update_bytes=()))
                expected = kept.peak_bytes[rank]
                recorder.add("stages", VL_FULL.name, f"rank {rank}", "memory error",
                             100 * abs(expected / peak - 1), "%", MEMORY_ERROR, MEMORY_ERROR,
                             lower_is_better=True,
                             note=f"predicted {expected / 2**30:.2f} GiB, "
                             f"measured {peak / 2**30:.2f} GiB")  # fmt: skip
    with recorder.attempt("stages", VL_FULL.name, "composed", 10):
        composed = simulate(plan, replace(costs, compute_ms={**costs.compute_ms, **measured}))
        missing = costs.compute_ms.keys() & _compute_actions(plan) - measured.keys()
        if missing:
            recorder.skip("stages", VL_FULL.name, "composed", f"{len(missing)} actions missing")
            return
        error = 100 * abs(predicted.makespan_ms / composed.makespan_ms - 1)
        recorder.add("stages", VL_FULL.name, "composed", "step error", error, "%",
                     STEP_ERROR, STEP_ERROR, lower_is_better=True,
                     note=f"predicted {predicted.makespan_ms:.1f}, "
                     f"composed {composed.makespan_ms:.1f} ms")  # fmt: skip


def _profile(bench: Bench) -> DeviceProfile:
    """Return the calibrated profile if part "layers" has written it."""
    file = bench.recorder.directory / "profile.json"
    return load_profile(file) if file.exists() else known_profile(bench.device)


def plan_pipeline(
    bench: Bench, parallel: dict[str, Any], case: Case
) -> tuple[ResolvedRecipe, PipelinePlan, list[MicrobatchMeta]]:
    """Return the run, the plan and the sizes of a step over several pipeline ranks.

    Args:
        parallel: values of the recipe's section.
        case: its microbatches have one sequence.
    """
    case = replace(bench.case(case), sequences=1, microbatches=case.microbatches)
    changes = {
        "training": {"dtype": bench.dtype, "parameter_dtype": bench.dtype},
        "model": {"chunked_loss": False},
        "optimizer": {"offload": False},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enabled": False},
        "parallel": parallel,
    }
    recipe = case.recipe(Path(tempfile.gettempdir()), bench.device, changes)
    run = resolve_recipe(recipe, int(recipe.parallel.pipeline))
    model = recipe_model(recipe)
    layered = {module.name: module for module in model.modality_modules()}
    modules = [module.describe() for module in layered.values()]
    metas = case.metas(0)
    layout = plan_layout(recipe.parallel, modules, metas)
    specs = partial(message_specs, modules=layered, microbatches=metas, dtype=DTYPES[bench.dtype])
    plan = plan_step(layout, recipe.parallel, modules, metas, specs=specs, sharding="none")
    return run, plan, metas


def _run_rank(
    bench: Bench,
    run: ResolvedRecipe,
    plan: PipelinePlan,
    metas: Sequence[MicrobatchMeta],
    rank: int,
) -> tuple[dict[Action, float], int, int]:
    """Return the median time of each action of a rank, and bytes between and during steps."""
    device, recipe = bench.device, run.recipe
    model = recipe_model(recipe, DTYPES[recipe.training.parameter_dtype])
    microbatches = [make_microbatch(model, meta).to(device) for meta in metas]
    stages = split_model_for_rank(model, plan.graph.layout, rank)
    materialize(model, device)
    draw_weights(model, 0)
    runtime = PipelineRuntime(
        rank,
        {index: make_stage(module, None) for index, module in stages.items()},
        LoneChannels(device),  # type: ignore[arg-type]
        device=device,
    )
    times: dict[Action, list[float]] = defaultdict(list)
    resident = peak = 0
    for step in range(2 if bench.small else 1 + STAGE_STEPS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            resident = torch.cuda.memory_allocated(device)
        result = runtime.step(plan, microbatches, loss_scale=1e-4, record=True)
        records = result.records or ()
        del result
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        for record in records if step else ():
            if record.action.type in COMPUTE:
                times[record.action].append(record.end_ms - record.start_ms)
    return {action: median(found) for action, found in times.items()}, resident, peak


def _compute_actions(plan: PipelinePlan) -> set[Action]:
    return {action for own in plan.actions for action in own if action.type in COMPUTE}
