"""Ways of training on uneven batches: plain FSDP2, balanced data, and pipelines.

Sizes, stages and segments of every arm are the fastest that fit for the first batch, and then used
for all batches, as in a run. `StepSimulator` times all steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from support.cases.plain_methods import NODE, SIZES, describe, recomputing, with_values
from support.papers.paper_cells import in_one_chain
from torchmm.balance.disttrain.arrangement import (
    apply_reorder,
    build_image_balancer,
    build_step_reorder,
    join_packs,
)
from torchmm.balance.image_balancing import balance_step_images
from torchmm.balance.pipeweaver.segment_search import choose_segments
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.run_costs import build_cost_model
from torchmm.balance.search.result import fits
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import LLM
from torchmm.costs.operators import DeviceProfile
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

CHAIN, SEPARATED, SEARCHED = "static 1F1B", "separated", "searched"
PLAIN, SORTED, IMAGES = "FSDP2", "FSDP2, reordered", "FSDP2, reordered, balanced images"
EVEN = ", balanced packing"
FIXED_MODES = ("encoders", "full")
"""Recomputation of plans without a pipeline; "encoders": "full" for encoders, "selective" for the
LLM. Layers tuned to the memory of each batch gain at most 1 % there, and 10 % in pipelines, whose
layers are tuned."""
MOST_DIVIDED, MICROBATCH_SIZES = 4, (1, 2)
CONTEXT_TOKENS = 8192
"""Context parallelism is tried for sequences of at least this length."""
PIPELINES = (2, 4, 8, 16)
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


class LaterStep(StepSimulator):
    """A step with the stages of an earlier one.

    Args:
        first: Forecaster of the step that determined the stages.
        sample: Batch of this step.
    """

    def __init__(self, first: StepSimulator, sample: StepSample) -> None:
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
        cpu_s: CPU time of the simulation in seconds.
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
    profile: DeviceProfile
    batches: list[BatchSample]

    @cached_property
    def largest_batch(self) -> int:
        """Index of the batch with the most patches."""
        patches = [
            sum(image.patches for meta in batch.packs for s in meta.samples for image in s.images)
            for batch in self.batches
        ]
        return patches.index(max(patches))

    def first_step_s(self, recipe: Recipe) -> float:
        """Return the step time of the first batch in seconds.

        Infinite if the recipe is not valid, or if the first or the largest batch does not fit.
        """
        if check_recipe(recipe, self.gpus):
            return inf
        first, *others = self.steps(recipe, sorted({0, self.largest_batch}))
        return first.step_s if all(step.fits for step in (first, *others)) else inf

    def steps(self, recipe: Recipe, indices: Sequence[int]) -> Iterator[Step]:
        """Yield simulated steps. The first batch determines stages and segments."""
        first = None
        for index in indices:
            begin_s = time.process_time()
            try:
                if first is None:
                    first = StepSimulator(recipe, self.gpus, self.profile, sample=self.batches[0])
                    forecaster: StepSimulator = first
                if index:
                    forecaster = LaterStep(first, self.batches[index])
                forecast = forecaster.simulate_parallel(recipe.parallel)
            except ConfigError:
                yield Step(inf, False, 0.0)
                continue
            step = forecast.step
            cpu_s = time.process_time() - begin_s
            yield Step(forecast.iteration_ms / 1e3, step is not None and fits(step), cpu_s)

    def fastest(self, recipes: Iterable[Recipe]) -> Recipe | None:
        """Return the fastest recipe for the first batch; None if none fits."""
        best, least_s = None, inf
        for recipe in recipes:
            if (step_s := self.first_step_s(recipe)) < least_s:
                best, least_s = recipe, step_s
        return best


def with_mode(recipe: Recipe, mode: str, encoders: Iterable[str]) -> Recipe:
    """Return the recipe with one of `FIXED_MODES`."""
    if mode != "encoders":
        return recomputing(recipe, mode)
    modules = dict.fromkeys(encoders, "full")
    return with_values(recipe, "activation_checkpoint", mode="selective", modules=modules)


def plain_recipes(setup: Setup, **data: str) -> Iterator[Recipe]:
    """Yield plans of FSDP2 over all GPUs.

    Args:
        data: Values of [data].
    """
    encoders = [module.name for module in setup.batches[0].modules if module.kind == "encoder"]
    recipe = with_values(setup.recipe, "data", **data)
    is_long = recipe.training.sequence_length >= CONTEXT_TOKENS
    contexts = SIZES if is_long and data["balance"] == "none" else (1,)
    for tensor, size, context in product(SIZES, MICROBATCH_SIZES, contexts):
        if tensor * context > MOST_DIVIDED:
            continue
        sized = in_one_chain(
            with_values(recipe, "training", microbatch_size=size),
            schedule="1f1b",
            pipeline=1,
            virtual_stages=1,
            tensor=tensor,
            sequence_parallel=tensor > 1,
            shard=setup.gpus // tensor,
            replicate=1,
            gradient_reduction="microbatch",
            **({LLM: {"context": context}} if context > 1 else {}),
        )
        yield from (with_mode(sized, mode, encoders) for mode in FIXED_MODES)


def pipeline_recipes(setup: Setup, schedule: str) -> Iterator[Recipe]:
    """Yield pipelines of a schedule with layers tuned to the memory."""
    lean = recomputing(setup.recipe, "auto")
    stages = (1, 2) if schedule == "megatron_balanced" else (1,)
    for pipeline, tensor, virtual in product(PIPELINES, SIZES, stages):
        if setup.gpus % (pipeline * tensor) == 0 and pipeline * tensor >= NODE:
            yield in_one_chain(
                lean,
                schedule=schedule,
                pipeline=pipeline,
                tensor=tensor,
                virtual_stages=virtual,
                sequence_parallel=tensor > 1,
            )


def searched_recipe(setup: Setup, separated: Recipe) -> Recipe:
    """Return the recipe of separate segments with a searched schedule and chosen segments."""
    recipe = with_values(separated, "parallel", schedule="searched")
    run = resolve_recipe(recipe, setup.gpus)
    sample = setup.batches[0]
    parallel = recipe.parallel.model_copy(update={"pipeline": run.llm.pipeline})
    costs = build_cost_model(run, sample.modules, setup.profile)
    shares = sample.shares(recipe, run.data_parallel_size)
    parallel = choose_segments(recipe, parallel, sample.modules, shares, costs)
    return recipe.model_copy(update={"parallel": parallel})


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
    """Return the CPU time of reordering and of balancing images for a step in ms."""
    run = resolve_recipe(recipe, setup.gpus)
    first = StepSimulator(recipe, setup.gpus, setup.profile, sample=setup.batches[0])
    modules, costs = first.modules, build_cost_model(run, first.modules, setup.profile)
    mode, balance = recipe.data.reorder, build_image_balancer(recipe, first.modules)
    reorder = None
    if mode != "none":
        reorder = build_step_reorder(run, modules, costs, first.layout(recipe.parallel))
    times = []
    for sample in setup.batches[: 1 + TIMED]:
        begin_s = time.process_time()
        if reorder is not None:
            shares = apply_reorder(reorder, sample.packs)
        else:
            shares = sample.shares(recipe, run.data_parallel_size)
        if balance is not None:
            balance_step_images(balance, shares)
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
        planning_ms: CPU time of planning per step.
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


def run_arm(setup: Setup, choice: ArmChoice, extra_ms: float = 0.0) -> Arm:
    """Return the results of an arm on the first batches.

    Args:
        choice: Arm with its recipe.
        extra_ms: CPU time of packing per step.
    """
    name, recipe, count = choice
    count = min(count, len(setup.batches))
    steps = list(setup.steps(recipe, range(count)))
    planning_ms = extra_ms + arrange_ms(setup, recipe)
    if recipe.parallel.schedule == "searched":
        static = with_values(recipe, "parallel", schedule="separated")
        timed = range(min(1 + TIMED, count))
        pairs = zip(steps, setup.steps(static, timed), strict=False)
        spent = [ours.cpu_s - theirs.cpu_s for ours, theirs in pairs]
        planning_ms += 1e3 * median(spent[1:] or spent)
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


class BatchCounts(NamedTuple):
    """Numbers of simulated batches by type of arm; 0 omits an arm."""

    plain: int
    chain: int
    separated: int
    searched: int


class ArmChoice(NamedTuple):
    """An arm before its steps are simulated.

    Attributes:
        name: Name of the arm.
        recipe: Recipe with the sizes of the arm.
        batches: Number of batches.
    """

    name: str
    recipe: Recipe
    batches: int


def choose_arms(setup: Setup, counts: BatchCounts) -> Iterator[ArmChoice]:
    """Yield the fastest recipe of each arm for sequences as drawn."""
    for name, reorder, balance in (
        (PLAIN, "none", "none"),
        (SORTED, "intra", "none"),
        (IMAGES, "intra", "images"),
    ):
        recipe = setup.fastest(plain_recipes(setup, reorder=reorder, balance=balance))
        if recipe is not None:
            yield ArmChoice(name, recipe, counts.plain)
    chain = separated = None
    if counts.chain:
        chain = setup.fastest(pipeline_recipes(setup, "megatron_balanced"))
    if chain is not None:
        yield ArmChoice(CHAIN, chain, counts.chain)
    if counts.separated:
        separated = setup.fastest(pipeline_recipes(setup, "separated"))
    if separated is None:
        return
    searched = searched_recipe(setup, separated)
    segmented = with_values(searched, "parallel", schedule="separated")
    yield ArmChoice(SEPARATED, setup.fastest([separated, segmented]) or separated, counts.separated)
    if counts.searched:
        yield ArmChoice(SEARCHED, searched, counts.searched)


def balanced_arm(choice: ArmChoice) -> ArmChoice | None:
    """Return the arm with sequences packed by their work; None for arms without balanced data."""
    if choice.name in (PLAIN, SORTED):
        return None
    recipe = choice.recipe
    if choice.name != IMAGES:
        recipe = with_values(recipe, "data", reorder="both")
    return ArmChoice(choice.name + EVEN, recipe, choice.batches)
