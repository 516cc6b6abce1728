"""Tests of disaggregated modules: layouts, task assignment and orders of replica groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from module_cases import AUDIO, GENERATOR, LLM, MODELS, VISION, freeze_cases, frozen, steps
from order_checks import assert_complete, makespan, peaks, simulate_order

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b, one_f_one_b, zero_bubble
from torchmm.pipelining.schedules.disaggregated import (
    ModuleGroupSize,
    assign_replicas,
    disaggregated_layout,
    disaggregated_order,
)
from torchmm.pipelining.schedules.separated import separated

F, B = ActionType.F, ActionType.B
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
UNITS = {
    "vision": [
        {"vision": ModuleGroupSize(1, 3), "llm": ModuleGroupSize(2, 2)},
        {"vision": ModuleGroupSize(2, 1), "llm": ModuleGroupSize(1, 4)},
        {"vision": ModuleGroupSize(1, 1), "llm": ModuleGroupSize(1, 1)},
        {"vision": ModuleGroupSize(2, 5), "llm": ModuleGroupSize(3, 3)},
    ],
    "two encoders": [
        {
            "vision": ModuleGroupSize(2, 2),
            "audio": ModuleGroupSize(1, 3),
            "llm": ModuleGroupSize(2, 1),
        }
    ],
    "generator": [
        {
            "vision": ModuleGroupSize(2, 1),
            "llm": ModuleGroupSize(2, 1),
            "generator": ModuleGroupSize(1, 1),
        },
        {
            "vision": ModuleGroupSize(1, 2),
            "llm": ModuleGroupSize(2, 2),
            "generator": ModuleGroupSize(2, 3),
        },
    ],
}


def graphs() -> Iterator[StageGraph]:
    for model, sizes in UNITS.items():
        kinds = freeze_cases(MODELS[model])
        if model == "generator":
            kinds["all but the generator"] = [frozen(VISION), frozen(LLM), GENERATOR]
            kinds["generator"] = [VISION, LLM, frozen(GENERATOR)]
        for units in sizes:
            for modules in kinds.values():
                layout = disaggregated_layout(modules, units)
                microbatches = 6 * units["llm"].replicas
                for graph in steps(layout, microbatches, seed=len(units)):
                    yield assign_replicas(graph)


def test_disaggregated_modules_share_no_rank() -> None:
    units = UNITS["generator"][1]
    layout = disaggregated_layout(MODELS["generator"], units)
    owners: dict[int, set[str]] = {}
    for stage in layout.stages:
        assert len(set(stage.ranks)) == units[stage.module].replicas
        for rank in stage.ranks:
            owners.setdefault(rank, set()).add(stage.module)
    assert sorted(owners) == list(range(sum(size.ranks for size in units.values())))
    assert all(len(modules) == 1 for modules in owners.values())


@pytest.mark.parametrize("name", [*SCHEDULES, "separated"])
def test_disaggregated_plans_are_complete_and_valid(name: str) -> None:
    for graph in graphs():
        if name == "separated":
            order = separated(graph)
        else:
            order = disaggregated_order(graph, SCHEDULES[name])
        if name == "zero_bubble":  # splits backward passes if useful
            assert not order_problems(graph, order)
        else:
            assert_complete(graph, order)
        simulate_order(graph, order, lambda action: 1.0)
        validate_plan(lower_plan(order, graph, {}, sharding="step")).raise_for_problems()


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble", "gpipe"])
def test_virtual_stages_of_disaggregated_llm_are_valid(name: str) -> None:
    schedule = {**SCHEDULES, "interleaved_1f1b": interleaved_1f1b}[name]
    for model, sizes in UNITS.items():
        for units in sizes:
            for modules in freeze_cases(MODELS[model]).values():
                layout = disaggregated_layout(modules, units, {"llm": 2})
                for graph in steps(layout, 6 * units["llm"].replicas, seed=3):
                    graph_ = assign_replicas(graph)
                    order = disaggregated_order(graph_, schedule)
                    simulate_order(graph_, order, lambda action: 1.0)
                    plan = lower_plan(order, graph_, {}, sharding="step")
                    validate_plan(plan).raise_for_problems()


@pytest.mark.parametrize("generator", [0, 1])
def test_virtual_stages_shorten_disaggregated_step(generator: int) -> None:
    """Check that two stages per rank halve the bubble of 4 LLM ranks."""
    modules = MODELS["generator"] if generator else MODELS["vision"]
    units = {
        "vision": ModuleGroupSize(1, 1),
        "llm": ModuleGroupSize(4, 1),
        "generator": ModuleGroupSize(1, 1),
    }
    units = {module.name: units[module.name] for module in modules}
    spans = []
    for stages, schedule in ((1, one_f_one_b), (2, interleaved_1f1b)):
        layout = disaggregated_layout(modules, units, {"llm": stages})
        parts = {name: (1,) * 16 for name in units if name != "llm"}
        graph = assign_replicas(StageGraph(layout, 16, parts))
        llm = [stage.module == "llm" for stage in layout.stages]
        order = disaggregated_order(graph, schedule)
        spans.append(makespan(simulate_order(graph, order, partial(_duration, llm, stages))))
    # F takes 1 and B 2, and half of this outside of the LLM. The terms are the work of the LLM,
    # its ramp-up and ramp-down, and the encoder.
    assert spans[1] == 3 * (16 + 3 / 2 + 1 / 2) < spans[0]


def _duration(llm: list[bool], stages: int, action: Action) -> float:
    return (1.0 if action.type is F else 2.0) / (stages if llm[action.stage] else 2)


def test_deadlock_of_order_is_reported() -> None:
    """Use an encoder that waits for a gradient before it computes an input of the LLM."""
    layout = disaggregated_layout(
        MODELS["vision"], {"vision": ModuleGroupSize(1, 1), "llm": ModuleGroupSize(1, 1)}
    )
    graph = assign_replicas(StageGraph(layout, 2, {"vision": (1, 1)}))
    vision = tuple(Action(kind, 0, m) for m in (0, 1) for kind in (F, B))
    llm = tuple(Action(kind, 1, m) for kind in (F, B) for m in (0, 1))
    report = validate_plan(lower_plan((vision, llm), graph, {}))
    assert {problem.kind for problem in report.problems} == {"deadlock"}


def test_ranks_limit_microbatches_in_flight() -> None:
    """Use uniform microbatches: the bound of 1F1B over a pipeline of 2 + 3 ranks applies."""
    layout = disaggregated_layout(
        MODELS["vision"], {"vision": ModuleGroupSize(2, 1), "llm": ModuleGroupSize(3, 1)}
    )
    graph = assign_replicas(StageGraph(layout, 9, {"vision": (1,) * 9}))
    assert peaks(disaggregated_order(graph, one_f_one_b)) == [5, 4, 3, 2, 1]


def test_fast_encoders_keep_the_llm_busy() -> None:
    """Use 3 encoder replicas for 2 LLM replicas, and encoder tasks of a third of the LLM time."""
    layout = disaggregated_layout(
        MODELS["vision"], {"vision": ModuleGroupSize(1, 3), "llm": ModuleGroupSize(1, 2)}
    )
    graph = assign_replicas(StageGraph(layout, 12, {"vision": (1,) * 12}))
    module = [stage.module for stage in layout.stages]
    records = simulate_order(
        graph,
        disaggregated_order(graph, one_f_one_b),
        lambda action: 3.0 if module[action.stage] == "llm" else 1.0,
    )
    for rank in (3, 4):
        spans = sorted((r.start_ms, r.end_ms) for r in records if r.rank == rank)
        assert spans[-1][1] - spans[0][0] == 3.0 * len(spans) == 3.0 * 12


@pytest.mark.parametrize(("encoders", "generators"), [(8, 0), (5, 0), (4, 4), (1, 6)])
def test_many_replicas_keep_one_llm_busy(encoders: int, generators: int) -> None:
    """Use task times that are proportional to the number of replicas of a module."""
    units = {"vision": ModuleGroupSize(1, encoders), "llm": ModuleGroupSize(1, 1)}
    if generators:
        units["generator"] = ModuleGroupSize(1, generators)
    modules = MODELS["generator" if generators else "vision"]
    layout = disaggregated_layout(modules, units)
    parts = {name: (1,) * 48 for name in units if name != "llm"}
    graph = assign_replicas(StageGraph(layout, 48, parts))
    times = [
        {"vision": encoders, "llm": 1, "generator": generators}[s.module] for s in layout.stages
    ]
    records = simulate_order(
        graph,
        disaggregated_order(graph, one_f_one_b),
        lambda action: (1.0 if action.type is F else 2.0) * times[action.stage],
    )
    # Ramp-up of the first microbatch to the LLM and back, and ramp-down of the last microbatches.
    assert makespan(records) <= 3 * (48 + encoders + 2 * generators)


def test_tasks_are_assigned_evenly_in_order() -> None:
    layout = disaggregated_layout(
        MODELS["generator"],
        {
            "vision": ModuleGroupSize(2, 3),
            "llm": ModuleGroupSize(1, 2),
            "generator": ModuleGroupSize(1, 3),
        },
    )
    images = (3, 0, 1, 2, 5, 1, 0, 4)
    costs = {0: 4.0, 1: 7.0, 2: 1.0}
    graph = assign_replicas(
        StageGraph(layout, 8, {"vision": images, "generator": (1,) * 8}),
        lambda action: costs[action.sub_microbatch % 3],
    )
    assert [graph.replica["llm", m, 0] for m in range(8)] == [0, 1] * 4
    replicas = [graph.replica["generator", m, 0] for m in range(8)]
    assert replicas == [0, 1, 2] * 2 + [0, 1]
    loads = [0.0] * 3
    for (name, _, index), chosen in graph.replica.items():
        if name == "vision":
            loads[chosen] += 2 * costs[index % 3]
    assert max(loads) - min(loads) <= 2 * max(costs.values())


def test_frozen_modules_send_no_gradients() -> None:
    """Check that gradients are sent only to modules with trainable modules before them."""
    units = UNITS["generator"][1]
    senders_by_modules = {  # modules that send gradients, by frozen modules
        (VISION, LLM, GENERATOR): {"llm", "generator"},
        (frozen(VISION), LLM, GENERATOR): {"generator"},
        (VISION, frozen(LLM), frozen(GENERATOR)): {"llm", "generator"},
        (frozen(VISION), LLM, frozen(GENERATOR)): {"generator"},
        (frozen(VISION), frozen(LLM), GENERATOR): set(),
    }
    for modules, senders in senders_by_modules.items():
        layout = disaggregated_layout(modules, units)
        graph = assign_replicas(StageGraph(layout, 4, {"vision": (1,) * 4, "generator": (2,) * 4}))
        order = disaggregated_order(graph, one_f_one_b)
        plan = lower_plan(order, graph, {})
        actual = {
            layout.stages[action.stage].module
            for row in plan.actions
            for action in row
            if action.type is ActionType.SEND_B
            and layout.stages[action.stage].module != layout.stages[action.other].module
        }
        assert actual == senders
        trained = {m.name for m in modules if m.embedding_trainable}
        with_backward = {layout.stages[a.stage].module for row in order for a in row if a.type is B}
        order_ = ["vision", "llm", "generator"]
        assert with_backward == set(order_[min(order_.index(name) for name in trained) :])


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"vision": ModuleGroupSize(1, 1)}, "degrees of"),
        (
            {"vision": ModuleGroupSize(9, 1), "llm": ModuleGroupSize(1, 1)},
            "vision: 8 layers for 9 ranks",
        ),
        ({"vision": ModuleGroupSize(1, 0), "llm": ModuleGroupSize(1, 1)}, "in 0 replicas"),
    ],
)
def test_invalid_disaggregated_degrees_are_rejected(
    units: dict[str, ModuleGroupSize], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        disaggregated_layout(MODELS["vision"], units)


def test_disaggregated_llm_stages_alternate_ranks() -> None:
    layout: StageLayout = disaggregated_layout(
        [VISION, AUDIO, LLM],
        {
            "vision": ModuleGroupSize(2, 1),
            "audio": ModuleGroupSize(1, 1),
            "llm": ModuleGroupSize(2, 2),
        },
        {"llm": 2},
    )
    ranks = [stage.ranks for stage in layout.stages if stage.module == "llm"]
    assert ranks == [(3, 5), (4, 6), (3, 5), (4, 6)]
    graph = assign_replicas(next(steps(layout, 4, seed=1)))
    validate_plan(lower_plan(separated(graph), graph, {})).raise_for_problems()
