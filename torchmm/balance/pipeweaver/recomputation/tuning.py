"""Memory tuning: select a recomputation mode per layer and task, so that a fast plan fits.

This implements PipeWeaver, section 6.3, for plans of any schedule. The actions of the plan define
which tasks are in memory at the same time.

    plan, costs  ->  candidates per stage (`costs`)
                 ->  problem per rank (`problem`, `rank_problems`)
                 ->  solution per rank (`prices`, or another `Solver`)
                 ->  mirrors agree
                 ->  plan with `PipelinePlan.recompute`

The memory limit includes weights, gradients, optimizer states, messages, saved activations, and the
activations of a layer during recomputation. It does not include temporaries inside layers, the
allocator and the framework, so the limit needs a margin for them.

Mirrors communicate in recomputed layers, so all of them must have the same modes for a task. If
their solutions differ, the candidate with the lowest memory applies, and the remaining pairs are
solved again.

On devices with separate memory, inputs of recomputed layers can be offloaded to host memory. Ranks
with offloading reserve memory for one prefetched input. Ranks that are as fast without offloading
do not use it. A plan that needs more than half of the host memory is tuned without offloading. Host
memory is not a limit of the problem, because it is hardly ever exhausted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import Peers, plan_costs
from torchmm.balance.pipeweaver.recomputation.costs import (
    MOST_CANDIDATES,
    Modes,
    StageRecompute,
    charged,
    stage_choices,
)
from torchmm.balance.pipeweaver.recomputation.prices import solve_quickly
from torchmm.balance.pipeweaver.recomputation.problem import TuningProblem, TuningSolution
from torchmm.balance.pipeweaver.recomputation.rank_problems import RankProblem, Rows, rank_problems
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.plan import MessageSpecs, PipelinePlan

Solver = Callable[[TuningProblem], TuningSolution | None]
"""Solver for the problem of one rank, which returns None if no choice fits."""
HOST_SHARE = 0.5
"""Fraction of host memory for offloaded activations. The rest is for data and checkpoints."""


@dataclass(frozen=True)
class LayerTuning:
    """Settings of memory tuning.

    Attributes:
        model: Cost model of the device. Modules in `names` must save all activations in it.
        names: Modules with a mode per layer and task. All other modules use the mode of `model`.
        memory_limit_bytes: Memory limit of each rank.
        layerwise: Whether FSDP2 shards each layer.
        peers: Microbatches of the ranks that run in lockstep, as for `plan_costs`.
        candidates: Maximum number of candidates per task.
        solver: Solver for the problem of one rank.
        offloads: Modules with layers that can offload inputs to host memory. Ignored on devices
            without separate memory.
        refuses: Whether a plan that cannot fit raises `PlanError`. If False, ranks without a
            solution use the candidates with the lowest memory.
    """

    model: CostModel
    names: frozenset[str]
    memory_limit_bytes: int
    layerwise: bool = False
    peers: Peers = ()
    candidates: int = MOST_CANDIDATES
    solver: Solver = solve_quickly
    offloads: frozenset[str] = frozenset()
    refuses: bool = True

    @property
    def host_limit_bytes(self) -> float:
        """Host memory limit of one rank."""
        return HOST_SHARE * self.model.profile.device.host_memory_bytes

    def choices(
        self,
        graph: StageGraph,
        modules: Sequence[ModuleDescription],
        microbatches: Sequence[MicrobatchMeta],
        targets: Sequence[int] | None = None,
    ) -> dict[int, StageRecompute]:
        """Return the result of `stage_choices` for these settings."""
        shares = self.model.profile.device.host_bytes_per_s == 0
        return stage_choices(
            graph,
            modules,
            microbatches,
            self.model,
            names=self.names,
            offloads=frozenset() if shares else self.names & self.offloads,
            targets=targets,
            peers=self.peers,
        )


@dataclass(frozen=True)
class TunedPlan:
    """Plan with selected recomputation modes.

    Attributes:
        plan: Plan with `recompute`.
        costs: Costs of this plan.
        peak_bytes: Peak device memory of each rank.
        extra_ms: Time of recomputation of each rank.
        bound_ms: Lower bound on the recomputation time of each rank for any valid choice.
        host_bytes: Peak host memory of each rank.
    """

    plan: PipelinePlan
    costs: PlanCosts
    peak_bytes: tuple[int, ...]
    extra_ms: tuple[float, ...]
    bound_ms: tuple[float, ...]
    host_bytes: tuple[int, ...]


def tune_layers(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    tuning: LayerTuning,
    targets: Sequence[int] | None = None,
) -> TunedPlan:
    """Select recomputation modes for the layers of each task of a plan.

    Args:
        plan: Training plan. Messages without specs use no memory.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the plan.
        tuning: Settings of memory tuning.
        targets: Number of positions that are included in the loss, by microbatch. If None, all
            text tokens.

    Raises:
        PlanError: Ranks cannot stay within the limit. The error message lists all of them.
    """
    return Tuner(plan.graph, modules, microbatches, tuning, targets).tune(plan)


class Tuner:
    """Memory tuning of any number of plans of one step.

    Args:
        graph: Task graph of the training plans.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the graph.
        tuning: Settings of memory tuning.
        targets: Number of positions that are included in the loss, by microbatch.
        specs: Tensors of messages for new plans. Without specs, messages use no memory.

    Attributes:
        costs: Costs of saving all activations.
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
                peers=tuning.peers,
            ),
            memory_limit_bytes=tuning.memory_limit_bytes,
        )

    @cached_property
    def choices(self) -> dict[int, StageRecompute]:
        """Times and bytes of the modes, by stage with selectable modes."""
        graph, modules, microbatches, targets = self._step
        return self.tuning.choices(graph, modules, microbatches, targets)

    @cached_property
    def rows(self) -> Rows:
        """Times and bytes of the candidates."""
        return Rows(self.costs, self.choices, self.tuning.candidates)

    def choices_at(self, costs: PlanCosts) -> dict[int, StageRecompute]:
        """Return the choices with times scaled to other costs of the step, such as measured costs.

        The factor of a stage is the ratio of its total backward time in both costs.
        """
        scaled = {}
        for stage, of_stage in self.choices.items():
            backwards = [Action(ActionType.B, *task) for task in of_stage.tasks]
            modeled_ms = sum(self.costs.compute_ms[action] for action in backwards)
            factor = 1.0
            if modeled_ms > 0:
                factor = sum(costs.compute_ms[action] for action in backwards) / modeled_ms
            scaled[stage] = replace(
                of_stage,
                forward_ms_KMN=factor * of_stage.forward_ms_KMN,
                again_ms_KMN=factor * of_stage.again_ms_KMN,
                tensor_ms_KMN=factor * of_stage.tensor_ms_KMN,
            )
        return scaled

    def tune(self, plan: PipelinePlan, book: RuleBook | None = None) -> TunedPlan:
        """Return a plan of the step with recomputation modes, or without if all activations fit.

        Args:
            plan: Plan of the step.
            book: Rules of the plan. If None, they are created.

        Raises:
            PlanError: Ranks cannot stay within the limit, and `LayerTuning.refuses` is set. The
                error message lists all of them.
        """
        limit_bytes = self.tuning.memory_limit_bytes
        book = RuleBook(plan) if book is None else book
        kept_bytes = self._all_kept_bytes(plan, book)
        if max(kept_bytes) <= limit_bytes:
            nothing = (0.0,) * len(kept_bytes)
            kept = replace(plan, recompute={})
            return TunedPlan(kept, self.costs, kept_bytes, nothing, nothing, (0,) * len(nothing))
        solved = self._solved(plan, book)
        if short := [
            _shortage(rank, each, limit_bytes)
            for rank, (each, solution) in enumerate(solved)
            if solution is None
        ]:
            raise PlanError(short)
        recompute: dict[Task, Modes] = {}
        peaks, extra, bounds, hosts = [], [], [], []
        for each, solution in solved:
            assert solution is not None
            recompute |= each.recompute(solution.choice_N)
            free_T = each.problem.free_bytes_T
            room = free_T - each.problem.used_bytes_T(solution.choice_N)
            peaks.append(limit_bytes - int(room.min()) - each.ahead_bytes)
            extra.append(solution.extra_ms)
            bounds.append(solution.bound_ms)
            hosts.append(each.host_bytes(solution.choice_N))
        if max(hosts) > self.tuning.host_limit_bytes:
            return self._without_offloads.tune(plan, book)
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

    def _solved(self, plan: PipelinePlan, book: RuleBook) -> list[Solved]:
        """Return the problem and the solution of each rank.

        With offloading, each rank is solved with and without it, because offloading reserves memory
        for a prefetched input. The faster solution is used.
        """
        limit_bytes = self.tuning.memory_limit_bytes
        problems = rank_problems(plan, self.costs, self.rows, limit_bytes, book)
        solved = [(each, self._solve(each.problem)) for each in problems]
        if not any(self.rows.ahead_bytes.values()):
            return self._agreed(plan.graph.layout, solved)
        other = self._without_offloads
        leaner = rank_problems(plan, other.costs, other.rows, limit_bytes, book)
        for rank, each in enumerate(leaner):
            solution = self._solve(each.problem) if solved[rank][0].ahead_bytes else None
            best = solved[rank][1]
            if solution and (best is None or solution.extra_ms <= best.extra_ms):
                solved[rank] = each, solution
        differ = _differing(plan.graph.layout, solved, {})
        return other._solved(plan, book) if differ else solved

    def _agreed(self, layout: StageLayout, solved: list[Solved]) -> list[Solved]:
        """Return solutions in which mirrors have the same modes."""
        places: dict[Task, int] = {}
        free = [each for each, _ in solved]
        while more := _differing(layout, solved, places):
            places |= more
            problems = [each.settled(places) for each in free]
            solved = [(each, self._solve(each.problem)) for each in problems]
        return solved

    def _all_kept_bytes(self, plan: PipelinePlan, book: RuleBook) -> tuple[int, ...]:
        """Return the peak memory of each rank without recomputation."""
        static = self.costs.static_bytes or (0,) * len(plan.actions)
        changes = memory_changes(plan, self.costs, book)
        return tuple(
            static_bytes + int(np.cumsum(rows).max(initial=0))
            for static_bytes, rows in zip(static, changes, strict=True)
        )

    def _solve(self, problem: TuningProblem) -> TuningSolution | None:
        solution = self.tuning.solver(problem)
        if solution is not None or self.tuning.refuses:
            return solution
        extra_ms = problem.extra_ms(problem.leanest_N)
        return TuningSolution(problem.leanest_N, extra_ms, extra_ms)

    @cached_property
    def _without_offloads(self) -> Tuner:
        graph, modules, microbatches, targets = self._step
        tuning = replace(self.tuning, offloads=frozenset())
        return Tuner(graph, modules, microbatches, tuning, targets)


Solved = tuple[RankProblem, TuningSolution | None]
"""Problem of a rank, and its solution if one exists."""


def _differing(
    layout: StageLayout, solved: Sequence[Solved], decided: Mapping[Task, int]
) -> dict[Task, int]:
    """Return the tasks with different candidates on mirrors, and the one with the lowest memory.

    Args:
        layout: Stages of the run.
        solved: Problem and solution of each rank.
        decided: Tasks whose candidate is already decided.

    Returns:
        Index of the candidate with the lowest memory that a mirror has selected, by task.
    """
    chosen: dict[Task, dict[Task, int]] = {}
    for each, solution in solved:
        if solution is None:
            return {}
        for task, place in zip(each.tasks, solution.choice_N.tolist(), strict=True):
            mirrors = layout.mirrored[task.stage]
            if len(mirrors) > 1 and task not in decided:
                of_mirrors = chosen.setdefault(task._replace(stage=mirrors[0]), {})
                of_mirrors[task] = place
    return {
        task: max(of_mirrors.values())
        for of_mirrors in chosen.values()
        if len(set(of_mirrors.values())) > 1
        for task in of_mirrors
    }


def _shortage(rank: int, each: RankProblem, limit_bytes: int) -> str:
    """Return the error message for a rank: the action with the largest memory deficit."""
    problem = each.problem
    over_T = problem.used_bytes_T(problem.leanest_N) - problem.free_bytes_T
    position = int(over_T.argmax())
    where = str(each.actions[position]) if position < len(each.actions) else "the end of the step"
    needed = limit_bytes + int(over_T[position])
    gib = 1 / 2**30
    return (
        f"rank {rank}, {where}: requires {needed * gib:.3f} GiB ({needed} bytes) even with "
        f"full recomputation of all layers, but {limit_bytes * gib:.3f} GiB ({limit_bytes} "
        "bytes) are available; raise activation_checkpoint.memory_limit, use fewer "
        "microbatches in flight, smaller microbatches, or more ranks (shard, tensor, "
        "pipeline)"
    )
