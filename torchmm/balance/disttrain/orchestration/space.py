"""All plans that a simulation may have to judge, band after band of their bounds.

    for variant in variants: ...                     # schedule, virtual stages, recomputation
    band = plans_below(variants, limit_s)            # plans whose bound is below, best guess first

A *variant* is a way to run any sizes: a schedule, stages per rank, recomputation. Plans are the
product of variants and sizes of all units. Each has a bound of its simulated step (`bounds`), an
estimate of it (the formula of `search`) and a guess whether it fits. The one who simulates takes
the best guesses first and stops where no bound is below the best step found.

For hundreds of devices there are more combinations than can be listed. Then, of an LLM's layout,
those options of other units stay that no other one beats in all that estimates and bounds depend
on; the layout counts as *open* with its bound, whatever becomes of those listed.
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
"""Combinations of one layout of the LLM that are listed all."""
UNEQUAL_SHARE = 0.1
"""Of the estimate, for every doubling of the LLM's replicas in a replica group: units of unlike
data-parallel sizes wait for each other in ways that the formula does not know."""
MOST_OPTIONS = 300
"""Of a unit, where combinations are more."""
MOST_KEPT = 64
"""Of more: those with the least estimates."""


@dataclass(frozen=True)
class Variant:
    """A way to run any sizes.

    Attributes:
        schedule: of the LLM's pipeline, as in recipes.
        stages: of the LLM per rank.
        recompute: of all modules, as in recipes.
        whole_backwards: whether its backwards are never split.
        waiting: which microbatches the LLM keeps.
        problem: with costs of this recomputation, and these stages.
        bounds: of the same units.
        guessed: whether the formula is of this schedule; plans of others come after.
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
    """A plan that has not been simulated.

    Attributes:
        variant: index of it.
        sizes: by unit.
        bound_s: no simulation of it is shorter.
        estimate_s: by the formula.
        likely: whether the formula knows the schedule and says that it fits.
        place: among the plans with the same layout of the LLM, best guess first.
    """

    variant: int
    sizes: tuple[UnitSizes, ...]
    bound_s: float
    estimate_s: float
    likely: bool
    place: int = 0


@dataclass(frozen=True)
class Band:
    """What was found below a limit.

    Attributes:
        plans: layout by layout of the LLM, best guess first.
        open_s: the least bound of layouts of which not all plans are listed; infinite if all are.
        beyond_s: the least bound of all others.
    """

    plans: tuple[PlanGuess, ...]
    open_s: float
    beyond_s: float


@dataclass(frozen=True)
class _Options:
    """Sizes of one unit, as columns."""

    sizes: tuple[UnitSizes, ...]
    bound_s: Float64s
    stage_s: Float64s
    warmup_s: Float64s
    sync_s: Float64s
    depth: Float64s
    """Pipeline ranks that there may be from here to the end for it to fit, by the formula."""

    @property
    def devices(self) -> Float64s:
        return np.array([own.devices for own in self.sizes], float)

    @property
    def pipeline(self) -> Float64s:
        return np.array([own.pipeline for own in self.sizes], float)

    @property
    def data(self) -> Int64s:
        return np.array([own.data for own in self.sizes], np.int64)

    def only(self, chosen: Sequence[int] | Int64s) -> _Options:
        """Some of them."""
        rows = list(chosen)
        columns = (self.bound_s, self.stage_s, self.warmup_s, self.sync_s, self.depth)
        return _Options(tuple(self.sizes[i] for i in rows), *(column[rows] for column in columns))


class PlanSpace:
    """Sizes of all units under some variants.

    Args:
        exact: whether all devices have to be used.
        limits: devices that units may have at most, by name.
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
        """No plan is below; infinite where there is none."""
        return self._layouts[0][0] if self._layouts else inf

    def plan(self, variant: int, sizes: tuple[UnitSizes, ...]) -> PlanGuess | None:
        """A plan with given sizes; None where the variant has none."""
        options = self._options_of(variant, sizes[self._problem.llm].data)
        rows = [
            own.sizes.index(size) if size in own.sizes else -1
            for own, size in zip(options, sizes, strict=True)
        ]
        if min(rows) < 0:
            return None
        alone = [own.only([row]) for own, row in zip(options, rows, strict=True)]
        found = self._combined(variant, sizes[self._problem.llm].data, alone, None)
        return found[0] if found else None

    def band(self, limit_s: float, most_layouts: int) -> Band:
        """Plans that were in no band before and whose LLM's layout has a bound below the limit.

        Args:
            most_layouts: of the LLM, to look at.
        """
        plans: list[PlanGuess] = []
        open_s = inf
        for _ in range(most_layouts):
            if self._taken == len(self._layouts) or self._layouts[self._taken][0] >= limit_s:
                break
            bound_s, variant, data, row = self._layouts[self._taken]
            self._taken += 1
            found, complete = self._plans_of(variant, data, row)
            plans += found
            if not complete:
                open_s = min(open_s, bound_s)
        rest = self._layouts[self._taken :]
        return Band(tuple(plans), open_s, rest[0][0] if rest else inf)

    def _layout_bounds(self, variant: int, data: int) -> Float64s:
        """Of all options of the LLM, with the best of the others on the devices that are left;
        infinite where none fit."""
        options = self._options_of(variant, data)
        own = options[self._problem.llm]
        left = np.maximum(0, self._problem.devices - own.devices.astype(int))
        behind_s = self._around_llm(variant, len(options) - 1, own)
        least_s = np.empty(len(own.sizes))
        for chain_s in set(behind_s.tolist()):
            others = [
                _by_devices(option, self._problem.devices) + chain_s * (unit > self._problem.llm)
                for unit, option in enumerate(options)
                if unit != self._problem.llm
            ]
            alike = behind_s == chain_s
            least_s[alike] = reduce(_shared, others)[left[alike]] if others else 0.0
        return np.maximum(own.bound_s, least_s)

    def _around_llm(self, variant: int, unit: int, llm: _Options) -> Float64s:
        """What passes the LLM before a unit and after it; by option of the LLM."""
        if unit <= self._problem.llm:
            return np.zeros(len(llm.sizes))
        own = self.variants[variant]
        bound = own.bounds[self._problem.llm]
        chain_s = {t: bound.chain_s(t, whole_backwards=own.whole_backwards) for t in bound.seconds}
        first = self._problem.microbatch_size
        return np.array([first * chain_s[sizes.tensor] for sizes in llm.sizes])

    def _options_of(self, variant: int, data: int) -> list[_Options]:
        own = self.variants[variant]
        found = []
        for unit, costs in enumerate(own.problem.units):
            # Only the LLM's depend on the schedule; costs are the same object where recomputation
            # is the same.
            schedule = (
                (own.stages, own.whole_backwards, own.waiting) if unit == self._problem.llm else ()
            )
            key = id(costs), data, schedule
            if key not in self._options:
                self._options[key] = self._unit_options(variant, data, unit)
            found.append(self._options[key])
        return found

    def _unit_options(self, variant: int, data: int, unit: int) -> _Options:
        """Sizes of a unit that may fit."""
        own = self.variants[variant]
        problem = own.problem
        bound = own.bounds[unit]
        costs = problem.units[unit]
        setting = problem.setting()
        tables = self._tables(variant)
        most = problem.devices - len(problem.units) + 1
        most = min(most, self._limits.get(costs.name, problem.devices))
        rows = every_option(tables, setting, data, unit, most)
        alone = rows[:, PIPELINE] == 1
        rows = rows[~(alone & (own.stages > 1) & (unit == setting.llm))]
        tensors = tables.tensor_T.tolist()
        keys = [(tensors[int(t)], int(d), int(p)) for t, d, p in rows[:, : PIPELINE + 1]]
        together = problem.microbatch_size * data
        behind = len(problem.units) - 1 - unit
        waiting: Waiting = own.waiting if unit == setting.llm else "some"
        least = bound.least_bytes_O(
            keys, together, setting.batch // data, behind, waiting, costs.virtual_stages
        )
        may = np.flatnonzero(least <= problem.memory_bytes)
        keys = [keys[row] for row in may]
        bounds_s = bound.steps_s(
            keys,
            problem.global_batch_size,
            problem.microbatch_size if unit == setting.llm else 0,
            stages=costs.virtual_stages,
            whole_backwards=own.whole_backwards,
        )
        times = (rows[may, column] for column in (STAGE_S, WARMUP_S, SYNC_S, DEPTH))
        return _Options(tuple(UnitSizes(*key) for key in keys), bounds_s, *times)

    def _tables(self, variant: int) -> UnitTables:
        problem = self.variants[variant].problem
        if id(problem) not in self._known_tables:
            self._known_tables[id(problem)] = problem.tables({})
        return self._known_tables[id(problem)]

    def _plans_of(self, variant: int, data: int, row: int) -> tuple[list[PlanGuess], bool]:
        """Plans with one layout of the LLM, and whether these are all."""
        options = self._options_of(variant, data)
        llm = self._problem.llm
        trunk = options[llm].only([row])
        left = int(self._problem.devices - trunk.devices[0])
        others = [
            trunk if unit == llm else own.only(np.flatnonzero(own.devices <= left))
            for unit, own in enumerate(options)
        ]
        complete = _count(others) <= MOST_LISTED
        if not complete:
            others = [
                trunk if unit == llm else self._worthwhile(own, left)
                for unit, own in enumerate(options)
            ]
        return self._combined(variant, data, others, None if complete else MOST_KEPT), complete

    def _worthwhile(self, options: _Options, devices: int) -> _Options:
        """Those that no other one beats, on so many devices; of very many, the fastest."""
        if id(options) not in self._undominated:
            kept = _undominated(options, same_devices=self._exact)
            self._undominated[id(options)] = kept
        kept = self._undominated[id(options)]
        kept = kept.only(np.flatnonzero(kept.devices <= devices))
        return kept.only(np.sort(np.argsort(kept.stage_s, kind="stable")[:MOST_OPTIONS]))

    def _combined(
        self, variant: int, data: int, options: list[_Options], most: int | None
    ) -> list[PlanGuess]:
        """The plans that have no more devices than there are, or exactly as many.

        Args:
            most: how many, those with the least estimates; None: all.
        """
        own = self.variants[variant]
        units = len(options)
        shape = [len(option.sizes) for option in options]
        if not all(shape):
            return []

        def spread(values: Float64s, unit: int) -> Float64s:
            return values.reshape([-1 if axis == unit else 1 for axis in range(units)])

        def over(name: str, join: np.ufunc) -> Float64s:
            columns = [spread(getattr(option, name), u) for u, option in enumerate(options)]
            return np.broadcast_to(reduce(join, columns), shape)

        devices = over("devices", np.add)
        steady = self._problem.global_batch_size // self._problem.microbatch_size // data - 1
        estimate_s = over("warmup_s", np.add) + steady * over("stage_s", np.maximum)
        estimate_s = estimate_s + over("sync_s", np.maximum)
        together = data / over("data", np.gcd)
        estimate_s = estimate_s * (1 + UNEQUAL_SHARE * np.log2(together))
        bounds_s = [
            spread(option.bound_s + self._around_llm(variant, u, options[self._problem.llm]), u)
            for u, option in enumerate(options)
        ]
        bound_s = np.broadcast_to(reduce(np.maximum, bounds_s), shape)
        likely = np.full(shape, own.guessed)
        depth: Float64s = np.zeros([1] * units)
        for unit in range(units - 1, -1, -1):
            depth = depth + spread(options[unit].pipeline, unit)
            likely = likely & (depth <= spread(options[unit].depth, unit))
        wanted = devices == self._problem.devices if self._exact else (
            devices <= self._problem.devices
        )  # fmt: skip
        at = np.flatnonzero(wanted)
        order = np.lexsort((estimate_s.ravel()[at], ~likely.ravel()[at]))
        found: list[PlanGuess] = []
        for place in at[order][:most].tolist():
            rows = np.unravel_index(place, shape)
            sizes = tuple(options[u].sizes[i] for u, i in enumerate(rows))
            found.append(
                PlanGuess(
                    variant,
                    sizes,
                    float(bound_s.ravel()[place]),
                    float(estimate_s.ravel()[place]),
                    bool(likely.ravel()[place]),
                    len(found),
                )
            )
        return found


def _by_devices(options: _Options, most: int) -> Float64s:
    """The least bound with at most so many devices, from 0 on."""
    found: Float64s = np.full(most + 1, inf)
    devices = options.devices.astype(int)
    fine = devices <= most
    np.minimum.at(found, devices[fine], options.bound_s[fine])
    return np.minimum.accumulate(found)


def _shared(one_s: Float64s, other_s: Float64s) -> Float64s:
    """The least of the slower one of two units that share so many devices, from 0 on."""
    found: Float64s = np.full(len(one_s), inf)
    faster = np.concatenate(([True], one_s[1:] < one_s[:-1])) & (one_s < inf)
    for count in np.flatnonzero(faster).tolist():
        slower_s = np.maximum(one_s[count], other_s[: len(found) - count])
        found[count:] = np.minimum(found[count:], slower_s)
    return found


def _count(options: Sequence[_Options]) -> int:
    return int(np.prod([len(own.sizes) for own in options], dtype=float))


def _undominated(options: _Options, *, same_devices: bool) -> _Options:
    """Without those that another one beats or equals in all that bounds and estimates depend on.

    Args:
        same_devices: only compare those of equally many devices.
    """
    devices = options.devices
    columns = np.stack([
        devices, options.bound_s, options.stage_s, options.warmup_s, options.sync_s,
        options.pipeline, options.pipeline - options.depth,
    ])  # fmt: skip
    kept: list[int] = []
    for row in np.lexsort((options.stage_s, devices)).tolist():
        better = columns[:, kept]
        beaten = (better <= columns[:, [row]]).all(axis=0)
        if same_devices:
            beaten &= devices[kept] == devices[row]
        if not beaten.any():
            kept.append(row)
    return options.only(kept)
