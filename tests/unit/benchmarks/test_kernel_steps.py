"""Encoders kernel by kernel: the work of whole actions, hidden where the LLM communicates."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torchmm.balance.optimus.encoder_work import encoder_work
from torchmm.balance.optimus.order import optimus
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_costs import PlanCosts
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
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("support.models.kernel_steps")


@pytest.fixture
def step() -> tuple[StageGraph, PlanCosts]:
    """Five encoder layers in two stages per pipeline, an LLM that communicates a third of its
    time; nothing is idle for as long as a layer of the encoder takes."""
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
        shares = {T.F: 1.0, T.B: 2.0, T.I: 1.0, T.W: 1.0}
        compute |= {Action(k, *task): share * forward_ms for k, share in shares.items()}
    return graph, PlanCosts(compute, {action: ms / 3 for action, ms in compute.items()})


def test_kernels_are_the_work_of_their_actions(model, step):
    graph, costs = step
    whole, kernels = encoder_work(graph, costs, "vision"), model.kernel_work(graph, costs, VISION)
    shape = (*whole.forward_ms_NSK.shape, -1)
    assert kernels.forward_ms_NSK.reshape(shape).sum(-1) == pytest.approx(whole.forward_ms_NSK)
    assert kernels.backward_ms_NSK.reshape(shape).sum(-1) == pytest.approx(whole.backward_ms_NSK)
    for links, ms_NSK in zip(
        kernels.links, (kernels.forward_ms_NSK, kernels.backward_ms_NSK), strict=True
    ):
        assert ms_NSK[..., links].sum() == pytest.approx(ms_NSK.sum() / 3)
    # Of 64 x 64 products: three for queries, keys and values, one behind attention, four and four.
    layer = kernels.forward_ms_NSK[0, 0].reshape(2, -1)[0]
    products = layer[~kernels.links[0][: len(layer)] & (layer > 0)]
    assert products / products.sum() == pytest.approx(np.array([3, 1, 4, 4]) / 12)


def test_bubbles_inside_of_actions_are_filled_and_only_those(model, step):
    graph, costs = step
    whole = optimus(graph, costs)
    planned = model.optimus_kernels(graph, costs, [VISION])
    assert planned.schedule.total_ms < whole.schedule.total_ms
    assert not order_problems(planned.graph, planned.order)
    hidden = planned.hidden_ms
    assert sum(hidden.values()) > 0.2 * planned.schedule.works[0].busy_ms
    assert all(-1e-6 <= ms <= costs.compute_ms[a] + 1e-6 for a, ms in hidden.items())
    plan = lower_plan(planned.order, planned.graph, {})
    found, bare = simulate(plan, planned.costs(costs)), simulate(plan, costs)
    assert found.makespan_ms < bare.makespan_ms
    assert found.makespan_ms <= 1.05 * planned.schedule.total_ms
    # Without communication there is nothing to hide in.
    alone = model.optimus_kernels(graph, replace(costs, tensor_ms={}), [VISION])
    assert sum(alone.hidden_ms.values()) == pytest.approx(0, abs=1e-6)


def test_hidden_time_is_that_inside_of_the_llms_actions(model, step):
    graph, costs = step
    planned = model.optimus_kernels(graph, costs, [VISION])
    schedule, (work,) = planned.schedule, planned.schedule.works
    inside = 0.0
    for row, pipeline in enumerate(schedule.pipeline_N[0].tolist()):
        for position, device in enumerate(work.devices_MS[pipeline].tolist()):
            own = schedule.llm[device]
            spans = list(zip(own.start_ps.tolist(), own.end_ps.tolist(), strict=True))
            for starts, ms_NSK in (
                (schedule.forward_start_ps[0], work.forward_ms_NSK),
                (schedule.backward_start_ps[0], work.backward_ms_NSK),
            ):
                for start, ms in zip(starts[row, position], ms_NSK[row, position], strict=True):
                    end = start + ms * 1e9
                    inside += sum(max(0, min(end, b) - max(start, a)) for a, b in spans) / 1e9
    assert sum(model.hidden_ms(schedule, planned.graph).values()) == pytest.approx(inside)


@pytest.mark.parametrize("name", ["searched", "zero_bubble", "gpipe"])
def test_any_order_of_the_llm_will_do(model, step, name):
    graph, costs = step
    planned = model.optimus_kernels(graph, costs, [VISION], llm_schedule=name, evaluations=16)
    assert not order_problems(planned.graph, planned.order)
    done = simulate(lower_plan(planned.order, planned.graph, {}), planned.costs(costs))
    assert done.makespan_ms >= planned.schedule.llm_ms
