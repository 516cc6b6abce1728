"""torchmm as a side: the Trainer of a recipe, built as in training but for data and weights.

Weights are drawn on the device, seeded by the name of each tensor, so that all sides have the same
values without copies. Everything else is `torchmm.training.build.build_run` and `Trainer.run_step`.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from support.one_gpu.cases import Case
from support.one_gpu.steps import Mark
from torchmm.balance.costs.step_costs import slowest_update_ms
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.run_costs import build_cost_model
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import microbatch_flops
from torchmm.costs.operators import DeviceProfile
from torchmm.data.loader import StepBatch
from torchmm.extensions.reports.diagnostics import predict_peak_bytes
from torchmm.models.hf.load import local_tensor
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import ResolvedRecipe, resolve_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training import build, model_build
from torchmm.training.shutdown import StopSignal
from torchmm.training.trainer import Trainer


class Switch(NamedTuple):
    """A change that can be turned off for a comparison.

    Attributes:
        module: module that defines the function. Empty if settings turn it off.
        function: name of the function that decides.
        value: its value without the change.
        settings: recipe tables without the change.
    """

    module: str = ""
    function: str = ""
    value: bool = False
    settings: Mapping[str, Any] = {}


SWITCHES: Mapping[str, Switch] = {
    "without compile": Switch(settings={"compile": {"enabled": False}}),
    "all layers compiled": Switch(settings={"compile": {"enabled": True}}),
    "with CUDA graphs": Switch(settings={"compile": {"cuda_graphs": True}}),
    "with FSDP2": Switch("torchmm.parallel.fsdp", "needs_fsdp", True),
    "without fused loss": Switch("torchmm.models.layers.loss", "uses_fused_loss"),
    "without fused update": Switch(
        "torchmm.extensions.low_precision.low_precision_optimizer", "uses_fused_update"
    ),
}


class MissingSwitchError(Exception):
    """torchmm has no such switch."""


@contextmanager
def switched_off(name: str) -> Iterator[Mapping[str, Any]]:
    """Turn a change off inside of the block; the value is recipe tables to apply.

    The function is replaced in every module that imported it.

    Raises:
        MissingSwitchError: torchmm has no such function.
    """
    switch = SWITCHES[name]
    if not switch.function:
        yield switch.settings
        return
    plain = getattr(sys.modules.get(switch.module), switch.function, None)
    if plain is None:
        raise MissingSwitchError(f"{switch.module} has no {switch.function}")
    with ExitStack() as patches:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("torchmm") and vars(module).get(switch.function) is plain:
                patches.enter_context(
                    mock.patch.object(module, switch.function, lambda *_, **__: switch.value)
                )
        yield switch.settings


@torch.no_grad()
def draw(tensor: Tensor, name: str) -> None:
    """Fill a parameter with values that depend on its name: matrices are random, norms are 1."""
    local = local_tensor(tensor)
    if local.ndim < 2:
        local.fill_(1.0 if name.endswith(("weight", "magnitude")) else 0.0)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    torch.manual_seed(seed)
    local.normal_(0.0, 0.02)


def draw_weights(model: MultimodalModel, seed: int, skip: Collection[str] = ()) -> None:
    """Fill all parameters on the device, and buffers as in training."""
    drawn = set(skip)
    for prefix, module in model.named_modality_modules():
        copies = module.tied_replicas()
        for name, parameter in module.named_parameters():
            drawn.add(f"{prefix}.{name}")
            draw(parameter, f"{prefix}.{copies.get(name, name)}")
    init_weights(model, seed, skip=drawn)


@dataclass(frozen=True)
class StepSizes:
    """Inputs of the cost model for the prediction of a step.

    Attributes:
        plan: plan of the step.
        targets: targets per microbatch.
        layerwise: whether FSDP2 gathers parameters per layer.
    """

    run: ResolvedRecipe
    modules: Sequence[ModuleDescription]
    plan: PipelinePlan
    metas: list[MicrobatchMeta]
    targets: list[int]
    layerwise: bool


class Predicted(NamedTuple):
    """Times of a step in ms: total with the update, the update, and compute by module and type."""

    step_ms: float
    update_ms: float
    module_ms: dict[str, float]


def predict(sizes: StepSizes, profile: DeviceProfile) -> Predicted:
    """Return the simulated times of a step.

    Raises:
        ValueError: the cost model cannot predict it.
    """
    model = build_cost_model(sizes.run, sizes.modules, profile)
    costs = compute_plan_costs_with_recompute(
        sizes.plan, sizes.modules, sizes.metas, model,
        targets=sizes.targets, layerwise=sizes.layerwise,
    )  # fmt: skip
    update_ms = slowest_update_ms(sizes.plan.graph.layout, sizes.modules, model)
    found: dict[str, float] = {}
    for actions in sizes.plan.actions:
        for action in actions:
            add_action(found, sizes.plan, action, costs.compute_ms.get(action, 0.0))
    return Predicted(simulate(sizes.plan, costs).makespan_ms + update_ms, update_ms, found)


def add_action(found: dict[str, float], plan: PipelinePlan, action: Action, ms: float) -> None:
    """Add the time of an action to that of its module and type."""
    if action.type in COMPUTE:
        key = f"{plan.graph.layout.stages[action.stage].module} {action.type.name}"
        found[key] = found.get(key, 0.0) + ms


class OurSide:
    """The Trainer of a case. See `steps.Side`.

    Args:
        batches: steps, from `Case.batches`.
        folder: directory for the files of the run.
    """

    def __init__(
        self, recipe: Recipe, batches: list[StepBatch], folder: Path, device: torch.device
    ) -> None:
        self.device, self.batches = device, batches
        self.wait_s = 0.0
        self.updates: list[tuple[Mark, Mark]] = []
        self.outcome: Any = None
        run = resolve_recipe(recipe, 1)
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        loader = SimpleNamespace(
            next_metas=nothing,
            planned_metas=nothing,
            timeout_message="",
            close=nothing,
            samples_per_pass=0,
        )
        data = SimpleNamespace(digest=lambda: ("", "synthetic")), None
        replaced: dict[str, Callable[..., Any]] = {
            "open_data": lambda *_, **__: data,
            "build_data": lambda *_, **__: loader,
            "describe_untrained_tokens": lambda *_, **__: None,
        }
        self._stop = StopSignal()
        with (
            mock.patch.multiple(build, **replaced),
            mock.patch.object(model_build, "init_weights", draw_weights),
            redirect_stdout(io.StringIO()),
        ):
            model = recipe_model(recipe, DTYPES[recipe.training.parameter_dtype])
            tokenizer: Any = None
            cut = model_build.choose_model_stages(run, model, tokenizer, device)
            parts = build.build_run(run, folder, device, model, tokenizer, cut)
        self.trainer = Trainer(parts, self._stop)
        self._watch()
        modules = parts.pipeline.descriptions
        self.tokens = [sum(m.meta.used_tokens for m in b.microbatches) for b in batches]
        self.flops = [
            float(
                sum(
                    f.forward + f.backward
                    for m in batch.microbatches
                    for f in microbatch_flops(modules, m.meta, m.target_count).values()
                )
            )
            for batch in batches
        ]

    def _watch(self) -> None:
        """Note the time of updates and waits, and the outcome of each step."""
        updates, train_step = self.trainer.updates, self.trainer.train_step
        apply, run = updates.apply, train_step.run

        def timed_apply(*args: Any, **kwargs: Any) -> Any:
            begin = Mark(self.device)
            found = apply(*args, **kwargs)
            self.updates.append((begin, Mark(self.device)))
            return found

        def noted_run(*args: Any, **kwargs: Any) -> Any:
            self.outcome = run(*args, **kwargs)
            return self.outcome

        health: Any = self.trainer.health
        plain_wait = health.waiting_for_device

        @contextmanager
        def timed_wait() -> Iterator[None]:
            begin_s = time.perf_counter()
            with plain_wait():
                yield
            self.wait_s += time.perf_counter() - begin_s

        health.waiting_for_device = timed_wait
        updates.apply, train_step.run = timed_apply, noted_run  # type: ignore[method-assign]

    def step(self, index: int) -> float:
        """Run a training step with batch `index` and return its loss."""
        done = self.trainer.run_step(iter([self.batches[index]]))
        assert done is not None
        return done.record["loss"]

    def sizes(self, index: int = 0) -> StepSizes:
        """Return what the cost model needs to predict a step."""
        parts = self.trainer.components
        pipeline = parts.pipeline
        microbatches = self.batches[index].microbatches
        plan = parts.planner.plan(self.trainer.step + 1, microbatches, lambda: None).plan
        return StepSizes(
            parts.run, list(pipeline.descriptions), plan,
            [m.meta for m in microbatches], [m.target_count for m in microbatches],
            pipeline.sharding == "layer",
        )  # fmt: skip

    def predicted_peak_bytes(self) -> float:
        """Return the predicted peak memory of the first batch; NaN if it cannot be predicted."""
        parts = self.trainer.components
        plan = self.sizes().plan
        microbatches = self.batches[0].microbatches
        return predict_peak_bytes(parts.run, parts.pipeline, parts.mesh, plan, microbatches)

    def measured_module_ms(self) -> dict[str, float]:
        """Return the time of the last step's actions by module and type."""
        found: dict[str, float] = {}
        for record in self.outcome.result.records or ():
            add_action(found, self.outcome.plan, record.action, record.end_ms - record.start_ms)
        return found

    def close(self) -> None:
        """Stop the threads of the trainer and free the model."""
        self.trainer.close()
        del self.trainer, self.batches
        self.outcome = None
        self.updates.clear()


def build_side(
    case: Case,
    batches: list[StepBatch],
    folder: Path,
    device: torch.device,
    changes: Mapping[str, Any] = {},
) -> OurSide:
    """Build torchmm for a case.

    Args:
        changes: further recipe tables.
    """
    return OurSide(case.recipe(folder, device, changes), batches, folder, device)
