"""Simulated step of a recipe on devices that are not available: time, MFU, bubbles and memory.

    recipe --> modules on the meta device --> plan, as in a run --> simulator with a device profile
           --> microbatches of the first step of the data, or sampled from [simulation]

One plan is simulated (PipeWeaver §4). In a pipeline, it is the plan of the data-parallel rank with
the most work, which the other ranks wait for at the end of the step. If ranks run layers in
lockstep (layer-by-layer all-gathers of FSDP2, expert parallelism), every action takes as long as on
the slowest rank of its group. The simulated plan and its timeline are then those of the slowest
group, not of a single rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
import transformers

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import slowest_update_ms
from torchmm.balance.disttrain.arrangement import (
    build_image_balancer,
    join_packs,
    reorder_first_step,
)
from torchmm.balance.image_balancing import add_feature_exchange, balance_step_images
from torchmm.balance.optimus.schedule_selection import StepOrder
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner
from torchmm.balance.pipeweaver.segment_search import choose_segments, needs_partitioner
from torchmm.balance.recipe_simulation.first_microbatches import (
    Workload,
    find_slowest_group,
    first_microbatches,
    most_loaded_rank,
)
from torchmm.balance.run_costs import build_cost_model, build_layer_tuning
from torchmm.balance.schedules import estimate_step_ms, plan_with_costs
from torchmm.balance.simulation.section import SimulationConfig
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_plans import compute_search_costs, plan_step_with_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import gc_disabled
from torchmm.costs.flops import module_layers, modules_with_trained_sources, step_flops
from torchmm.costs.operators import DeviceProfile
from torchmm.costs.sizes import sequence_sizes
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import Durations, UnshardMode
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.colocated import encoder_names
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.planning.first_step import with_single_sequence_microbatches
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import ResolvedRecipe, resolve_recipe
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.check import find_problems
from torchmm.recipe.mesh_sizes import MeshSizes, replica_groups
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import Placement, find_schedule, schedules_for

AUTO_VALUES = {"reorder": "intra", "balance": "images"}
"""Values that "auto" tries, by key of [data]."""
MIN_GAINS = {"reorder": 0.0, "balance": 0.01}
"""Minimum simulated gain of these values as a fraction of a step. That of balanced images allows
for the host time of the exchange, which is not simulated."""


@dataclass(frozen=True)
class SimulatedStepReport:
    """Simulated step with one schedule.

    Attributes:
        schedule: Name of the schedule in the recipe.
        step: Simulated step. None if the recipe cannot be planned.
        problem: Reason why the step is missing.
        mfu: Model FLOPs, including encoders and generators, as a fraction of the peak of all
            devices.
        tokens_per_s: Tokens of all devices together, including padding.
        update_ms: Optimizer time on the slowest rank after the last action of the plan. All ranks
            wait for the gradient norm. MFU and tokens include it.
    """

    schedule: str
    step: SimulatedStep | None = None
    problem: str = ""
    mfu: float = 0.0
    tokens_per_s: float = 0.0
    update_ms: float = 0.0

    @property
    def iteration_ms(self) -> float:
        """Time of the plan and the update. Infinite without a plan."""
        return inf if self.step is None else self.step.makespan_ms + self.update_ms

    @cached_property
    def encoder_bytes(self) -> int:
        """Maximum over ranks of the activations that encoders save at once. 0 without a plan."""
        if self.step is None:
            return 0
        encoders = encoder_names(self.step.plan.graph.layout)
        return max(self.step.saved_bytes(encoders), default=0)

    @property
    def memory_summary(self) -> str:
        """Description of the memory of encoders, and whether the step fits."""
        assert self.step is not None
        fits = "fits" if self.step.fits else "does not fit"
        words = [fits]
        if self.encoder_bytes:
            words.append(f"encoders use up to {self.encoder_bytes / 2**30:.2f} GiB")
        if recomputing := len(self.step.plan.recompute):
            words.append(f"{recomputing} tasks recompute")
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics for a JSON file."""
        if self.step is None:
            return {"schedule": self.schedule, "problem": self.problem}
        timeline = self.step.timeline
        return {
            "schedule": self.schedule,
            "step_ms": self.step.makespan_ms,
            "update_ms": self.update_ms,
            "iteration_ms": self.iteration_ms,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "bubble_fraction": timeline.bubble_fraction,
            "bubble_share": timeline.bubble_fractions,
            "module_ms": timeline.mean_module_ms(),
            "peak_memory_bytes": list(self.step.peak_bytes),
            "encoder_activation_bytes": self.encoder_bytes,
            "memory_limit_bytes": self.step.costs.memory_limit_bytes,
            "fits": self.step.fits,
        }


class StepSample:
    """Model of a recipe and packs of its first step.

    Simulations with different parallelism degrees, schedules and recomputation share it.

    Args:
        recipe: Recipe of the sample.
        model: Model of the recipe, if it exists.

    Raises:
        ConfigError: The model cannot be built.
    """

    def __init__(self, recipe: Recipe, model: MultimodalModel | None = None) -> None:
        self.recipe = recipe
        self.model = recipe_model(recipe) if model is None else model
        self.layered = {module.name: module for module in self.model.modality_modules()}
        self.modules = [module.describe() for module in self.layered.values()]
        self._shares: dict[tuple[int, int], list[list[MicrobatchMeta]]] = {}
        self._joined_packs: dict[int, list[MicrobatchMeta]] = {}
        self._cuts: dict[tuple[int, int], list[ModuleLayers]] = {}

    def shares(self, recipe: Recipe, count: int) -> list[list[MicrobatchMeta]]:
        """Return the microbatches of each data-parallel rank without reordering.

        Args:
            recipe: Recipe of the sample, with any microbatch size.
            count: Number of data-parallel ranks.
        """
        size = recipe.training.microbatch_size
        key = count, size
        if key not in self._shares:
            if recipe.data.sources:
                self._shares[key] = first_microbatches(recipe, self.model, count)
            else:  # packs are sampled from statistics in a fixed order
                joined = self.join_packs(size)
                per_rank = len(joined) // count
                self._shares[key] = [joined[rank * per_rank :][:per_rank] for rank in range(count)]
        return self._shares[key]

    def join_packs(self, size: int) -> list[MicrobatchMeta]:
        """Return microbatches of `size` consecutive packs."""
        if size not in self._joined_packs:
            packs = self.packs
            self._joined_packs[size] = [
                join_packs(packs[first : first + size])
                for first in range(0, len(packs) - size + 1, size)
            ]
        return self._joined_packs[size]

    def stage_split_layers(self, recipe: Recipe, count: int) -> list[ModuleLayers]:
        """Return the module layers that determine the split into stages for `shares`."""
        key = count, recipe.training.microbatch_size
        if key not in self._cuts:
            metas = [meta for share in self.shares(recipe, count) for meta in share]
            self._cuts[key] = module_layers(self.modules, metas)
        return self._cuts[key]

    @cached_property
    def packs(self) -> list[MicrobatchMeta]:
        """Packs of the global batch, each as a separate microbatch.

        Raises:
            ConfigError: The recipe has neither data nor a [simulation] section.
        """
        return first_microbatches(with_single_sequence_microbatches(self.recipe), self.model, 1)[0]

    @cached_property
    def layers(self) -> list[ModuleLayers]:
        """Module layers with which modules are split for these packs."""
        return module_layers(self.modules, self.packs)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the global batch."""
        return float(step_flops(self.modules, self.packs).sum())


class StepSimulator:
    """Simulator of steps of one recipe, without process groups and weights.

    Values of [data] that are "auto" are chosen first (`choose_reordering`).

    Args:
        recipe: Recipe to simulate.
        world_size: Number of devices.
        profile: Profile of the devices.
        model: Model of the recipe, if it exists.
        sample: Sample of the recipe, or of a recipe with other parallelism degrees, schedule or
            recomputation.

    Raises:
        ConfigError: The model cannot be built, or the data are missing.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        profile: DeviceProfile,
        model: MultimodalModel | None = None,
        sample: StepSample | None = None,
    ) -> None:
        transformers.logging.set_verbosity_error()
        self.profile = profile
        self.sample = StepSample(recipe, model) if sample is None else sample
        self.run = choose_reordering(resolve_recipe(recipe, world_size), profile, self.sample)
        self.recipe = recipe = self.run.recipe
        self.model = self.sample.model
        self.modules = self.sample.modules
        costs = self._costs(recipe.parallel)  # raises early if the section is invalid
        self._segmented_sections: dict[str, ParallelConfig] = {}
        self._estimates_ms: dict[str, float] = {}
        if not recipe.data.is_reordered:
            shares = self._shares = self._unordered_shares
        else:
            parallel = recipe.parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
            shares = self._shares = self._reorder_packs(parallel)
            if needs_partitioner(parallel):  # the layout changes, so reorder again
                shares = self._reorder_packs(self.with_segments(parallel))
        balance = build_image_balancer(recipe, self.modules)
        self._balanced = balance is not None and self.run.llm.pipeline == 1 and not self.run.units
        if balance is not None and self._balanced:
            shares = self._shares = balance_step_images(balance, shares)
        self.shares: list[list[MicrobatchMeta]] = shares
        """Microbatches of the first step, by data-parallel rank."""
        if self.run.units:
            most_loaded = _most_loaded_rank(self.modules, shares, self.run.units, costs)
            flops = float(step_flops(self.modules, shares[most_loaded]).sum())
            mean = self.sample.flops / len(shares)
            self.workload = Workload(shares[most_loaded], mean / flops if flops else 1.0)
        else:
            self.workload = self._slowest(self.run.lockstep_size, costs)

    def _slowest(self, ranks: int, costs: CostModel) -> Workload:
        """Return the microbatches that determine the step time.

        Args:
            ranks: Number of consecutive data-parallel ranks that run layers in lockstep.
            costs: Costs of the modules.
        """
        if ranks == 1:
            return most_loaded_rank(self.modules, self.shares)
        metas = [meta for share in self.shares for meta in share]
        layout = megatron_layout(module_layers(self.modules, metas[:1]), 1)  # one stage per module
        graph = step_graph(layout, self.recipe.parallel, metas, "layer")
        return find_slowest_group(self.modules, self.shares, ranks, costs, graph)

    def workload_for(self, parallel: ParallelConfig) -> Workload:
        """Return the workload of another [parallel] section, which may have no lockstep ranks."""
        run = self.run.with_parallel(parallel)
        if run.lockstep_size == self.run.lockstep_size:
            return self.workload
        return self._slowest(run.lockstep_size, self._costs(parallel))

    def _reorder_packs(self, parallel: ParallelConfig) -> list[list[MicrobatchMeta]]:
        """Return the reordered microbatches of the first step, by data-parallel rank."""
        run = self.run.with_parallel(parallel)
        costs = self._costs(parallel)
        return reorder_first_step(
            run, self.modules, costs, self.layout(parallel), self.sample.packs
        )

    def with_segments(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return a section with the LLM ranks of the run, and with segments chosen as in a run."""
        parallel = parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
        if not needs_partitioner(parallel):
            return parallel
        key = parallel.model_dump_json()
        if key not in self._segmented_sections:
            costs = self._costs(parallel)
            section = choose_segments(self.recipe, parallel, self.modules, self._shares, costs)
            self._segmented_sections[key] = section
        return self._segmented_sections[key]

    def layout(self, parallel: ParallelConfig) -> StageLayout:
        """Return the stage layout of a [parallel] section."""
        sample = self.sample
        if self.run.units:
            return plan_layout(parallel, self.modules, sample.packs, self.run.units, sample.layers)
        return plan_layout(parallel, self.modules, self.unordered_microbatches, layers=self._layers)

    @cached_property
    def _unordered_shares(self) -> list[list[MicrobatchMeta]]:
        return self.sample.shares(self.recipe, self.run.data_parallel_size)

    @cached_property
    def unordered_microbatches(self) -> list[MicrobatchMeta]:
        """Microbatches of the first step without reordering, for the split of modules."""
        return [meta for share in self._unordered_shares for meta in share]

    @cached_property
    def _layers(self) -> list[ModuleLayers]:
        return self.sample.stage_split_layers(self.recipe, self.run.data_parallel_size)

    def _costs(self, parallel: ParallelConfig) -> CostModel:
        return build_cost_model(self.run.with_parallel(parallel), self.modules, self.profile)

    def simulate_schedule(self, schedule: str | None = None) -> SimulatedStepReport:
        """Simulate the first step.

        Args:
            schedule: Replaces the schedule of the recipe.
        """
        name = schedule or self.recipe.parallel.schedule
        stages = 1 if name == "1f1b" else self.recipe.parallel.virtual_stages
        placement = _placement(name, self.recipe.parallel.placement)
        changes = {"schedule": name, "placement": placement, "virtual_stages": stages}
        return self.simulate_parallel(self.recipe.parallel.model_copy(update=changes))

    @gc_disabled()
    def simulate_parallel(self, parallel: ParallelConfig) -> SimulatedStepReport:
        """Simulate the first step with another [parallel] section.

        Args:
            parallel: Section with the same number of LLM ranks.

        Raises:
            ConfigError: Separate parallelism degrees of encoders do not fit.
        """
        name = parallel.schedule
        parallel = self.with_segments(parallel)
        workload = self.workload_for(parallel)
        metas = workload.microbatches
        dtype = DTYPES[self.recipe.training.dtype]
        specs = partial(message_specs, modules=self.sample.layered, microbatches=metas, dtype=dtype)
        model = self._costs(parallel)
        sharding, layerwise = self._sharding_mode(parallel, model)
        recipe = self.recipe.model_copy(update={"parallel": parallel})
        tuning = build_layer_tuning(recipe, model, layerwise=layerwise)
        if tuning is not None:
            tuning = replace(tuning, peers=workload.peers)
        search = None
        schedule = find_schedule(parallel.schedule)
        is_planned = schedule is not None and schedule.planned
        if is_planned and parallel.pipeline * parallel.mirrors > 1:

            def search(graph: StageGraph, _: Durations) -> StepOrder:
                costs = compute_search_costs(graph, self.modules, metas, model, layerwise=layerwise)
                tuner = None
                if tuning is not None:
                    tuner = LayerTuner(graph, self.modules, metas, tuning, specs=specs(graph))
                return plan_with_costs(parallel, graph, costs, sharding, tuner=tuner).step

        try:
            plan = plan_step_with_costs(
                self.layout(parallel),
                parallel,
                self.modules,
                metas,
                specs=specs,
                sharding=sharding,
                search=search,
                reduces_early=self.profile.device.asynchronous,
                tuning=tuning,
            )
        except (ConfigError, PlanError) as error:
            return SimulatedStepReport(name, problem=" ".join(str(error).split()))
        costs = compute_plan_costs_with_recompute(
            plan, self.modules, metas, model, layerwise=layerwise, peers=workload.peers
        )
        if self._balanced:
            ranks = self.run.data_parallel_size
            costs = add_feature_exchange(costs, plan.graph, self.modules, metas, model, ranks)
        return self.make_report(name, simulate(plan, costs), model, workload)

    @gc_disabled()
    def estimate_step_ms(self, parallel: ParallelConfig) -> float:
        """Return the bubble scheduler estimate (`schedules.estimate_step_ms`) of the first step.

        Args:
            parallel: [parallel] section with colocated encoders.

        Returns:
            The time in ms. Infinite if the modules cannot be split like this.

        Raises:
            ConfigError: As for `simulate_parallel`.
        """
        parallel = parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
        key = parallel.model_dump_json()
        if key in self._estimates_ms:
            return self._estimates_ms[key]
        metas = self.workload.microbatches
        model = self._costs(parallel)
        sharding, layerwise = self._sharding_mode(parallel, model)
        try:
            graph = step_graph(self.layout(parallel), parallel, metas, sharding)
        except (ConfigError, PlanError):
            self._estimates_ms[key] = inf
            return inf
        costs = compute_search_costs(graph, self.modules, metas, model, layerwise=layerwise)
        if graph.layout.rank_count == 1:
            estimate_ms = sum(costs.compute_ms.values())
        else:
            estimate_ms = estimate_step_ms(parallel, graph, costs, sharding)
        self._estimates_ms[key] = estimate_ms
        return estimate_ms

    def _sharding_mode(
        self, parallel: ParallelConfig, model: CostModel
    ) -> tuple[UnshardMode, bool]:
        """Return when parameters are all-gathered, and whether FSDP2 does so layer by layer."""
        layerwise = self.run.with_parallel(parallel).unshards_per_layer
        if all(model.execution(module.name).shard == 1 for module in self.modules):
            return "none", layerwise
        return ("layer" if layerwise else "step"), layerwise

    def make_report(
        self,
        name: str,
        step: SimulatedStep,
        model: CostModel | None = None,
        workload: Workload | None = None,
    ) -> SimulatedStepReport:
        """Return the report of a simulated step: MFU, throughput and optimizer time.

        Args:
            name: Name of the schedule.
            step: Simulated step of the workload.
            model: Costs of the plan. By default, those of [parallel] of the recipe.
            workload: Microbatches of the step. By default, those of the recipe.
        """
        workload = workload or self.workload
        model = model or self._costs(self.recipe.parallel)
        update_ms = slowest_update_ms(step.plan.graph.layout, self.modules, model)
        seconds = (step.makespan_ms + update_ms) / 1e3
        peak = self.profile.device.peak_flops[self.recipe.training.dtype]
        flops_per_s = step.model_flops * workload.mean_flops_fraction / seconds
        training = self.recipe.training
        tokens = training.global_batch_size * training.sequence_length
        mfu = flops_per_s / (self.run.world_size / self.run.data_parallel_size * peak)
        return SimulatedStepReport(name, step, "", mfu, tokens / seconds, update_ms)


def choose_reordering(
    run: ResolvedRecipe, profile: DeviceProfile | None, sample: StepSample
) -> ResolvedRecipe:
    """Return the run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    All supported combinations are simulated for the first step, and the fastest is chosen
    (`MIN_GAINS`). The choice depends only on the recipe, the first step of its data and the number
    of ranks. All ranks therefore make the same choice, also after a restart.

    Args:
        run: Recipe with resolved parallelism degrees.
        profile: Profile of the devices. None if it is not available.
        sample: Model and first step of the recipe.
    """
    keys = [key for key in AUTO_VALUES if getattr(run.recipe.data, key) == "auto"]
    reasons = {key: _reason_to_skip(run, key, profile, sample) for key in keys}
    options = [("none", AUTO_VALUES[key]) if not reasons[key] else ("none",) for key in keys]
    runs = {
        values: _replace_data_values(run, dict(zip(keys, values, strict=True)))
        for values in product(*options)
    }
    best = ("none",) * len(keys)
    if profile is not None and len(runs) > 1:
        try:
            reports = {
                values: StepSimulator(
                    candidate.recipe, candidate.world_size, profile, sample=sample
                ).simulate_schedule()
                for values, candidate in runs.items()
            }
        except ConfigError as error:
            reasons |= {key: f"no simulation: {'; '.join(error.problems)}" for key in keys}
        else:
            best = min(reports, key=lambda values: _score(reports[values], keys, values))
            for index, key in enumerate(keys):
                if not reasons[key]:
                    values = (*best[:index], AUTO_VALUES[key], *best[index + 1 :])
                    without = (*best[:index], "none", *best[index + 1 :])
                    reasons[key] = _compare_reports(reports[values], reports[without])
    choices = {f"data.{key}": f"{v} ({reasons[key]})" for key, v in zip(keys, best, strict=True)}
    return replace(runs[best], choices={**run.choices, **choices})


def _score(
    report: SimulatedStepReport, keys: Sequence[str], values: Sequence[str]
) -> tuple[bool, float]:
    """Return a score that is lower for better reports.

    Times are rounded to microseconds, so that ranks with different processors agree.
    """
    gain = sum(MIN_GAINS[key] for key, value in zip(keys, values, strict=True) if value != "none")
    fits = report.step is not None and report.step.fits
    return not fits, round((1 + gain) * report.iteration_ms, 3)


def _compare_reports(report: SimulatedStepReport, without: SimulatedStepReport) -> str:
    text = (
        f"simulated step with it {report.iteration_ms:,.1f} ms, without it "
        f"{without.iteration_ms:,.1f}"
    )
    fits = report.step is not None and report.step.fits
    return f"{text} ms" if fits else f"{text} ms, does not fit into memory"


def _replace_data_values(run: ResolvedRecipe, values: Mapping[str, str]) -> ResolvedRecipe:
    data = run.recipe.data.model_copy(update=values)
    return replace(run, recipe=run.recipe.model_copy(update={"data": data}))


def _reason_to_skip(
    run: ResolvedRecipe, key: str, profile: DeviceProfile | None, sample: StepSample
) -> str:
    """Return the reason why an arrangement cannot be simulated, or cannot help. Otherwise "".

    Args:
        run: Recipe with resolved parallelism degrees.
        key: Key of the arrangement in [data].
        profile: Profile of the devices.
        sample: Model and first step of the recipe.
    """
    data = run.recipe.data
    training = run.recipe.training
    reasons = {
        "one data-parallel rank": run.data_parallel_size == 1,
        "sizes of streamed samples are not known in advance": any(
            source.streaming for source in data.sources
        ),
        "producers plan the steps": data.producers.plan,
    }
    if key == "balance":
        changed = _replace_data_values(run, {key: AUTO_VALUES[key]})
        problems = find_problems(changed.recipe, run.world_size)
        reasons |= {p.text.partition(";")[0]: p.key == "data.balance" for p in problems}
        kinds = [module.kind for module in sample.modules]
        reasons["the model has neither encoders nor a generator"] = set(kinds) == {"llm"}
    else:
        has_router_loss = sample.model.llm.balance is not None
        reasons |= {
            "ranks of a pipeline synchronize once per step": run.is_pipelined,
            "one sequence per rank": run.data_parallel_size == training.global_batch_size,
            "the load-balancing loss depends on the sequences of a microbatch": has_router_loss
            and training.microbatch_size > 1,
        }
    reasons[
        f"no profile of simulation.device = {SimulationConfig.from_parent(run.recipe).device}"
    ] = profile is None
    return next((reason for reason, is_true in reasons.items() if is_true), "")


def _placement(schedule: str, placement: Placement) -> Placement:
    """Return the placement of the recipe, unless the schedule requires another one."""
    if schedule in schedules_for("colocated"):
        return "colocated"
    return "interleaved" if placement == "colocated" else placement


def _most_loaded_rank(
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    units: Mapping[str, MeshSizes],
    model: CostModel,
) -> int:
    """Return the data-parallel rank of the LLM whose most loaded device has the most work.

    With disaggregated modules, a step cannot end earlier. This need not be the rank with the most
    total work, because that can be spread over many devices.
    """
    metas = [meta for share in shares for meta in share]
    share_N = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    max_device_ms = np.zeros(len(shares))
    for module in modules:
        indices_with_input, sizes = sequence_sizes(module, metas)
        if sizes is None:
            continue
        needs_input_grad_N = np.array(
            [
                modules_with_trained_sources(modules, metas[i])[module.name]
                for i in indices_with_input
            ],
            bool,
        )
        costs = model.stage_costs(module, 0, len(module.layers), sizes, needs_input_grad_N)
        total_N = costs.forward.total_ms + costs.backward.total_ms
        sizes_of_unit = units[module.name]
        max_layer_fraction = -(-len(module.layers) // sizes_of_unit.pipeline) / len(module.layers)
        replicas = sizes_of_unit.data_parallel // replica_groups(units)
        rank_ms = (
            np.bincount(share_N[indices_with_input], total_N, len(shares))
            * max_layer_fraction
            / replicas
        )
        max_device_ms = np.maximum(max_device_ms, rank_ms)
    return int(max_device_ms.argmax())
