"""Tests of DeepStack costs: bytes of messages and FLOPs of mergers."""

from dataclasses import replace
from math import prod

import pytest
import torch
from pipeline_cases import LAYERS, Case, step_of
from torch.utils.flop_counter import FlopCounterMode

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import _extra_values, _message_bytes, compute_plan_costs
from torchmm.costs.blocks import stage_blocks
from torchmm.costs.sizes import module_tasks, text_tokens
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout

CASE = Case("deepstack", encoder="qwen3_vl", tied=False)


@pytest.fixture
def cost_model() -> CostModel:
    return CostModel(load_profile("h100"), "bfloat16")


def graph_and_batch(seed: int):
    batch, parts = step_of(CASE, seed)
    cuts = {name: [StageSplit(1, (i % 2,)) for i in range(LAYERS)] for name in ("vision", "llm")}
    return StageGraph(build_layout(CASE.modules(), cuts), len(batch), parts), batch


@pytest.mark.parametrize("seed", [0, 1, 3])  # with enough images
def test_deepstack_message_bytes_match_specs(seed: int, cost_model: CostModel) -> None:
    graph, batch = graph_and_batch(seed)
    metas = [m.meta for m in batch]
    modules = {m.name: m for m in CASE.build().modality_modules()}
    specs = message_specs(graph, modules, metas, torch.bfloat16)
    assert (
        max(len(tensors) for tensors in specs.values()) == 3
    )  # two DeepStack features before the last stage
    counts = [text_tokens(meta) for meta in metas]
    tasks = {n: module_tasks(graph, m.describe(), metas, counts) for n, m in modules.items()}
    compared = 0
    for message, tensors in specs.items():
        edge = message.source, message.destination
        # Sub-microbatches determine the size of messages between an encoder and another module.
        has_sub_microbatches = [graph.layout.has_sub_microbatches(stage) for stage in edge]
        sized_by = edge[1] if has_sub_microbatches == [False, True] else edge[0]
        module = tasks[graph.layout.stages[sized_by].module]
        key = message.microbatch, message.sub_microbatch
        nbytes = dict(
            zip(module.keys, _message_bytes(graph.layout, edge, module, cost_model), strict=True)
        )[key]
        nbytes += 2 * _extra_values(graph.layout, edge, tasks).get(key, 0.0)
        assert nbytes == sum(2 * prod(spec.shape) for spec in tensors), message
        compared += len(tensors) > 1
    assert compared


def test_deepstack_adds_plan_costs(cost_model: CostModel) -> None:
    graph, batch = graph_and_batch(1)
    metas = [m.meta for m in batch]
    modules = [m.describe() for m in CASE.build().modality_modules()]
    deep = compute_plan_costs(graph, modules, metas, cost_model)
    without = [replace(m, deepstack_layers=()) for m in modules]
    less = compute_plan_costs(graph, without, metas, cost_model)
    wider = [key for key, time in deep.transfer_ms.items() if time > less.transfer_ms[key]]
    first = graph.layout.stages[0].index
    assert any(message.source == first for message, _ in wider)
    assert any(graph.layout.stages[m.destination].module == "llm" for m, _ in wider)
    kept = [task for task, size in deep.saved_bytes.items() if size > less.saved_bytes[task]]
    assert {graph.layout.stages[task.stage].module for task in kept} == {"vision", "llm"}


def test_deepstack_merger_flops_and_parameters() -> None:
    model = CASE.build()
    materialize(model, "cpu")
    init_weights(model, 0)
    encoder = model.encoders["vision"]
    description = encoder.describe()
    hidden = torch.randn(8, 32)
    with FlopCounterMode(display=False) as counter:
        output = encoder.connector(hidden, [hidden] * 3)
    assert output.shape == (2, 4 * 32)
    assert counter.get_total_flops() == 2 * description.head_flops_per_unit
    mergers = sum(p.numel() for p in encoder.connector.parameters())
    assert description.head_parameters == mergers
    assert description.deepstack_layers == (0, 1, 3) and model.llm.describe().deepstack_layers == (
        0,
        1,
        2,
    )


def test_deepstack_mergers_belong_to_connector() -> None:
    frozen = Case("frozen", encoder="qwen3_vl", tied=False, freeze=("vision",))
    description = frozen.build().encoders["vision"].describe()
    assert not description.trainable and description.connector_trainable
    blocks = stage_blocks(description, LAYERS, LAYERS)
    assert len(blocks) == 8 and all(block.trained for block in blocks)
