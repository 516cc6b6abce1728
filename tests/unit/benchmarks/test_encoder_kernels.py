"""Encoder kernels: the work of full actions, overlapped with LLM communication."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torchmm.balance.optimus.action_order import best_optimus_step
from torchmm.balance.optimus.encoder_work import encoder_work
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers

T = ActionType
LAYER = LayerDescription(64, 4, 4, 16, 256, False, False, parameters=12 * 64**2)
VISION = ModuleDescription("vision", "encoder", (LAYER,) * 5, 1, 1, 5 * LAYER.parameters)
IMAGES = (2, 0, 1, 1, 2, 1, 0, 1)


@pytest.fixture
def model(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("support.models.kernel_steps")


@pytest.fixture
def step() -> tuple[StageGraph, PlanCosts]:
    """Return a graph of encoder and LLM stages, and its costs.

    Five encoder layers are in two stages per pipeline. The LLM communicates for a third of its
    time. No rank is idle for as long as an encoder layer takes.
    """
    layers = [
        ModuleLayers("vision", "encoder", (1.0,) * 5, sub_microbatched=True),
        ModuleLayers("llm", "llm", (1.0,) * 8),
    ]
    layout = colocated_layout(layers, 4, 2, pipelines={"vision": 2}, slices={"vision": 2})
    graph = StageGraph(layout, 8, {"vision": IMAGES})
    compute = {}
    for task in graph.tasks():
        stage = layout.stages[task.stage]
        forward_ms = (0.4 if stage.module == "vision" else 1.0) * (stage.stop - stage.start)
        factors = {T.F: 1.0, T.B: 2.0, T.I: 1.0, T.W: 1.0}
        compute |= {Action(k, *task): factor * forward_ms for k, factor in factors.items()}
    return graph, PlanCosts(compute, {action: ms / 3 for action, ms in compute.items()})


def test_kernel_times_sum_to_action_times(model, step):
    graph, costs = step
    work, kernels = encoder_work(graph, costs, "vision"), model.kernel_work(graph, costs, VISION)
    shape = (*work.forward_ms_NSK.shape, -1)
    assert kernels.forward_ms_NSK.reshape(shape).sum(-1) == pytest.approx(work.forward_ms_NSK)
    assert kernels.backward_ms_NSK.reshape(shape).sum(-1) == pytest.approx(work.backward_ms_NSK)
    for links, ms_NSK in zip(
        kernels.links, (kernels.forward_ms_NSK, kernels.backward_ms_NSK), strict=True
    ):
        assert ms_NSK[..., links].sum() == pytest.approx(ms_NSK.sum() / 3)
    # Matmuls of 64 x 64: three for Q, K and V, one after attention, four and four.
    layer = kernels.forward_ms_NSK[0, 0].reshape(2, -1)[0]
    matmuls = layer[~kernels.links[0][: len(layer)] & (layer > 0)]
    assert matmuls / matmuls.sum() == pytest.approx(np.array([3, 1, 4, 4]) / 12)


def test_kernels_fill_bubbles_inside_llm_actions(model, step):
    graph, costs = step
    coarse = best_optimus_step(graph, costs)
    planned = model.optimus_kernels(graph, costs, [VISION])
    assert planned.schedule.total_ms < coarse.schedule.total_ms
    assert not order_problems(planned.graph, planned.order)
    hidden = planned.hidden_ms
    assert sum(hidden.values()) > 0.2 * planned.schedule.works[0].busy_ms
    assert all(-1e-6 <= ms <= costs.compute_ms[a] + 1e-6 for a, ms in hidden.items())
    plan = lower_plan(planned.order, planned.graph, {})
    actual, unfilled = simulate(plan, planned.costs(costs)), simulate(plan, costs)
    assert actual.makespan_ms < unfilled.makespan_ms
    assert actual.makespan_ms <= 1.05 * planned.schedule.total_ms
    # Without communication, no time can be hidden.
    without_comm = model.optimus_kernels(graph, replace(costs, tp_comm_ms={}), [VISION])
    assert sum(without_comm.hidden_ms.values()) == pytest.approx(0, abs=1e-6)


def test_hidden_time_is_inside_llm_actions(model, step):
    graph, costs = step
    planned = model.optimus_kernels(graph, costs, [VISION])
    schedule, (work,) = planned.schedule, planned.schedule.works
    inside = 0.0
    for row, pipeline in enumerate(schedule.pipeline_N[0].tolist()):
        for position, device in enumerate(work.devices_MS[pipeline].tolist()):
            llm_spans = schedule.llm[device]
            spans = list(zip(llm_spans.start_ps.tolist(), llm_spans.end_ps.tolist(), strict=True))
            for starts, ms_NSK in (
                (schedule.forward_start_ps[0], work.forward_ms_NSK),
                (schedule.backward_start_ps[0], work.backward_ms_NSK),
            ):
                for start, ms in zip(starts[row, position], ms_NSK[row, position], strict=True):
                    end = start + ms * 1e9
                    inside += sum(max(0, min(end, b) - max(start, a)) for a, b in spans) / 1e9
    assert sum(model.hidden_ms(schedule, planned.graph).values()) == pytest.approx(inside)


@pytest.mark.parametrize("name", ["searched", "zero_bubble", "gpipe"])
def test_kernels_support_any_llm_schedule(model, step, name):
    graph, costs = step
    planned = model.optimus_kernels(graph, costs, [VISION], llm_schedule=name, evaluations=16)
    assert not order_problems(planned.graph, planned.order)
    simulated = simulate(lower_plan(planned.order, planned.graph, {}), planned.costs(costs))
    assert simulated.makespan_ms >= planned.schedule.llm_ms
