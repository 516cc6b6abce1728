"""Plan space: all plans that a simulation may have to evaluate, in bands of increasing bounds.

    space = PlanSpace(variants)
    band = space.band(limit_s, layouts)    # plans of LLM layouts whose bound is below limit_s

A *variant* is a way to run arbitrary parallelism degrees: a schedule, stages per rank and
recomputation. Plans are the product of variants and parallelism degrees of all units. Each plan has
three values:

- A bound (`bounds`). No simulated step of the plan is shorter.
- An estimate, by the formula of `search`.
- A guess whether the plan fits into memory.

The caller simulates plans with the best estimates first. It stops when no bound is below the best
simulated step:

    bound    |----A----|--B--|---C---|-----D------>    plans, sorted by the bound of their LLM
    layout
             band 1          band 2        ^
                                           best simulated step: D and later plans are not simulated

With hundreds of devices, some LLM layouts have too many combinations to list. For such a layout,
only options remain that no other option of the unit dominates in all columns of estimates and
bounds. The layout is then *open*: its bound still counts as unsimulated (`Band.open_s`).

Invariants: each LLM layout is in exactly one band, layouts are visited in ascending order of their
bounds, and `Band.beyond_s` is a lower bound for all plans that no band contains yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.disttrain.orchestration.bounds import UnitBound, Waiting
from torchmm.balance.disttrain.orchestration.kernels import (
    DEPTH,
    PIPELINE,
    STAGE_S,
    SYNC_S,
    WARMUP_S,
    every_option,
)
from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import UnitSizes
from torchmm.balance.disttrain.orchestration.tables import UnitTables

MOST_LISTED = 2_000
"""Maximum number of combinations of an LLM layout for a complete list."""
UNEQUAL_SHARE = 0.1
"""Fraction that each doubling of LLM replicas per replica group adds to an estimate. Units with
different data-parallel sizes wait for each other, which the formula does not model."""
MOST_OPTIONS = 300
"""Maximum number of options of a unit if the list of a layout is incomplete."""
MOST_KEPT = 64
"""Number of listed plans of an open layout. They have the lowest estimates."""


@dataclass(frozen=True)
class Variant:
    """Schedule, stages per rank and recomputation, without parallelism degrees.

    Attributes:
        schedule: Schedule of the LLM pipeline, as in recipes.
        stages: LLM stages per rank.
        recompute: Activation checkpointing of all modules, as in recipes.
        whole_backwards: Whether the schedule never splits backward passes.
        waiting: Microbatches whose activations the LLM saves.
        problem: Problem with the costs of this recomputation and number of stages.
        bounds: Bounds of the same units.
        guessed: Whether the formula models this schedule. Plans of other schedules come later.
    """

    schedule: str
    stages: int
    recompute: str
    whole_backwards: bool
    waiting: Waiting
    problem: OrchestrationProblem
    bounds: tuple[UnitBound, ...]
    guessed: bool = True


@dataclass(frozen=True)
class PlanGuess:
    """Plan that has not been simulated.

    Attributes:
        variant: Index of the variant.
        sizes: Parallelism degrees of each unit.
        bound_s: Lower bound of the simulated step time.
        estimate_s: Step time by the formula.
        likely: Whether the formula models the schedule and predicts that the plan fits.
        place: Rank among the plans with the same LLM layout, best guess first.
    """

    variant: int
    sizes: tuple[UnitSizes, ...]
    bound_s: float
    estimate_s: float
    likely: bool
    place: int = 0


@dataclass(frozen=True)
class Band:
    """Plans with bounds below a limit.

    Attributes:
        plans: Plans grouped by LLM layout, best guess first.
        open_s: Lowest bound of layouts with an incomplete list. Infinite if all lists are complete.
        beyond_s: Lowest bound of all layouts that are not in any band yet.
    """

    plans: tuple[PlanGuess, ...]
    open_s: float
    beyond_s: float


@dataclass(frozen=True)
class _Options:
    """Parallelism degrees of one unit, stored as columns."""

    sizes: tuple[UnitSizes, ...]
    bound_s: Float64s
    stage_s: Float64s
    warmup_s: Float64s
    sync_s: Float64s
    depth: Float64s
    """Maximum number of pipeline ranks from the first rank of the unit to the last rank of all
    units for which the option fits, by the formula."""

    @property
    def devices(self) -> Float64s:
        return np.array([sizes.devices for sizes in self.sizes], float)

    @property
    def pipeline(self) -> Float64s:
        return np.array([sizes.pipeline for sizes in self.sizes], float)

    @property
    def data(self) -> Int64s:
        return np.array([sizes.data for sizes in self.sizes], np.int64)

    def only(self, chosen: Sequence[int] | Int64s) -> _Options:
        """Return a subset of the options."""
        rows = list(chosen)
        columns = (self.bound_s, self.stage_s, self.warmup_s, self.sync_s, self.depth)
        return _Options(tuple(self.sizes[i] for i in rows), *(column[rows] for column in columns))


class PlanSpace:
    """Parallelism degrees of all units under several variants.

    Args:
        variants: Variants to combine with parallelism degrees.
        exact: Whether plans must use all devices.
        limits: Maximum number of devices of each unit, by name.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        *,
        exact: bool = False,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.variants = variants
        self._exact = exact
        self._limits = limits or {}
        self._undominated: dict[int, _Options] = {}
        self._known_tables: dict[int, UnitTables] = {}
        self._options: dict[tuple[object, ...], _Options] = {}
        self._layouts = sorted(
            (bound, variant, data, row)
            for variant in range(len(variants))
            for data in self._data_sizes
            for row, bound in enumerate(self._layout_bounds(variant, data))
            if bound < inf
        )
        self._taken = 0

    @property
    def _problem(self) -> OrchestrationProblem:
        return self.variants[0].problem

    @property
    def _data_sizes(self) -> list[int]:
        batch = self._problem.global_batch_size // self._problem.microbatch_size
        most = min(batch, self._problem.devices)
        return [data for data in range(1, most + 1) if batch % data == 0]

    @property
    def least_s(self) -> float:
        """Lower bound of all plans. Infinite if no plan exists."""
        return self._layouts[0][0] if self._layouts else inf

    def plan(self, variant: int, sizes: tuple[UnitSizes, ...]) -> PlanGuess | None:
        """Return the plan with these parallelism degrees. None if the variant does not have it."""
        options = self._options_of(variant, sizes[self._problem.llm].data)
        rows = [
            unit_options.sizes.index(size) if size in unit_options.sizes else -1
            for unit_options, size in zip(options, sizes, strict=True)
        ]
        if min(rows) < 0:
            return None
        selected = [
            unit_options.only([row]) for unit_options, row in zip(options, rows, strict=True)
        ]
        plans = self._combined(variant, sizes[self._problem.llm].data, selected, None)
        return plans[0] if plans else None

    def band(self, limit_s: float, most_layouts: int) -> Band:
        """Return the plans of LLM layouts with bounds below a limit that no earlier band contains.

        Args:
            limit_s: Upper limit of the bounds.
            most_layouts: Maximum number of LLM layouts to evaluate.
        """
        plans: list[PlanGuess] = []
        open_s = inf
        for _ in range(most_layouts):
            if self._taken == len(self._layouts) or self._layouts[self._taken][0] >= limit_s:
                break
            bound_s, variant, data, row = self._layouts[self._taken]
            self._taken += 1
            layout_plans, complete = self._plans_of(variant, data, row)
            plans += layout_plans
            if not complete:
                open_s = min(open_s, bound_s)
        rest = self._layouts[self._taken :]
        return Band(tuple(plans), open_s, rest[0][0] if rest else inf)

    def _layout_bounds(self, variant: int, data: int) -> Float64s:
        """Return the bounds of all LLM options with the best options of other units.

        Other units share the remaining devices. Bounds are infinite if no options fit.
        """
        options = self._options_of(variant, data)
        llm_options = options[self._problem.llm]
        remaining = np.maximum(0, self._problem.devices - llm_options.devices.astype(int))
        behind_s = self._around_llm(variant, len(options) - 1, llm_options)
        lowest_s = np.empty(len(llm_options.sizes))
        # Units after the LLM also wait for the LLM chain, whose time depends on the LLM option.
        for chain_s in set(behind_s.tolist()):
            others = [
                _by_devices(option, self._problem.devices) + chain_s * (unit > self._problem.llm)
                for unit, option in enumerate(options)
                if unit != self._problem.llm
            ]
            same_chain = behind_s == chain_s
            lowest_s[same_chain] = reduce(_shared, others)[remaining[same_chain]] if others else 0.0
        return np.maximum(llm_options.bound_s, lowest_s)

    def _around_llm(self, variant: int, unit: int, llm: _Options) -> Float64s:
        """Return the LLM time before and after the work of a unit, for each LLM option."""
        if unit <= self._problem.llm:
            return np.zeros(len(llm.sizes))
        chosen_variant = self.variants[variant]
        bound = chosen_variant.bounds[self._problem.llm]
        chain_s = {
            t: bound.chain_s(t, whole_backwards=chosen_variant.whole_backwards)
            for t in bound.seconds
        }
        first = self._problem.microbatch_size
        return np.array([first * chain_s[sizes.tensor] for sizes in llm.sizes])

    def _options_of(self, variant: int, data: int) -> list[_Options]:
        chosen_variant = self.variants[variant]
        options = []
        for unit, costs in enumerate(chosen_variant.problem.units):
            # Only LLM options depend on the schedule. Variants with the same recomputation share
            # the cost object, so its id is a key.
            schedule = (
                (chosen_variant.stages, chosen_variant.whole_backwards, chosen_variant.waiting)
                if unit == self._problem.llm
                else ()
            )
            key = id(costs), data, schedule
            if key not in self._options:
                self._options[key] = self._unit_options(variant, data, unit)
            options.append(self._options[key])
        return options

    def _unit_options(self, variant: int, data: int, unit: int) -> _Options:
        """Return the options of a unit that may fit."""
        chosen_variant = self.variants[variant]
        problem = chosen_variant.problem
        bound = chosen_variant.bounds[unit]
        costs = problem.units[unit]
        setting = problem.setting()
        tables = self._tables(variant)
        max_devices = problem.devices - len(problem.units) + 1
        max_devices = min(max_devices, self._limits.get(costs.name, problem.devices))
        rows = every_option(tables, setting, data, unit, max_devices)
        alone = rows[:, PIPELINE] == 1
        rows = rows[~(alone & (chosen_variant.stages > 1) & (unit == setting.llm))]
        tensors = tables.tensor_T.tolist()
        keys = [(tensors[int(t)], int(d), int(p)) for t, d, p in rows[:, : PIPELINE + 1]]
        together = problem.microbatch_size * data
        behind = len(problem.units) - 1 - unit
        waiting: Waiting = chosen_variant.waiting if unit == setting.llm else "some"
        min_bytes = bound.least_bytes_O(
            keys, together, setting.batch // data, behind, waiting, costs.virtual_stages
        )
        fitting = np.flatnonzero(min_bytes <= problem.memory_bytes)
        keys = [keys[row] for row in fitting]
        bounds_s = bound.steps_s(
            keys,
            problem.global_batch_size,
            problem.microbatch_size if unit == setting.llm else 0,
            stages=costs.virtual_stages,
            whole_backwards=chosen_variant.whole_backwards,
        )
        times = (rows[fitting, column] for column in (STAGE_S, WARMUP_S, SYNC_S, DEPTH))
        return _Options(tuple(UnitSizes(*key) for key in keys), bounds_s, *times)

    def _tables(self, variant: int) -> UnitTables:
        problem = self.variants[variant].problem
        if id(problem) not in self._known_tables:
            self._known_tables[id(problem)] = problem.tables({})
        return self._known_tables[id(problem)]

    def _plans_of(self, variant: int, data: int, row: int) -> tuple[list[PlanGuess], bool]:
        """Return plans with one LLM layout, and whether the list is complete."""
        options = self._options_of(variant, data)
        llm = self._problem.llm
        trunk = options[llm].only([row])
        remaining = int(self._problem.devices - trunk.devices[0])
        others = [
            trunk if unit == llm else option.only(np.flatnonzero(option.devices <= remaining))
            for unit, option in enumerate(options)
        ]
        complete = _count(others) <= MOST_LISTED
        if not complete:
            others = [
                trunk if unit == llm else self._worthwhile(option, remaining)
                for unit, option in enumerate(options)
            ]
        return self._combined(variant, data, others, None if complete else MOST_KEPT), complete

    def _worthwhile(self, options: _Options, devices: int) -> _Options:
        """Return the undominated options within a number of devices.

        If they are too many, only the fastest remain.
        """
        if id(options) not in self._undominated:
            selected = _undominated(options, same_devices=self._exact)
            self._undominated[id(options)] = selected
        selected = self._undominated[id(options)]
        selected = selected.only(np.flatnonzero(selected.devices <= devices))
        return selected.only(np.sort(np.argsort(selected.stage_s, kind="stable")[:MOST_OPTIONS]))

    def _combined(
        self, variant: int, data: int, options: list[_Options], most: int | None
    ) -> list[PlanGuess]:
        """Return the combinations of options that use at most, or exactly, the available devices.

        Args:
            variant: Index of the variant.
            data: Data-parallel size of the LLM.
            options: Options of each unit.
            most: Maximum number of plans; those with the lowest estimates are returned. None for
                all.
        """
        chosen_variant = self.variants[variant]
        units = len(options)
        shape = [len(option.sizes) for option in options]
        if not all(shape):
            return []

        # Arrays have one axis per unit, so broadcasting evaluates all combinations at once.
        def on_axis(values: Float64s, unit: int) -> Float64s:
            return values.reshape([-1 if axis == unit else 1 for axis in range(units)])

        def join_columns(name: str, join: np.ufunc) -> Float64s:
            columns = [on_axis(getattr(option, name), u) for u, option in enumerate(options)]
            return np.broadcast_to(reduce(join, columns), shape)

        devices = join_columns("devices", np.add)
        steady = self._problem.global_batch_size // self._problem.microbatch_size // data - 1
        estimate_s = join_columns("warmup_s", np.add) + steady * join_columns("stage_s", np.maximum)
        estimate_s = estimate_s + join_columns("sync_s", np.maximum)
        # LLM replicas per replica group. Several replicas of a group wait for each other.
        together = data / join_columns("data", np.gcd)
        estimate_s = estimate_s * (1 + UNEQUAL_SHARE * np.log2(together))
        bounds_s = [
            on_axis(option.bound_s + self._around_llm(variant, u, options[self._problem.llm]), u)
            for u, option in enumerate(options)
        ]
        bound_s = np.broadcast_to(reduce(np.maximum, bounds_s), shape)
        likely = np.full(shape, chosen_variant.guessed)
        # The depth of a unit includes all later units, so sum from the last unit to the first.
        depth: Float64s = np.zeros([1] * units)
        for unit in range(units - 1, -1, -1):
            depth = depth + on_axis(options[unit].pipeline, unit)
            likely = likely & (depth <= on_axis(options[unit].depth, unit))
        is_allowed = devices == self._problem.devices if self._exact else (
            devices <= self._problem.devices
        )  # fmt: skip
        at = np.flatnonzero(is_allowed)
        order = np.lexsort((estimate_s.ravel()[at], ~likely.ravel()[at]))
        plans: list[PlanGuess] = []
        for place in at[order][:most].tolist():
            rows = np.unravel_index(place, shape)
            sizes = tuple(options[u].sizes[i] for u, i in enumerate(rows))
            plans.append(
                PlanGuess(
                    variant,
                    sizes,
                    float(bound_s.ravel()[place]),
                    float(estimate_s.ravel()[place]),
                    bool(likely.ravel()[place]),
                    len(plans),
                )
            )
        return plans


def _by_devices(options: _Options, most: int) -> Float64s:
    """Return the lowest bound with at most n devices, for n from 0 to `most`."""
    lowest_s: Float64s = np.full(most + 1, inf)
    devices = options.devices.astype(int)
    within = devices <= most
    np.minimum.at(lowest_s, devices[within], options.bound_s[within])
    return np.minimum.accumulate(lowest_s)


def _shared(one_s: Float64s, other_s: Float64s) -> Float64s:
    """Return the lowest time of the slower of two units that share n devices, for each n from 0.

    Args:
        one_s: Lowest times of the first unit by number of devices, not increasing.
        other_s: Lowest times of the second unit by number of devices, not increasing.
    """
    lowest_s: Float64s = np.full(len(one_s), inf)
    # Only numbers of devices at which the first unit gets faster can reduce the maximum.
    faster = np.concatenate(([True], one_s[1:] < one_s[:-1])) & (one_s < inf)
    for count in np.flatnonzero(faster).tolist():
        slower_s = np.maximum(one_s[count], other_s[: len(lowest_s) - count])
        lowest_s[count:] = np.minimum(lowest_s[count:], slower_s)
    return lowest_s


def _count(options: Sequence[_Options]) -> int:
    return int(np.prod([len(option.sizes) for option in options], dtype=float))


def _undominated(options: _Options, *, same_devices: bool) -> _Options:
    """Return the options that no other option equals or beats in all columns.

    The columns are those on which bounds and estimates depend.

    Args:
        options: Options of one unit.
        same_devices: Whether to compare only options with the same number of devices.
    """
    devices = options.devices
    columns = np.stack([
        devices, options.bound_s, options.stage_s, options.warmup_s, options.sync_s,
        options.pipeline, options.pipeline - options.depth,
    ])  # fmt: skip
    selected: list[int] = []
    # In ascending order of devices, an option can only be dominated by an earlier option.
    for row in np.lexsort((options.stage_s, devices)).tolist():
        better = columns[:, selected]
        is_dominated = (better <= columns[:, [row]]).all(axis=0)
        if same_devices:
            is_dominated &= devices[selected] == devices[row]
        if not is_dominated.any():
            selected.append(row)
    return options.only(selected)
