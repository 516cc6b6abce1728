"""Tests of plan costs: completeness, message sizes and invalid arguments."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from pipeline_cases import KINDS, Case, step_of
from random_orders import random_order

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.devices import WITHIN_NODE
from torchmm.costs.execution import Execution
from torchmm.costs.flops import microbatch_flops, module_layers
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.plan.slices import TensorParallelism
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.colocated import colocated_layout

MODEL = CostModel(load_profile("cpu"), "float32", {"vision": Execution(), "llm": Execution()})
ENCODERS = [("clip", None), ("siglip, folded", "qwen2_5_vl"), ("siglip2", "clip")]


class Step:
    """Step of random microbatches of a test case."""

    def __init__(self, case: Case, seed: int = 3) -> None:
        self.case = case
        self.model = case.build()
        self.modules: list[ModuleDescription] = [
            m.describe() for m in self.model.modality_modules()
        ]
        batch, parts = step_of(case, seed)
        self.metas: list[MicrobatchMeta] = [m.meta for m in batch]
        self.targets = [m.target_count for m in batch]
        self.graph = StageGraph(case.layout(), len(batch), parts)

    def costs(self, model: CostModel = MODEL) -> PlanCosts:
        return compute_plan_costs(self.graph, self.modules, self.metas, model, targets=self.targets)


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@pytest.mark.parametrize("freeze", [(), ("vision",), ("llm",)], ids=str)
def test_action_flops_sum_to_microbatch_flops(encoder, freeze) -> None:
    case = Case("sum", pipeline=2, encoder=encoder[0], second=encoder[1], freeze=freeze)
    step = Step(case)
    costs = step.costs()
    totals = {ActionType.F: 0.0, ActionType.B: 0.0}
    for action, flops in costs.flops.items():
        totals[action.type] = totals.get(action.type, 0.0) + flops
    expected = [
        module_flops
        for meta, targets in zip(step.metas, step.targets, strict=True)
        for module_flops in microbatch_flops(step.modules, meta, targets).values()
    ]
    assert totals[ActionType.F] == pytest.approx(sum(f.forward for f in expected))
    assert totals[ActionType.B] == pytest.approx(sum(f.backward for f in expected))


@pytest.mark.parametrize("freeze", [(), ("llm",), ("vision",)], ids=str)
def test_every_action_has_a_cost(freeze) -> None:
    step = Step(Case("complete", pipeline=2, encoder="siglip2", freeze=freeze))
    costs = step.costs()
    order = random_order(step.graph, 4, split=0.5)
    assert not order_problems(step.graph, order)
    plan = lower_plan(order, step.graph, {}, sharding="step")
    for action in (a for row in plan.actions for a in row):
        if action.type in COMPUTE:
            assert costs.compute_ms[action] > 0, action
            assert action in costs.flops
        if action.type in (ActionType.UNSHARD, ActionType.REDUCE_GRAD):
            assert action.stage in costs.gather_ms
    assert set(costs.saved_bytes) == set(step.graph.tasks())
    for task, kept in costs.saved_bytes.items():
        # For W, torch keeps the full graph and the gradients of linear layer outputs.
        waiting = costs.saved_for_weights_bytes[task]
        assert waiting == 0 or waiting > kept > 0, task
    assert len(costs.static_bytes) == 2
    assert min(costs.static_bytes) > 0


@pytest.mark.parametrize("encoder", KINDS)
def test_transfer_times_match_message_bytes(encoder) -> None:
    step = Step(Case("messages", pipeline=4, encoder=encoder))
    by_name = {m.name: m for m in step.model.modality_modules()}
    specs = message_specs(step.graph, by_name, step.metas, torch.float32)
    costs, ranks = step.costs(), step.graph.rank
    assert costs.transfer_ms
    for message, tensors in specs.items():
        producer, consumer = step.graph.producer(message), step.graph.consumer(message)
        nbytes = sum(prod(t.shape) * t.dtype.itemsize for t in tensors)
        for backward in (False, True):
            key = message, backward
            crosses_ranks = ranks(producer) != ranks(consumer)
            assert (key in costs.transfer_ms) == crosses_ranks
            if crosses_ranks:
                assert costs.transfer_ms[key] == MODEL.transfer_times_ms([nbytes], [WITHIN_NODE])[0]


@pytest.mark.parametrize("encoder", KINDS)
def test_sliced_transfer_times_match_message_bytes(encoder) -> None:
    """Compare bytes without padding, and check the all-gathers of the consumer."""
    full = Step(Case("messages", pipeline=4, encoder=encoder, tensor=2))
    sliced = Step(Case("messages", pipeline=4, encoder=encoder, tensor=2, sequence_parallel=True))
    split = {m.name: Execution(tensor=2, sequence_parallel=True) for m in full.modules}
    model = CostModel(load_profile("cpu"), "float32", split)
    by_name = {m.name: m for m in sliced.model.modality_modules()}
    specs = message_specs(sliced.graph, by_name, sliced.metas, torch.float32)
    costs, before = sliced.costs(model), full.costs(model)
    assert costs.transfer_ms.keys() == before.transfer_ms.keys()
    for message, backward in costs.transfer_ms:
        assert all(spec.slices is not None for spec in specs[message])
        sent = sum(spec.local_spec(source=True).nbytes for spec in specs[message])
        exact = sum(spec.nbytes for spec in specs[message]) / 2
        assert exact <= sent
        expected_ms, full_ms = model.transfer_times_ms([exact, 2 * exact], [WITHIN_NODE] * 2)
        assert costs.transfer_ms[message, backward] == pytest.approx(expected_ms)
        assert before.transfer_ms[message, backward] == pytest.approx(full_ms)
    longer = {a for a, ms in costs.compute_ms.items() if ms > before.compute_ms[a]}
    gathering = set()
    for message, tensors in specs.items():
        if any(spec.needs_all_gather for spec in tensors):
            gathering.add(Action(ActionType.F, *sliced.graph.consumer(message)))
            producer = sliced.graph.producer(message)
            gathering |= {Action(ActionType.B, *producer), Action(ActionType.I, *producer)}
    assert longer == gathering & costs.compute_ms.keys()
    assert all(ms >= before.compute_ms[a] for a, ms in costs.compute_ms.items())


def test_transfer_costs_to_more_tensor_ranks() -> None:
    """Check that each destination rank receives a full tensor, or its slice of a sliced tensor."""
    step = Step(Case("messages", pipeline=4))

    def costs(vision: TensorParallelism, llm: TensorParallelism) -> PlanCosts:
        tensor = {"vision": vision, "llm": llm}
        graph = replace(step.graph, layout=replace(step.graph.layout, tensor_parallel=tensor))
        return compute_plan_costs(graph, step.modules, step.metas, MODEL)

    plain = costs(TensorParallelism(), TensorParallelism()).transfer_ms
    copied = costs(TensorParallelism(), TensorParallelism(4)).transfer_ms
    sliced = costs(TensorParallelism(1, True, True), TensorParallelism(4, True, True)).transfer_ms
    between = [
        key for key in plain
        if [step.graph.layout.stages[i].module for i in key[0][:2]] == ["vision", "llm"]
    ]  # fmt: skip
    assert between
    for key in between:
        assert sliced[key] == plain[key]  # sent by the only rank of the encoder
        assert copied[key] == plain[key] if key[1] else copied[key] > plain[key]


def test_unassigned_replicas_have_transfer_times() -> None:
    """Compare with the costs after replicas are assigned."""
    step = Step(Case("replicas"))
    layers = module_layers(step.modules, step.metas)
    layout = colocated_layout(layers, 2, slices={"vision": 2})
    counts = {"vision": tuple(int(meta.module_image_count("vision") > 0) for meta in step.metas)}
    graph = StageGraph(layout, len(step.metas), counts)
    unassigned = compute_plan_costs(graph, step.modules, step.metas, MODEL).transfer_ms
    transfers = 0
    for replica in range(2):
        tasks = [("vision", index, 0) for index, count in enumerate(counts["vision"]) if count]
        assigned = replace(graph, replica=dict.fromkeys(tasks, replica))
        chosen = compute_plan_costs(assigned, step.modules, step.metas, MODEL).transfer_ms
        assert all(unassigned[key] == ms for key, ms in chosen.items())
        transfers += sum(layout.stages[key[0].source].module == "vision" for key in chosen)
    assert transfers == 2 * len(tasks)  # outputs of the second replica, and their gradients


def test_tensor_parallel_stages_have_exposed_communication() -> None:
    step = Step(Case("tensor", pipeline=2))
    both = {name: Execution(tensor=2) for name in ("vision", "llm")}
    costs = step.costs(CostModel(load_profile("cpu"), "float32", both))
    # Gradients of sharded weights need no communication.
    assert set(costs.tp_comm_ms) == {a for a in costs.compute_ms if a.type is not ActionType.W}
    assert all(0 < ms < costs.compute_ms[action] for action, ms in costs.tp_comm_ms.items())
    assert not step.costs().tp_comm_ms


def test_tied_stages_exchange_gradients() -> None:
    tied = Step(Case("tied", pipeline=2, tied=True)).costs().tied_ms
    assert len(tied) == 2
    assert min(tied.values()) > 0
    assert not Step(Case("tied", pipeline=2, tied=False)).costs().tied_ms


def test_plan_costs_reject_mismatched_graph() -> None:
    step = Step(Case("refused", pipeline=2))
    with pytest.raises(ValueError, match="one of each per microbatch"):
        compute_plan_costs(step.graph, step.modules, step.metas[1:], MODEL, targets=step.targets)
    with pytest.raises(ValueError, match="no descriptions of the modules"):
        compute_plan_costs(step.graph, step.modules[1:], step.metas, MODEL)
    crowded = StageGraph(step.graph.layout, 1, {"vision": (9,)})
    with pytest.raises(ValueError, match="9 sub-microbatches for the"):
        compute_plan_costs(
            crowded, step.modules, [m for m in step.metas if m.image_count][:1], MODEL
        )


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_layerwise_fsdp_reduces_in_backward(device, each) -> None:
    step = Step(Case("sharded", pipeline=1, freeze=("vision",)))
    # The host needs no time, so that the device determines the time of these small actions.
    profile = replace(load_profile(device), launch_us=0.0)
    dtype = "float32" if device == "cpu" else "bfloat16"
    names = ("vision", "llm")
    alone, sharded = (
        CostModel(
            profile, dtype, dict.fromkeys(names, Execution(**sizes, reduces_every_microbatch=each))
        )
        for sizes in ({}, {"shard": 2, "replicate": 2})
    )
    step_arguments = step.graph, step.modules, step.metas
    before = compute_plan_costs(
        *step_arguments, alone, targets=step.targets, layerwise=True
    ).compute_ms
    after = compute_plan_costs(
        *step_arguments, sharded, targets=step.targets, layerwise=True
    ).compute_ms
    assert before == compute_plan_costs(*step_arguments, alone, targets=step.targets).compute_ms
    last = len(step.metas) - 1
    for action, ms in before.items():
        stage = step.graph.layout.stages[action.stage]
        if ms == 0 or action.type not in (ActionType.F, ActionType.B):
            continue
        module = next(m for m in step.modules if m.name == stage.module)
        work = sharded.gather_work(module, stage.start, stage.stop)
        if action.type is ActionType.B and (each or action.microbatch == last):
            span = module, stage.start, stage.stop
            work = work.add(sharded.reduce_work(*span, replicas=action.microbatch == last))
        copied_ms, sent_ms = work.compute_ms[0], work.network_ms[0]
        # On GPUs, one chunk does not overlap. Each layer is a chunk, and so are the root
        # parameters.
        alone_ms = sent_ms if device == "cpu" else sent_ms / (stage.stop - stage.start + 1)
        computed_ms = ms + copied_ms
        # Collectives use 20 of 132 multiprocessors while they overlap with layers.
        computed_ms += 20 / 132 * min(computed_ms, sent_ms - alone_ms)
        expected_ms = max(computed_ms, sent_ms - alone_ms) + alone_ms
        assert after[action] == pytest.approx(expected_ms), action
