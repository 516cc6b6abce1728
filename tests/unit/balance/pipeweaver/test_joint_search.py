"""Tests of orders that are evaluated by their time after layer tuning."""

from dataclasses import replace

import pytest
from pipeline_cases import Case, varied_microbatch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.activation_checkpointing.memory_aware_search import (
    MemoryAwareSearch,
)
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner, LayerTuning
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import StepSearch
from torchmm.balance.schedules import build_step_search
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_plans import compute_search_costs
from torchmm.costs.flops import module_layers
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.schedules.layouts import separated_layout
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig

CONFIG = ParallelConfig.model_validate(
    {"pipeline": 2, "schedule": "searched", "vision": {"sub_microbatch_images": 2}}
)
MODEL = CostModel(load_profile("cpu"), "float32")
BUDGET, SETTINGS = SearchBudget(evaluations=600), SearchSettings()


class Step:
    """Step of eight microbatches with 0 to 8 images on two ranks."""

    def __init__(self) -> None:
        case = Case("joint", tied=False)
        modules = {m.name: m for m in case.build().modality_modules()}
        self.modules = [m.describe() for m in modules.values()]
        self.metas = [varied_microbatch(i, {"vision": 8}, case.kinds).meta for i in range(8)]
        layout = separated_layout(module_layers(self.modules, self.metas), 2)
        self.graph = step_graph(layout, CONFIG, self.metas)
        self.costs = compute_search_costs(self.graph, self.modules, self.metas, MODEL)
        self.names = frozenset(modules)

    def tuner(self, limit: int) -> LayerTuner:
        tuning = LayerTuning(MODEL, self.names, limit)
        return LayerTuner(self.graph, self.modules, self.metas, tuning)

    def tuned(self, order, limit: int):
        plan = self.tuner(limit).tune(lower_plan(order, self.graph, {}, receives_ahead=10**6)).plan
        validate_plan(plan).raise_for_problems()
        costs = compute_plan_costs_with_recompute(plan, self.modules, self.metas, MODEL)
        return simulate(plan, costs)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


@pytest.fixture(scope="module")
def limits(step) -> list[int]:
    """Return limits from the strongest recomputation to no recomputation."""
    free = StepSearch(step.graph, replace(step.costs, memory_limit_bytes=None))
    maximum = max(free.best().peak_bytes)
    static = max(step.costs.static_bytes)
    return [round(static + share * (maximum - static)) for share in (0.35, 0.5, 0.7, 1.5)]


def test_predicted_time_matches_tuned_plan(step, limits):
    for limit in limits:
        result = MemoryAwareSearch(step.graph, step.costs, step.tuner(limit)).search(
            BUDGET, SETTINGS
        )
        simulated = step.tuned(result.order, limit)
        assert simulated.makespan_ms == pytest.approx(result.predicted_ms, rel=1e-6)
        assert max(simulated.peak_bytes) <= limit
        assert result.predicted_ms <= min(result.default_order_ms, result.static_ms)


def test_joint_search_beats_sequential_tuning(step, limits):
    gains = []
    for limit in limits:
        result = MemoryAwareSearch(step.graph, step.costs, step.tuner(limit)).search(
            BUDGET, SETTINGS
        )
        alone = build_step_search(step.graph, replace(step.costs, memory_limit_bytes=limit))
        before = step.tuned(alone.search(BUDGET, SETTINGS).order, limit)
        gains.append(before.makespan_ms / result.predicted_ms - 1)
    assert min(gains) > -0.01
    assert max(gains) > 0.01


def test_sufficient_memory_needs_no_tuning(step):
    plenty = MemoryAwareSearch(step.graph, step.costs, step.tuner(1 << 50))
    result = plenty.search(BUDGET, SETTINGS)
    free = StepSearch(step.graph, replace(step.costs, memory_limit_bytes=1 << 50))
    assert result.order == free.search(BUDGET.fraction(0.5), SETTINGS).order or (
        result.predicted_ms <= free.search(BUDGET.fraction(0.5), SETTINGS).predicted_ms
    )
    assert plenty.dispatcher.costs.saved_bytes == step.costs.saved_bytes


def test_equal_budgets_find_equal_orders(step, limits):
    orders = [
        MemoryAwareSearch(step.graph, step.costs, step.tuner(limits[1]))
        .search(BUDGET, SETTINGS)
        .order
        for _ in range(2)
    ]
    assert orders[0] == orders[1]


def test_measured_times_scale_recomputation(step, limits):
    """Check that a device of half the speed takes twice as long, without transfers."""
    slow = {action: 2 * ms for action, ms in step.costs.compute_ms.items()}
    costs = replace(step.costs, compute_ms=slow, transfer_ms={})
    same = replace(step.costs, transfer_ms={})
    tuner = step.tuner(limits[1])
    result = MemoryAwareSearch(step.graph, same, tuner).search(BUDGET, SETTINGS)
    slower = MemoryAwareSearch(step.graph, costs, tuner).search(BUDGET, SETTINGS)
    assert slower.predicted_ms == pytest.approx(2 * result.predicted_ms, rel=0.01)


def test_unsatisfiable_limit_uses_plain_search(step):
    tuner = step.tuner(1000)
    assert not MemoryAwareSearch(step.graph, step.costs, tuner).fits
    assert isinstance(build_step_search(step.graph, step.costs, tuner=tuner), StepSearch)


def test_callback_can_stop_the_search(step, limits):
    improvements = []

    def once(ms, make):
        improvements.append((ms, make()))
        return False

    tuned = MemoryAwareSearch(step.graph, step.costs, step.tuner(limits[1]))
    result = tuned.search(BUDGET, SETTINGS, once)
    assert (
        len(improvements) == 1
        and improvements[0][0] == improvements[0][1].predicted_ms == tuned.best().predicted_ms
    )
    assert result.evaluations < 600
