"""What every rank of a plan may recompute, put together for solvers: the `problem` of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.pipeweaver.recomputation.costs import (
    Modes,
    StageRecompute,
    inputs_ahead,
    ordered,
    stage_candidates,
)
from torchmm.balance.pipeweaver.recomputation.problem import TuningProblem
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan


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

    def settled(self, places: Mapping[Task, int]) -> RankProblem:
        """The problem in which some tasks have one candidate only, given by its place."""
        columns = np.tile(np.arange(self.index_NC.shape[1]), (len(self.tasks), 1))
        for pair, task in enumerate(self.tasks):
            if task in places:
                columns[pair] = places[task]

        def chosen(table_NC: Any) -> Any:
            return np.take_along_axis(table_NC, columns, 1)

        given = self.problem
        problem = replace(
            given,
            extra_ms_NC=chosen(given.extra_ms_NC),
            kept_bytes_NC=chosen(given.kept_bytes_NC),
            passing_bytes_NC=chosen(given.passing_bytes_NC),
            later_bytes_NC=chosen(given.later_bytes_NC),
        )
        index_NC, host_NC = chosen(self.index_NC), chosen(self.host_bytes_NC)
        return replace(self, problem=problem, index_NC=index_NC, host_bytes_NC=host_NC)


def rank_problems(
    plan: PipelinePlan,
    costs: PlanCosts,
    rows: Rows,
    memory_limit_bytes: int,
    book: RuleBook | None = None,
) -> list[RankProblem]:
    """What there is to choose, by rank of the plan.

    Args:
        costs: of keeping everything.
        rows: of the step, the same for all its plans.
        book: as of `memory_changes`.
    """
    fixed = replace(
        costs,
        kept_bytes={t: n for t, n in costs.kept_bytes.items() if t not in rows.of_task},
        kept_for_weights_bytes={
            t: n for t, n in costs.kept_for_weights_bytes.items() if t not in rows.of_task
        },
    )
    static = costs.static_bytes or (0,) * len(plan.actions)
    every = zip(plan.actions, memory_changes(plan, fixed, book), static, strict=True)
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
