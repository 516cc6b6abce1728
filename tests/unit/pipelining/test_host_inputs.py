"""Inputs of layers in the host's memory: which leave the device, when they return, in which order.

On a CPU, with streams that note what they are asked for and keep copies in the host's stead.
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
from torchmm.parallel.host_inputs import Guest, HostInputs
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.step_state import StepState
from torchmm.pipelining.schedules.layouts import Cut, build_layout

CUTS = {"vision": [Cut(n, (0,)) for n in (1, 3)], "llm": [Cut(n, (0,)) for n in (2, 2)]}
CASE = Case("offloaded", encoder="clip", recompute="auto", tied=False)
ONE, SEVERAL = 1, 4
"""Seeds of steps with one and with several microbatches."""


class Copies:
    """Streams of a device, as far as anybody asks them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.guests: list[Guest] = []
        self.ahead: set[Guest] = set()
        """Copies on the device that nobody has used yet."""
        self.most_ahead = 0

    def send(self, tensor: Tensor) -> Guest:
        unused: Any = None
        self.guests.append(Guest(tensor.detach().clone(), tensor.device, unused, unused))
        self.told.append(("sent", self.guests[-1]))
        return self.guests[-1]

    def let_go(self, guest: Guest) -> None:
        self.told.append(("let go", guest))

    def bring(self, guest: Guest) -> None:
        guest.copy = guest.host.clone()
        self.ahead.add(guest)
        self.most_ahead = max(self.most_ahead, len(self.ahead))
        self.told.append(("brought", guest))

    def await_arrival(self, guest: Guest) -> None:
        self.ahead.remove(guest)
        self.told.append(("used", guest))

    def act(self, action: Action) -> None:
        self.told.append(("begun", action))


@pytest.fixture
def copies(monkeypatch) -> Copies:
    """Of all modules; with the actions that compute among what they are told."""
    found: Any = Copies()
    monkeypatch.setattr(activation, "HostInputs", lambda: HostInputs(lambda device: found))
    compute = StepState._bringing

    def told(self, handler, action):
        found.act(action)
        compute(self, handler, action)

    monkeypatch.setattr(StepState, "_bringing", told)
    return found


def offloading(plan: PipelinePlan) -> PipelinePlan:
    """All tasks with a backward send all inputs to the host."""
    graph = plan.graph
    chosen = {
        task: ("offload",) * (stage.stop - stage.start)
        for task in graph.tasks()
        for stage in [graph.layout.stages[task.stage]]
        if graph.needs_backward(task.stage, task.microbatch)
    }
    return replace(plan, recompute=chosen)


def test_only_inputs_of_offloaded_layers_leave_the_device(copies):
    layout = build_layout(CASE.modules(), CUTS)
    model, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, ONE)
    hidden = torch.Size((1, batch[0].input_ids_T.numel(), LLM["hidden_size"]))
    gradients = []
    for modes in (("none", "none"), ("offload", "full"), ("offload", "offload")):
        model.zero_grad()
        copies.guests.clear()
        PipelineRuntime(0, stages, None).step(replace(plan, recompute={Task(2, 0): modes}), batch)
        assert [g.host.shape for g in copies.guests] == [hidden] * modes.count("offload")
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6)


def test_what_was_sent_is_free_when_its_forward_is_over(copies):
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, ONE)
    given: list[StorageWeakRef] = []
    freed: list[bool] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given.append(StorageWeakRef(arguments[0].untyped_storage()))

    def look(guest: Guest) -> None:
        freed[:] = freed or [reference.expired() for reference in given]

    for index in (2, 3):
        for layer in stages[index].module.layers:
            layer.register_forward_pre_hook(note)
    copies.await_arrival = look  # type: ignore[method-assign]
    every = {Task(2, 0): ("full", "offload"), Task(3, 0): ("offload", "offload")}
    PipelineRuntime(0, stages, None).step(replace(plan, recompute=every), batch)
    assert freed == [False, True, False, True], "stay: what is not offloaded, what was received"


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_each_comes_back_once_and_no_more_than_one_ahead_of_its_use(copies, split):
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, SEVERAL, split=split)
    assert len(batch) > 1
    PipelineRuntime(0, stages, None).step(offloading(plan), batch)
    assert len(copies.guests) > 8 and copies.most_ahead == 1
    for guest in copies.guests:
        own = [what for what, of in copies.told if of is guest]
        assert own == ["sent", "let go", "brought", "used"]


def test_what_the_plans_next_backward_needs_first_comes_during_the_action_before(copies):
    assert backwards_that_wait(copies) == 0


def test_without_the_plan_it_comes_when_its_backward_has_begun(copies, monkeypatch):
    monkeypatch.setattr("torchmm.pipelining.run.step_state._next_offloaded", lambda *_: {})
    assert backwards_that_wait(copies) > 3


def backwards_that_wait(copies: Copies) -> int:
    """How many, of those that follow something else than their own forward."""
    layout = build_layout(CASE.modules(), CUTS)
    _, stages = built(CASE, layout)
    batch, plan = planned(CASE, layout, SEVERAL, split=0.0)
    chosen = offloading(plan)
    PipelineRuntime(0, stages, None).step(chosen, batch)
    places = {entry: place for place, entry in enumerate(copies.told)}
    own: dict[Task, list[Guest]] = {}
    running = Action(ActionType.F, 0, 0)
    for what, of in copies.told:
        running = of if what == "begun" else running
        if what == "sent":
            own.setdefault(running.task, []).append(of)
    computing = [action for action in plan.actions[0] if action.type in COMPUTE]
    waiting = 0
    for before, action in pairwise(computing):
        if action.type is ActionType.B and before.task != action.task and action.task in own:
            last = own[action.task][-1]
            assert places["brought", last] > places["begun", before]
            waiting += places["brought", last] > places["begun", action]
    return waiting
