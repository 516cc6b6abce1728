"""Lower bounds of the step time and memory of a plan, in about one millisecond.

The search tries plans in the order of an estimate, and skips plans whose bound exceeds the best
step. Bound and estimate add the cost model times of complete modules. These are computed once for
all plans that run a module in the same way. The bound contains only work that no schedule hides:

- The average rank computes its fraction of the layers for its fraction of the batch.
- FSDP2 without a pipeline all-gathers parameters in every forward and backward pass. The time of a
  layer is the maximum of computation and communication.
- Ranks of a chain are idle until the first microbatch arrives and after their last backward pass.
- The optimizer updates the parameters of an average rank.

    bound      work of the average rank, ramp of a chain with the smallest microbatch, update
    estimate   work of the slowest rank, mean ramp, all-gathers and reductions, update
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel, StageCosts
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.balance.run_costs import build_cost_model
from torchmm.balance.search.plan_space import (
    IMAGES_AT_ONCE,
    REDUCTION,
    TUNED,
    CandidatePlan,
    apply_plan,
    microbatch_sizes,
)
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution
from torchmm.costs.flops import modules_with_trained_sources
from torchmm.costs.operators import DeviceProfile, OperatorTotals
from torchmm.costs.sizes import sequence_sizes
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES

REGROUPING_FACTOR = 0.97
"""Factor of the work bound. Reordering forms other microbatches than those with the computed times,
which changes kernel efficiency by a few percent."""
CHAINS = ("chain",)
"""Methods whose ranks wait for the first microbatch with any order of actions."""


class PlanBound(NamedTuple):
    """Bounds of a plan."""

    step_ms: float
    """Lower bound of the simulated step time."""
    estimate_ms: float
    memory_bytes: float
    """Lower bound of the memory of the rank with the highest memory use."""


class _ParameterCosts(NamedTuple):
    """Costs of a complete module that depend only on its parameters."""

    update_ms: float
    gather_ms: float
    reduce_ms: float
    state_bytes: float
    """Weights, all-gathered weights and optimizer states."""
    gradient_bytes: float


class _ModuleTimes(NamedTuple):
    """Times of a complete module."""

    total_N: np.ndarray
    """Forward and backward time in ms of every microbatch of the global batch."""
    min_ms: float
    """Minimum forward and backward time over microbatches. 0 if one has no input."""
    saved_bytes: float
    """Minimum saved activations over microbatches."""


class PlanBounds:
    """Bounds of plans whose modules share all ranks.

    Args:
        recipe: Plain recipe (`strip_parallelism`).
        profile: Profile of the devices.
        sample: Model and first step of the recipe.
    """

    def __init__(self, recipe: Recipe, profile: DeviceProfile, sample: StepSample) -> None:
        self._recipe = recipe
        self._profile = profile
        self._sample = sample
        self._images: dict[str, float] = {}
        self._sizes: dict[str, tuple[Any, Any, Any]] = {}
        self._costs: dict[tuple[str, Execution], StageCosts | None] = {}
        self._times: dict[tuple[object, ...], dict[int, _ModuleTimes]] = {}
        self._models: dict[tuple[object, ...], CostModel] = {}
        self._sharing: dict[tuple[str, Execution, bool], _ParameterCosts] = {}

    def bound(self, plan: CandidatePlan) -> PlanBound:
        """Return the bounds of a plan.

        Raises:
            ConfigError: The parallelism degrees do not fit together.
        """
        model = self._model(plan)
        recomputed = model
        if plan.recompute == TUNED:
            recomputed = self._model(plan.with_changes(activation_checkpoint__mode="full"))
        return PlanBound(*self._step_ms(plan, model), self._memory_bytes(plan, recomputed))

    def state_bytes(self, plan: CandidatePlan) -> float:
        """Return the memory of an average rank without activations, which is fast to compute.

        Raises:
            ConfigError: The parallelism degrees do not fit together.
        """
        model = self._model(plan)
        microbatches = self._microbatches(plan)
        reduces_each_microbatch = plan.changes.get(REDUCTION) == "microbatch"
        unsharded = plan.size("pipeline") > 1 or (microbatches > 1 and not reduces_each_microbatch)
        total_bytes = 0.0
        for module in self._sample.modules:
            shared = self._module_sharing(plan, module, model)
            total_bytes += shared.state_bytes + unsharded * shared.gradient_bytes
        return total_bytes / plan.size("pipeline")

    def _step_ms(self, plan: CandidatePlan, model: CostModel) -> tuple[float, float]:
        """Return the bound and the estimate of the step time."""
        pipeline = plan.size("pipeline")
        microbatches = self._microbatches(plan)
        stages = plan.size("virtual_stages")
        work_ms = ramp_ms = min_ramp_ms = update_ms = 0.0
        estimate_ms = self._slowest_ms(plan, model) / pipeline
        for module in self._sample.modules:
            times = self._module_times(plan, module, model)
            mean_ms = float(times.total_N.mean())
            work_ms += microbatches * mean_ms / pipeline
            if module.kind == "llm" or plan.method == "chain":
                ramp_ms += mean_ms
            elif plan.method == "separated":
                ramp_ms += mean_ms / self._sub_microbatches(module, plan)
            min_ramp_ms += times.min_ms
            shared = self._module_sharing(plan, module, model)
            update_ms += shared.update_ms / pipeline
            if pipeline == 1:
                estimate_ms += shared.reduce_ms / (len(module.layers) + 1)
            else:
                estimate_ms += (shared.reduce_ms + shared.gather_ms) / pipeline
        estimate_ms += ramp_ms * (pipeline - 1) / pipeline / stages + update_ms
        bound_ms = REGROUPING_FACTOR * work_ms + update_ms
        if plan.method in CHAINS and plan.schedule == "1f1b":
            bound_ms += REGROUPING_FACTOR * min_ramp_ms * (pipeline - 1) / (2 * pipeline)
        return bound_ms, estimate_ms

    def tasks(self, plan: CandidatePlan) -> int:
        """Return the approximate number of forward tasks of a pipeline."""
        pipeline = plan.size("pipeline")
        llm_stages = pipeline * plan.size("virtual_stages")
        stages = 0.0
        for module in self._sample.modules:
            parts = self._sub_microbatches(module, plan)
            if plan.method == "colocated" and module.kind == "encoder":
                stages += len(module.layers)
            elif plan.method == "separated":
                stages += pipeline * plan.size(f"{module.name}.segments") * parts
            elif plan.method == "disaggregated" and module.kind != "llm":
                stages += plan.size(f"{module.name}.pipeline") * parts
            elif module.kind == "llm":
                stages += llm_stages
        return round(self._microbatches(plan) * stages)

    def _sub_microbatches(self, module: ModuleDescription, plan: CandidatePlan) -> float:
        """Return the mean number of sub-microbatches of a microbatch of a separate encoder."""
        if module.kind == "llm":
            return 1.0
        key = f"parallel.{module.name}.sub_microbatch_images"
        at_once = int(plan.changes.get(key, IMAGES_AT_ONCE[0]))
        if module.name not in self._images:
            packs = self._sample.packs
            images = sum(pack.module_image_count(module.name) for pack in packs)
            self._images[module.name] = images / len(packs)
        return max(1.0, plan.microbatch_size * self._images[module.name] / at_once)

    def _slowest_ms(self, plan: CandidatePlan, model: CostModel) -> float:
        """Return the estimated work of the slowest rank in all layers.

        Without a pipeline, ranks that share parameters synchronize in every module of every
        microbatch. In a pipeline, ranks with the same layers synchronize at the end of the step.
        Reordering gives synchronized ranks similar microbatches, and divides the work of a step
        equally.
        """
        shares = plan.data_ranks
        shape = shares, self._microbatches(plan)
        lockstep = max(1, plan.size("shard") // plan.size("llm.context"))
        data = self._recipe.data
        is_ordered = plan.changes.get("data.reorder", data.reorder) not in ("auto", "none")
        is_balanced = plan.changes.get("data.balance", data.balance) == "images"
        times = [
            (module.kind, self._module_times(plan, module, model).total_N)
            for module in self._sample.modules
        ]
        work_N = np.sum([total_N for _, total_N in times], axis=0)
        if plan.size("pipeline") > 1:
            if is_ordered:
                return max(float(work_N.sum()) / shares, float(work_N.max()))
            return float(work_N.reshape(shape).sum(1).max())
        order_N = np.argsort(-work_N)
        group_ms_G = np.zeros(shares // lockstep)
        for kind, total_N in times:
            if is_balanced and kind != "llm":
                group_ms_G += total_N.sum() / shares
            elif is_ordered:
                group_ms_G += total_N[order_N].reshape(shape[::-1]).max(1).sum()
            else:
                group_ms_G += total_N.reshape(-1, lockstep, shape[1]).max(1).sum(1)
        return float(group_ms_G.max())

    def _memory_bytes(self, plan: CandidatePlan, model: CostModel) -> float:
        """Return the memory of an average rank: states and the activations that it saves."""
        pipeline = plan.size("pipeline")
        waiting = min((pipeline + 1) / 2, self._microbatches(plan))
        saved_bytes = sum(
            self._module_times(plan, module, model).saved_bytes for module in self._sample.modules
        )
        return self.state_bytes(plan) + waiting * saved_bytes / pipeline

    def _microbatches(self, plan: CandidatePlan) -> int:
        batch = self._recipe.training.global_batch_size
        return batch // (plan.data_ranks * plan.microbatch_size)

    def _model(self, plan: CandidatePlan) -> CostModel:
        """Return the cost model of a plan, whose executions depend on few of its changes."""
        keys = (
            *("tensor", "replicate", "shard", "expert", "llm.context", "sequence_parallel"),
            *("pipeline", "placement", "gradient_reduction", "tp_comm_fraction"),
            *(f"{module.name}.tensor" for module in self._sample.modules),
        )
        # Layers with split backward passes are not compiled.
        splits = plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].splits_backward
        key = (plan.recompute, splits, *(plan.changes.get(f"parallel.{name}") for name in keys))
        if key not in self._models:
            planned = apply_plan(self._recipe, plan)
            run = resolve_recipe(planned, plan.devices)
            self._models[key] = build_cost_model(run, self._sample.modules, self._profile)
        return self._models[key]

    def _module_sharing(
        self, plan: CandidatePlan, module: ModuleDescription, model: CostModel
    ) -> _ParameterCosts:
        layerwise = plan.size("pipeline") == 1
        key = module.name, model.execution(module.name), layerwise
        if key not in self._sharing:
            layers = len(module.layers)
            held_bytes = model.static_bytes(module, 0, layers, layerwise=layerwise)
            gradient_bytes = model.gradient_bytes(module, 0, layers)
            self._sharing[key] = _ParameterCosts(
                model.update_ms(module, 0, layers),
                model.gather_ms(module, 0, layers),
                model.reduce_ms(module, 0, layers),
                held_bytes - gradient_bytes,
                gradient_bytes,
            )
        return self._sharing[key]

    def _module_times(
        self, plan: CandidatePlan, module: ModuleDescription, model: CostModel
    ) -> _ModuleTimes:
        layerwise = plan.size("pipeline") == 1
        key = module.name, model.execution(module.name), layerwise
        if key not in self._times:
            self._times[key] = self._times_by_size(module, model, layerwise=layerwise)
        times = self._times[key][plan.microbatch_size]
        context = plan.size("llm.context")
        if module.kind == "llm" or context == 1:
            return times
        # Ranks of context parallelism divide the images.
        total_N, min_ms, saved_bytes = times
        return _ModuleTimes(total_N / context, min_ms / context, saved_bytes / context)

    def _times_by_size(
        self, module: ModuleDescription, model: CostModel, *, layerwise: bool
    ) -> dict[int, _ModuleTimes]:
        """Return the times of the complete module, by microbatch size."""
        metas_by_size = self._microbatches_by_size
        total_N = np.zeros(sum(len(metas) for metas in metas_by_size.values()))
        kept_N = np.zeros(len(total_N))
        has_input_N = np.zeros(len(total_N), bool)
        costs = self._module_costs(module, model)
        if costs is not None:
            execution = model.execution(module.name)
            layers = len(module.layers)
            shares = execution.shard > 1 or model.element_bytes < execution.states.weight
            if layerwise and execution.uses_fsdp and shares:
                gather = model.gather_work(module, 0, layers)
                hides = self._profile.device.asynchronous
                none = OperatorTotals.zero(len(costs.saved_bytes))
                costs = costs.sharded(gather, none, layers + 1, hides)
            indices_with_input = self._module_sizes(module)[0]
            total_N[indices_with_input] = costs.forward.total_ms + costs.backward.total_ms
            kept_N[indices_with_input] = costs.saved_bytes
            has_input_N[indices_with_input] = True
        times = {}
        stop = 0
        for size, metas in metas_by_size.items():
            microbatches = slice(stop, stop := stop + len(metas))
            all_have_input = bool(has_input_N[microbatches].all())
            min_ms = float(total_N[microbatches].min())
            saved_bytes = float(kept_N[microbatches].min())
            times[size] = _ModuleTimes(
                total_N[microbatches], min_ms * all_have_input, saved_bytes * all_have_input
            )
        return times

    def _module_costs(self, module: ModuleDescription, model: CostModel) -> StageCosts | None:
        """Return the costs of the complete module without sharding, by microbatch with input.

        Microbatches of all sizes are computed at once, because the computation time hardly depends
        on their number. The addition of gradients to those of other microbatches is not included,
        because a rank runs fewer microbatches.
        """
        execution = model.execution(module.name)
        key = module.name, replace(execution, shard=1, replicate=1, reduces_every_microbatch=True)
        if key not in self._costs:
            _, sizes, needs_input_grad_N = self._module_sizes(module)
            self._costs[key] = None
            if sizes is not None:
                layers = len(module.layers)
                first = replace(
                    model,
                    executions={module.name: replace(execution, reduces_every_microbatch=True)},
                )
                self._costs[key] = first.stage_costs(module, 0, layers, sizes, needs_input_grad_N)
        return self._costs[key]

    def _module_sizes(self, module: ModuleDescription):  # type: ignore[no-untyped-def]
        if module.name not in self._sizes:
            metas = [
                meta for size_metas in self._microbatches_by_size.values() for meta in size_metas
            ]
            indices_with_input, sizes = sequence_sizes(module, metas)
            modules = self._sample.modules
            needs_input_grad_N = np.array(
                [
                    modules_with_trained_sources(modules, metas[i])[module.name]
                    for i in indices_with_input
                ],
                bool,
            )
            self._sizes[module.name] = indices_with_input, sizes, needs_input_grad_N
        return self._sizes[module.name]

    @cached_property
    def _microbatches_by_size(self) -> dict[int, list[MicrobatchMeta]]:
        """Microbatches of the global batch, by the number of sequences in each."""
        return {size: self._sample.join_packs(size) for size in microbatch_sizes(self._recipe)}
