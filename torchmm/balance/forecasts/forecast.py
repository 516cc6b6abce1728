"""What a recipe's step would take on devices that are not at hand: time, MFU, bubbles, memory.

The recipe's modules are described on the meta device, its first step's microbatches come from its
data or are drawn from `[simulation]`, the plan is the one a run would execute, and the simulator
times it with a device's profile. PipeWeaver §4.

One plan is simulated. In a pipeline it is that of the data-parallel rank with the most work, which
the other ranks wait for at the end of the step. If ranks run layers in lockstep (FSDP2 that gathers
layer by layer, expert parallelism), every action takes as long as on the slowest rank of its group.
The simulated plan and its timeline are then those of the slowest group, not of a single rank.
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
from torchmm.balance.disttrain.arrangement import dealt, image_balance, join_packs
from torchmm.balance.forecasts.first_microbatches import (
    Workload,
    first_microbatches,
    heaviest,
    slowest_group,
)
from torchmm.balance.image_shares import balanced_shares, with_feature_exchange
from torchmm.balance.optimus.choice import StepOrder
from torchmm.balance.pipeweaver.recomputation.costs import costs_of_plan
from torchmm.balance.pipeweaver.recomputation.tuning import Tuner
from torchmm.balance.pipeweaver.segments import chosen_segments, leaves_segments_open
from torchmm.balance.run_costs import layer_tuning, run_costs
from torchmm.balance.schedules import plan_by_costs, promised_ms
from torchmm.balance.simulation.section import SimulationConfig
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_plans import plan_costed_step, searched_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import without_collection
from torchmm.costs.flops import gradients_arrive, module_layers, step_flops
from torchmm.costs.operators import Profile
from torchmm.costs.sizes import pack_sizes
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import Durations, Gathering
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.colocated import encoder_names
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.planning.first_step import one_by_one
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved import Resolved, resolve
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.check import find_problems
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import Placement, find_schedule, schedules_for
from torchmm.recipe.sizes import MeshSizes, replica_groups

ARRANGEMENTS = {"reorder": "intra", "balance": "images"}
"""Values that "auto" tries, by key of [data]."""
MIN_GAINS = {"reorder": 0.0, "balance": 0.01}
"""Fractions of a step that a forecast has to gain with them. That of balanced images does not
include the host time of the exchange."""


@dataclass(frozen=True)
class Forecast:
    """A step under one schedule.

    Attributes:
        schedule: the recipe's name of it.
        step: simulated; None if the recipe cannot be planned so.
        problem: why not.
        mfu: share of all devices' peak that the model's FLOPs need; those of images included.
        tokens_per_s: of all devices together, padding included.
        update_ms: after the plan's last action: the optimizer, on the rank that takes longest,
            as all wait for the gradients' norm. MFU and tokens include it.
    """

    schedule: str
    step: SimulatedStep | None = None
    problem: str = ""
    mfu: float = 0.0
    tokens_per_s: float = 0.0
    update_ms: float = 0.0

    @property
    def iteration_ms(self) -> float:
        """Time of the plan and the update; infinite without a plan."""
        return inf if self.step is None else self.step.makespan_ms + self.update_ms

    @cached_property
    def encoder_bytes(self) -> int:
        """Activations that encoders keep at once, on the rank where that is most; 0 without a
        plan."""
        if self.step is None:
            return 0
        encoders = encoder_names(self.step.plan.graph.layout)
        return max(self.step.kept_bytes(encoders), default=0)

    @property
    def memory_words(self) -> str:
        """What of the memory encoders have, and whether it fits; of a forecast with a step."""
        assert self.step is not None
        fits = "fits" if self.step.fits else "does not fit"
        words = [fits]
        if self.encoder_bytes:
            words.append(f"encoders use up to {self.encoder_bytes / 2**30:.2f} GiB")
        if recomputing := len(self.step.plan.recompute):
            words.append(f"{recomputing} tasks recompute")
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Figures, for a JSON file."""
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
            "bubble_share": timeline.bubble_share,
            "module_ms": timeline.mean_module_ms(),
            "peak_memory_bytes": list(self.step.peak_bytes),
            "encoder_activation_bytes": self.encoder_bytes,
            "memory_limit_bytes": self.step.costs.memory_limit_bytes,
            "fits": self.step.fits,
        }


class StepSample:
    """A recipe's model and the packs of its first step: what forecasts of it share, whatever sizes,
    schedule and recomputation they are for.

    Args:
        model: the recipe's, if it has been built before.

    Raises:
        ConfigError: the model cannot be built.
    """

    def __init__(self, recipe: Recipe, model: MultimodalModel | None = None) -> None:
        self.recipe = recipe
        self.model = recipe_model(recipe) if model is None else model
        self.layered = {module.name: module for module in self.model.modality_modules()}
        self.modules = [module.describe() for module in self.layered.values()]
        self._shares: dict[tuple[int, int], list[list[MicrobatchMeta]]] = {}
        self._joined: dict[int, list[MicrobatchMeta]] = {}
        self._cuts: dict[tuple[int, int], list[ModuleLayers]] = {}

    def shares(self, recipe: Recipe, count: int) -> list[list[MicrobatchMeta]]:
        """Return the microbatches of every share of the global batch, without reordering.

        Args:
            recipe: the recipe of the sample, with microbatches of any size.
            count: number of shares.
        """
        size = recipe.training.microbatch_size
        key = count, size
        if key not in self._shares:
            if recipe.data.sources:
                self._shares[key] = first_microbatches(recipe, self.model, count)
            else:  # statistics, which are drawn in the order of the packs
                joined = self.joined(size)
                own = len(joined) // count
                self._shares[key] = [joined[rank * own :][:own] for rank in range(count)]
        return self._shares[key]

    def joined(self, size: int) -> list[MicrobatchMeta]:
        """Return microbatches of `size` consecutive packs."""
        if size not in self._joined:
            packs = self.packs
            self._joined[size] = [
                join_packs(packs[first : first + size])
                for first in range(0, len(packs) - size + 1, size)
            ]
        return self._joined[size]

    def cut_layers(self, recipe: Recipe, count: int) -> list[ModuleLayers]:
        """Return the modules as they are cut for the microbatches of `shares`."""
        key = count, recipe.training.microbatch_size
        if key not in self._cuts:
            metas = [meta for share in self.shares(recipe, count) for meta in share]
            self._cuts[key] = module_layers(self.modules, metas)
        return self._cuts[key]

    @cached_property
    def packs(self) -> list[MicrobatchMeta]:
        """Of the global batch, each as a microbatch of its own.

        Raises:
            ConfigError: there is nothing to draw them from.
        """
        return first_microbatches(one_by_one(self.recipe), self.model, 1)[0]

    @cached_property
    def layers(self) -> list[ModuleLayers]:
        """The modules as they are cut for these packs."""
        return module_layers(self.modules, self.packs)

    @cached_property
    def flops(self) -> float:
        """Of the whole global batch."""
        return float(step_flops(self.modules, self.packs).sum())


class Forecaster:
    """Forecasts steps of one recipe on `world_size` devices; needs no process group, no weights.

    Values of [data] that are "auto" are chosen first (`choose_arrangement`).

    Args:
        profile: of the devices.
        model: the recipe's, if it has been built before.
        sample: the recipe's, or that of one with other sizes, schedule or recomputation.

    Raises:
        ConfigError: the model cannot be built, or there is nothing to draw microbatches from.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        profile: Profile,
        model: MultimodalModel | None = None,
        sample: StepSample | None = None,
    ) -> None:
        transformers.logging.set_verbosity_error()
        self.profile = profile
        self.sample = StepSample(recipe, model) if sample is None else sample
        self.run = choose_arrangement(resolve(recipe, world_size), profile, self.sample)
        self.recipe = recipe = self.run.recipe
        self.model = self.sample.model
        self.modules = self.sample.modules
        costs = self._costs(recipe.parallel)  # what is wrong with it, now
        self._divisions: dict[str, ParallelConfig] = {}
        self._promises_ms: dict[str, float] = {}
        if not recipe.data.is_reordered:
            shares = self._shares = self._as_they_come
        else:
            parallel = recipe.parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
            shares = self._shares = self._dealt(parallel)
            if leaves_segments_open(parallel):  # they choose, and are dealt again for the choice
                shares = self._dealt(self.divided(parallel))
        balance = image_balance(recipe, self.modules)
        self._balanced = balance is not None and self.run.llm.pipeline == 1 and not self.run.units
        if balance is not None and self._balanced:
            shares = self._shares = balanced_shares(balance, shares)
        self.shares: list[list[MicrobatchMeta]] = shares
        """Microbatches of the first step, by share of the global batch."""
        if self.run.units:
            busiest = _busiest(self.modules, shares, self.run.units, costs)
            own = float(step_flops(self.modules, shares[busiest]).sum())
            mean = self.sample.flops / len(shares)
            self.workload = Workload(shares[busiest], mean / own if own else 1.0)
        else:
            self.workload = self._slowest(self.run.lockstep_shares, costs)

    def _slowest(self, ranks: int, costs: CostModel) -> Workload:
        """Return the microbatches that decide how long a step takes.

        Args:
            ranks: consecutive shares of the global batch whose ranks run layers in lockstep.
            costs: of the modules.
        """
        if ranks == 1:
            return heaviest(self.modules, self.shares)
        metas = [meta for share in self.shares for meta in share]
        layout = megatron_layout(module_layers(self.modules, metas[:1]), 1)  # one stage per module
        graph = step_graph(layout, self.recipe.parallel, metas, "layer")
        return slowest_group(self.modules, self.shares, ranks, costs, graph)

    def workload_of(self, parallel: ParallelConfig) -> Workload:
        """Return the workload of another section, whose ranks may not run layers in lockstep."""
        run = self.run.with_parallel(parallel)
        if run.lockstep_shares == self.run.lockstep_shares:
            return self.workload
        return self._slowest(run.lockstep_shares, self._costs(parallel))

    def _dealt(self, parallel: ParallelConfig) -> list[list[MicrobatchMeta]]:
        """The first step's microbatches where reordering for a section puts them, by share."""
        run = self.run.with_parallel(parallel)
        costs = self._costs(parallel)
        return dealt(run, self.modules, costs, self.layout(parallel), self.sample.packs)

    def divided(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return a section with the LLM ranks of the run, and open segments chosen as in a run."""
        parallel = parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
        if not leaves_segments_open(parallel):
            return parallel
        key = parallel.model_dump_json()
        if key not in self._divisions:
            costs = self._costs(parallel)
            found = chosen_segments(self.recipe, parallel, self.modules, self._shares, costs)
            self._divisions[key] = found
        return self._divisions[key]

    def layout(self, parallel: ParallelConfig) -> StageLayout:
        """How modules are cut."""
        sample = self.sample
        if self.run.units:
            return plan_layout(parallel, self.modules, sample.packs, self.run.units, sample.layers)
        return plan_layout(parallel, self.modules, self.typical, layers=self._layers)

    @cached_property
    def _as_they_come(self) -> list[list[MicrobatchMeta]]:
        return self.sample.shares(self.recipe, self.run.shares)

    @cached_property
    def typical(self) -> list[MicrobatchMeta]:
        """The first step's microbatches as they come, which decide how modules are cut."""
        return [meta for share in self._as_they_come for meta in share]

    @cached_property
    def _layers(self) -> list[ModuleLayers]:
        return self.sample.cut_layers(self.recipe, self.run.shares)

    def _costs(self, parallel: ParallelConfig) -> CostModel:
        return run_costs(self.run.with_parallel(parallel), self.modules, self.profile)

    def forecast(self, schedule: str | None = None) -> Forecast:
        """The first step.

        Args:
            schedule: instead of the recipe's.
        """
        name = schedule or self.recipe.parallel.schedule
        stages = 1 if name == "1f1b" else self.recipe.parallel.virtual_stages
        placement = _placement(name, self.recipe.parallel.placement)
        changes = {"schedule": name, "placement": placement, "virtual_stages": stages}
        return self.forecast_parallel(self.recipe.parallel.model_copy(update=changes))

    @without_collection()
    def forecast_parallel(self, parallel: ParallelConfig) -> Forecast:
        """The first step with another section, whose LLM is on as many ranks.

        Raises:
            ConfigError: own sizes of encoders do not fit.
        """
        name = parallel.schedule
        parallel = self.divided(parallel)
        workload = self.workload_of(parallel)
        metas = workload.microbatches
        dtype = DTYPES[self.recipe.training.dtype]
        specs = partial(message_specs, modules=self.sample.layered, microbatches=metas, dtype=dtype)
        model = self._costs(parallel)
        sharding, layerwise = self._gathering(parallel, model)
        recipe = self.recipe.model_copy(update={"parallel": parallel})
        tuning = layer_tuning(recipe, model, layerwise=layerwise)
        if tuning is not None:
            tuning = replace(tuning, peers=workload.peers)
        search = None
        schedule = find_schedule(parallel.schedule)
        is_planned = schedule is not None and schedule.planned
        if is_planned and parallel.pipeline * parallel.mirrors > 1:

            def search(graph: StageGraph, _: Durations) -> StepOrder:
                costs = searched_costs(graph, self.modules, metas, model, layerwise=layerwise)
                tuner = None
                if tuning is not None:
                    tuner = Tuner(graph, self.modules, metas, tuning, specs=specs(graph))
                return plan_by_costs(parallel, graph, costs, sharding, tuner=tuner).step

        try:
            plan = plan_costed_step(
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
            return Forecast(name, problem=" ".join(str(error).split()))
        costs = costs_of_plan(
            plan, self.modules, metas, model, layerwise=layerwise, peers=workload.peers
        )
        if self._balanced:
            ranks = self.run.shares
            costs = with_feature_exchange(costs, plan.graph, self.modules, metas, model, ranks)
        return self.rate(name, simulate(plan, costs), model, workload)

    @without_collection()
    def promised_ms(self, parallel: ParallelConfig) -> float:
        """What the bubble scheduler promises (`planners.promised_ms`) for the first step with
        another section, of colocated encoders; infinite where the modules cannot be cut like this.

        Raises:
            ConfigError: as `forecast_parallel`.
        """
        parallel = parallel.model_copy(update={"pipeline": self.run.llm.pipeline})
        key = parallel.model_dump_json()
        if key in self._promises_ms:
            return self._promises_ms[key]
        metas = self.workload.microbatches
        model = self._costs(parallel)
        sharding, layerwise = self._gathering(parallel, model)
        try:
            graph = step_graph(self.layout(parallel), parallel, metas, sharding)
        except (ConfigError, PlanError):
            self._promises_ms[key] = inf
            return inf
        costs = searched_costs(graph, self.modules, metas, model, layerwise=layerwise)
        if graph.layout.rank_count == 1:
            found_ms = sum(costs.compute_ms.values())
        else:
            found_ms = promised_ms(parallel, graph, costs, sharding)
        self._promises_ms[key] = found_ms
        return found_ms

    def _gathering(self, parallel: ParallelConfig, model: CostModel) -> tuple[Gathering, bool]:
        """When parameters are gathered, and whether FSDP2 is the one to do it, layer by layer."""
        layerwise = self.run.with_parallel(parallel).gathers_by_layer
        if all(model.execution(module.name).shard == 1 for module in self.modules):
            return "none", layerwise
        return ("layer" if layerwise else "step"), layerwise

    def rate(
        self,
        name: str,
        step: SimulatedStep,
        model: CostModel | None = None,
        workload: Workload | None = None,
    ) -> Forecast:
        """Return the forecast of a simulated step: MFU, throughput and optimizer time.

        Args:
            name: of the schedule.
            step: simulated step of the workload.
            model: costs of the plan. By default, those of [parallel] of the recipe.
            workload: microbatches of the step. By default, those of the recipe.
        """
        workload = workload or self.workload
        model = model or self._costs(self.recipe.parallel)
        update_ms = slowest_update_ms(step.plan.graph.layout, self.modules, model)
        seconds = (step.makespan_ms + update_ms) / 1e3
        peak = self.profile.device.peak_flops[self.recipe.training.dtype]
        flops_per_s = step.model_flops * workload.mean_share / seconds
        training = self.recipe.training
        tokens = training.global_batch_size * training.sequence_length
        mfu = flops_per_s / (self.run.world_size / self.run.shares * peak)
        return Forecast(name, step, "", mfu, tokens / seconds, update_ms)


def choose_arrangement(run: Resolved, profile: Profile | None, sample: StepSample) -> Resolved:
    """Return the run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    All supported combinations are forecast for the first step, and the fastest is chosen
    (`MIN_GAINS`). The choice depends only on the recipe, the first step of its data and the number
    of ranks, so that all ranks choose the same, also after a restart.

    Args:
        run: Recipe with resolved sizes.
        profile: Profile of the devices; None if it is not available.
        sample: Model and first step of the recipe.
    """
    keys = [key for key in ARRANGEMENTS if getattr(run.recipe.data, key) == "auto"]
    reasons = {key: _reason_against(run, key, profile, sample) for key in keys}
    tried = [("none", ARRANGEMENTS[key]) if not reasons[key] else ("none",) for key in keys]
    runs = {
        values: _with_data(run, dict(zip(keys, values, strict=True))) for values in product(*tried)
    }
    best = ("none",) * len(keys)
    if profile is not None and len(runs) > 1:
        try:
            forecasts = {
                values: Forecaster(own.recipe, own.world_size, profile, sample=sample).forecast()
                for values, own in runs.items()
            }
        except ConfigError as error:
            reasons |= {key: f"no simulation: {'; '.join(error.problems)}" for key in keys}
        else:
            best = min(forecasts, key=lambda values: _score(forecasts[values], keys, values))
            for place, key in enumerate(keys):
                if not reasons[key]:
                    values = (*best[:place], ARRANGEMENTS[key], *best[place + 1 :])
                    without = (*best[:place], "none", *best[place + 1 :])
                    reasons[key] = _comparison(forecasts[values], forecasts[without])
    choices = {f"data.{key}": f"{v} ({reasons[key]})" for key, v in zip(keys, best, strict=True)}
    return replace(runs[best], choices={**run.choices, **choices})


def _score(forecast: Forecast, keys: Sequence[str], values: Sequence[str]) -> tuple[bool, float]:
    """Return a value that is small for good forecasts.

    Times are rounded to microseconds, so that ranks with other processors agree.
    """
    gain = sum(MIN_GAINS[key] for key, value in zip(keys, values, strict=True) if value != "none")
    fits = forecast.step is not None and forecast.step.fits
    return not fits, round((1 + gain) * forecast.iteration_ms, 3)


def _comparison(found: Forecast, without: Forecast) -> str:
    text = (
        f"simulated step with it {found.iteration_ms:,.1f} ms, without it "
        f"{without.iteration_ms:,.1f}"
    )
    fits = found.step is not None and found.step.fits
    return f"{text} ms" if fits else f"{text} ms, does not fit into memory"


def _with_data(run: Resolved, values: Mapping[str, str]) -> Resolved:
    data = run.recipe.data.model_copy(update=values)
    return replace(run, recipe=run.recipe.model_copy(update={"data": data}))


def _reason_against(run: Resolved, key: str, profile: Profile | None, sample: StepSample) -> str:
    """Return why an arrangement cannot be forecast, or cannot help; an empty string if it can.

    Args:
        run: Recipe with resolved sizes.
        key: Key of the arrangement in [data].
        profile: Profile of the devices.
        sample: Model and first step of the recipe.
    """
    data = run.recipe.data
    training = run.recipe.training
    reasons = {
        "one data-parallel rank": run.shares == 1,
        "sizes of streamed samples are not known in advance": any(
            source.streaming for source in data.sources
        ),
        "producers plan the steps": data.producers.plan,
    }
    if key == "balance":
        own = _with_data(run, {key: ARRANGEMENTS[key]})
        problems = find_problems(own.recipe, run.world_size)
        reasons |= {p.text.partition(";")[0]: p.key == "data.balance" for p in problems}
        kinds = [module.kind for module in sample.modules]
        reasons["the model has neither encoders nor a generator"] = set(kinds) == {"llm"}
    else:
        has_router_loss = sample.model.llm.balance is not None
        reasons |= {
            "ranks of a pipeline synchronize once per step": run.is_cut,
            "one sequence per rank": run.shares == training.global_batch_size,
            "the load-balancing loss depends on the sequences of a microbatch": has_router_loss
            and training.microbatch_size > 1,
        }
    reasons[f"no profile of simulation.device = {SimulationConfig.of(run.recipe).device}"] = (
        profile is None
    )
    return next((reason for reason, holds in reasons.items() if holds), "")


def _placement(schedule: str, given: Placement) -> Placement:
    """That of the recipe, unless another schedule needs another."""
    if schedule in schedules_for("colocated"):
        return "colocated"
    return "interleaved" if given == "colocated" else given


def _busiest(
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    units: Mapping[str, MeshSizes],
    model: CostModel,
) -> int:
    """The share whose busiest rank has most to do: with modules apart, a step ends no earlier, and
    the share with the most work may have it where ranks are many."""
    metas = [meta for share in shares for meta in share]
    share_N = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    busiest_ms = np.zeros(len(shares))
    for module in modules:
        at, sizes = pack_sizes(module, metas)
        if sizes is None:
            continue
        arrives_N = np.array([gradients_arrive(modules, metas[i])[module.name] for i in at], bool)
        costs = model.stage_costs(module, 0, len(module.layers), sizes, arrives_N)
        whole_N = costs.forward.total_ms + costs.backward.total_ms
        own = units[module.name]
        fullest = -(-len(module.layers) // own.pipeline) / len(module.layers)
        replicas = own.data_parallel // replica_groups(units)
        rank_ms = np.bincount(share_N[at], whole_N, len(shares)) * fullest / replicas
        busiest_ms = np.maximum(busiest_ms, rank_ms)
    return int(busiest_ms.argmax())
