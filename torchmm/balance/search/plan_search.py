"""Search for the fastest parallelism degrees over all methods.

    result = search_plans(recipe, 64, load_profile("h100"))
    result.best.recipe, result.best.step_ms, result.best_by_method["chain"]

Every candidate is evaluated by the simulation that a dry run of its recipe prints
(`StepSimulator`). The first candidate is the unchanged recipe, after one plan of each method if the
recipe leaves segments open. The search is best-first:

    methods     fsdp    chain    separated    colocated    disaggregated
    each has    roots   (all parallelism degrees, rough estimates)
                queue   (neighbors of simulated plans, estimates relative to these)
    loop        select a method --> pop the plan with the lowest estimate --> simulate --> push
                its neighbors, or the plan with more recomputation if it does not fit

Methods take turns until each has a plan that fits. Then the plan with the lowest estimate is
simulated next. Plans whose lower bound exceeds the best step are skipped. If a plan is among the
fastest of its schedule, its neighbors are tried: other schedules, stages per rank, segments, and
images per sub-microbatch. If a plan does not fit into memory, it is tried with layers tuned to
memory. A plan is skipped if its simulation is expected to end after the time limit.

Invariants: a plan is listed at most once per method (`MethodSearch.known`), bounds never exceed
simulated times, and without a time limit all ranks return the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from torchmm.balance.pipeweaver.segment_search import needs_partitioner
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.run_costs import build_cost_model
from torchmm.balance.search.bounds import PlanBounds
from torchmm.balance.search.disaggregated import DisaggregatedPlans
from torchmm.balance.search.method_search import (
    CONFIRM_RATIO,
    EXPECTED_RATIOS,
    NEIGHBOR_RATIO,
    MethodSearch,
    PlanDraft,
    SimulationTimes,
)
from torchmm.balance.search.plan_space import (
    METHODS,
    RECOMPUTE_MODES,
    TUNED,
    CandidatePlan,
    apply_plan,
    describe_sizes,
    neighbors,
    root_plans,
    strip_parallelism,
    with_memory_limit,
)
from torchmm.balance.search.recipe_plans import (
    base_recipe,
    changed_keys,
    open_keys,
    recipe_candidate,
    recipe_methods,
    recipe_plans,
)
from torchmm.balance.search.result import PlanSearchResult, SimulatedPlan
from torchmm.balance.section import SearchConfig
from torchmm.common.errors import ConfigError
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.costs.operators import DeviceProfile
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe

REORDERED_RATIO = 1.02
"""Expected step time of a neighbor with another `data.reorder` over that of its plan."""
RECOMPUTED_RATIO = 1.05
"""Expected step time with layers tuned to memory over that without recomputation."""
MAX_FAILED_PLANS, FIRST_FRACTION = 12, 0.15
"""Plans that a method simulates until one fits, and its fraction of the time, before other methods.
Every method simulates at least one plan, also after the time limit."""
ESTIMATE_MARGIN = 1.05
"""Plans with the parallelism degrees of a recipe are simulated if the bubble scheduler estimate is
at most this factor of that of the best plan."""
MAX_TASKS, TASKS_FRACTION, TASKS_S = 10_000, 0.25, 2.5
"""Maximum number of tasks of a pipeline with colocated encoders, and the maximum time of one such
plan: a fraction of the limit, or seconds if that is more."""
SCREENING_EVALUATIONS = 100
"""Orders that are evaluated for a plan with a searched schedule, until it is the best of its
method."""
FIRST_REPORT_S = 1.0
REPORT_GROWTH = 2.0


def search_plans(  # noqa: PLR0913 - limits of the search
    recipe: Recipe,
    devices: int,
    profile: DeviceProfile,
    *,
    methods: Sequence[str] = METHODS,
    budget_s: float = 20.0,
    max_actions: float = inf,
    exact: bool = False,
    schedules: Sequence[str] | None = None,
    limits: Mapping[str, int] | None = None,
    keep_sizes: bool = False,
    sample: StepSample | None = None,
    report: Callable[[str], None] | None = None,
) -> PlanSearchResult:
    """Return the fastest plan of each method.

    Results are deterministic if the search completes, or if only `max_actions` limits it.

    Args:
        recipe: Recipe whose parallelism degrees, schedule, placement, microbatch size and
            recomputation are searched. Other keys are not changed.
        devices: Number of devices in the cluster.
        profile: Profile of one device.
        methods: Methods to search, from `METHODS`.
        budget_s: Limit of the CPU time in seconds. Every method simulates at least one plan. Later
            simulations start only if they are expected to end before the limit. 0 simulates only
            the unchanged recipe.
        max_actions: Limit of the number of simulated actions.
        exact: Whether plans must use all devices.
        schedules: Schedules to use; None for all.
        limits: Maximum number of devices by module, for disaggregated modules.
        keep_sizes: Whether to use the values that the recipe sets, except the schedule. Requires
            one method of `recipe_methods`.
        sample: Model and first step of the recipe, if they exist.
        report: Function that receives progress messages.

    Raises:
        ConfigError: The recipe has errors that do not depend on parallelism degrees.
    """
    started = time.thread_time()
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"unknown method {unknown[0]!r}; use one of {', '.join(METHODS)}")
    plain = base_recipe(recipe, methods[0]) if keep_sizes else strip_parallelism(recipe)
    plain = with_memory_limit(plain, profile.device.memory_bytes)
    ranks = devices if plain.parallel.placement != "interleaved" else 1
    if problems := find_problems(plain, ranks):
        raise ConfigError([str(problem) for problem in problems])
    sample = StepSample(recipe) if sample is None else sample
    if not sample.packs:
        raise ConfigError("training.global_batch_size: the first step has no sequences")
    build_cost_model(resolve_recipe(plain, ranks), sample.modules, profile)
    search = _PlanSearch(
        plain, devices, profile, sample,
        exact=exact, schedules=schedules, limits=limits, report=report,
        sized=recipe if keep_sizes else None,
    )  # fmt: skip
    unchanged = None if schedules or limits or keep_sizes else recipe
    deadline = started + budget_s if budget_s else -inf
    search.run([name for name in METHODS if name in methods], deadline, max_actions, unchanged)
    return search.result(time.thread_time() - started)


class _PlanSearch:
    """State and control loop of a search."""

    def __init__(  # noqa: PLR0913 - limits of the search
        self,
        recipe: Recipe,
        devices: int,
        profile: DeviceProfile,
        sample: StepSample,
        *,
        exact: bool,
        schedules: Sequence[str] | None,
        limits: Mapping[str, int] | None,
        report: Callable[[str], None] | None,
        sized: Recipe | None,
    ) -> None:
        self._recipe = recipe
        self._devices = devices
        self._profile = profile
        self._sample = sample
        self._exact = exact
        self._schedules = schedules
        self._limits = limits
        self._report = report
        self._bounds = PlanBounds(recipe, profile, sample)
        self._sized = sized
        """Recipe whose parallelism degrees are fixed. None if all are searched."""
        self._limit_bytes = USABLE_MEMORY_FRACTION * profile.device.memory_bytes
        self._disaggregated: DisaggregatedPlans | None = None
        self._methods: dict[str, MethodSearch] = {}
        self._allowed: dict[tuple[object, ...], bool] = {}
        self._times = SimulationTimes()
        self._complete = True
        self._deadline = inf
        self._budget_s = inf
        self._turns = 0
        self._pending_recipe: Recipe | None = None
        """Recipe that is still to be simulated without changes."""

    @property
    def best_ms(self) -> float:
        """Step time of the fastest plan."""
        return min((method.best_ms for method in self._methods.values()), default=inf)

    def run(
        self,
        names: Sequence[str],
        deadline: float,
        max_actions: float,
        unchanged: Recipe | None = None,
    ) -> None:
        """Simulate plans until none is left, or a limit is reached.

        Args:
            names: Methods to search.
            deadline: CPU time of this thread in seconds at which methods with a simulated plan
                stop. -inf simulates only `unchanged`.
            max_actions: Limit of the number of simulated actions.
            unchanged: Recipe that is also simulated without changes.
        """
        self._methods = {name: MethodSearch(name) for name in names}
        self._deadline = deadline
        is_only = deadline == -inf
        if unchanged is not None and (is_only or not needs_partitioner(unchanged.parallel)):
            self._add_recipe(unchanged)
        elif unchanged is not None:  # the choice of segments takes seconds, so it runs later
            self._pending_recipe = unchanged
        self._complete = not is_only
        if not is_only:
            self._improve(max_actions)
        for method in self._methods.values():
            if method.best is not None and method.best.is_short_search:
                self._confirm(method)

    def _improve(self, max_actions: float) -> None:
        started = time.thread_time()
        self._budget_s = self._deadline - started
        next_report = FIRST_REPORT_S
        while True:
            now = time.thread_time()
            method = self._first_method()
            if method is None and self._pending_recipe is not None:
                self._add_recipe(self._pending_recipe)
                continue
            if method is None:
                method = self._next_method()
                if method is None:
                    return
                simulated_actions = sum(
                    searched_method.simulated_actions for searched_method in self._methods.values()
                )
                if now + self._confirm_s() > self._deadline or simulated_actions > max_actions:
                    self._complete = False
                    return
            elapsed = now - started
            if self._report is not None and elapsed > next_report:
                self._report(self._progress(elapsed))
                next_report = REPORT_GROWTH * elapsed
            if not method.started:
                self._start(method)
            elif method.drafts:
                self._simulate_draft(method, method.pop())
            else:
                self._list_more(method)
            method.seconds += time.thread_time() - now

    def _confirm_s(self) -> float:
        """Return the expected time to simulate the best plans as a dry run does."""
        limit_ms = NEIGHBOR_RATIO * self.best_ms
        return sum(
            CONFIRM_RATIO * method.best_s
            for method in self._methods.values()
            if method.best is not None
            and method.best.is_short_search
            and method.best_ms <= limit_ms
        )

    def _add_recipe(self, recipe: Recipe) -> None:
        """Simulate an unchanged recipe, and list it with its method."""
        self._pending_recipe = None
        candidate = recipe_candidate(recipe, self._devices, self._profile, self._sample)
        if candidate is None or candidate.method not in self._methods:
            return
        method = self._methods[candidate.method]
        method.simulated += 1
        method.considered += 1
        method.known.add(candidate.plan.text)
        if candidate.step_ms < method.best_ms:
            method.best = candidate
        if candidate.step_ms < method.confirmed_ms:
            method.confirmed = candidate
        if candidate.method in ("fsdp", "chain", "separated"):
            plan = candidate.plan.with_changes(activation_checkpoint__mode=RECOMPUTE_MODES[0])
            self._push(method, plan, candidate.plan, candidate.step_ms)

    def _first_method(self) -> MethodSearch | None:
        """Return the first method without a simulated plan; None if there is none."""
        for method in self._methods.values():
            is_open = not method.started or method.drafts or method.open_ms < inf
            if not method.simulated and is_open:
                return method
        return None

    def _next_method(self) -> MethodSearch | None:
        """Return the method whose plan is simulated next; None if no plan is left.

        Methods without a plan that fits come first, until they have used their fraction of the
        search. Then turns alternate between the method with the lowest estimate, and the method
        with little work so far and a low estimate. The first of these turns are for methods with a
        plan, because estimates of plans that do not fit into memory are unreliable.
        """
        self._turns += 1
        best_ms = self.best_ms
        open_methods = []
        for method in self._methods.values():
            is_tried = method.best is not None or self._has_tried(method)
            if is_tried:
                method.drop(best_ms)
            if method.drafts or not method.started or method.open_ms < best_ms:
                open_methods.append(method)
        if not open_methods:
            return None
        for method in open_methods:
            if not method.started or (method.best is None and not self._has_tried(method)):
                return method
        if self._turns % 2:
            with_plan = [
                candidate for candidate in open_methods if candidate.best is not None
            ] or open_methods
            return min(with_plan, key=lambda candidate: candidate.expected_next_ms)
        return min(
            open_methods,
            key=lambda candidate: (
                candidate.work * candidate.expected_next_ms**2
                if candidate.simulated_actions
                else 0.0
            ),
        )

    def _has_tried(self, method: MethodSearch) -> bool:
        """Return True if a method has used its fraction of the search without a plan that fits."""
        is_late = method.seconds > FIRST_FRACTION * self._budget_s
        return method.simulated >= (1 if is_late else MAX_FAILED_PLANS)

    def _start(self, method: MethodSearch) -> None:
        """List the plans of a method."""
        method.started = True
        if self._sized is not None:
            for plan in recipe_plans(method.name, self._sized, self._devices, self._sample):
                self._push(method, plan)
            return
        if method.name == "disaggregated":
            self._start_disaggregated(method)
            return
        has_encoders = any(module.kind == "encoder" for module in self._sample.modules)
        if method.name == "colocated" and not has_encoders:
            method.problems["the model has no encoders"] += 1
            return
        plans = root_plans(
            method.name, self._recipe, self._devices, self._profile, self._sample,
            exact=self._exact,
        )  # fmt: skip
        for plan in plans:
            if method.name == "colocated" and not self._is_small(plan):
                method.problems[
                    "scheduling bubbles exceeds the time limit; use a higher --budget-s"
                ] += 1
                continue
            self._push(method, plan)

    def _is_small(self, plan: CandidatePlan) -> bool:
        """Return True if a plan with colocated encoders can be simulated in time."""
        tasks = self._bounds.tasks(plan)
        limit_s = max(TASKS_S, TASKS_FRACTION * self._budget_s)
        return tasks <= MAX_TASKS and self._times.expected_s(plan, tasks) <= limit_s

    def _start_disaggregated(self, method: MethodSearch) -> None:
        try:
            self._disaggregated = DisaggregatedPlans(
                self._recipe, self._devices, self._profile, self._sample,
                exact=self._exact, schedules=self._schedules, limits=self._limits,
            )  # fmt: skip
        except ConfigError as error:
            method.problems[_error_line(error)] += 1
            return
        for plan, bound_ms, estimate_ms in self._disaggregated.formula_plans():
            self._push_draft(
                method,
                PlanDraft(estimate_ms, plan.text, plan, bound_ms, initial_estimate_ms=estimate_ms),
            )
        method.open_ms = self._disaggregated.open_ms

    def _list_more(self, method: MethodSearch) -> None:
        """List further plans of modules on separate ranks."""
        assert self._disaggregated is not None
        for plan, bound_ms, estimate_ms in self._disaggregated.next_band():
            self._push_draft(
                method,
                PlanDraft(estimate_ms, plan.text, plan, bound_ms, initial_estimate_ms=estimate_ms),
            )
        method.open_ms = self._disaggregated.open_ms

    def _push(
        self,
        method: MethodSearch,
        plan: CandidatePlan,
        parent: CandidatePlan | None = None,
        parent_ms: float = inf,
        *,
        is_root: bool = False,
    ) -> None:
        """List a plan, with the first recomputation mode that may fit.

        Args:
            method: Method of the plan.
            plan: Plan to list.
            parent: Simulated plan that the estimate is based on.
            parent_ms: Step time of that plan.
            is_root: Whether the parent has the same schedule and a rough estimate.
        """
        if plan.text in method.known:
            return
        if self._schedules is not None and plan.schedule not in self._schedules:
            return
        if method.name == "disaggregated":
            self._push_draft(method, PlanDraft(0.0, plan.text, plan, 0.0, is_rough=False))
            return
        memory_bytes = self._bounds.state_bytes(plan)
        if memory_bytes <= self._limit_bytes:
            bound = self._bounds.bound(plan)
            memory_bytes = bound.memory_bytes
        if memory_bytes > self._limit_bytes:
            method.known.add(plan.text)
            method.considered += 1
            method.min_bytes = min(method.min_bytes, memory_bytes)
            for other in self._with_more_recomputation(plan):
                self._push(method, other, parent, parent_ms, is_root=is_root)
            return
        estimate_ms = bound.estimate_ms
        if parent is not None:
            estimate_ms = parent_ms * self._expected_ratio(method, plan, parent)
        draft = PlanDraft(estimate_ms, plan.text, plan, bound.step_ms, parent is None)
        if parent is None or is_root:
            draft.initial_estimate_ms = bound.estimate_ms
        self._push_draft(method, draft)

    def _expected_ratio(
        self, method: MethodSearch, plan: CandidatePlan, parent: CandidatePlan
    ) -> float:
        """Return the expected step time of a plan over that of a simulated plan."""
        ratio = self._bounds.bound(plan).estimate_ms / self._bounds.bound(parent).estimate_ms
        if plan.schedule != parent.schedule:
            gain = EXPECTED_RATIOS.get(plan.schedule)
            ratio *= 1.0 if gain is None else min(gain, method.gain)
        if plan.changes.get("data.reorder") != parent.changes.get("data.reorder"):
            ratio = max(ratio, REORDERED_RATIO)
        return ratio

    def _push_draft(self, method: MethodSearch, draft: PlanDraft) -> None:
        if draft.text not in method.known:
            method.known.add(draft.text)
            method.considered += 1
            method.push(draft)

    def _with_more_recomputation(self, plan: CandidatePlan) -> Iterator[CandidatePlan]:
        """Yield the plan with the next mode that the recipe checks accept."""
        modes = RECOMPUTE_MODES if self._sized is None else ()
        for mode in modes[modes.index(plan.recompute) + 1 :] if plan.recompute in modes else ():
            changed = plan.with_changes(activation_checkpoint__mode=mode)
            if self._allows_mode(changed):
                yield changed
                if mode == TUNED:  # never slower than the remaining modes
                    return

    def _allows_mode(self, plan: CandidatePlan) -> bool:
        """Return True if the recipe checks accept the recomputation mode of a plan."""
        axes = (plan.size("expert") > 1, plan.size("llm.context") > 1)
        key = plan.method, plan.schedule, plan.recompute, *axes
        if key not in self._allowed:
            problems = find_problems(apply_plan(self._recipe, plan), plan.devices)
            mode = "activation_checkpoint.mode"
            self._allowed[key] = not any(problem.touches(mode) for problem in problems)
        return self._allowed[key]

    def _simulate_draft(self, method: MethodSearch, draft: PlanDraft) -> None:
        """Simulate a plan and list the plans that follow from it."""
        plan = draft.plan
        if method.simulated and self._is_too_long(plan):
            self._complete = False
            method.excluded_ms = min(method.excluded_ms, draft.bound_ms)
            return
        if plan.method == "colocated" and not self._passes_estimate(method, draft):
            return
        simulated = method.simulated
        started = time.thread_time()
        candidate = self._simulate(method, plan)
        seconds = time.thread_time() - started
        if method.simulated > simulated:
            self._times.add(plan, self._bounds.tasks(plan), seconds)
        if candidate is None:
            return
        if candidate.step_ms == inf:
            self._recompute_more(method, draft, candidate)
            return
        if draft.initial_estimate_ms < inf:
            ratio = candidate.step_ms / draft.initial_estimate_ms
            method.factor = min(method.factor or ratio, ratio)
        best_ms = method.schedule_ms.get(plan.schedule, inf)
        method.schedule_ms[plan.schedule] = min(best_ms, candidate.step_ms)
        is_best = candidate.step_ms < method.best_ms
        if is_best:
            method.best, method.best_s = candidate, seconds
            method.estimated_ms = draft.estimate_ms if draft.has_scheduler_estimate else inf
        if not candidate.is_short_search and candidate.step_ms < method.confirmed_ms:
            method.confirmed = candidate
        if is_best or (self._sized is None and candidate.step_ms < NEIGHBOR_RATIO * best_ms):
            self._push_neighbors(method, plan, candidate.step_ms)

    def _is_too_long(self, plan: CandidatePlan) -> bool:
        """Return True if the simulation of a plan is expected to end after the time limit."""
        if self._deadline == inf:
            return False
        seconds = self._times.expected_s(plan, self._bounds.tasks(plan))
        if plan.schedule == "searched":
            seconds *= 1 + CONFIRM_RATIO
        return time.thread_time() + seconds > self._deadline

    def _recompute_more(
        self, method: MethodSearch, draft: PlanDraft, candidate: SimulatedPlan
    ) -> None:
        """List a plan that does not fit with more recomputation."""
        step = candidate.report.step
        assert step is not None
        method.min_bytes = min(method.min_bytes, max(step.peak_bytes))
        # Until a plan fits, recomputation has priority over all other plans.
        expected_ms = 0.0
        if method.best is not None:
            expected_ms = RECOMPUTED_RATIO * candidate.report.iteration_ms
        if draft.is_rough:  # assume the gain of other schedules that the best degrees have
            expected_ms *= method.gain
        if method.name == "disaggregated":
            self._push_neighbors(method, draft.plan, expected_ms)
            return
        is_root = draft.initial_estimate_ms < inf
        for other in self._with_more_recomputation(draft.plan):
            self._push(method, other, draft.plan, expected_ms, is_root=is_root)

    def _push_neighbors(self, method: MethodSearch, plan: CandidatePlan, step_ms: float) -> None:
        """List the neighbors of a simulated plan."""
        if self._sized is not None:
            changeable = open_keys(method.name, self._sized, self._sample)
            for other in neighbors(plan, self._recipe, self._sample):
                if changed_keys(plan, other) <= changeable:
                    self._push(method, other, plan, step_ms)
            return
        if method.name == "disaggregated":
            assert self._disaggregated is not None
            for other, bound_ms, ratio in self._disaggregated.related_plans(plan):
                draft = PlanDraft(step_ms * ratio, other.text, other, bound_ms, is_rough=False)
                self._push_draft(method, draft)
            return
        for other in neighbors(plan, self._recipe, self._sample):
            self._push(method, other, plan, step_ms)

    def _passes_estimate(self, method: MethodSearch, draft: PlanDraft) -> bool:
        """Return True if the bubble scheduler predicts that a plan is the fastest of its method.

        The estimate is within a few percent of the simulated time and needs a fraction of its CPU
        time. Plans with a slower estimate are simulated later.
        """
        if not draft.has_scheduler_estimate:
            simulator = self._build_simulator(method, draft.plan)
            if simulator is None:
                return False
            method.simulated_actions += 2 * self._bounds.tasks(draft.plan)
            try:
                expected_ms = simulator.estimate_step_ms(simulator.recipe.parallel)
            except ConfigError as error:
                method.problems[_error_line(error)] += 1
                return False
            if draft.is_rough:
                ratio = expected_ms / draft.estimate_ms
                method.factor = min(method.factor or ratio, ratio)
            draft.estimate_ms, draft.is_rough, draft.has_scheduler_estimate = (
                expected_ms,
                False,
                True,
            )
            draft.initial_estimate_ms = inf
            if expected_ms > method.best_ms or (self._sized is not None and method.roots):
                method.push(draft)
                return False
        if self._sized is not None and draft.estimate_ms > ESTIMATE_MARGIN * method.estimated_ms:
            method.excluded_ms = min(method.excluded_ms, draft.bound_ms)
            return False
        return True

    def _build_simulator(self, method: MethodSearch, plan: CandidatePlan) -> StepSimulator | None:
        """Return the simulator of a plan; None if the plan cannot be run."""
        recipe = apply_plan(self._recipe, plan)
        if problems := find_problems(recipe, plan.devices):
            method.problems[str(problems[0])] += 1
            return None
        try:
            return StepSimulator(recipe, plan.devices, self._profile, sample=self._sample)
        except ConfigError as error:
            method.problems[_error_line(error)] += 1
            return None

    def _simulate(
        self, method: MethodSearch, plan: CandidatePlan, *, short: bool = True
    ) -> SimulatedPlan | None:
        """Return the simulated plan; None if it cannot be run.

        Args:
            method: Method of the plan.
            plan: Plan to simulate.
            short: Whether a schedule that is searched may be searched for a short time.
        """
        short = short and plan.schedule == "searched"
        simulator = self._build_simulator(method, plan)
        if simulator is None:
            return None
        recipe = simulator.recipe
        parallel = recipe.parallel
        if short:
            evaluations = min(
                SCREENING_EVALUATIONS,
                SearchConfig.from_parent(recipe.parallel).evaluations or SCREENING_EVALUATIONS,
            )
            search = SearchConfig.from_parent(recipe.parallel).model_copy(
                update={"evaluations": evaluations}
            )
            parallel = recipe.parallel.model_copy(update={"search": search})
        try:
            report = simulator.simulate_parallel(parallel)
        except ConfigError as error:
            method.problems[_error_line(error)] += 1
            return None
        method.simulated += 1
        if report.step is None:
            method.simulated_actions += 2 * self._bounds.tasks(plan)
            method.problems[report.problem] += 1
            return None
        method.simulated_actions += len(report.step.records)
        sizes = describe_sizes(plan)
        return SimulatedPlan(method.name, recipe, plan.devices, sizes, report, short, plan)

    def _confirm(self, method: MethodSearch) -> None:
        """Simulate the best plan of a method as a dry run does, if it may be the best of all."""
        assert method.best is not None
        if method.best.step_ms > NEIGHBOR_RATIO * self.best_ms:
            return
        candidate = self._simulate(method, method.best.plan, short=False)
        if candidate is not None and candidate.step_ms < method.confirmed_ms:
            method.confirmed = candidate
        method.best = method.confirmed

    def _progress(self, elapsed: float) -> str:
        simulated = sum(method.simulated for method in self._methods.values())
        best_ms = self.best_ms
        text = (
            f"best step {best_ms:,.0f} ms" if best_ms < inf else "no plan that fits in memory yet"
        )
        limit = f" of {self._budget_s:.0f}" if self._budget_s < inf else ""
        return f"plans simulated: {simulated} in {elapsed:.0f}{limit} s of CPU time, {text}"

    def result(self, seconds: float) -> PlanSearchResult:
        """Return the results.

        Args:
            seconds: CPU time of the search.
        """
        best_ms = self.best_ms
        bounds_ms = [
            min([method.open_ms, method.excluded_ms, *(draft.bound_ms for draft in method.drafts)])
            for method in self._methods.values()
        ]
        best_by_method = {
            method.name: method.best or self._failure(method) for method in self._methods.values()
        }
        return PlanSearchResult(
            best_by_method,
            {method.name: method.simulated for method in self._methods.values()},
            {method.name: method.considered for method in self._methods.values()},
            min([best_ms, *bounds_ms]),
            self._complete,
            seconds,
        )

    def _failure(self, method: MethodSearch) -> str:
        """Return the reason why a method has no plan."""
        if method.min_bytes < inf:
            text = (
                "no plan fits in memory"
                if self._complete
                else "no plan that fits in memory was found in time"
            )
            least_gib = method.min_bytes / 2**30
            limit_gib = self._limit_bytes / 2**30
            share = f"{limit_gib:.1f} GiB ({USABLE_MEMORY_FRACTION:.0%} of the memory)"
            return f"{text}: at least {least_gib:.1f} GiB per device, of {share}"
        if method.problems:
            return method.problems.most_common(1)[0][0]
        if not self._complete and (not method.started or method.drafts):
            return "no plan was simulated in time; use a higher --budget-s"
        if method.considered:
            return f"no plan can be below {self.best_ms:,.0f} ms"
        return f"no parallelism degrees for {self._devices} devices"


def _error_line(error: ConfigError) -> str:
    return " ".join(str(error).split())


def compare_schedules(
    recipe: Recipe, devices: int, profile: DeviceProfile, sample: StepSample, budget_s: float
) -> dict[str, SimulatedPlan | str]:
    """Return the fastest plan with the parallelism degrees of the recipe for each schedule.

    Args:
        recipe: Recipe with parallelism degrees.
        devices: Number of devices in the cluster.
        profile: Profile of one device.
        sample: Model and first step of the recipe.
        budget_s: Limit of the CPU time of each schedule in seconds.

    Returns:
        Plan, or the reason why there is none, by schedule.
    """
    names: dict[str, str] = {}
    for method in recipe_methods(recipe, devices, sample):
        for plan in recipe_plans(method, recipe, devices, sample):
            names.setdefault(plan.schedule, method)
    fastest: dict[str, SimulatedPlan | str] = {}
    for name, method in names.items():
        result = search_plans(
            recipe, devices, profile, methods=(method,), budget_s=budget_s, schedules=(name,),
            keep_sizes=True, sample=sample,
        )  # fmt: skip
        fastest[name] = result.best_by_method[method]
    unchanged = recipe_candidate(recipe, devices, profile, sample)
    if unchanged is not None:
        current = fastest.get(recipe.parallel.schedule)
        if not isinstance(current, SimulatedPlan) or unchanged.step_ms <= current.step_ms:
            fastest[recipe.parallel.schedule] = unchanged
    return fastest
