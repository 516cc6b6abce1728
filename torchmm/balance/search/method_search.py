"""Queue of the plans of one method, and the state of their search."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from torchmm.balance.search.plan_space import FIRST_SCHEDULES, TUNED, CandidatePlan
from torchmm.balance.search.result import SimulatedPlan

EXPECTED_RATIOS = {"searched": 0.75}
"""Expected step time of a neighbor over that of its plan, by schedule. 1 for other schedules. The
searched order of VLM-S of PipeWeaver takes 0.82 of the static one."""
LOWEST_RATIO = min(EXPECTED_RATIOS.values())
NEIGHBOR_RATIO = 1.15
"""Neighbors are tried for plans whose step is at most this factor of the best of the schedule."""
SETUP_ACTIONS = 500
"""Number of simulated actions that take as long as the setup of a simulation (measured: 0.1 s)."""

MS_PER_TASK = {
    ("static", False): 0.2, ("static", True): 0.45, ("searched", False): 1.0,
    ("searched", True): 1.6, ("optimus", False): 2.6, ("optimus", True): 2.6,
}  # fmt: skip
"""CPU time of a simulation per task, by schedule and whether layers are tuned. Measured for VLM-S
of PipeWeaver on 8 GPUs (1,400 to 8,900 tasks) and model D of Optimus (17,000 tasks)."""
SETUP_TASKS, PRIOR_TASKS = 150, 1_000
"""Number of tasks that take as long as the setup of a simulation, and weight of `MS_PER_TASK` in
tasks."""
CONFIRM_RATIO = 1.25
"""Expected time to simulate a searched plan as a dry run does, over that of the first simulation.
Measured: 0.9 (omni_qwen3_8b), 1.0 (qwen3_vl_8b_video) and 1.2 (T2V-S of PipeWeaver)."""


class SimulationTimes:
    """Expected CPU times of simulations, from `MS_PER_TASK` and measured times."""

    def __init__(self) -> None:
        self._seconds = {kind: PRIOR_TASKS * ms / 1e3 for kind, ms in MS_PER_TASK.items()}
        self._tasks = dict.fromkeys(MS_PER_TASK, PRIOR_TASKS)

    def expected_s(self, plan: CandidatePlan, tasks: int) -> float:
        """Return the expected time of a simulation in seconds."""
        kind = self._kind(plan)
        return (SETUP_TASKS + tasks) * self._seconds[kind] / self._tasks[kind]

    def add(self, plan: CandidatePlan, tasks: int, seconds: float) -> None:
        """Add a measured time."""
        kind = self._kind(plan)
        self._seconds[kind] += seconds
        self._tasks[kind] += SETUP_TASKS + tasks

    def _kind(self, plan: CandidatePlan) -> tuple[str, bool]:
        schedule = plan.schedule if plan.schedule in ("searched", "optimus") else "static"
        return schedule, plan.recompute == TUNED


@dataclass(order=True)
class PlanDraft:
    """Plan that has not been simulated. Sorts by estimate."""

    estimate_ms: float
    text: str
    plan: CandidatePlan = field(compare=False)
    bound_ms: float = field(compare=False)
    is_rough: bool = field(compare=False, default=True)
    """Whether the estimate is not based on a simulated plan."""
    has_scheduler_estimate: bool = field(compare=False, default=False)
    initial_estimate_ms: float = field(compare=False, default=inf)
    """Estimate that is not based on a simulated plan; infinite for neighbors of other plans."""


@dataclass
class MethodSearch:
    """State of the search for one method."""

    name: str
    roots: list[PlanDraft] = field(default_factory=list)
    """Plans with estimates that are not based on a simulated plan."""
    queue: list[PlanDraft] = field(default_factory=list)
    """Plans that follow from simulated plans."""
    known: set[str] = field(default_factory=set)
    best: SimulatedPlan | None = None
    best_s: float = 0.0
    """CPU time of the simulation of the fastest plan."""
    estimated_ms: float = inf
    """Bubble scheduler estimate of the fastest plan."""
    confirmed: SimulatedPlan | None = None
    """Fastest plan that was simulated exactly as in a dry run."""
    factor: float = 0.0
    """Lowest ratio of simulated to estimated step times of plans that fit. 0 before the first one.
    Plans that do not fit are faster than the same degrees with recomputation, so they are excluded.
    """
    schedule_ms: dict[str, float] = field(default_factory=dict)
    """Step time of the fastest plan that fits, by schedule."""
    simulated: int = 0
    considered: int = 0
    simulated_actions: int = 0
    """Simulated actions."""
    seconds: float = 0.0
    started: bool = False
    open_ms: float = inf
    """Lower bound of plans that are not listed."""
    excluded_ms: float = inf
    """Lower bound of plans that were excluded by the bubble scheduler estimate."""
    problems: Counter[str] = field(default_factory=Counter)
    min_bytes: float = inf

    @property
    def best_ms(self) -> float:
        return inf if self.best is None else self.best.step_ms

    @property
    def work(self) -> float:
        """Simulated actions, including the equivalent of the setup of each simulation."""
        return self.simulated_actions + SETUP_ACTIONS * self.simulated

    @property
    def confirmed_ms(self) -> float:
        return inf if self.confirmed is None else self.confirmed.step_ms

    @property
    def drafts(self) -> list[PlanDraft]:
        """Plans that are still to be simulated."""
        return self.roots + self.queue

    @property
    def expected_next_ms(self) -> float:
        """Expected step time of the next plan, or the bound of plans that are not listed yet."""
        heads = [queue[0] for queue in (self.roots, self.queue) if queue]
        return min((self._expected_ms(head) for head in heads), default=self.open_ms)

    def _expected_ms(self, draft: PlanDraft) -> float:
        return draft.estimate_ms * (self.factor if draft.is_rough and self.factor else 1.0)

    @property
    def gain(self) -> float:
        """Step time of the best plan over that of the best plan with the first schedule."""
        first_ms = self.schedule_ms.get(FIRST_SCHEDULES.get(self.name, "1f1b"), inf)
        return min(1.0, self.best_ms / first_ms) if first_ms < inf else 1.0

    def push(self, draft: PlanDraft) -> None:
        """Add a plan."""
        heappush(self.roots if draft.is_rough else self.queue, draft)

    def drop(self, limit_ms: float) -> None:
        """Drop the next plans whose bounds are not below a limit."""
        for queue in (self.roots, self.queue):
            while queue and queue[0].bound_ms >= limit_ms:
                heappop(queue)

    def pop(self) -> PlanDraft:
        """Remove and return the next plan. Both queues alternate once there is a plan that fits.

        Estimates of neighbors are close to a simulated step, so they would hide other parallelism
        degrees. Degrees that are not expected to be the best even with another schedule come last.
        Neighbors that are not expected to be the best come after degrees with a lower estimate.
        """
        queues = [queue for queue in (self.roots, self.queue) if queue]
        if self.best is None:
            return heappop(min(queues, key=lambda queue: self._expected_ms(queue[0])))
        if len(queues) == 2:
            initial_estimate_ms = self._expected_ms(self.roots[0])
            if min(LOWEST_RATIO, self.gain / NEIGHBOR_RATIO) * initial_estimate_ms > self.best_ms:
                return heappop(self.queue)
            if self.queue[0].estimate_ms > max(initial_estimate_ms, self.best_ms):
                return heappop(self.roots)
        return heappop(queues[self.simulated % len(queues)])
