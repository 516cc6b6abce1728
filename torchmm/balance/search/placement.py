"""Values that a recipe leaves open, chosen when a run starts.

Parallel sizes (`parallel.orchestrate`), and "auto" for `data.reorder` and `data.balance`.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf

from torchmm.balance.forecasts.forecast import Forecaster, StepSample, choose_arrangement
from torchmm.balance.run_costs import simulated_profile
from torchmm.balance.search.recipe_plans import leaves_encoders_open
from torchmm.balance.search.result import SearchResult, find_best
from torchmm.balance.search.search import search_plans
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import Profile
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.resolved import Resolved
from torchmm.recipe.recipe import Recipe

EFFORT = 100_000
"""Simulated actions while a run waits. All ranks plan alike, so no clock limits the search."""


def orchestrated_units(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with sizes of all modules on separate ranks that use all ranks.

    Raises:
        ConfigError: The recipe has errors, nothing fits, or no plan uses all ranks.
    """
    profile = simulated_profile(recipe)
    sample = StepSample(recipe)
    methods = ("disaggregated",)

    def search(effort: float, *, exact: bool):  # type: ignore[no-untyped-def]
        return search_plans(
            recipe, world_size, profile, methods=methods, budget_s=inf, effort=effort,
            exact=exact, sample=sample,
        )  # fmt: skip

    if (best := search(EFFORT, exact=True).best) is not None:
        return best.recipe
    fewer = find_best(search(EFFORT / 10, exact=False), world_size)
    raise ConfigError(
        f"parallel.orchestrate: no plan uses all {world_size} ranks; start {fewer.devices} "
        "ranks, or give sizes in [parallel] and [parallel.NAME]"
    )


def orchestrated(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with sizes of colocated encoders, or of all modules, if it requests that.

    Raises:
        ConfigError: Nothing fits into memory, or the device is unknown.
    """
    if recipe.parallel.leaves_units_open:
        return orchestrated_units(recipe, world_size)
    if not leaves_encoders_open(recipe):
        return recipe
    found = search_encoder_sizes(Forecaster(recipe, world_size, simulated_profile(recipe)))
    best = find_best(found, world_size).recipe
    return best.model_copy(update={"data": recipe.data})


def search_encoder_sizes(forecaster: Forecaster) -> SearchResult:
    """Return the search for the sizes of colocated encoders that a recipe leaves open.

    It ends without a limit, so that all ranks find the same plan.

    Args:
        forecaster: Forecaster of the recipe.

    Raises:
        ConfigError: The sizes of the recipe do not fit together.
    """
    return search_plans(
        forecaster.recipe, forecaster.run.world_size, forecaster.profile,
        methods=("colocated",), budget_s=inf, own_sizes=True, sample=forecaster.sample,
    )  # fmt: skip


def with_arrangement(run: Resolved, model: MultimodalModel) -> Resolved:
    """Return a run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    Args:
        run: Recipe with resolved sizes.
        model: Its model on the meta device.

    Raises:
        DataError: The samples of the first step cannot be read.
    """
    profile: Profile | None = None
    with suppress(ConfigError):  # such as a calibration file that is not on this node
        profile = simulated_profile(run.recipe)
    return choose_arrangement(run, profile, StepSample(run.recipe, model))
