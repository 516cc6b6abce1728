"""Ways of training on uneven batches: plain FSDP2, balanced data, and pipelines.

Sizes, stages and segments of every arm are the fastest for the first batches that fit, and then
used for all batches, as in a run. Candidates are those of `plain_methods` without a pipeline, and a
chain or separate segments on 2 to 16 pipeline ranks otherwise. `Forecaster` times all steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from support.cases.hand_pipelines import PIPELINES
from support.cases.plain_methods import (
    FSDP2,
    HSDP,
    NODE,
    SIZES,
    describe,
    plain_sizes,
    recomputing,
    with_values,
)
from support.papers.paper_cells import in_one_chain
from torchmm.balance.costs.operators import Profile
from torchmm.balance.image_shares import balanced_shares
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.executions import run_costs
from torchmm.planning.forecast import Forecaster, StepSample
from torchmm.planning.reordering import arrangement, image_balance, join_packs, reordered
from torchmm.planning.resolved import resolve
from torchmm.planning.search.search import fits
from torchmm.planning.segments import chosen_segments
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

CHAIN, SEPARATED, SEARCHED = "static 1F1B", "separated", "searched"
PLAIN, SORTED, IMAGES = "FSDP2", "FSDP2, A", "FSDP2, A + C"
TYPICAL = 2
"""Batches by which sizes are chosen."""
STATIC_MODES = ("none", "selective", "encoders", "full")
"""Recomputation without a decision per batch; "encoders": "full" for encoders, "selective" for the
LLM."""
TUNED_GAIN = 0.99
"""Layers are tuned to the memory of each batch if the step takes at most this fraction."""
TIMED = 5
"""Batches for which planning is timed."""


class BatchSample(StepSample):
    """A batch of given sequences.

    Args:
        recipe: Recipe of the model.
        model: Model of the recipe.
        packs: Sequences of the batch, each as a microbatch.
    """

    def __init__(
        self, recipe: Recipe, model: MultimodalModel, packs: Sequence[MicrobatchMeta]
    ) -> None:
        super().__init__(recipe, model)
        self.packs = list(packs)

    def shares(self, recipe: Recipe, count: int) -> list[list[MicrobatchMeta]]:
        """Return the microbatches of every share of the batch, without reordering."""
        size, per_share = recipe.training.microbatch_size, len(self.packs) // count
        return [
            [join_packs(self.packs[i : i + size]) for i in range(start, start + per_share, size)]
            for start in range(0, len(self.packs), per_share)
        ]


class LaterStep(Forecaster):
    """A step with the stages of an earlier one.

    Args:
        first: Forecaster of the step that determined the stages.
        sample: Batch of this step.
    """

    def __init__(self, first: Forecaster, sample: StepSample) -> None:
        self._first = first
        super().__init__(first.recipe, first.run.world_size, first.profile, sample=sample)

    def layout(self, parallel: ParallelConfig) -> StageLayout:
        """Return the stages of the earlier step."""
        return self._first.layout(parallel)


class Step(NamedTuple):
    """A simulated step.

    Attributes:
        step_s: Step time in seconds; infinite without a plan.
        fits: Whether all ranks have enough memory.
        cpu_s: Processor time of the simulation in seconds.
    """

    step_s: float
    fits: bool
    cpu_s: float


@dataclass
class Setup:
    """Batches of a case on a cluster.

    Attributes:
        recipe: Recipe of the case.
        gpus: Number of GPUs.
        profile: Profile of one GPU.
        batches: Samples of all batches.
    """

    recipe: Recipe
    gpus: int
    profile: Profile
    batches: list[BatchSample]
    chosen: dict[str, Recipe | None] = field(default_factory=dict)
    """Recipes by arm of another packing, whose sizes are used again."""

    def first_steps(self, recipe: Recipe) -> list[Step] | None:
        """Return the first batches; None if the recipe is not valid or a batch does not fit."""
        if check_recipe(recipe, self.gpus):
            return None
        found = list(self.steps(recipe, range(min(TYPICAL, len(self.batches)))))
        return found if all(step.fits for step in found) else None

    def steps(self, recipe: Recipe, indices: Sequence[int]) -> Iterator[Step]:
        """Yield simulated steps. The first batch determines stages and segments."""
        first = None
        for index in indices:
            begin_s = time.process_time()
            try:
                if first is None:
                    first = Forecaster(recipe, self.gpus, self.profile, sample=self.batches[0])
                    forecaster: Forecaster = first
                if index:
                    forecaster = LaterStep(first, self.batches[index])
                forecast = forecaster.forecast_parallel(recipe.parallel)
            except ConfigError:
                yield Step(inf, False, 0.0)
                continue
            step = forecast.step
            cpu_s = time.process_time() - begin_s
            yield Step(forecast.iteration_ms / 1e3, step is not None and fits(step), cpu_s)

    def fastest(self, recipes: Sequence[Recipe]) -> Recipe | None:
        """Return the fastest recipe for the first batches; None if none fits."""
        best, least_s = None, inf
        for recipe in recipes:
            found = self.first_steps(recipe)
            if found is not None and (step_s := mean(step.step_s for step in found)) < least_s:
                best, least_s = recipe, step_s
        return best

    def without_tuning(self, recipe: Recipe | None) -> Recipe | None:
        """Return the recipe with the fastest fixed recomputation, unless tuned layers gain."""
        if recipe is None:
            return None
        fixed = self.fastest([self._with_mode(recipe, mode) for mode in STATIC_MODES])
        if fixed is None:
            return recipe
        steps = [self.first_steps(each) for each in (recipe, fixed)]
        tuned_s, fixed_s = (mean(s.step_s for s in found) if found else inf for found in steps)
        return recipe if tuned_s < TUNED_GAIN * fixed_s else fixed

    def _with_mode(self, recipe: Recipe, mode: str) -> Recipe:
        if mode != "encoders":
            return recomputing(recipe, mode)
        names = [own.name for own in self.batches[0].modules if own.kind == "encoder"]
        modules = dict.fromkeys(names, "full")
        return with_values(recipe, "activation_checkpoint", mode="selective", modules=modules)


def plain_recipe(setup: Setup, **data: str) -> Recipe | None:
    """Return the fastest plan without a pipeline.

    Args:
        data: Values of [data].
    """
    tuned = recomputing(setup.recipe, "tuned")
    methods = (FSDP2, HSDP) if setup.gpus > NODE else (FSDP2,)
    context_tokens = 8192
    tried = []
    for method in methods:
        for sized in plain_sizes(tuned, setup.gpus, method, setup.batches[0]):
            own = sized.parallel.modules.get("llm")
            if own is not None and own.context and tuned.training.sequence_length <= context_tokens:
                continue
            for size in (1, 2, 4):
                each = with_values(sized, "training", microbatch_size=size)
                tried.append(with_values(each, "data", **data))
    return setup.without_tuning(setup.fastest(tried))


def chain_recipe(setup: Setup, schedule: str, reorder: str) -> Recipe | None:
    """Return the fastest pipeline of a static schedule.

    Args:
        schedule: Schedule of the recipe.
        reorder: Value of `data.reorder`.
    """
    lean = with_values(recomputing(setup.recipe, "tuned"), "data", reorder=reorder)
    stages = (1, 2) if schedule == "megatron_balanced" else (1,)
    tried = [
        in_one_chain(
            lean,
            schedule=schedule,
            pipeline=pipeline,
            tensor=tensor,
            virtual_stages=virtual,
            sequence_parallel=tensor > 1,
        )
        for pipeline, tensor, virtual in product(PIPELINES, SIZES, stages)
        if setup.gpus % (pipeline * tensor) == 0
    ]
    best = setup.fastest(tried)
    return setup.without_tuning(best) if schedule == "megatron_balanced" else best


def searched_recipe(setup: Setup, separated: Recipe) -> Recipe:
    """Return the recipe of separate segments with a searched schedule and chosen segments."""
    recipe = with_values(separated, "parallel", schedule="searched")
    run = resolve(recipe, setup.gpus)
    sample = setup.batches[0]
    parallel = recipe.parallel.model_copy(update={"pipeline": run.llm.pipeline})
    costs = run_costs(run, sample.modules, setup.profile)
    shares = sample.shares(recipe, run.shares)
    parallel = chosen_segments(recipe, parallel, sample.modules, shares, costs)
    return recipe.model_copy(update={"parallel": parallel})


def pipeline_recipes(setup: Setup, reorder: str) -> dict[str, Recipe | None]:
    """Return the recipes of the pipeline arms."""
    separated = chain_recipe(setup, "separated", reorder)
    searched = None
    if separated is not None:
        searched = searched_recipe(setup, separated)
        segmented = with_values(searched, "parallel", schedule="separated")
        separated = setup.fastest([separated, segmented])
    return {
        CHAIN: chain_recipe(setup, "megatron_balanced", reorder),
        SEPARATED: setup.without_tuning(separated),
        SEARCHED: searched,
    }


def plain_recipes(setup: Setup) -> dict[str, Recipe | None]:
    """Return the recipes of the arms without a pipeline."""
    return {
        PLAIN: plain_recipe(setup, reorder="none", balance="none"),
        SORTED: plain_recipe(setup, reorder="intra", balance="none"),
        IMAGES: plain_recipe(setup, reorder="intra", balance="images"),
    }


def arm_sizes(recipe: Recipe) -> str:
    """Return parallel sizes and recomputation in words."""
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        return describe(recipe)
    words = [f"pipeline {parallel.pipeline}", f"tensor {parallel.tensor}"]
    words += [f"{parallel.virtual_stages} stages per rank"] * (parallel.virtual_stages > 1)
    mode = recipe.activation_checkpoint.mode
    return ", ".join([*words, f"recomputation {mode}"])


def arrange_ms(setup: Setup, recipe: Recipe) -> float:
    """Return the processor time of reordering and of balancing images for a step in ms."""
    run = resolve(recipe, setup.gpus)
    first = Forecaster(recipe, setup.gpus, setup.profile, sample=setup.batches[0])
    modules, costs = first.modules, run_costs(run, first.modules, setup.profile)
    mode, balance = recipe.data.reorder, image_balance(recipe, first.modules)
    reorder = None
    if mode != "none":
        reorder = arrangement(run, modules, costs, first.layout(recipe.parallel))
    times = []
    for sample in setup.batches[: 1 + TIMED]:
        begin_s = time.process_time()
        if reorder is not None:
            shares = reordered(reorder, sample.packs)
        else:
            shares = sample.shares(recipe, run.shares)
        if balance is not None:
            balanced_shares(balance, shares)
        times.append(1e3 * (time.process_time() - begin_s))
    return median(times[1:] or times)


@dataclass(frozen=True)
class Arm:
    """Results of an arm.

    Attributes:
        name: Name of the arm.
        sizes: Parallel sizes in words.
        steps_s: Step time of each batch in seconds.
        tokens: Tokens of samples in each of these batches.
        too_large: Number of batches that do not fit into memory.
        planning_ms: Processor time of planning per step.
    """

    name: str
    sizes: str
    steps_s: list[float]
    tokens: list[int]
    too_large: int
    planning_ms: float

    @property
    def mean_s(self) -> float:
        """Mean step time in seconds."""
        return mean(self.steps_s)

    @property
    def late_s(self) -> float:
        """95th percentile of the step time in seconds."""
        return float(np.percentile(self.steps_s, 95))

    def tokens_per_s(self, batches: int | None = None) -> float:
        """Return the throughput of the first batches, without padding."""
        return sum(self.tokens[:batches]) / sum(self.steps_s[:batches])


def run_arm(
    setup: Setup, name: str, recipe: Recipe, count: int, extra_ms: float = 0.0
) -> Arm:
    """Return the results of an arm on the first batches.

    Args:
        count: Number of batches.
        extra_ms: Processor time of packing per step.
    """
    count = min(count, len(setup.batches))
    steps = list(setup.steps(recipe, range(count)))
    planning_ms = extra_ms + arrange_ms(setup, recipe)
    if recipe.parallel.schedule == "searched":
        static = with_values(recipe, "parallel", schedule="separated")
        timed = range(min(1 + TIMED, count))
        pairs = zip(steps, setup.steps(static, timed), strict=False)
        planning_ms += 1e3 * median(a.cpu_s - b.cpu_s for a, b in list(pairs)[1:] or [(steps[0], Step(0, True, 0))])
    tokens = [
        sum(sample.tokens for meta in batch.packs for sample in meta.samples)
        for batch in setup.batches[:count]
    ]
    planned = [i for i, step in enumerate(steps) if step.step_s < inf]
    return Arm(
        name,
        arm_sizes(recipe),
        [steps[i].step_s for i in planned],
        [tokens[i] for i in planned],
        sum(not step.fits for step in steps),
        planning_ms,
    )


def paired_speed(arm: Arm, other: Arm) -> float:
    """Return the throughput of an arm over that of another arm on the batches of both."""
    count = min(len(arm.steps_s), len(other.steps_s))
    return arm.tokens_per_s(count) / other.tokens_per_s(count)


def speeds(arms: Mapping[str, Arm], base: str) -> dict[str, float]:
    """Return the throughput of all arms relative to one."""
    return {name: paired_speed(arm, arms[base]) for name, arm in arms.items()}
