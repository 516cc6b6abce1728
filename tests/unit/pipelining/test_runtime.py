"""Tests of the runtime on one rank: gradients, freed memory, records and errors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_orders import random_graph, random_order
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from toy_stages import (
    WIDTH,
    ToyModule,
    ToyStage,
    compare,
    gradients,
    reference,
    toy_specs,
    toy_stages,
)

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run import step_state
from torchmm.pipelining.run.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.run.stage import PipelineStage, StageOutput
from torchmm.pipelining.run.step_state import StepState

KIND = ActionType


def plan_of(graph: StageGraph, seed: int, split: float | None = None) -> PipelinePlan:
    return lower_plan(random_order(graph, seed, split), graph, toy_specs(graph))


def chain(count: int, microbatches: int = 1, ranks: Sequence[int] | None = None) -> StageGraph:
    """Return the step graph of an LLM with `count` stages."""
    ranks_ = ranks or [0] * count
    stages = tuple(StageSpec(i, "llm", i, i + 1, (r,)) for i, r in enumerate(ranks_))
    return StageGraph(
        StageLayout(stages, tuple((i, i + 1) for i in range(count - 1))), microbatches
    )


def errors_of(graph: StageGraph, plan: PipelinePlan) -> dict[str, float]:
    """Execute a plan of one rank and compare it with autograd over all stages."""
    data = list(range(7, 7 + graph.microbatches))
    stages = toy_stages(graph)
    result = PipelineRuntime(0, stages, None).step(plan, data, loss_scale=0.3)
    losses, expected = reference(graph, data, 0.3)
    assert result.losses.keys() == losses.keys()
    for index, loss in result.losses.items():
        assert loss.item() == pytest.approx(losses[index], rel=1e-5)
        assert not loss.requires_grad
    return compare(gradients(stages), expected)


@pytest.mark.parametrize("seed", range(60))
def test_random_orders_match_autograd_gradients(seed):
    graph = random_graph(seed, ranks=1)
    assert errors_of(graph, plan_of(graph, seed)) == {}


@pytest.mark.parametrize("seed", range(8))
def test_unsupported_weight_split_runs_full_backward(seed, monkeypatch):
    graph = random_graph(seed, ranks=1)
    plan = plan_of(graph, seed, split=1.0)

    def fail(*_: Any) -> None:
        raise AssertionError("split although it is not supported")

    monkeypatch.setattr(step_state, "supports_weight_split", lambda: False)
    monkeypatch.setattr(step_state, "stage_backward_input", fail)
    assert errors_of(graph, plan) == {}


def test_split_backward_of_first_stage_is_complete():
    graph = chain(2)
    order = [Action(KIND.F, 0, 0), Action(KIND.F, 1, 0)]
    order += [Action(kind, stage, 0) for stage in (1, 0) for kind in (KIND.I, KIND.W)]
    assert errors_of(graph, lower_plan((tuple(order),), graph, toy_specs(graph))) == {}


def test_gradients_accumulate_over_steps():
    graph = random_graph(3, ranks=1)
    plan, stages = plan_of(graph, 0), toy_stages(graph)
    runtime = PipelineRuntime(0, stages, None)
    data = list(range(graph.microbatches))
    runtime.step(plan, data)
    once = {name: grad.clone() for name, grad in gradients(stages).items()}
    runtime.step(plan, data)
    assert once
    for name, grad in gradients(stages).items():
        torch.testing.assert_close(grad, 2 * once[name])


def test_unused_parameters_get_zero_gradients():
    stages = (StageSpec(0, "vision", 0, 1, (0,)), StageSpec(1, "llm", 0, 1, (0,)))
    layout = StageLayout(stages, ((0, 1),), frozenset({"vision"}))
    graph = StageGraph(layout, 2, {"vision": (0, 0)})
    stages_ = toy_stages(graph)
    PipelineRuntime(0, stages_, None).step(plan_of(graph, 0), [1, 2])
    assert [p.grad.abs().sum().item() for p in stages_[0].module.parameters()] == [0.0, 0.0]
    assert all(p.grad.abs().sum() > 0 for p in stages_[1].module.parameters())


class PassThrough(PipelineStage):
    """Stage that adds its weight, so gradients of input, weight and output can share storage."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        x = (inputs[0][0] if inputs else microbatch) + self.module.weight
        if graph.layout.destinations[task.stage]:
            return StageOutput([(x,)])
        return StageOutput((), (x * microbatch).sum())


def test_sent_gradients_do_not_change_afterwards():
    graph = chain(3, microbatches=2)
    modules = [nn.Module() for _ in range(3)]
    for module in modules:
        module.weight = nn.Parameter(torch.zeros(WIDTH))
    specs = {m: (TensorSpec((WIDTH,), torch.float32),) for t in graph.tasks()
             for m in graph.outgoing(t)}  # fmt: skip
    # All W actions of the middle stage precede the backward of the first stage, which uses the I
    # results.
    order = [Action(KIND.F, s, m) for m in (0, 1) for s in range(3)]
    order += [Action(KIND.B, 2, m) for m in (0, 1)]
    order += [Action(kind, 1, m) for m in (0, 1) for kind in (KIND.I, KIND.W)]
    order += [Action(KIND.B, 0, m) for m in (0, 1)]
    plan = lower_plan((tuple(order),), graph, specs)
    runtime = PipelineRuntime(0, {i: PassThrough(m) for i, m in enumerate(modules)}, None)
    data = [torch.ones(WIDTH), torch.full((WIDTH,), 10.0)]
    runtime.step(plan, data)
    for module in modules:
        assert module.weight.grad.tolist() == [11.0] * WIDTH


class _CompletedTransfer:
    """Transfer that is complete."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def wait(self, action: object) -> tuple[Tensor, ...]:
        return self.tensors


class _Loopback:
    """Channels whose peer accepts all tensors and sends ones."""

    device = torch.device("cpu")

    def send(
        self, tensors: Any, specs: Any, peer: int, action: object, cuts: Any
    ) -> _CompletedTransfer:
        return _CompletedTransfer(tuple(tensors))

    def receive(self, specs: Any, peer: int, action: object, cuts: Any) -> _CompletedTransfer:
        return _CompletedTransfer(tuple(torch.ones(s.shape, dtype=s.dtype) for s in specs))


class _WatchedStage(ToyStage):
    """Stage that records the storages of its activations and outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inside: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            self.inside.append(StorageWeakRef(output.untyped_storage()))

        handle = self.module.dropout.register_forward_hook(note)
        output = super().forward(task, inputs, microbatch, graph)
        handle.remove()
        self.outputs += [StorageWeakRef(t.untyped_storage()) for t, *_ in output.messages]
        return output


def watched_step() -> tuple[PipelinePlan, _WatchedStage, dict[Any, Any]]:
    """Return the plan, stage and handlers of the first of two ranks, for single actions."""
    graph = chain(2, microbatches=2, ranks=[0, 1])
    stage = _WatchedStage(ToyModule(0, trainable=True, dropout=0.1))
    forwards = tuple(Action(KIND.F, 0, m) for m in (0, 1))
    backwards = tuple(Action(KIND.B, 0, m) for m in (0, 1))
    other = tuple(Action(kind, 1, m) for m in (0, 1) for kind in (KIND.F, KIND.B))
    plan = lower_plan((forwards + backwards, other), graph, toy_specs(graph))
    state = StepState(0, {0: stage}, _Loopback(), plan, [3, 4], 1.0)
    return plan, stage, state.handlers()


def test_sent_outputs_and_activations_are_freed():
    plan, stage, handlers = watched_step()
    executed = set()
    for action in plan.actions[0]:
        handlers[action.type](action)
        executed.add((action.type, action.microbatch))
        for index, (output, inside) in enumerate(zip(stage.outputs, stage.inside, strict=True)):
            assert output.expired() == ((KIND.WAIT_SEND_F, index) in executed), (action, index)
            assert inside.expired() == ((KIND.B, index) in executed), (action, index)
    assert {(KIND.WAIT_SEND_F, 0), (KIND.B, 1)} <= executed


def test_frozen_inputs_are_freed_after_forward():
    graph = chain(2)
    frozen = tuple(replace(s, trainable=False) for s in graph.layout.stages)
    graph = StageGraph(StageLayout(frozen, graph.layout.edges), 1)
    order = ((Action(KIND.F, 0, 0), Action(KIND.F, 1, 0)),)
    plan = lower_plan(order, graph, toy_specs(graph))
    stages = {i: _WatchedStage(ToyModule(i, trainable=False)) for i in (0, 1)}
    state = StepState(0, stages, None, plan, [3], 1.0)
    for action in plan.actions[0]:
        state.handlers()[action.type](action)
    assert stages[0].outputs[0].expired()
    assert stages[0].inside[0].expired()


def test_forward_only_plan_returns_losses():
    graph = random_graph(5, ranks=1)
    order = tuple(a for a in random_order(graph, 0)[0] if a.type is KIND.F)
    plan = lower_plan((order,), graph, toy_specs(graph), training=False)
    stages, data = toy_stages(graph), list(range(graph.microbatches))
    result = PipelineRuntime(0, stages, None).step(plan, data)
    losses, _ = reference(graph, data, 1.0)
    assert {m: pytest.approx(loss.item(), rel=1e-5) for m, loss in result.losses.items()} == losses
    assert all(p.grad is None for s in stages.values() for p in s.module.parameters())


def test_every_action_is_recorded_in_order():
    graph = random_graph(7, ranks=1)
    plan = plan_of(graph, 1)
    data = list(range(graph.microbatches))
    result = PipelineRuntime(0, toy_stages(graph), None).step(plan, data, record=True)
    assert result.records is not None
    assert [r.action for r in result.records] == list(plan.actions[0])
    times = [t for r in result.records for t in (r.start_ms, r.end_ms)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert {r.rank for r in result.records} == {0}


def test_profiles_name_actions_only_if_enabled():
    graph = chain(2)
    plan = plan_of(graph, 0, split=0.0)
    runtime = PipelineRuntime(0, toy_stages(graph), None)
    for annotate in (False, True):
        with torch.profiler.profile() as profile:
            runtime.step(plan, [1], annotate=annotate)
        names = {event.name for event in profile.events()}
        assert ({"0F0", "1F0", "1B0", "0B0"} <= names) == annotate


def test_channels_follow_edges_ties_and_replicas():
    stages = (
        StageSpec(0, "vision", 0, 1, (2, 3)),
        StageSpec(1, "llm", 0, 1, (0,), tied_to=3),
        StageSpec(2, "llm", 1, 2, (0,)),
        StageSpec(3, "llm", 2, 3, (1,), tied_to=1),
    )
    layout = StageLayout(stages, ((0, 1), (1, 2), (2, 3)), frozenset({"vision"}))
    assert channel_pairs(layout) == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]


def test_stages_and_microbatches_must_match_plan():
    graph = chain(2, microbatches=2)
    plan, stages = plan_of(graph, 0), toy_stages(graph)
    with pytest.raises(ValueError, match=r"has stages \[1\] on rank 0, but the rank has \[0\]"):
        PipelineRuntime(0, {0: stages[0]}, None).step(plan, [1, 2])
    with pytest.raises(ValueError, match="3 microbatches for a plan of 2"):
        PipelineRuntime(0, stages, None).step(plan, [1, 2, 3])
    split = chain(2, ranks=[0, 1])
    with pytest.raises(ValueError, match="a plan of 2 ranks requires P2PChannels"):
        PipelineRuntime(0, stages, None).step(plan_of(split, 0), [1])


def without(plan: PipelinePlan, action: Action) -> PipelinePlan:
    return replace(plan, actions=(tuple(a for a in plan.actions[0] if a != action),))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (Action(KIND.F, 0, 0), r"action 1F0 requires Message\(source=0, destination=1"),
        (Action(KIND.F, 1, 0), r"action 1B0 requires Task\(stage=1"),
        (Action(KIND.B, 1, 0), r"action 0B0 requires Message\(source=0, destination=1"),
        (Action(KIND.B, 0, 0), r"rank 0 is incomplete: Task\(stage=0.* has no backward"),
    ],
)
def test_missing_action_is_named_at_runtime(missing, message):
    graph = chain(2)
    plan = without(plan_of(graph, 0, split=0.0), missing)
    with pytest.raises(ValueError, match=message):
        PipelineRuntime(0, toy_stages(graph), None).step(plan, [1])


def test_errors_of_stages_name_the_action():
    graph = chain(2)
    stages = toy_stages(graph)
    stages[1].module.twice.data = torch.ones(WIDTH, WIDTH + 1)
    with pytest.raises(RuntimeError) as error:
        PipelineRuntime(0, stages, None).step(plan_of(graph, 0), [1])
    assert "in action 1F0 of the plan's rank 0" in error.value.__notes__
