"""Layer tuning: what each task's layers recompute, so that a plan fits into memory and is fast.

PipeWeaver §6.3. The order of a plan is given, and with it which tasks are in memory together. Each
pair of a forward and its backward has candidates (`costs`), and each rank is a problem of its own
(`problem`), solved by prices of memory with a bound on what is lost (`prices`), or by another
solver, such as the paper's integer program in `benchmarks/support/integer_program.py`. Any
schedule's plan will do; the choice is stored in the plan (`PipelinePlan.recompute`).

Counted against the limit are weights, gradients, optimizer state, messages, what tasks keep, and
what a layer that runs again needs. Not counted: temporaries inside layers, and what the
allocator and the framework take; leave room for them in the limit.

Mirrors communicate in what they run again, so all of them choose the same for a task: where their
ranks' solutions differ, the leanest, and the rest is solved again.

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
        peers: microbatches of the ranks that run the layers in lockstep, as for `plan_costs`.
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
    peers: Peers = ()
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
            peers=self.peers,
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
                peers=tuning.peers,
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

    def tune(self, plan: PipelinePlan, book: RuleBook | None = None) -> TunedPlan:
        """A plan of the step with what its tasks recompute: nothing if all of it fits.

        Args:
            book: of the plan; None: it is made.

        Raises:
            PlanError: a rank cannot stay within the limit, if that is to be refused; all such are
                listed.
        """
        limit_bytes = self.tuning.memory_limit_bytes
        book = RuleBook(plan) if book is None else book
        kept_bytes = self._all_kept_bytes(plan, book)
        if max(kept_bytes) <= limit_bytes:
            nothing = (0.0,) * len(kept_bytes)
            kept = replace(plan, recompute={})
            return TunedPlan(kept, self.costs, kept_bytes, nothing, nothing, (0,) * len(nothing))
        found = self._solved(plan, book)
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
        """Every rank's problem and its solution. Where inputs may wait in the host's memory there
        are two, as these need room for one on its way back: the faster one counts."""
        limit_bytes = self.tuning.memory_limit_bytes
        problems = rank_problems(plan, self.costs, self.rows, limit_bytes, book)
        found = [(each, self._solve(each.problem)) for each in problems]
        if not any(self.rows.ahead_bytes.values()):
            return self._agreed(plan.graph.layout, found)
        other = self._without_offloads
        leaner = rank_problems(plan, other.costs, other.rows, limit_bytes, book)
        for rank, each in enumerate(leaner):
            solution = self._solve(each.problem) if found[rank][0].ahead_bytes else None
            best = found[rank][1]
            if solution and (best is None or solution.extra_ms <= best.extra_ms):
                found[rank] = each, solution
        differ = _differing(plan.graph.layout, found, {})
        return other._solved(plan, book) if differ else found

    def _agreed(self, layout: StageLayout, found: list[Solved]) -> list[Solved]:
        """Solutions in which mirrors choose the same."""
        places: dict[Task, int] = {}
        free = [each for each, _ in found]
        while more := _differing(layout, found, places):
            places |= more
            problems = [each.settled(places) for each in free]
            found = [(each, self._solve(each.problem)) for each in problems]
        return found

    def _all_kept_bytes(self, plan: PipelinePlan, book: RuleBook) -> tuple[int, ...]:
        """By rank: the peak if nothing is recomputed."""
        static = self.costs.static_bytes or (0,) * len(plan.actions)
        changes = memory_changes(plan, self.costs, book)
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


Solved = tuple[RankProblem, TuningSolution | None]


def _differing(
    layout: StageLayout, found: Sequence[Solved], settled: Mapping[Task, int]
) -> dict[Task, int]:
    """Tasks that are not settled and for which mirrors have chosen differently, with the place of
    the leanest candidate that one of them has chosen."""
    chosen: dict[Task, dict[Task, int]] = {}
    for each, solution in found:
        if solution is None:
            return {}
        for task, place in zip(each.tasks, solution.choice_N.tolist(), strict=True):
            alike = layout.mirrored[task.stage]
            if len(alike) > 1 and task not in settled:
                of_mirrors = chosen.setdefault(task._replace(stage=alike[0]), {})
                of_mirrors[task] = place
    return {
        task: max(of_mirrors.values())
        for of_mirrors in chosen.values()
        if len(set(of_mirrors.values())) > 1
        for task in of_mirrors
    }


def _shortage(rank: int, each: RankProblem, limit_bytes: int) -> str:
    """Where the leanest choice needs the most."""
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
