"""Plan space: all plans that a simulation may have to evaluate, in bands of increasing bounds.

    space = PlanSpace(variants)
    band = space.next_band(limit_s, layouts)    # plans of LLM layouts whose bound is below limit_s

A *variant* is a way to run arbitrary parallelism degrees: a schedule, stages per rank and
recomputation. Plans are the product of variants and parallelism degrees of all units. Each plan has
three values:

- A bound (`bounds`). No simulated step of the plan is shorter.
- An estimate, by the formula of `search`.
- A prediction whether the plan fits into memory.

The caller simulates plans with the best estimates first. It stops when no bound is below the best
simulated step:

    bound    |----A----|--B--|---C---|-----D------>    plans, sorted by the bound of their LLM
    layout
             band 1          band 2        ^
                                           best simulated step: D and later plans are not simulated

With hundreds of devices, some LLM layouts have too many combinations to list. For such a layout,
only options remain that no other option of the unit dominates in all columns of estimates and
bounds. The layout is then *open*: its bound still counts as unsimulated (`PlanBand.open_s`).

Invariants: each LLM layout is in exactly one band, layouts are visited in ascending order of their
bounds, and `PlanBand.remaining_bound_s` is a lower bound for all plans that no band contains yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf

import numpy as np

from torchmm.balance.disttrain.orchestration.bounds import SavedMicrobatches, UnitBounds
from torchmm.balance.disttrain.orchestration.kernels import (
    DEPTH,
    PIPELINE,
    STAGE_S,
    SYNC_S,
    WARMUP_S,
    list_all_options,
)
from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import UnitSizes
from torchmm.balance.disttrain.orchestration.tables import UnitTables
from torchmm.balance.numba_utils import Float64s, Int64s

MAX_LISTED = 2_000
"""Maximum number of combinations of an LLM layout for a complete list."""
REPLICA_MISMATCH_PENALTY = 0.1
"""Fraction that each doubling of LLM replicas per replica group adds to an estimate. Units with
different data-parallel sizes wait for each other, which the formula does not model."""
MAX_OPTIONS = 300
"""Maximum number of options of a unit if the list of a layout is incomplete."""
MAX_OPEN_PLANS = 64
"""Number of listed plans of an open layout. They have the lowest estimates."""


@dataclass(frozen=True)
class PlanVariant:
    """Schedule, stages per rank and recomputation, without parallelism degrees.

    Attributes:
        schedule: Schedule of the LLM pipeline, as in recipes.
        stages: LLM stages per rank.
        recompute: Activation checkpointing of all modules, as in recipes.
        unsplit_backward: Whether the schedule never splits backward passes.
        saved_microbatches: Microbatches whose activations the LLM saves.
        problem: Problem with the costs of this recomputation and number of stages.
        bounds: Bounds of the same units.
        is_modeled: Whether the formula models this schedule. Plans of other schedules come later.
    """

    schedule: str
    stages: int
    recompute: str
    unsplit_backward: bool
    saved_microbatches: SavedMicrobatches
    problem: OrchestrationProblem
    bounds: tuple[UnitBounds, ...]
    is_modeled: bool = True


@dataclass(frozen=True)
class PlanEstimate:
    """Plan that has not been simulated.

    Attributes:
        variant: Index of the variant.
        sizes: Parallelism degrees of each unit.
        bound_s: Lower bound of the simulated step time.
        estimate_s: Step time by the formula.
        is_likely: Whether the formula models the schedule and predicts that the plan fits.
        position: Rank among the plans with the same LLM layout, best estimate first.
    """

    variant: int
    sizes: tuple[UnitSizes, ...]
    bound_s: float
    estimate_s: float
    is_likely: bool
    position: int = 0


@dataclass(frozen=True)
class PlanBand:
    """Plans with bounds below a limit.

    Attributes:
        plans: Plans grouped by LLM layout, best estimate first.
        open_s: Lowest bound of layouts with an incomplete list. Infinite if all lists are complete.
        remaining_bound_s: Lowest bound of all layouts that are not in any band yet.
    """

    plans: tuple[PlanEstimate, ...]
    open_s: float
    remaining_bound_s: float


@dataclass(frozen=True)
class _Options:
    """Parallelism degrees of one unit, stored as columns."""

    sizes: tuple[UnitSizes, ...]
    bound_s: Float64s
    stage_s: Float64s
    warmup_s: Float64s
    grad_sync_s: Float64s
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

    def select(self, chosen: Sequence[int] | Int64s) -> _Options:
        """Return a subset of the options."""
        rows = list(chosen)
        columns = (self.bound_s, self.stage_s, self.warmup_s, self.grad_sync_s, self.depth)
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
        variants: Sequence[PlanVariant],
        *,
        exact: bool = False,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.variants = variants
        self._exact = exact
        self._limits = limits or {}
        self._undominated: dict[int, _Options] = {}
        self._tables_by_problem: dict[int, UnitTables] = {}
        self._options: dict[tuple[object, ...], _Options] = {}
        self._layouts = sorted(
            (bound, variant, data, row)
            for variant in range(len(variants))
            for data in self._data_sizes
            for row, bound in enumerate(self._layout_bounds(variant, data))
            if bound < inf
        )
        self._next_layout = 0

    @property
    def _problem(self) -> OrchestrationProblem:
        return self.variants[0].problem

    @property
    def _data_sizes(self) -> list[int]:
        batch = self._problem.global_batch_size // self._problem.microbatch_size
        max_data = min(batch, self._problem.devices)
        return [data for data in range(1, max_data + 1) if batch % data == 0]

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of all plans. Infinite if no plan exists."""
        return self._layouts[0][0] if self._layouts else inf

    def estimate_plan(self, variant: int, sizes: tuple[UnitSizes, ...]) -> PlanEstimate | None:
        """Return the plan with these parallelism degrees. None if the variant does not have it."""
        options = self._options_by_unit(variant, sizes[self._problem.llm].data)
        rows = [
            unit_options.sizes.index(size) if size in unit_options.sizes else -1
            for unit_options, size in zip(options, sizes, strict=True)
        ]
        if min(rows) < 0:
            return None
        selected = [
            unit_options.select([row]) for unit_options, row in zip(options, rows, strict=True)
        ]
        plans = self._combine_options(variant, sizes[self._problem.llm].data, selected, None)
        return plans[0] if plans else None

    def next_band(self, limit_s: float, max_layouts: int) -> PlanBand:
        """Return the plans of LLM layouts with bounds below a limit that no earlier band contains.

        Args:
            limit_s: Upper limit of the bounds.
            max_layouts: Maximum number of LLM layouts to evaluate.
        """
        plans: list[PlanEstimate] = []
        open_s = inf
        for _ in range(max_layouts):
            if (
                self._next_layout == len(self._layouts)
                or self._layouts[self._next_layout][0] >= limit_s
            ):
                break
            bound_s, variant, data, row = self._layouts[self._next_layout]
            self._next_layout += 1
            layout_plans, complete = self._list_layout(variant, data, row)
            plans += layout_plans
            if not complete:
                open_s = min(open_s, bound_s)
        remaining = self._layouts[self._next_layout :]
        return PlanBand(tuple(plans), open_s, remaining[0][0] if remaining else inf)

    def _layout_bounds(self, variant: int, data: int) -> Float64s:
        """Return the bounds of all LLM options with the best options of other units.

        Other units share the remaining devices. Bounds are infinite if no options fit.
        """
        options = self._options_by_unit(variant, data)
        llm_options = options[self._problem.llm]
        remaining = np.maximum(0, self._problem.devices - llm_options.devices.astype(int))
        chains_s = self._llm_chain_s(variant, len(options) - 1, llm_options)
        lowest_s = np.empty(len(llm_options.sizes))
        # Units after the LLM also wait for the LLM chain, whose time depends on the LLM option.
        for chain_s in set(chains_s.tolist()):
            unit_bounds_s = [
                _bounds_by_devices(option, self._problem.devices)
                + chain_s * (unit > self._problem.llm)
                for unit, option in enumerate(options)
                if unit != self._problem.llm
            ]
            same_chain = chains_s == chain_s
            lowest_s[same_chain] = (
                reduce(_share_devices, unit_bounds_s)[remaining[same_chain]]
                if unit_bounds_s
                else 0.0
            )
        return np.maximum(llm_options.bound_s, lowest_s)

    def _llm_chain_s(self, variant: int, unit: int, llm: _Options) -> Float64s:
        """Return the LLM time before and after the work of a unit, for each LLM option."""
        if unit <= self._problem.llm:
            return np.zeros(len(llm.sizes))
        chosen_variant = self.variants[variant]
        bound = chosen_variant.bounds[self._problem.llm]
        chain_s = {
            t: bound.chain_s(t, unsplit_backward=chosen_variant.unsplit_backward)
            for t in bound.seconds
        }
        first = self._problem.microbatch_size
        return np.array([first * chain_s[sizes.tensor] for sizes in llm.sizes])

    def _options_by_unit(self, variant: int, data: int) -> list[_Options]:
        chosen_variant = self.variants[variant]
        options = []
        for unit, costs in enumerate(chosen_variant.problem.units):
            # Only LLM options depend on the schedule. Variants with the same recomputation share
            # the cost object, so its id is a key.
            schedule = (
                (
                    chosen_variant.stages,
                    chosen_variant.unsplit_backward,
                    chosen_variant.saved_microbatches,
                )
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
        rows = list_all_options(tables, setting, data, unit, max_devices)
        is_unpipelined = rows[:, PIPELINE] == 1
        rows = rows[~(is_unpipelined & (chosen_variant.stages > 1) & (unit == setting.llm))]
        tensors = tables.tensor_T.tolist()
        keys = [(tensors[int(t)], int(d), int(p)) for t, d, p in rows[:, : PIPELINE + 1]]
        samples = problem.microbatch_size * data
        later_ranks = len(problem.units) - 1 - unit
        saved_microbatches: SavedMicrobatches = (
            chosen_variant.saved_microbatches if unit == setting.llm else "some"
        )
        min_bytes = bound.memory_bounds_O(
            keys,
            samples,
            setting.batch // data,
            later_ranks,
            saved_microbatches,
            costs.virtual_stages,
        )
        fitting = np.flatnonzero(min_bytes <= problem.memory_bytes)
        keys = [keys[row] for row in fitting]
        bounds_s = bound.step_bounds_s(
            keys,
            problem.global_batch_size,
            problem.microbatch_size if unit == setting.llm else 0,
            stages=costs.virtual_stages,
            unsplit_backward=chosen_variant.unsplit_backward,
        )
        times = (rows[fitting, column] for column in (STAGE_S, WARMUP_S, SYNC_S, DEPTH))
        return _Options(tuple(UnitSizes(*key) for key in keys), bounds_s, *times)

    def _tables(self, variant: int) -> UnitTables:
        problem = self.variants[variant].problem
        if id(problem) not in self._tables_by_problem:
            self._tables_by_problem[id(problem)] = problem.tables({})
        return self._tables_by_problem[id(problem)]

    def _list_layout(self, variant: int, data: int, row: int) -> tuple[list[PlanEstimate], bool]:
        """Return plans with one LLM layout, and whether the list is complete."""
        options = self._options_by_unit(variant, data)
        llm = self._problem.llm
        llm_option = options[llm].select([row])
        remaining = int(self._problem.devices - llm_option.devices[0])
        unit_options = [
            llm_option
            if unit == llm
            else option.select(np.flatnonzero(option.devices <= remaining))
            for unit, option in enumerate(options)
        ]
        complete = _count_combinations(unit_options) <= MAX_LISTED
        if not complete:
            unit_options = [
                llm_option if unit == llm else self._reduce_options(option, remaining)
                for unit, option in enumerate(options)
            ]
        return self._combine_options(
            variant, data, unit_options, None if complete else MAX_OPEN_PLANS
        ), complete

    def _reduce_options(self, options: _Options, devices: int) -> _Options:
        """Return the undominated options within a number of devices.

        If they are too many, only the fastest remain.
        """
        if id(options) not in self._undominated:
            selected = _drop_dominated(options, same_devices=self._exact)
            self._undominated[id(options)] = selected
        selected = self._undominated[id(options)]
        selected = selected.select(np.flatnonzero(selected.devices <= devices))
        return selected.select(np.sort(np.argsort(selected.stage_s, kind="stable")[:MAX_OPTIONS]))

    def _combine_options(
        self, variant: int, data: int, options: list[_Options], max_plans: int | None
    ) -> list[PlanEstimate]:
        """Return the combinations of options that use at most, or exactly, the available devices.

        Args:
            variant: Index of the variant.
            data: Data-parallel size of the LLM.
            options: Options of each unit.
            max_plans: Maximum number of plans; those with the lowest estimates are returned. None
                for all.
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
        estimate_s = estimate_s + join_columns("grad_sync_s", np.maximum)
        # LLM replicas per replica group. Several replicas of a group wait for each other.
        llm_replicas = data / join_columns("data", np.gcd)
        estimate_s = estimate_s * (1 + REPLICA_MISMATCH_PENALTY * np.log2(llm_replicas))
        bounds_s = [
            on_axis(option.bound_s + self._llm_chain_s(variant, u, options[self._problem.llm]), u)
            for u, option in enumerate(options)
        ]
        bound_s = np.broadcast_to(reduce(np.maximum, bounds_s), shape)
        is_likely = np.full(shape, chosen_variant.is_modeled)
        # The depth of a unit includes all later units, so sum from the last unit to the first.
        depth: Float64s = np.zeros([1] * units)
        for unit in range(units - 1, -1, -1):
            depth = depth + on_axis(options[unit].pipeline, unit)
            is_likely = is_likely & (depth <= on_axis(options[unit].depth, unit))
        is_allowed = devices == self._problem.devices if self._exact else (
            devices <= self._problem.devices
        )  # fmt: skip
        allowed = np.flatnonzero(is_allowed)
        order = np.lexsort((estimate_s.ravel()[allowed], ~is_likely.ravel()[allowed]))
        plans: list[PlanEstimate] = []
        for index in allowed[order][:max_plans].tolist():
            rows = np.unravel_index(index, shape)
            sizes = tuple(options[u].sizes[i] for u, i in enumerate(rows))
            plans.append(
                PlanEstimate(
                    variant,
                    sizes,
                    float(bound_s.ravel()[index]),
                    float(estimate_s.ravel()[index]),
                    bool(is_likely.ravel()[index]),
                    len(plans),
                )
            )
        return plans


def _bounds_by_devices(options: _Options, max_devices: int) -> Float64s:
    """Return the lowest bound with at most n devices, for n from 0 to `max_devices`."""
    lowest_s: Float64s = np.full(max_devices + 1, inf)
    devices = options.devices.astype(int)
    within = devices <= max_devices
    np.minimum.at(lowest_s, devices[within], options.bound_s[within])
    return np.minimum.accumulate(lowest_s)


def _share_devices(one_s: Float64s, other_s: Float64s) -> Float64s:
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


def _count_combinations(options: Sequence[_Options]) -> int:
    return int(np.prod([len(option.sizes) for option in options], dtype=float))


def _drop_dominated(options: _Options, *, same_devices: bool) -> _Options:
    """Return the options that no other option equals or beats in all columns.

    The columns are those on which bounds and estimates depend.

    Args:
        options: Options of one unit.
        same_devices: Whether to compare only options with the same number of devices.
    """
    devices = options.devices
    columns = np.stack([
        devices, options.bound_s, options.stage_s, options.warmup_s, options.grad_sync_s,
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
    return options.select(selected)
