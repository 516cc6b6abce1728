"""Simulated steps of PipeWeaver's models with its techniques and its baselines.

`pipeweaver_figures.py` describes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.papers.paper_figures import PIPEWEAVER_ABLATION
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.activation_checkpointing.memory_aware_search import (
    MemoryAwareSearch,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner, LayerTuning
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.search import (
    SearchBudget,
    SearchSettings,
    search_orders,
)
from torchmm.balance.pipeweaver.segment_search import needs_partitioner, search_segments
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.simulation.section import SimulatedSequences
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.costs.execution import RecomputeSetting
from torchmm.costs.flops import module_layers
from torchmm.costs.layers import stage_parameters
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import megatron_balanced_layout
from torchmm.planning.executions import module_executions
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[3]
SEED = 0
VIRTUAL_STAGES = 4
"""Virtual stages per rank of Megatron-LM."""
MEMORY_SHARE = 0.85
COARSE = "sequential modules"
Modes = tuple[RecomputeSetting, ...]


class Model(NamedTuple):
    """Model of the paper with its parallelism degrees."""

    recipe: str
    data: int
    pipeline: int
    tensor: int

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.data * self.pipeline * self.tensor


VLM_S = Model("pipeweaver_vlm_s", 1, 4, 4)
SELECTIVE = ["--activation_checkpoint.mode", "selective"]
SELECTIVE += ["--activation_checkpoint.modules.generator", "full"]
SELECTIVE += ["--activation_checkpoint.memory_limit", "85%"]
"""Recomputation for which stages of T2V models are partitioned, for any mode of the recipe."""


class Setting:
    """Model with the microbatches of one pipeline and costs for all recomputation modes.

    If there are several data-parallel ranks, the pipeline is that of the rank with the most work.

    Args:
        dealt: Whether sequences are reordered so that data-parallel ranks have about equal work
            (`data.reorder`).
    """

    def __init__(
        self,
        microbatches: int,
        images: int | None = None,
        model: Model = VLM_S,
        *,
        dealt: bool = True,
    ) -> None:
        overrides = ["--parallel.schedule", "searched", "--simulation.seed", str(SEED)]
        overrides += [
            "--parallel.pipeline",
            str(model.pipeline),
            "--parallel.sequence_parallel=true",
        ]
        overrides += ["--parallel.tensor", str(model.tensor)]
        overrides += SELECTIVE if "_t2v_" in model.recipe else []
        overrides += ["--training.global_batch_size", str(microbatches * model.data)]
        overrides += ["--data.reorder", "intra" if dealt else "none"]
        if images is not None:
            overrides += ["--parallel.vision.sub_microbatch_images", str(images)]
        self.sizes = model
        self.recipe = load_recipe(ROOT / f"recipes/papers/{model.recipe}.toml", overrides).recipe
        self.profile = load_profile(self.recipe.simulation.device)
        forecaster = StepSimulator(self.recipe, model.devices, self.profile)
        self.modules, self.metas = forecaster.modules, forecaster.workload.microbatches
        self.mean_flops_fraction = forecaster.workload.mean_flops_fraction
        self.limited = True
        """True if schedules must fit into memory."""
        self.unordered_microbatches = self.metas
        """Typical microbatches, which determine the stage layout."""
        device = self.profile.device.type
        self._executions = module_executions(forecaster.run, self.modules, device)
        self.parallel: ParallelConfig = self.recipe.parallel
        if needs_partitioner(self.parallel):
            cost_model = CostModel(self.profile, self.recipe.training.dtype, self._executions)
            self.parallel = search_segments(self.parallel, self.modules, self.metas, cost_model)

    @property
    def limit_bytes(self) -> int:
        return round(MEMORY_SHARE * self.profile.device.memory_bytes)

    def model(self, modes: Sequence[RecomputeSetting]) -> CostModel:
        executions = {
            module.name: replace(self._executions[module.name], recompute=mode)
            for module, mode in zip(self.modules, modes, strict=True)
        }
        return CostModel(self.profile, self.recipe.training.dtype, executions)

    def costs(self, graph: StageGraph, modes: Sequence[RecomputeSetting]) -> PlanCosts:
        plan_cost = compute_plan_costs(graph, self.modules, self.metas, self.model(modes))
        return replace(plan_cost, memory_limit_bytes=self.limit_bytes if self.limited else None)

    def megatron(self) -> StageGraph:
        """Return a single pipeline with the same number of parameters per virtual stage."""
        layers = []
        typical = module_layers(self.modules, self.unordered_microbatches)
        for cut, module in zip(typical, self.modules, strict=True):
            count = len(module.layers)
            parameters = [stage_parameters(module, i, i + 1).total for i in range(count)]
            layers.append(replace(cut, costs=tuple(parameters), embedding_cost=0.0, head_cost=0.0))
        return self._chain(megatron_balanced_layout(layers, self.sizes.pipeline, VIRTUAL_STAGES))

    def separated(self) -> StageGraph:
        """Return separate segments of each module, with the selected sub-microbatches."""
        layout: StageLayout = plan_layout(self.parallel, self.modules, self.unordered_microbatches)
        return step_graph(layout, self.parallel, self.metas)

    def static(self) -> StageGraph:
        """Return a static single pipeline with virtual stages of equal cost."""
        layers = module_layers(self.modules, self.unordered_microbatches)
        return self._chain(megatron_balanced_layout(layers, self.sizes.pipeline, VIRTUAL_STAGES))

    def _chain(self, layout: StageLayout) -> StageGraph:
        counts = {
            name: tuple(int(meta.module_image_count(name) > 0) for meta in self.metas)
            for name in layout.sub_microbatched
        }
        return StageGraph(layout, len(self.metas), counts)

    def with_images(self, least: int, most: int, seed: int) -> Setting:
        """Return a setting with the same stages and different image counts."""
        simulation = self.recipe.simulation.model_copy(
            update={"sequences": [SimulatedSequences(images=[least, most])], "seed": seed}
        )
        other = copy(self)
        length = self.recipe.training.sequence_length
        other.metas = sample_microbatches(simulation, len(self.metas), sequence_length=length)
        return other

    def lowered(self, graph: StageGraph, order: ComputeOrder) -> PipelinePlan:
        """Return a validated plan without message sizes. It has FSDP collectives if sharded."""
        plan = lower_plan(order, graph, {}, sharding="step" if self.sizes.data > 1 else "none")
        validate_plan(plan).raise_for_problems()
        return plan

    def mfu(self, step: Timed) -> float:
        """Return the MFU of all devices, if this pipeline is the slowest pipeline."""
        peak = self.profile.device.peak_flops[self.recipe.training.dtype]
        devices = self.sizes.pipeline * self.sizes.tensor
        return self.mean_flops_fraction * step.flops / (step.ms / 1e3) / (devices * peak)


class Timed(NamedTuple):
    """Simulated step."""

    ms: float
    peak_bytes: int
    bubbles: float
    flops: float
    """Model FLOPs, without recomputation."""
    first_peak_bytes: int
    """Peak memory of the first rank."""
    fluctuation_bytes: int
    """Range of the memory use of the first rank in the middle half of the step."""


def timed(plan: PipelinePlan, costs: PlanCosts) -> Timed:
    """Return step time, peak memory over ranks and the bubble fraction."""
    step = simulate(plan, costs)
    shares = step.timeline.bubble_fractions
    bubbles = sum(shares.values()) - shares["tp"]
    first = step.memory[0]
    quarter_ms = step.makespan_ms / 4
    steady = (first.times_ms >= quarter_ms) & (first.times_ms <= 3 * quarter_ms)
    used = first.used_bytes[steady]
    return Timed(
        step.makespan_ms,
        max(step.peak_bytes),
        bubbles,
        step.model_flops,
        step.peak_bytes[0],
        int(np.ptp(used)) if len(used) else 0,
    )


def ladder(setting: Setting, modes: Modes, evaluations: int) -> Iterator[tuple[str, Timed]]:
    """Yield steps with more and more techniques, without schedules that run out of memory."""
    chain, graph = setting.megatron(), setting.separated()
    names = list(PIPEWEAVER_ABLATION)
    yield (
        names[0],
        timed(setting.lowered(chain, interleaved_1f1b(chain)), setting.costs(chain, modes)),
    )
    costs = setting.costs(graph, modes)
    yield names[1], timed(setting.lowered(graph, interleaved_1f1b(graph)), costs)
    dispatcher = Dispatcher(graph, costs)
    natural = dispatcher.dispatch()
    if not natural.blocked:
        yield names[2], timed(setting.lowered(graph, natural.order), costs)
    searched = search_orders(dispatcher, SearchBudget(evaluations=evaluations), seed=SEED)
    if not searched.fits:
        return
    plan = setting.lowered(graph, dispatcher.dispatch(searched.order).order)
    yield names[3], timed(plan, costs)
    if not setting.limited:
        return
    everything = setting.model(("none",) * len(setting.modules))
    tuned = frozenset(module.name for module in setting.modules)
    tuning = LayerTuning(everything, tuned, setting.limit_bytes, offloads=tuned)
    tuner = LayerTuner(graph, setting.modules, setting.metas, tuning)
    step = MemoryAwareSearch(graph, tuner.costs, tuner)
    if not step.fits:
        return
    best = step.search(
        SearchBudget(evaluations=evaluations), SearchSettings(seed=SEED, starts=[searched.order])
    )
    layers = tuner.tune(setting.lowered(graph, best.order))
    yield names[4], timed(layers.plan, layers.costs)


def systems(setting: Setting, evaluations: int) -> dict[str, Timed]:
    """Return one step per system. All except "tuned" use full recomputation."""
    full: Modes = ("full",) * len(setting.modules)
    times = {}
    for name, graph in (("Megatron-LM", setting.megatron()), ("static plan", setting.static())):
        plan = setting.lowered(graph, interleaved_1f1b(graph))
        times[name] = timed(plan, setting.costs(graph, full))
    steps = dict(ladder(setting, full, evaluations))
    names = {
        "no search": "+ partitioner",
        "searched": "+ module ranking",
        "tuned": "+ layer tuning",
    }
    graph = setting.separated()
    dispatcher = Dispatcher(graph, setting.costs(graph, full))
    place = {module.name: index for index, module in enumerate(setting.modules)}
    segments = dispatcher.segments
    coarse = sorted(range(len(segments)), key=lambda i: place[segments[i].module])
    dispatched = dispatcher.dispatch(np.array(coarse, np.uint32))
    if not dispatched.blocked and len({segment.module for segment in segments}) > 1:
        times[COARSE] = timed(setting.lowered(graph, dispatched.order), dispatcher.costs)
    return times | {name: steps[row] for name, row in names.items() if row in steps}
