"""Tests of the token slices that tensor-parallel ranks send and receive."""

from dataclasses import replace
from math import prod

import pytest
import torch
from pipeline_cases import KINDS, Case, step_of

from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import TensorSpec
from torchmm.pipelining.plan.slices import MessageSlices, Slices, TensorParallelism
from torchmm.pipelining.plan.transfers import transfers
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import channel_pairs, channel_streams
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.disaggregated import ModuleGroupSize, disaggregated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout
from torchmm.pipelining.schedules.separated import separated

UNSLICED = MessageSlices(None, None)
MODULES = [
    ModuleLayers("vision", "encoder", (1.0,) * 4, sub_microbatched=True),
    ModuleLayers("llm", "llm", (1.0,) * 4),
]


def layout(vision: TensorParallelism, llm: TensorParallelism) -> StageLayout:
    """Return a layout with two stages per module on two ranks."""
    layout_ = separated_layout(MODULES, 2, {"llm": 1})
    assert [s.module for s in layout_.stages] == ["vision"] * 2 + ["llm"] * 2
    return replace(layout_, tensor_parallel={"vision": vision, "llm": llm})


def test_stages_of_a_module_send_local_slices():
    local = TensorParallelism(4, sends_token_slices=True, is_sequence_sharded=True)
    slices = layout(local, local).slices(2, 3, same_rank=False)
    assert slices.hidden == Slices(4, 4, gathered=False)
    assert slices.additional == Slices(4, 4), "later layers need complete features"
    assert layout(local, local).slices(2, 3, same_rank=True) == (Slices(4, 4, gathered=False), None)


def test_sent_slices_are_gathered_if_needed():
    local = TensorParallelism(4, sends_token_slices=True, is_sequence_sharded=True)
    complete = TensorParallelism(4, sends_token_slices=True)
    assert layout(local, local).slices(1, 2, same_rank=False) == (Slices(4, 4), Slices(4, 4))
    assert layout(local, local).slices(1, 2, same_rank=True) == UNSLICED
    assert layout(complete, local).slices(0, 1, same_rank=False) == (Slices(4, 4), Slices(4, 4))


def test_slices_follow_group_sizes():
    small, large = (TensorParallelism(size, True, True) for size in (2, 8))
    assert layout(small, large).slices(1, 2, same_rank=False).additional == Slices(2, 8)
    spec = TensorSpec((13, 6), torch.float32, slices=Slices(2, 8))
    assert spec.local_spec(source=True).shape == (8, 6)
    assert spec.local_spec(source=False).shape == (2, 6)
    assert spec.local_spec(source=True) == spec._replace(shape=(8, 6), slices=None)


def test_messages_are_unsliced_without_sequence_parallelism():
    split = TensorParallelism(4)
    layout_ = layout(split, split)
    assert {
        layout_.slices(*edge, same_rank=stays) for edge in layout_.edges for stays in (0, 1)
    } == {UNSLICED}
    single = TensorParallelism(1, sends_token_slices=True, is_sequence_sharded=True)
    assert layout(single, single).slices(2, 3, same_rank=False) == UNSLICED


def test_channels_between_different_groups_have_several_streams():
    equal_groups = layout(TensorParallelism(4), TensorParallelism(4))
    assert channel_streams(equal_groups) == channel_pairs(equal_groups)
    disaggregated = replace(
        disaggregated_layout(
            MODULES, {"vision": ModuleGroupSize(1, 1), "llm": ModuleGroupSize(1, 1)}, {}
        ),
        tensor_parallel={"vision": TensorParallelism(1), "llm": TensorParallelism(4)},
    )
    assert channel_streams(disaggregated) == [(0, 1)] * 4 + [(1, 0)] * 4


def mirrored(ranks: TensorParallelism) -> StageGraph:
    """Return a step with encoders on one rank each and an LLM on two ranks."""
    layout_ = replace(colocated_layout(MODULES, 2, mirrors=2), tensor_parallel={
        "vision": ranks._replace(size=1), "llm": ranks._replace(size=2),
    })  # fmt: skip
    return StageGraph(layout_, 1, {"vision": (1,)})


def test_mirrors_receive_slices_and_return_gradients():
    graph = mirrored(TensorParallelism(2, True, True))
    first, *_ = [s.index for s in graph.layout.stages if s.module == "llm"]
    entries = graph.layout.mirror_stages[first]
    assert len(entries) == 2
    for entry in entries:
        message = Message(0, entry, 0)
        assert graph.slices(message) == (Slices(2, 2), Slices(2, 2)), (
            "messages within a rank are not sliced"
        )
        assert graph.sends_gradient(message)
    assert {graph.layout.tensor_group_size(stage.index) for stage in graph.layout.stages} == {1}
    assert channel_streams(graph.layout) == channel_pairs(graph.layout)
    unsliced = mirrored(TensorParallelism(2))
    assert [unsliced.sends_gradient(Message(0, entry, 0)) for entry in entries] == [True, False]
    assert {unsliced.slices(Message(0, entry, 0)) for entry in entries} == {UNSLICED}


@pytest.mark.parametrize("encoder", [n for n, kind in KINDS.items() if not kind.composite])
def test_ranks_send_every_row_once(encoder):
    """Allow padding of less than a row per rank and image."""
    case = Case("sliced", 2, tensor=2, sequence_parallel=True, encoder=encoder)
    plain = replace(case, sequence_parallel=False)
    batch, parts = step_of(case, 1)
    metas = [m.meta for m in batch]
    by_name = {m.name: m for m in case.build().modality_modules()}
    sliced, complete = (
        message_specs(StageGraph(c.layout(), len(batch), parts), by_name, metas, torch.float32)
        for c in (case, plain)
    )
    assert sliced.keys() == complete.keys()
    sliced_count = 0
    for message, specs in sliced.items():
        for spec, expected in zip(specs, complete[message], strict=True):
            assert spec.shape == expected.shape
            if spec.slices is None:
                assert spec == expected
                continue
            sliced_count += 1
            total = 2 * prod(spec.local_spec(source=True).shape)
            padding = prod(spec.shape[:-2]) * spec.shape[-1]
            assert prod(spec.shape) <= total <= prod(spec.shape) + padding
    assert sliced_count


def test_memory_of_plan_uses_slices():
    """Check the rules of validation and simulation for sends and receives."""
    case = Case("sliced", 2, tensor=2, sequence_parallel=True)
    batch, parts = step_of(case, 1)
    graph = StageGraph(case.layout(), len(batch), parts)
    by_name = {m.name: m for m in case.build().modality_modules()}
    specs = message_specs(graph, by_name, [m.meta for m in batch], torch.float32)
    plan = lower_plan(separated(graph), graph, specs)
    validate_plan(plan).raise_for_problems()
    book = PlanRules(plan)
    counted = 0
    for transfer in transfers(graph):
        if transfer.source == transfer.destination:
            continue
        send, _, receive, _ = transfer.actions()
        moved = [s for s in specs[transfer.message] if s.requires_grad or not transfer.backward]
        expected = sum(spec.local_spec(source=not transfer.backward).nbytes for spec in moved)
        assert book.rules[transfer.source][send].allocates == expected
        assert book.rules[transfer.destination][receive].allocates == expected
        assert expected < 0.6 * sum(spec.nbytes for spec in moved)
        counted += 1
    assert counted
