"""Memory tuning problems of the ranks of a plan, built from candidates and memory changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.pipeweaver.activation_checkpointing.problem import TuningProblem
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    Modes,
    StageRecompute,
    prefetched_input_bytes,
    sort_candidates,
    stage_candidates,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan


@dataclass(frozen=True)
class RankProblem:
    """Memory tuning problem of one rank, and the meaning of its indices.

    Attributes:
        problem: Arrays for solvers.
        tasks: Task of each pair.
        stage_candidates: Candidates of each stage: the modes of its layers.
        no_recompute: Indices of the candidates of each stage that recompute nothing.
        index_NC: Index into `stage_candidates`, by pair and candidate.
        host_bytes_NC: Bytes in host memory, by pair and candidate.
        actions: Action of each position. The last position is the end of the step and has none.
        prefetch_bytes: Memory that is reserved for an input that is prefetched from host memory.
    """

    problem: TuningProblem
    tasks: list[Task]
    stage_candidates: Mapping[int, list[Modes]]
    no_recompute: Mapping[int, set[int]]
    index_NC: Int64s
    host_bytes_NC: Int64s
    actions: list[Action]
    prefetch_bytes: int = 0

    def host_bytes(self, choice_N: Int64s) -> int:
        """Return the maximum bytes in host memory at any time."""
        chosen_N = self.host_bytes_NC[np.arange(len(self.tasks)), choice_N]
        change_T = np.zeros(self.problem.positions + 1, np.int64)
        np.add.at(change_T, self.problem.start_N, chosen_N)
        np.add.at(change_T, self.problem.middle_N + 1, -chosen_N)
        return int(np.cumsum(change_T).max())

    def recompute(self, choice_N: Int64s) -> dict[Task, Modes]:
        """Return the modes of the layers of all tasks that recompute or offload."""
        chosen = self.index_NC[np.arange(len(self.tasks)), choice_N].tolist()
        return {
            task: self.stage_candidates[task.stage][index]
            for task, index in zip(self.tasks, chosen, strict=True)
            if index not in self.no_recompute[task.stage]
        }

    def with_fixed_candidates(self, fixed: Mapping[Task, int]) -> RankProblem:
        """Return the problem with only one candidate for some tasks.

        Args:
            fixed: Index of the candidate, by task.
        """
        columns = np.tile(np.arange(self.index_NC.shape[1]), (len(self.tasks), 1))
        for pair, task in enumerate(self.tasks):
            if task in fixed:
                columns[pair] = fixed[task]

        def chosen(table_NC: Any) -> Any:
            return np.take_along_axis(table_NC, columns, 1)

        base = self.problem
        problem = replace(
            base,
            extra_ms_NC=chosen(base.extra_ms_NC),
            kept_bytes_NC=chosen(base.kept_bytes_NC),
            transient_bytes_NC=chosen(base.transient_bytes_NC),
            later_bytes_NC=chosen(base.later_bytes_NC),
        )
        index_NC, host_NC = chosen(self.index_NC), chosen(self.host_bytes_NC)
        return replace(self, problem=problem, index_NC=index_NC, host_bytes_NC=host_NC)


def build_rank_problems(
    plan: PipelinePlan,
    costs: PlanCosts,
    rows: CandidateTables,
    memory_limit_bytes: int,
    book: PlanRules | None = None,
) -> list[RankProblem]:
    """Return the memory tuning problem of each rank of the plan.

    Args:
        plan: Plan of the step.
        costs: Costs of saving all activations.
        rows: Times and bytes of the candidates, which all plans of a step share.
        memory_limit_bytes: Memory limit of each rank.
        book: Rules of the plan, as for `memory_changes`.
    """
    fixed = replace(
        costs,
        saved_bytes={t: n for t, n in costs.saved_bytes.items() if t not in rows.by_task},
        saved_for_weights_bytes={
            t: n for t, n in costs.saved_for_weights_bytes.items() if t not in rows.by_task
        },
    )
    static = costs.static_bytes or (0,) * len(plan.actions)
    by_rank = zip(plan.actions, memory_changes(plan, fixed, book), static, strict=True)
    problems = []
    for rank, (program, changes, static_bytes) in enumerate(by_rank):
        ahead = rows.prefetch_bytes.get(rank, 0)
        available = memory_limit_bytes - static_bytes - ahead
        problems.append(
            replace(_build_rank_problem(program, changes, available, rows), prefetch_bytes=ahead)
        )
    return problems


class CandidateTables:
    """Times and bytes of the candidates of all tasks.

    Args:
        costs: Costs of saving all activations.
        choices: Times and bytes of the modes, by stage.
        candidates: Maximum number of candidates per stage.

    Attributes:
        prefetch_bytes: Bytes of the largest prefetched input, by rank.
        stage_candidates: Candidates of each stage, from the fastest to the lowest memory.
        by_task: Arrays over candidates of each task: extra time, saved bytes, passing bytes, host
            bytes, and index into `stage_candidates`.
        width: Number of candidates C of all tasks.
        no_recompute: Indices of the candidates of each stage that recompute nothing.
    """

    def __init__(
        self, costs: PlanCosts, choices: Mapping[int, StageRecompute], candidates: int
    ) -> None:
        self.costs = costs
        self.prefetch_bytes = prefetched_input_bytes(choices)
        self.stage_candidates: dict[int, list[Modes]] = {}
        self.by_task: dict[Task, tuple[np.ndarray, ...]] = {}
        by_costs: dict[tuple[bytes, ...], list[Modes]] = {}
        self.width = 1
        for stage, of_stage in choices.items():
            tables = of_stage.forward_ms_KMN, of_stage.backward_ms_KMN, of_stage.kept_bytes_KMN
            key = bytes(of_stage.kinds), *(table.tobytes() for table in tables)
            if key not in by_costs:
                by_costs[key] = stage_candidates(of_stage, candidates)
            self.stage_candidates[stage] = by_costs[key]
            self.width = max(self.width, len(by_costs[key]))
        for stage, of_stage in choices.items():
            self._add(of_stage, self.stage_candidates[stage])
        self.no_recompute = {
            stage: {i for i, modes in enumerate(candidates_of_stage) if set(modes) == {"none"}}
            for stage, candidates_of_stage in self.stage_candidates.items()
        }

    def _add(self, of_stage: StageRecompute, modes: list[Modes]) -> None:
        kept_N = np.array([self.costs.saved_bytes[t] for t in of_stage.tasks], float)
        columns = [
            (
                of_stage.extra_ms_N(m),
                kept_N - of_stage.saved_bytes_N(m),
                of_stage.transient_bytes_N(m),
                of_stage.host_bytes_N(m),
            )
            for m in modes
        ]
        extra, kept, passing, host = (np.stack(each, 1) for each in zip(*columns, strict=True))
        kept_NC = np.maximum(np.rint(kept), 0).astype(np.int64)
        index_NC = sort_candidates(extra, kept_NC)
        pad = np.minimum(np.arange(self.width), len(modes) - 1)
        index_NC = index_NC[:, pad]
        tables = [
            np.take_along_axis(table, index_NC, 1)
            for table in (extra, kept_NC, *(np.rint(t).astype(np.int64) for t in (passing, host)))
        ]
        for task, *row in zip(of_stage.tasks, *tables, index_NC, strict=True):
            self.by_task[task] = tuple(row)


def _build_rank_problem(
    program: Sequence[Action], changes: Int64s, available_bytes: int, rows: CandidateTables
) -> RankProblem:
    """Return the problem of one rank.

    Memory other than that of pairs, such as messages, is subtracted from the free memory.

    Args:
        program: Actions of the rank.
        changes: Memory changes before and after each action, without those of pairs.
        available_bytes: Memory limit without static memory.
        rows: Times and bytes of the candidates.
    """
    used = np.cumsum(changes)[::2]  # while each action runs
    actions: list[Action] = []
    base, highest = [], 0
    spans: dict[Task, list[int]] = {}
    for index, action in enumerate(program):
        highest = max(highest, int(used[index]))
        if action.type not in COMPUTE:
            continue
        task = Task(*action[1:4])
        if task in rows.by_task:
            spans.setdefault(task, []).append(len(actions))
        actions.append(action)
        base.append(highest)
        highest = 0
    base.append(highest)
    tasks = list(spans)
    extra, *numbers = (
        np.array([rows.by_task[task][i] for task in tasks]).reshape(len(tasks), rows.width)
        for i in range(5)
    )
    kept, passing, host_NC, index_NC = (table.astype(np.int64) for table in numbers)
    later = np.zeros_like(kept)
    for pair, task in enumerate(tasks):
        if actions[spans[task][1]].type is not ActionType.I:
            continue
        # Only candidates without recomputation have I and W, and save gradients between them.
        keeps_all = np.isin(index_NC[pair], list(rows.no_recompute[task.stage]))
        split = spans[task][-1] > spans[task][1]
        waiting = keeps_all * split * rows.costs.saved_for_weights_bytes[task]
        later[pair] = waiting
        passing[pair] = np.where(keeps_all, np.maximum(0, waiting - kept[pair]), passing[pair])
    starts, middles, ends = (
        np.array([positions[i] for positions in spans.values()], np.int64) for i in (0, 1, -1)
    )
    free_T = available_bytes - np.array(base, np.int64)
    problem = TuningProblem(
        starts, middles, ends, extra.astype(float), kept, passing, later, free_T
    )
    return RankProblem(
        problem, tasks, rows.stage_candidates, rows.no_recompute, index_NC, host_NC, actions
    )
