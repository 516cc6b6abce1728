"""Which sizes colocated encoders get where the recipe leaves them open: Optimus' model planner.

    choice = choose_encoders(Forecaster(recipe, world_size, profile))
    recipe = choice.recipe                     # with [parallel.NAME] pipeline and tensor set

Every combination of pipeline sizes that divide the LLM's, with every tensor-parallel size that does
(§4.1; with several encoders first one tensor-parallel size for all), is first held against the
memory of the rank that needs most, optimizer state included (`bubbles.encoder_sizes`). Of those
that fit, the bubble scheduler promises a step's time; the best promises are planned and simulated,
activations included, and the fastest that still fits is taken, of equally fast ones the leanest.
Then other tensor-parallel sizes of single encoders, images at once and stages of encoders that the
recipe leaves open are tried with it. It is a pure function of the recipe, so every rank finds the
same.

Rejected: simulating all sizes. On 1,536 devices these are thirteen steps of up to 64 ranks of a
plan, half a minute each; a promise takes a second or two, and excludes most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple, get_args

from torchmm.balance.bubbles.encoder_sizes import (
    ParallelSizes,
    backbone_bytes,
    colocated_plans,
)
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM
from torchmm.planning.executions import parameter_states
from torchmm.planning.forecast import Forecast, Forecaster
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import LlmSchedule

VIRTUAL_STAGES = (1, 2, 4)
"""Stages of the LLM on each of its ranks that are tried."""
IMAGES_AT_ONCE = (4, 2, 1)
LAYERS_PER_STAGE = (2, 4)
"""Of encoders, other than one."""
PROMISE_MARGIN = 1.05
"""What is simulated may be promised to take this much longer than the best."""


def encoder_combinations(forecaster: Forecaster) -> Iterator[dict[str, int]]:
    """Pipeline ranks by encoder; of one whose size the recipe gives, that one."""
    parallel = forecaster.recipe.parallel
    ranks = forecaster.run.llm.pipeline
    choices = {}
    for module in forecaster.modules:
        if module.kind != "encoder":
            continue
        given = parallel.sizes_given(module.name).get("pipeline")
        slices = parallel.slices(module.name) or 1
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        fine = [n for n in divisors if n * slices <= len(module.layers)]
        choices[module.name] = [given] if given else fine
    for sizes in product(*choices.values()):
        yield dict(zip(choices, sizes, strict=True))


def encoder_tensors(forecaster: Forecaster) -> list[int]:
    """Tensor-parallel sizes that all encoders to which the recipe gives none can have, the LLM's
    first: divisors of it that divide their heads."""
    most = forecaster.run.llm.tensor
    modules = _open_encoders(forecaster)
    return _tensors_of(modules, most) if modules else [most // forecaster.recipe.parallel.mirrors]


def _open_encoders(forecaster: Forecaster) -> list[ModuleDescription]:
    """Encoders to which the recipe gives no tensor-parallel size."""
    encoders = [module for module in forecaster.modules if module.kind == "encoder"]
    given = forecaster.recipe.parallel.sizes_given
    return [module for module in encoders if "tensor" not in given(module.name)]


def _tensors_of(modules: Sequence[ModuleDescription], most: int) -> list[int]:
    heads = {layer.heads for module in modules for layer in module.layers}
    divisors = [n for n in range(most, 0, -1) if most % n == 0]
    return [n for n in divisors if n == most or not any(count % n for count in heads)]


def with_pipelines(
    recipe: Recipe,
    pipelines: dict[str, int],
    sub_microbatch_images: int | None = None,
    tensor: int | None = None,
) -> Recipe:
    """The recipe with pipeline ranks of encoders.

    Args:
        sub_microbatch_images: of all of them; None: as in the recipe.
        tensor: tensor-parallel ranks of all to which the recipe gives none; None: as in the recipe.

    Raises:
        ValidationError: the recipe has sizes that contradict these.
    """
    own: dict[str, dict[str, int]] = {name: {"pipeline": n} for name, n in pipelines.items()}
    for name, sizes in own.items():
        if sub_microbatch_images is not None:
            sizes["sub_microbatch_images"] = sub_microbatch_images
        if tensor is not None and "tensor" not in recipe.parallel.sizes_given(name):
            sizes["tensor"] = tensor
    return _with_modules(recipe, own)


class Colocated(NamedTuple):
    """Colocated encoders with all that can be chosen about them, and the step that it makes."""

    recipe: Recipe
    forecast: Forecast
    words: tuple[str, ...] = ()
    """What is not as it was."""

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts: what can be planned and fits first, then by time."""
        step = self.forecast.step
        if step is None:
            return True, True, 0.0
        return False, not step.fits, step.makespan_ms


def refined(forecaster: Forecaster, start: Colocated, *, of_llm: bool = True) -> Colocated:
    """Other stages of the LLM per rank, orders of the LLM, images at once and stages of encoders,
    one after the other, each kept if the first step is shorter with it: never longer than `start`.

    Rejected: all combinations, of which there are hundreds.

    Args:
        of_llm: False: of encoders only, and sizes of single ones.
    """
    best = start
    first = (_virtual_stages, _llm_schedules) if of_llm else (_tensors,)
    for vary in (*first, _images_at_once, _slices):
        varied = list(vary(forecaster, best.recipe))
        limit_ms = PROMISE_MARGIN * forecaster.promised_ms(best.recipe.parallel) if varied else 0.0
        tried = [
            Colocated(recipe, forecaster.forecast_parallel(recipe.parallel), (*best.words, words))
            for recipe, words in varied
            if forecaster.promised_ms(recipe.parallel) <= limit_ms
        ]
        best = min([best, *tried], key=lambda found: found.rank)
    return best


Variation = tuple[Recipe, str]


def _virtual_stages(forecaster: Forecaster, recipe: Recipe) -> Iterator[Variation]:
    ranks = forecaster.run.llm.pipeline
    layers = next(len(m.layers) for m in forecaster.modules if m.name == LLM)
    for stages in VIRTUAL_STAGES:
        if stages != recipe.parallel.virtual_stages and stages * ranks <= layers:
            yield _changed(recipe, virtual_stages=stages), f"{stages} LLM stages per rank"


def _llm_schedules(forecaster: Forecaster, recipe: Recipe) -> Iterator[Variation]:
    for name in get_args(LlmSchedule):
        # 1F1B and GPipe are for one stage per rank, with which interleaved 1F1B is 1F1B.
        several = recipe.parallel.virtual_stages > 1
        known = {recipe.parallel.llm_schedule, "1f1b", *(["gpipe"] if several else [])}
        if name not in known:
            yield _changed(recipe, llm_schedule=name), f"LLM {name}"


def _tensors(forecaster: Forecaster, recipe: Recipe) -> Iterator[Variation]:
    """Another tensor-parallel size of one of several encoders."""
    encoders = [module for module in forecaster.modules if module.kind == "encoder"]
    most = forecaster.run.llm.tensor
    for module in _open_encoders(forecaster) if len(encoders) > 1 else ():
        own = recipe.parallel.encoder_tensor(module.name)
        for size in _tensors_of([module], most):
            if size != own:
                changed = _with_modules(recipe, {module.name: {"tensor": size}})
                yield changed, f"{module.name} tensor {size}"


def _images_at_once(forecaster: Forecaster, recipe: Recipe) -> Iterator[Variation]:
    names = [m.name for m in forecaster.modules if m.kind == "encoder"]
    if any(recipe.parallel.sub_microbatch_images(name) for name in names):
        return
    metas = forecaster.typical
    most = max((meta.images_of(name) for meta in metas for name in names), default=0)
    for count in IMAGES_AT_ONCE:
        if count >= most:  # all at once, as without
            continue
        own = {name: {"sub_microbatch_images": count} for name in names}
        yield _with_modules(recipe, own), f"{count} images at once"


def _slices(forecaster: Forecaster, recipe: Recipe) -> Iterator[Variation]:
    """Fewer stages than layers."""
    encoders = [m for m in forecaster.modules if m.kind == "encoder"]
    if any(recipe.parallel.slices(module.name) for module in encoders):
        return
    for share in LAYERS_PER_STAGE:
        counts = {
            m.name: len(m.layers) // recipe.parallel.sizes_given(m.name).get("pipeline", 1) // share
            for m in encoders
        }
        if all(counts.values()):
            own = {name: {"segments": count} for name, count in counts.items()}
            yield _with_modules(recipe, own), f"encoder stages of {share} layers"


def _changed(recipe: Recipe, **changes: object) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})


def _with_modules(recipe: Recipe, changes: Mapping[str, Mapping[str, int]]) -> Recipe:
    """The recipe with other keys in [parallel.NAME]."""
    content = recipe.model_dump(exclude_unset=True)
    parallel = content.setdefault("parallel", {})
    for name, own in changes.items():
        parallel[name] = {**parallel.get(name, {}), **own}
    return Recipe.model_validate(content)


class Tried(NamedTuple):
    """A combination and its step."""

    recipe: Recipe
    """With these sizes."""
    pipelines: dict[str, int]
    forecast: Forecast
    tensor: int | None = None
    """Tensor-parallel ranks of all encoders to which the recipe gives none; None where there is
    nothing to choose."""

    @property
    def sizes(self) -> str:
        """In words."""
        words = [f"{name} {size}" for name, size in self.pipelines.items()]
        return ", ".join(words + ([f"tensor {self.tensor}"] if self.tensor else []))


@dataclass(frozen=True)
class EncoderChoice:
    """What was chosen, and from what.

    Attributes:
        recipe: with the sizes chosen.
        tried: all sizes that were simulated, the chosen ones first.
        left_out: combinations whose states alone do not fit.
        promised_longer: combinations that were not simulated, for that reason.
        refined: the chosen sizes with images at once and stages of encoders that are faster.
    """

    recipe: Recipe
    tried: tuple[Tried, ...]
    left_out: int
    promised_longer: int = 0
    refined: Colocated | None = None

    def lines(self) -> Iterator[str]:
        """One line for each combination, best first."""
        for tried in self.tried:
            sizes = tried.sizes
            forecast = tried.forecast
            step = forecast.step
            if step is None:
                yield f"pipeline ranks of {sizes}: {forecast.problem}"
                continue
            peak = max(step.peak_bytes) / 2**30
            words = f"{step.makespan_ms:,.1f} ms, {peak:.1f} GiB: {forecast.memory_words}"
            yield f"pipeline ranks of {sizes}: {words}"
        if self.refined is not None and (step := self.refined.forecast.step) is not None:
            yield f"the first with {', '.join(self.refined.words)}: {step.makespan_ms:,.1f} ms"
        if self.promised_longer:
            yield f"{self.promised_longer} more that the bubble scheduler expects to be slower"
        if self.left_out:
            yield f"{self.left_out} more whose parameters and optimizer state do not fit"


def leaves_encoders_open(recipe: Recipe) -> bool:
    """Whether a recipe asks for sizes of colocated encoders."""
    return recipe.parallel.orchestrate and recipe.parallel.placement == "colocated"


def choose_encoders(forecaster: Forecaster) -> EncoderChoice:
    """Tries all sizes of encoders that the recipe does not give; with the best, images at once and
    stages that it does not give (`refined`).

    Raises:
        ConfigError: nothing fits into memory; the message says what comes nearest.
    """
    recipe = forecaster.recipe
    fitting = _fitting(forecaster)
    recipes = [with_pipelines(recipe, sizes, tensor=tensor) for sizes, tensor in fitting.sizes]
    tried = []
    for index, forecast in promising(forecaster, [sized.parallel for sized in recipes]):
        sizes, tensor = fitting.sizes[index]
        tried.append(Tried(recipes[index], sizes, forecast, tensor))

    def rank(found: Tried) -> tuple[Any, ...]:
        step = found.forecast.step
        if step is None:
            return True, True, 0.0, 0
        return False, not step.fits, round(step.makespan_ms, 6), max(step.peak_bytes)

    tried.sort(key=rank)
    longer = len(fitting.sizes) - len(tried)
    choice = EncoderChoice(tried[0].recipe, tuple(tried), fitting.left_out, longer)
    step = tried[0].forecast.step
    if step is None or not step.fits:
        choices = "; ".join(choice.lines())
        raise ConfigError(
            f"parallel.orchestrate: no pipelines of encoders fit into memory: {choices}. Use more "
            "ranks, activation_checkpoint, or encoders on ranks of their own"
        )
    best = refined(forecaster, Colocated(choice.recipe, tried[0].forecast), of_llm=False)
    return replace(choice, recipe=best.recipe, refined=best) if best.words else choice


def promising(
    forecaster: Forecaster, sections: Sequence[ParallelConfig]
) -> Iterator[tuple[int, Forecast]]:
    """First steps with several sections of colocated encoders, by index, the shortest promise
    first; once one fits, only those promised to take at most `PROMISE_MARGIN` times as long as
    it."""
    promises_ms = [forecaster.promised_ms(section) for section in sections]
    limit_ms = inf
    for index in sorted(range(len(sections)), key=promises_ms.__getitem__):
        if promises_ms[index] > limit_ms:
            return
        forecast = forecaster.forecast_parallel(sections[index])
        if limit_ms == inf and forecast.step is not None and forecast.step.fits:
            limit_ms = PROMISE_MARGIN * promises_ms[index]
        yield index, forecast


def least_promise_ms(forecaster: Forecaster) -> float:
    """The shortest step that the bubble scheduler promises of all that `choose_encoders` tries.

    Raises:
        ConfigError: the states of none fit into memory.
    """
    return min(
        forecaster.promised_ms(with_pipelines(forecaster.recipe, sizes, tensor=tensor).parallel)
        for sizes, tensor in _fitting(forecaster).sizes
    )


class _Fitting(NamedTuple):
    """Sizes of encoders whose states fit on the rank that needs most."""

    sizes: list[tuple[dict[str, int], int | None]]
    """Pipeline ranks by encoder, and tensor-parallel ranks of all to which the recipe gives none;
    None for the latter where there is nothing to choose."""
    left_out: int
    """Combinations that do not fit."""


def _fitting(forecaster: Forecaster) -> _Fitting:
    """Of all combinations.

    Raises:
        ConfigError: none does.
    """
    tensors = encoder_tensors(forecaster)
    combinations = list(encoder_combinations(forecaster))
    ranks = forecaster.run.llm
    modules = forecaster.modules
    llm = ParallelSizes(ranks.data_parallel, ranks.pipeline, ranks.tensor)
    unsplit = {n: {"pipeline": p, "tensor": ranks.tensor} for n, p in combinations[0].items()}
    whole = _with_modules(forecaster.recipe, unsplit).parallel
    layout = plan_layout(whole, modules, forecaster.typical)
    encoders = [module for module in modules if module.kind == "encoder"]
    limit_bytes = int(forecaster.profile.device.memory_bytes)
    compute_bytes = 2 if forecaster.recipe.training.dtype == "bfloat16" else 4
    states = parameter_states(forecaster.recipe)
    own_bytes = backbone_bytes(layout, modules, llm, compute_bytes=compute_bytes, states=states)
    try:
        plans = colocated_plans(
            encoders, llm, own_bytes, limit_bytes, compute_bytes=compute_bytes, states=states
        )
    except ValueError as error:
        raise ConfigError(f"parallel.orchestrate: {error}") from error
    found = {
        tuple((own.sizes.pipeline, own.sizes.tensor) for own in plan.encoders) for plan in plans
    }
    given = forecaster.recipe.parallel.sizes_given
    fitting = [
        (sizes, tensor if len(tensors) > 1 else None)
        for tensor in tensors
        for sizes in combinations
        if tuple((n, given(name).get("tensor", tensor)) for name, n in sizes.items()) in found
    ]
    if not fitting:
        raise ConfigError(
            f"parallel.orchestrate: none of {combinations} pipeline ranks of encoders fits into "
            f"{limit_bytes / 2**30:.1f} GiB; leave their sizes open, or use more ranks"
        )
    return _Fitting(fitting, len(combinations) * len(tensors) - len(fitting))
