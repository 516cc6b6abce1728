"""Layer tuning: what each task's layers recompute, so that a plan fits into memory and is fast.

PipeWeaver §6.3. The order of a plan is given, and with it which tasks are in memory together. Each
pair of a forward and its backward has candidates (`costs`), and each rank is a problem of its own
(`problem`), solved by prices of memory with a bound on what is lost (`prices`), or by another
solver, such as the paper's integer program in `benchmarks/support/integer_program.py`. Any
schedule's plan will do; the choice is stored in the plan (`PipelinePlan.recompute`).

Counted against the limit are weights, gradients, optimizer state, messages, what tasks keep, and
what a layer that runs again needs. Not counted: temporaries inside layers, and what the
allocator and the framework take; leave room for them in the limit.

Where the device has memory of its own, inputs of recomputed layers may wait in the host's; one of
them may be on its way back on a rank, for which there is room; ranks that are as fast without have
none there. A plan that would need more than half of the host's memory is tuned without. Rejected:
limits for two memories in one problem, of which the second hardly ever binds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.recomputation.costs import (
    MOST_CANDIDATES,
    Modes,
    StageRecompute,
    charged,
    inputs_ahead,
    ordered,
    stage_candidates,
    stage_choices,
)
from torchmm.balance.recomputation.prices import solve_quickly
from torchmm.balance.recomputation.problem import TuningProblem, TuningSolution
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, PipelinePlan

Solver = Callable[[TuningProblem], TuningSolution | None]
HOST_SHARE = 0.5
"""Of the host's memory that activations may take; the rest is for data and checkpoints."""


@dataclass(frozen=True)
class LayerTuning:
    """How plans are tuned.

    Attributes:
        model: costs on the device; modules in `names` keep everything in it.
        names: modules whose tasks may choose; all others stay as `model` has them.
        memory_limit_bytes: of every rank.
        layerwise: whether FSDP2 gathers layer by layer.
        candidates: most of them for a task.
        solver: of one rank.
        offloads: modules whose layers' inputs may wait in the host's memory; none on devices that
            share it.
        refuses: whether a plan that cannot stay within the limit is an error; if not, its full
            ranks recompute all they may.
    """

    model: CostModel
    names: frozenset[str]
    memory_limit_bytes: int
    layerwise: bool = False
    candidates: int = MOST_CANDIDATES
    solver: Solver = solve_quickly
    offloads: frozenset[str] = frozenset()
    refuses: bool = True

    @property
    def host_limit_bytes(self) -> float:
        """Of the host's memory, for a rank."""
        return HOST_SHARE * self.model.profile.device.host_memory_bytes

    def choices(
        self,
        graph: StageGraph,
        modules: Sequence[ModuleDescription],
        microbatches: Sequence[MicrobatchMeta],
        targets: Sequence[int] | None = None,
    ) -> dict[int, StageRecompute]:
        """`stage_choices`."""
        shares = self.model.profile.device.host_bytes_per_s == 0
        return stage_choices(
            graph,
            modules,
            microbatches,
            self.model,
            names=self.names,
            offloads=frozenset() if shares else self.names & self.offloads,
            targets=targets,
        )


@dataclass(frozen=True)
class TunedPlan:
    """A plan with what its tasks recompute.

    Attributes:
        plan: with `recompute`.
        costs: of this plan.
        peak_bytes: by rank: no more than this is in use at any time.
        extra_ms: how long what is recomputed takes, by rank.
        bound_ms: the least that anything that fits takes, by rank.
        host_bytes: by rank: no more than this waits in the host's memory.
    """

    plan: PipelinePlan
    costs: PlanCosts
    peak_bytes: tuple[int, ...]
    extra_ms: tuple[float, ...]
    bound_ms: tuple[float, ...]
    host_bytes: tuple[int, ...]


@dataclass(frozen=True)
class RankProblem:
    """What there is to choose on one rank.

    Attributes:
        problem: in numbers.
        tasks: by pair.
        stage_candidates: modes of layers, by stage.
        keeping: by stage: which of them recompute nothing.
        index_NC: by pair and candidate: which of its stage's candidates it is.
        host_bytes_NC: by pair and candidate: what waits in the host's memory.
        actions: by position; one fewer than there are positions, as the last is the step's end.
        ahead_bytes: of what is taken, room for an input that comes from the host ahead of its use.
    """

    problem: TuningProblem
    tasks: list[Task]
    stage_candidates: Mapping[int, list[Modes]]
    keeping: Mapping[int, set[int]]
    index_NC: Int64s
    host_bytes_NC: Int64s
    actions: list[Action]
    ahead_bytes: int = 0

    def host_bytes(self, choice_N: Int64s) -> int:
        """The most that waits in the host's memory at any time."""
        own_N = self.host_bytes_NC[np.arange(len(self.tasks)), choice_N]
        change_T = np.zeros(self.problem.positions + 1, np.int64)
        np.add.at(change_T, self.problem.start_N, own_N)
        np.add.at(change_T, self.problem.middle_N + 1, -own_N)
        return int(np.cumsum(change_T).max())

    def recompute(self, choice_N: Int64s) -> dict[Task, Modes]:
        """Tasks that run anything again, with modes of their layers."""
        chosen = self.index_NC[np.arange(len(self.tasks)), choice_N].tolist()
        return {
            task: self.stage_candidates[task.stage][index]
            for task, index in zip(self.tasks, chosen, strict=True)
            if index not in self.keeping[task.stage]
        }


def tune_layers(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    tuning: LayerTuning,
    targets: Sequence[int] | None = None,
) -> TunedPlan:
    """Chooses for each task of a plan what its layers recompute.

    Args:
        plan: for training; without specs, messages take no memory.
        modules: encoders, LLM and generator, whole.
        microbatches: of the plan.
        targets: positions that count in the loss, by microbatch; None: all text.

    Raises:
        PlanError: a rank cannot stay within the limit; all such are listed.
    """
    return Tuner(plan.graph, modules, microbatches, tuning, targets).tune(plan)


class Tuner:
    """Tunes any number of plans of one step.

    Args:
        graph: of the plans, for training.
        modules, microbatches, targets: as for `tune_layers`.
        specs: tensors of the messages of plans that are yet to be made; none: they take no memory.

    Attributes:
        costs: of keeping everything.
    """

    def __init__(
        self,
        graph: StageGraph,
        modules: Sequence[ModuleDescription],
        microbatches: Sequence[MicrobatchMeta],
        tuning: LayerTuning,
        targets: Sequence[int] | None = None,
        specs: MessageSpecs | None = None,
    ) -> None:
        self.tuning = tuning
        self.specs: MessageSpecs = specs or {}
        self._step = graph, modules, microbatches, targets
        self.costs = replace(
            plan_costs(
                graph,
                modules,
                microbatches,
                tuning.model,
                targets=targets,
                layerwise=tuning.layerwise,
            ),
            memory_limit_bytes=tuning.memory_limit_bytes,
        )

    @cached_property
    def choices(self) -> dict[int, StageRecompute]:
        """By stage, where tasks may choose."""
        graph, modules, microbatches, targets = self._step
        return self.tuning.choices(graph, modules, microbatches, targets)

    @cached_property
    def rows(self) -> Rows:
        """Times and bytes of the choices."""
        return Rows(self.costs, self.choices, self.tuning.candidates)

    def choices_at(self, costs: PlanCosts) -> dict[int, StageRecompute]:
        """The choices, whose times are the model's, as much longer as the backwards of each stage
        are in other costs of the step, measured ones."""
        found = {}
        for stage, own in self.choices.items():
            backwards = [Action(ActionType.B, *task) for task in own.tasks]
            modelled_ms = sum(self.costs.compute_ms[action] for action in backwards)
            factor = 1.0
            if modelled_ms > 0:
                factor = sum(costs.compute_ms[action] for action in backwards) / modelled_ms
            found[stage] = replace(
                own,
                forward_ms_KMN=factor * own.forward_ms_KMN,
                again_ms_KMN=factor * own.again_ms_KMN,
                tensor_ms_KMN=factor * own.tensor_ms_KMN,
            )
        return found

    def tune(self, plan: PipelinePlan) -> TunedPlan:
        """A plan of the step with what its tasks recompute: nothing if all of it fits.

        Raises:
            PlanError: a rank cannot stay within the limit, if that is to be refused; all such are
                listed.
        """
        limit_bytes = self.tuning.memory_limit_bytes
        kept_bytes = self._all_kept_bytes(plan)
        if max(kept_bytes) <= limit_bytes:
            nothing = (0.0,) * len(kept_bytes)
            kept = replace(plan, recompute={})
            return TunedPlan(kept, self.costs, kept_bytes, nothing, nothing, (0,) * len(nothing))
        found = self._solved(plan)
        if short := [
            _shortage(rank, each, limit_bytes)
            for rank, (each, solution) in enumerate(found)
            if solution is None
        ]:
            raise PlanError(short)
        recompute: dict[Task, Modes] = {}
        peaks, extra, bounds, hosts = [], [], [], []
        for each, solution in found:
            assert solution is not None
            recompute |= each.recompute(solution.choice_N)
            free_T = each.problem.free_bytes_T
            room = free_T - each.problem.used_bytes_T(solution.choice_N)
            peaks.append(limit_bytes - int(room.min()) - each.ahead_bytes)
            extra.append(solution.extra_ms)
            bounds.append(solution.bound_ms)
            hosts.append(each.host_bytes(solution.choice_N))
        if max(hosts) > self.tuning.host_limit_bytes:
            return self._without_offloads.tune(plan)
        costs = charged(self.costs, recompute, self.choices)
        ahead = np.subtract(costs.static_bytes, self.costs.static_bytes).tolist()
        return TunedPlan(
            replace(plan, recompute=recompute),
            costs,
            tuple(map(sum, zip(peaks, ahead, strict=True))),
            tuple(extra),
            tuple(bounds),
            tuple(hosts),
        )

    def _solved(self, plan: PipelinePlan) -> list[tuple[RankProblem, TuningSolution | None]]:
        """Every rank's problem and its solution. Where inputs may wait in the host's memory there
        are two, as these need room for one on its way back: the faster one counts."""
        limit_bytes = self.tuning.memory_limit_bytes
        solver = self._solve
        problems = _problems(plan, self.costs, self.rows, limit_bytes)
        found = [(each, solver(each.problem)) for each in problems]
        if not any(self.rows.ahead_bytes.values()):
            return found
        other = self._without_offloads
        for rank, each in enumerate(_problems(plan, other.costs, other.rows, limit_bytes)):
            solution = solver(each.problem) if found[rank][0].ahead_bytes else None
            best = found[rank][1]
            if solution and (best is None or solution.extra_ms <= best.extra_ms):
                found[rank] = each, solution
        return found

    def _all_kept_bytes(self, plan: PipelinePlan) -> tuple[int, ...]:
        """By rank: the peak if nothing is recomputed."""
        static = self.costs.static_bytes or (0,) * len(plan.actions)
        changes = memory_changes(plan, self.costs)
        return tuple(
            own + int(np.cumsum(rows).max(initial=0))
            for own, rows in zip(static, changes, strict=True)
        )

    def _solve(self, problem: TuningProblem) -> TuningSolution | None:
        found = self.tuning.solver(problem)
        if found is not None or self.tuning.refuses:
            return found
        extra_ms = problem.extra_ms(problem.leanest_N)
        return TuningSolution(problem.leanest_N, extra_ms, extra_ms)

    @cached_property
    def _without_offloads(self) -> Tuner:
        graph, modules, microbatches, targets = self._step
        tuning = replace(self.tuning, offloads=frozenset())
        return Tuner(graph, modules, microbatches, tuning, targets)


def rank_problems(
    plan: PipelinePlan,
    costs: PlanCosts,
    choices: Mapping[int, StageRecompute],
    memory_limit_bytes: int,
    candidates: int = MOST_CANDIDATES,
) -> list[RankProblem]:
    """What there is to choose, by rank of the plan.

    Args:
        costs: of keeping everything.
        choices: by stage.
    """
    return _problems(plan, costs, Rows(costs, choices, candidates), memory_limit_bytes)


def _problems(
    plan: PipelinePlan, costs: PlanCosts, rows: Rows, memory_limit_bytes: int
) -> list[RankProblem]:
    """`rank_problems` with what is the same for all plans of a step."""
    fixed = replace(
        costs,
        kept_bytes={t: n for t, n in costs.kept_bytes.items() if t not in rows.of_task},
        kept_for_weights_bytes={
            t: n for t, n in costs.kept_for_weights_bytes.items() if t not in rows.of_task
        },
    )
    static = costs.static_bytes or (0,) * len(plan.actions)
    every = zip(plan.actions, memory_changes(plan, fixed), static, strict=True)
    found = []
    for rank, (program, changes, own) in enumerate(every):
        ahead = rows.ahead_bytes.get(rank, 0)
        available = memory_limit_bytes - own - ahead
        found.append(replace(_rank_problem(program, changes, available, rows), ahead_bytes=ahead))
    return found


class Rows:
    """Times and bytes of every task's candidates."""

    def __init__(
        self, costs: PlanCosts, choices: Mapping[int, StageRecompute], candidates: int
    ) -> None:
        self.costs = costs
        self.ahead_bytes = inputs_ahead(choices)
        self.stage_candidates: dict[int, list[Modes]] = {}
        self.of_task: dict[Task, tuple[np.ndarray, ...]] = {}
        alike: dict[tuple[bytes, ...], list[Modes]] = {}
        self.width = 1
        for stage, own in choices.items():
            tables = own.forward_ms_KMN, own.again_ms_KMN, own.kept_bytes_KMN
            key = bytes(own.kinds), *(table.tobytes() for table in tables)
            if key not in alike:
                alike[key] = stage_candidates(own, candidates)
            self.stage_candidates[stage] = alike[key]
            self.width = max(self.width, len(alike[key]))
        for stage, own in choices.items():
            self._add(own, self.stage_candidates[stage])
        self.keeping = {
            stage: {i for i, modes in enumerate(found) if set(modes) == {"none"}}
            for stage, found in self.stage_candidates.items()
        }

    def _add(self, own: StageRecompute, modes: list[Modes]) -> None:
        kept_N = np.array([self.costs.kept_bytes[t] for t in own.tasks], float)
        columns = [
            (
                own.extra_ms_N(m),
                kept_N - own.saved_bytes_N(m),
                own.passing_bytes_N(m),
                own.host_bytes_N(m),
            )
            for m in modes
        ]
        extra, kept, passing, host = (np.stack(each, 1) for each in zip(*columns, strict=True))
        kept_NC = np.maximum(np.rint(kept), 0).astype(np.int64)
        index_NC = ordered(extra, kept_NC)
        pad = np.minimum(np.arange(self.width), len(modes) - 1)
        index_NC = index_NC[:, pad]
        tables = [
            np.take_along_axis(table, index_NC, 1)
            for table in (extra, kept_NC, *(np.rint(t).astype(np.int64) for t in (passing, host)))
        ]
        for task, *row in zip(own.tasks, *tables, index_NC, strict=True):
            self.of_task[task] = tuple(row)


def _rank_problem(
    program: Sequence[Action], changes: Int64s, available_bytes: int, rows: Rows
) -> RankProblem:
    """One rank's pairs; what the rest of its memory holds is taken off what is free."""
    used = np.cumsum(changes)[::2]  # while each action runs
    actions: list[Action] = []
    base, highest = [], 0
    spans: dict[Task, list[int]] = {}
    for index, action in enumerate(program):
        highest = max(highest, int(used[index]))
        if action.type not in COMPUTE:
            continue
        task = Task(*action[1:4])
        if task in rows.of_task:
            spans.setdefault(task, []).append(len(actions))
        actions.append(action)
        base.append(highest)
        highest = 0
    base.append(highest)
    tasks = list(spans)
    extra, *numbers = (
        np.array([rows.of_task[task][i] for task in tasks]).reshape(len(tasks), rows.width)
        for i in range(5)
    )
    kept, passing, host_NC, index_NC = (table.astype(np.int64) for table in numbers)
    later = np.zeros_like(kept)
    for pair, task in enumerate(tasks):
        if actions[spans[task][1]].type is not ActionType.I:
            continue
        # Only what recomputes nothing is done in halves, and then keeps gradients too.
        whole = np.isin(index_NC[pair], list(rows.keeping[task.stage]))
        split = spans[task][-1] > spans[task][1]
        waiting = whole * split * rows.costs.kept_for_weights_bytes[task]
        later[pair] = waiting
        passing[pair] = np.where(whole, np.maximum(0, waiting - kept[pair]), passing[pair])
    starts, middles, ends = (
        np.array([own[i] for own in spans.values()], np.int64) for i in (0, 1, -1)
    )
    free_T = available_bytes - np.array(base, np.int64)
    problem = TuningProblem(
        starts, middles, ends, extra.astype(float), kept, passing, later, free_T
    )
    return RankProblem(
        problem, tasks, rows.stage_candidates, rows.keeping, index_NC, host_NC, actions
    )


def _shortage(rank: int, each: RankProblem, limit_bytes: int) -> str:
    """Where the leanest choice needs the most."""
    problem = each.problem
    over_T = problem.used_bytes_T(problem.leanest_N) - problem.free_bytes_T
    position = int(over_T.argmax())
    where = str(each.actions[position]) if position < len(each.actions) else "the end of the step"
    needed = limit_bytes + int(over_T[position])
    gib = 1 / 2**30
    return (
        f"rank {rank}, {where}: needs {needed * gib:.3f} GiB ({needed} bytes) even if all layers "
        f"recompute what they can; {limit_bytes * gib:.3f} GiB ({limit_bytes} bytes) are "
        "available; raise activation_checkpoint.memory_limit, let fewer microbatches be in flight, "
        "make them smaller, or use more ranks (shard, tensor, pipeline)"
    )
