"""Tests of layer tuning of plans: costs of recomputation, simulated memory, limits, choices."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline_cases import Case
from random_orders import random_order
from support.integer_program import solve_exactly
from support.memory_needs import memory_needs
from test_plan_costs import Step

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.activation_checkpointing import tuning as tuning_module
from torchmm.balance.pipeweaver.activation_checkpointing.rank_problems import (
    CandidateTables,
    build_rank_problems,
)
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    LAYER_MODES,
    MAX_CANDIDATES,
    StageRecompute,
    add_recompute_costs,
    compute_plan_costs_with_recompute,
    sort_candidates,
    stage_candidates,
    stage_recompute_costs,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import (
    LayerTuning,
    TunedPlan,
    tune_layers,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.errors import PlanError
from torchmm.costs.execution import Execution
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.classic import gpipe
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.planning.executions import module_executions
from torchmm.planning.step import module_layers, plan_layout, step_graph
from torchmm.recipe.read import load_recipe

MODEL = CostModel(load_profile("cpu"), "float32", {"vision": Execution(), "llm": Execution()})
BOTH = frozenset({"vision", "llm"})
CASES = [
    Case("tuned", pipeline=2, encoder="clip", tied=False),
    Case("windows", pipeline=2, encoder="qwen2_5_vl", freeze=("llm",), tied=False),
    Case("frozen tower", pipeline=3, encoder="siglip2", freeze=("vision",), tied=False),
]


def planned(step: Step, seed: int, split: float = 0.0, *, messages: bool = True) -> PipelinePlan:
    specs = {}
    if messages:
        modules = {m.name: m for m in step.model.modality_modules()}
        specs = message_specs(step.graph, modules, step.metas, torch.float32)
    return lower_plan(random_order(step.graph, seed, split), step.graph, specs)


def tuned(step: Step, plan: PipelinePlan, limit: int, **settings) -> TunedPlan:
    tuning = LayerTuning(MODEL, BOTH, limit, **settings)
    return tune_layers(plan, step.modules, step.metas, tuning, step.targets)


def pairs_ms(costs: PlanCosts) -> float:
    both = ActionType.F, ActionType.B
    return sum(ms for action, ms in costs.compute_ms.items() if action.type in both)


def limits(step: Step, plan: PipelinePlan) -> tuple[int, int]:
    """Return the minimum memory of any choice, and the memory without recomputation."""
    tuning = LayerTuning(MODEL, BOTH, 1)
    needs = memory_needs(plan, step.modules, step.metas, tuning, step.targets)
    with pytest.raises(PlanError) as caught:
        tuned(step, plan, 1)
    needed = [int(re.findall(r"\((\d+) bytes\) even", p)[0]) for p in caught.value.problems]
    assert needed == [need.least_bytes for need in needs]
    maximum = max(need.most_bytes for need in needs)
    assert maximum == max(tuned(step, plan, 1 << 60).peak_bytes)
    return max(needed), maximum


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("mode", LAYER_MODES)
def test_uniform_mode_matches_module_costs(case, mode):
    step = Step(case)
    plan = planned(step, 0)
    layers = {s.index: s.stop - s.start for s in step.graph.layout.stages}
    choices = stage_recompute_costs(
        step.graph, step.modules, step.metas, MODEL, names=BOTH, targets=step.targets
    )
    recompute = {t: (mode,) * layers[t.stage] for c in choices.values() for t in c.tasks}
    charged_costs = compute_plan_costs_with_recompute(
        replace(plan, recompute=recompute), step.modules, step.metas, MODEL, targets=step.targets
    )
    uniform = replace(MODEL, executions={n: Execution(recompute=mode) for n in BOTH})
    expected = step.costs(uniform)
    # Modules with a mode also charge forward passes without backward, which plans ignore.
    charged_ms, expected_ms = (
        {a: ms for a, ms in costs.compute_ms.items() if Task(*a[1:4]) in recompute}
        for costs in (charged_costs, expected)
    )
    assert charged_ms == pytest.approx(expected_ms)
    assert charged_costs.saved_bytes == pytest.approx(expected.saved_bytes, abs=2)
    assert charged_costs.saved_for_weights_bytes == pytest.approx(
        expected.saved_for_weights_bytes, abs=2
    )
    if mode == "none":
        assert charged_costs.saved_bytes == expected.saved_bytes


@pytest.mark.parametrize("split", [0.0, 0.6])
def test_memory_of_choices_matches_simulation(split):
    rng = np.random.default_rng(1)
    for seed, case in enumerate(CASES):
        step = Step(case, seed + 2)
        plan = planned(step, seed, split, messages=False)
        costs = step.costs()
        choices = stage_recompute_costs(
            step.graph, step.modules, step.metas, MODEL, names=BOTH, targets=step.targets
        )
        problems = build_rank_problems(
            plan, costs, CandidateTables(costs, choices, MAX_CANDIDATES), 1 << 50
        )
        for _ in range(5):
            recompute, peaks = {}, []
            for each in problems:
                pairs, candidates = each.problem.extra_ms_NC.shape
                choice_N = rng.integers(0, candidates, pairs)
                recompute |= each.recompute(choice_N)
                used_T = each.problem.used_bytes_T(choice_N)
                peaks.append((1 << 50) - int((each.problem.free_bytes_T - used_T).min()))
            chosen = replace(plan, recompute=recompute)
            validate_plan(chosen).raise_for_problems()
            simulated = simulate(chosen, add_recompute_costs(costs, recompute, choices))
            assert simulated.peak_bytes == pytest.approx(peaks, abs=60)
        assert any(recompute.values())


@pytest.mark.parametrize("split", [0.0, 0.6])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_tuned_plans_stay_within_limits(case, split):
    step = Step(case, 7)
    plan = planned(step, 1, split)
    minimum, maximum = limits(step, plan)
    extra = []
    for share in (0.0, 0.1, 0.4, 0.7, 1.0):
        limit = round(minimum + share * (maximum - minimum))
        exact = tuned(step, plan, limit, solver=solve_exactly)
        validate_plan(exact.plan).raise_for_problems()
        step_ = simulate(exact.plan, exact.costs)
        assert step_.fits and max(exact.peak_bytes) <= limit
        for simulated, bound in zip(step_.peak_bytes, exact.peak_bytes, strict=True):
            assert simulated <= bound + 60
        quick = tuned(step, plan, limit)
        assert simulate(quick.plan, quick.costs).fits
        assert sum(quick.bound_ms) <= sum(exact.extra_ms) + 1e-9
        assert sum(exact.extra_ms) <= sum(quick.extra_ms) + 1e-9
        again_ms = pairs_ms(exact.costs) - pairs_ms(step.costs())
        assert again_ms == pytest.approx(sum(exact.extra_ms))
        extra.append(sum(exact.extra_ms))
    assert extra == sorted(extra, reverse=True) and extra[0] > extra[-1] == 0
    assert not tuned(step, plan, maximum).plan.recompute


def test_mirrors_choose_the_same_modes(monkeypatch):
    """Use encoder tasks that leave different amounts of memory on the ranks of mirrors."""
    step = Step(CASES[0], 7)
    layers = module_layers(step.modules, step.metas)
    layout = colocated_layout(layers, 1, slices={"vision": 2}, mirrors=2)
    step.graph = StageGraph(layout, len(step.metas), step.graph.sub_microbatches)
    plan = lower_plan(gpipe(step.graph), step.graph, {})  # the first replica has all encoder tasks
    needs = memory_needs(plan, step.modules, step.metas, LayerTuning(MODEL, BOTH, 1), step.targets)
    assert needs[0] != needs[1]
    minimum, maximum = (max(each) for each in zip(*needs, strict=True))

    def differing_tasks(share: float) -> int:
        limit = round(minimum + share * (maximum - minimum))
        result = tuned(step, plan, limit)
        assert result.plan.recompute and max(result.peak_bytes) <= limit
        assert simulate(result.plan, result.costs).fits
        modes_of_tasks = [
            [
                result.plan.recompute.get(task._replace(stage=s))
                for s in layout.mirror_stages[task.stage]
            ]
            for task in step.graph.tasks()
        ]
        return sum(len(set(modes)) > 1 for modes in modes_of_tasks)

    shares = (0.2, 0.4, 0.6, 0.8)
    assert not any(map(differing_tasks, shares))
    monkeypatch.setattr(tuning_module, "_differing_mirrors", lambda *_: {})
    assert any(map(differing_tasks, shares))


def test_unsatisfiable_limits_name_rank_and_bytes():
    step = Step(CASES[0])
    plan = planned(step, 1)
    minimum, _ = limits(step, plan)
    tuned(step, plan, minimum)
    with pytest.raises(PlanError, match=rf"rank \d, \d[FB]\d.*{minimum} bytes.*memory_limit"):
        tuned(step, plan, minimum - 1)


def test_unnamed_modules_keep_their_mode():
    step = Step(CASES[0])
    plan = planned(step, 1)
    fixed = replace(MODEL, executions={"vision": Execution(recompute="full"), "llm": Execution()})
    tuning = LayerTuning(fixed, frozenset({"llm"}), 1 << 40)
    peak = max(tune_layers(plan, step.modules, step.metas, tuning, step.targets).peak_bytes)
    tight = replace(tuning, memory_limit_bytes=peak - 2000)
    result = tune_layers(plan, step.modules, step.metas, tight, step.targets)
    stages = step.graph.layout.stages
    assert result.plan.recompute
    assert {stages[task.stage].module for task in result.plan.recompute} == {"llm"}


def test_candidates_are_the_pareto_front():
    rng = np.random.default_rng(2)
    for kinds in ((0, 0, 0), (0, 1, 1, 0), (1, 0, 2, 1, 0)):
        count = max(kinds) + 1
        again = np.sort(rng.random((count, 3, 1)), axis=1)
        again[:, 0] = 0
        kept = np.sort(rng.random((count, 3, 1)), axis=1)[:, ::-1].copy()
        choices = StageRecompute((Task(0, 0),), kinds, again / 4, again * 3 / 4, 0 * again, kept)

        def point(modes, choices=choices):
            times, saved = choices.extra_ms_N(modes)[0], choices.saved_bytes_N(modes)[0]
            return round(times, 9), round(-saved, 9)

        points = {point(modes) for modes in product(LAYER_MODES, repeat=len(kinds))}
        best = {
            p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
        }
        assert {point(modes) for modes in stage_candidates(choices, 1000)} == best
        few = stage_candidates(choices, 4)
        assert few[0] == ("none",) * len(kinds) and few[-1] == ("full",) * len(kinds)
        assert len(few) <= 4
    with pytest.raises(ValueError, match="1 candidates"):
        stage_candidates(choices, 1)


def test_first_layers_recompute_most():
    kept = np.array([[[100.0], [40.0], [10.0]]])
    again = np.array([[[0.0], [1.0], [4.0]]])
    choices = StageRecompute((Task(0, 0),), (0, 0, 0), 0 * again, again, 0 * again, kept)
    assert choices.transient_bytes_N(("full", "selective", "none")) == [0]
    assert choices.transient_bytes_N(("none", "none", "full")) == [90]
    assert choices.transient_bytes_N(("full", "full", "full")) == [90]
    assert choices.transient_bytes_N(("full", "full", "selective")) == [60]
    for modes in stage_candidates(choices):
        ranks = [LAYER_MODES.index(mode) for mode in modes]
        assert ranks == sorted(ranks, reverse=True)


DISCRETE = replace(
    MODEL,
    profile=replace(
        MODEL.profile,
        device=replace(MODEL.profile.device, host_bytes_per_s=16e9, host_memory_bytes=1e12),
    ),
)
"""Device with memory that is separate from host memory."""


def test_inputs_are_offloaded_only_if_faster():
    step = Step(CASES[0], 7)
    plan = planned(step, 1)
    minimum, maximum = limits(step, plan)
    plan_arguments = plan, step.modules, step.metas
    alone = LayerTuning(DISCRETE, BOTH, 0)
    both = replace(alone, offloads=BOTH)
    needs = memory_needs(*plan_arguments, both, step.targets)
    leaner = max(need.least_bytes for need in needs)
    assert leaner < minimum
    for share in (0.0, 0.1, 0.5, 1.0):
        limit = round(minimum + share * (maximum - minimum))
        with_, without = (
            tune_layers(*plan_arguments, replace(t, memory_limit_bytes=limit, solver=solve_exactly),
                        step.targets)
            for t in (both, alone)
        )  # fmt: skip
        assert not any(without.host_bytes)
        assert sum(with_.extra_ms) <= sum(without.extra_ms) * (1 + 1e-9)
    lean = tune_layers(*plan_arguments, replace(both, memory_limit_bytes=leaner), step.targets)
    assert any(lean.host_bytes)
    simulated = simulate(lean.plan, lean.costs)
    assert simulated.fits
    again = compute_plan_costs_with_recompute(
        lean.plan, step.modules, step.metas, DISCRETE, targets=step.targets
    )
    assert pairs_ms(again) == pytest.approx(pairs_ms(lean.costs))
    slow = replace(DISCRETE.profile.device, host_bytes_per_s=1e6)
    far = replace(both, model=replace(DISCRETE, profile=replace(DISCRETE.profile, device=slow)))
    chosen = tune_layers(*plan_arguments, replace(far, memory_limit_bytes=minimum), step.targets)
    assert not any(chosen.host_bytes), "recomputing is faster"


def test_offloading_needs_separate_host_memory():
    step = Step(CASES[0], 7)
    plan = planned(step, 1)
    minimum, _ = limits(step, plan)
    same = tuned(step, plan, minimum, offloads=BOTH)
    assert same.plan.recompute == tuned(step, plan, minimum).plan.recompute
    device = replace(DISCRETE.profile.device, host_memory_bytes=100.0)
    model = replace(DISCRETE, profile=replace(DISCRETE.profile, device=device))
    tuning = LayerTuning(model, BOTH, minimum - 1, offloads=BOTH)
    with pytest.raises(PlanError, match="memory_limit"):
        tune_layers(plan, step.modules, step.metas, tuning, step.targets)


def test_received_inputs_are_not_offloaded():
    tables = np.array([[[0.0], [1.0], [4.0], [6.0]]])
    kept = np.array([[[100.0], [40.0], [10.0], [0.0]]])
    first_stage = StageRecompute((Task(0, 0),), (0, 0, 0), 0 * tables, tables, 0 * tables, kept)
    later = replace(first_stage, received_bytes_MN=np.array([[0.0], [0.0], [0.0], [10.0]]))
    offloaded = ("offload",) * 3
    assert first_stage.saved_bytes_N(offloaded) == [300] and later.saved_bytes_N(offloaded) == [290]
    assert first_stage.transient_bytes_N(offloaded) == [100] and later.transient_bytes_N(
        offloaded
    ) == [100]
    assert later.transient_bytes_N(("offload", "none", "none")) == [0]
    assert first_stage.host_bytes_N(("full", "offload", "none")) == [16]  # a power of two
    assert first_stage.host_bytes_N(("full", "selective", "none")) == [0]
    assert ("full", "offload", "offload") in stage_candidates(later, 1000)
    # A first layer that saves another tensor of its input saves the input only if it is recomputed.
    partial = replace(first_stage, received_bytes_MN=np.array([[10.0], [0.0], [0.0], [10.0]]))
    full = ("full",) * 3
    assert first_stage.saved_bytes_N(full) == [270] and partial.saved_bytes_N(full) == [280]
    assert partial.saved_bytes_N(offloaded) == [300] and partial.saved_bytes_N(("none",) * 3) == [0]


def test_dominated_candidates_are_removed():
    extra_NC = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 2.0], [0.0, 1.0, 2.0]])
    kept_NC = np.array([[9, 5, 1], [9, 5, 1], [9, 10, 1]])
    assert sort_candidates(extra_NC, kept_NC).tolist() == [[0, 1, 2], [0, 2, 2], [0, 2, 2]]


@pytest.mark.parametrize("name", ["vlm_s", "t2v_s"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_published_models_match_uniform_mode_costs(name, mode):
    path = Path(__file__).parents[4] / f"recipes/papers/pipeweaver_{name}.toml"
    overrides = ["--training.global_batch_size", "4", "--activation_checkpoint.mode", "none"]
    recipe = load_recipe(path, [*overrides, "--activation_checkpoint.modules", "{}"]).recipe
    recipe.activation_checkpoint.modules.clear()
    simulator = StepSimulator(
        recipe, recipe.simulation.gpus, load_profile(recipe.simulation.device)
    )
    executions = module_executions(simulator.run, simulator.modules, simulator.profile.device.type)
    metas = simulator.workload.microbatches
    parallel = recipe.parallel.model_copy(update={"schedule": "separated"})
    graph = step_graph(plan_layout(parallel, simulator.modules, metas), parallel, metas)
    no_recompute, uniform_model = (
        CostModel(simulator.profile, "bfloat16", {
            n: replace(e, recompute=recompute) for n, e in executions.items()
        })
        for recompute in ("none", mode)
    )  # fmt: skip
    choices = stage_recompute_costs(
        graph, simulator.modules, metas, no_recompute, names=frozenset(executions)
    )
    layers = {s.index: s.stop - s.start for s in graph.layout.stages}
    recompute = {t: (mode,) * layers[t.stage] for c in choices.values() for t in c.tasks}
    charged_costs = add_recompute_costs(
        compute_plan_costs(graph, simulator.modules, metas, no_recompute), recompute, choices
    )
    uniform = compute_plan_costs(graph, simulator.modules, metas, uniform_model)
    for task in recompute:
        assert charged_costs.saved_bytes[task] == pytest.approx(uniform.saved_bytes[task], abs=2)
        for kind in (ActionType.F, ActionType.B):
            action = Action(kind, *task)
            assert charged_costs.compute_ms[action] == pytest.approx(uniform.compute_ms[action])
