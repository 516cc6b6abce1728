"""Orders that are scored by their time after layer tuning."""

from dataclasses import replace

import pytest
from pipeline_cases import Case, varied_microbatch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.order_search.best_order import StepSearch
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.recomputation.costs import costs_of_plan
from torchmm.balance.pipeweaver.recomputation.joint import TunedSearch
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning, Tuner
from torchmm.balance.schedules import step_search
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_plans import searched_costs
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
BUDGET, SETTINGS = Budget(evaluations=600), Settings()


class Step:
    """Eight microbatches of 0 to 8 images on two ranks."""

    def __init__(self) -> None:
        case = Case("joint", tied=False)
        modules = {m.name: m for m in case.build().modality_modules()}
        self.modules = [m.describe() for m in modules.values()]
        self.metas = [varied_microbatch(i, {"vision": 8}, case.kinds).meta for i in range(8)]
        layout = separated_layout(module_layers(self.modules, self.metas), 2)
        self.graph = step_graph(layout, CONFIG, self.metas)
        self.costs = searched_costs(self.graph, self.modules, self.metas, MODEL)
        self.names = frozenset(modules)

    def tuner(self, limit: int) -> Tuner:
        tuning = LayerTuning(MODEL, self.names, limit)
        return Tuner(self.graph, self.modules, self.metas, tuning)

    def tuned(self, order, limit: int):
        plan = self.tuner(limit).tune(lower_plan(order, self.graph, {}, receives_ahead=10**6)).plan
        validate_plan(plan).raise_for_problems()
        costs = costs_of_plan(plan, self.modules, self.metas, MODEL)
        return simulate(plan, costs)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


@pytest.fixture(scope="module")
def limits(step) -> list[int]:
    """From what only leaner and leaner layers fit into, to what everything does."""
    free = StepSearch(step.graph, replace(step.costs, memory_limit_bytes=None))
    most = max(free.best().peak_bytes)
    static = max(step.costs.static_bytes)
    return [round(static + share * (most - static)) for share in (0.35, 0.5, 0.7, 1.5)]


def test_what_is_promised_is_what_the_tuned_plan_takes(step, limits):
    for limit in limits:
        found = TunedSearch(step.graph, step.costs, step.tuner(limit)).search(BUDGET, SETTINGS)
        simulated = step.tuned(found.order, limit)
        assert simulated.makespan_ms == pytest.approx(found.predicted_ms, rel=1e-6)
        assert max(simulated.peak_bytes) <= limit
        assert found.predicted_ms <= min(found.natural_ms, found.static_ms)


def test_it_beats_tuning_what_was_searched_for_untuned_layers(step, limits):
    gains = []
    for limit in limits:
        found = TunedSearch(step.graph, step.costs, step.tuner(limit)).search(BUDGET, SETTINGS)
        alone = step_search(step.graph, replace(step.costs, memory_limit_bytes=limit))
        before = step.tuned(alone.search(BUDGET, SETTINGS).order, limit)
        gains.append(before.makespan_ms / found.predicted_ms - 1)
    assert min(gains) > -0.01
    assert max(gains) > 0.01


def test_where_memory_suffices_there_is_one_level(step):
    plenty = TunedSearch(step.graph, step.costs, step.tuner(1 << 50))
    found = plenty.search(BUDGET, SETTINGS)
    free = StepSearch(step.graph, replace(step.costs, memory_limit_bytes=1 << 50))
    assert found.order == free.search(BUDGET.part(0.5), SETTINGS).order or (
        found.predicted_ms <= free.search(BUDGET.part(0.5), SETTINGS).predicted_ms
    )
    assert plenty.dispatcher.costs.kept_bytes == step.costs.kept_bytes


def test_the_same_budget_gives_the_same_order(step, limits):
    orders = [
        TunedSearch(step.graph, step.costs, step.tuner(limits[1])).search(BUDGET, SETTINGS).order
        for _ in range(2)
    ]
    assert orders[0] == orders[1]


def test_measured_backwards_make_recomputing_dearer(step, limits):
    """Twice as slow a device: the same order, twice the time, transfers aside."""
    slow = {action: 2 * ms for action, ms in step.costs.compute_ms.items()}
    costs = replace(step.costs, compute_ms=slow, transfer_ms={})
    same = replace(step.costs, transfer_ms={})
    tuner = step.tuner(limits[1])
    found = TunedSearch(step.graph, same, tuner).search(BUDGET, SETTINGS)
    other = TunedSearch(step.graph, costs, tuner).search(BUDGET, SETTINGS)
    assert other.predicted_ms == pytest.approx(2 * found.predicted_ms, rel=0.01)


def test_a_step_that_never_fits_is_left_to_the_separated_schedule(step):
    tuner = step.tuner(1000)
    assert not TunedSearch(step.graph, step.costs, tuner).fits
    assert isinstance(step_search(step.graph, step.costs, tuner=tuner), StepSearch)


def test_who_follows_the_search_can_end_it(step, limits):
    seen = []

    def once(ms, make):
        seen.append((ms, make()))
        return False

    tuned = TunedSearch(step.graph, step.costs, step.tuner(limits[1]))
    found = tuned.search(BUDGET, SETTINGS, once)
    assert len(seen) == 1 and seen[0][0] == seen[0][1].predicted_ms == tuned.best().predicted_ms
    assert found.evaluations < 600
