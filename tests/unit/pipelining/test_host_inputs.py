"""Tests of activation offloading: selection, time and order of copies of layer inputs.

The tests run on a CPU, with streams that record their calls and copy tensors on the same device.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from pipeline_cases import LLM, Case
from test_model_stages import built, planned
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchmm.parallel import activation
from torchmm.parallel.activation_offload import ActivationOffload, OffloadedActivation
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.step_state import StepState
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout

CUTS = {
    "vision": [StageSplit(n, (0,)) for n in (1, 3)],
    "llm": [StageSplit(n, (0,)) for n in (2, 2)],
}
CASE = Case("offloaded", encoder="clip", recompute="auto", tied=False)
ONE, SEVERAL = 1, 4
"""Seeds of steps with one and with several microbatches."""


class RecordingStreams:
    """Copy streams of a device that record their calls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.activations: list[OffloadedActivation] = []
        self.ahead: set[OffloadedActivation] = set()
        """Copies on the device that no backward pass has used yet."""
        self.max_unused = 0

    def offload(self, tensor: Tensor) -> OffloadedActivation:
        unused: Any = None
        self.activations.append(
            OffloadedActivation(tensor.detach().clone(), tensor.device, unused, unused)
        )
        self.events.append(("sent", self.activations[-1]))
        return self.activations[-1]

    def wait_for_offload(self, activation: OffloadedActivation) -> None:
        self.events.append(("released", activation))

    def prefetch(self, activation: OffloadedActivation) -> None:
        activation.device_copy = activation.host_copy.clone()
        self.ahead.add(activation)
        self.max_unused = max(self.max_unused, len(self.ahead))
        self.events.append(("brought", activation))

    def wait_for_prefetch(self, activation: OffloadedActivation) -> None:
        self.ahead.remove(activation)
        self.events.append(("used", activation))

    def act(self, action: Action) -> None:
        self.events.append(("begun", action))


@pytest.fixture
def streams(monkeypatch) -> RecordingStreams:
    """Return the streams of all modules. Their events include computation."""
    streams_: Any = RecordingStreams()
    monkeypatch.setattr(
        activation, "ActivationOffload", lambda: ActivationOffload(lambda device: streams_)
    )
    compute = StepState._run_with_prefetch

    def record_action(self, handler, action):
        streams_.act(action)
        compute(self, handler, action)

    monkeypatch.setattr(StepState, "_run_with_prefetch", record_action)
    return streams_


def offloading(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with all inputs of tasks with a backward pass offloaded."""
    graph = plan.graph
    modes = {
        task: ("offload",) * (stage.stop - stage.start)
        for task in graph.tasks()
        for stage in [graph.layout.stages[task.stage]]
        if graph.needs_backward(task.stage, task.microbatch)
    }
    return replace(plan, recompute=modes)


def test_only_offloaded_inputs_are_copied(streams):
    layout = build_layout(CASE.modules(), CUTS)
    model, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, ONE)
    hidden = torch.Size((1, batch[0].input_ids_T.numel(), LLM["hidden_size"]))
    gradients = []
    for modes in (("none", "none"), ("offload", "full"), ("offload", "offload")):
        model.zero_grad()
        streams.activations.clear()
        PipelineRuntime(0, stages, None).step(replace(plan, recompute={Task(2, 0): modes}), batch)
        assert [a.host_copy.shape for a in streams.activations] == [hidden] * modes.count("offload")
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6)


def test_offloaded_inputs_are_freed_after_forward(streams):
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, ONE)
    inputs: list[StorageWeakRef] = []
    freed: list[bool] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    def look(activation: OffloadedActivation) -> None:
        freed[:] = freed or [reference.expired() for reference in inputs]

    for index in (2, 3):
        for layer in stages[index].module.layers:
            layer.register_forward_pre_hook(note)
    streams.wait_for_prefetch = look  # type: ignore[method-assign]
    recompute = {Task(2, 0): ("full", "offload"), Task(3, 0): ("offload", "offload")}
    PipelineRuntime(0, stages, None).step(replace(plan, recompute=recompute), batch)
    assert freed == [False, True, False, True], (
        "only offloaded inputs of non-first layers are freed"
    )


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_inputs_are_fetched_once_with_one_ahead(streams, split):
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, SEVERAL, split=split)
    assert len(batch) > 1
    PipelineRuntime(0, stages, None).step(offloading(plan), batch)
    assert len(streams.activations) > 8 and streams.max_unused == 1
    for sent in streams.activations:
        events = [event for event, subject in streams.events if subject is sent]
        assert events == ["sent", "released", "brought", "used"]


def test_inputs_are_prefetched_during_previous_action(streams):
    assert waiting_backwards(streams) == 0


def test_without_prefetch_backward_waits_for_inputs(streams, monkeypatch):
    monkeypatch.setattr("torchmm.pipelining.run.step_state._next_offloaded", lambda *_: {})
    assert waiting_backwards(streams) > 3


def waiting_backwards(streams: RecordingStreams) -> int:
    """Return the number of waiting backward passes, unless they directly follow their forward."""
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, SEVERAL, split=0.0)
    chosen = offloading(plan)
    PipelineRuntime(0, stages, None).step(chosen, batch)
    positions = {entry: place for place, entry in enumerate(streams.events)}
    sent: dict[Task, list[OffloadedActivation]] = {}
    running = Action(ActionType.F, 0, 0)
    for what, of in streams.events:
        running = of if what == "begun" else running
        if what == "sent":
            sent.setdefault(running.task, []).append(of)
    computing = [action for action in plan.actions[0] if action.type in COMPUTE]
    waiting = 0
    for before, action in pairwise(computing):
        if action.type is ActionType.B and before.task != action.task and action.task in sent:
            last = sent[action.task][-1]
            assert positions["brought", last] > positions["begun", before]
            waiting += positions["brought", last] > positions["begun", action]
    return waiting
