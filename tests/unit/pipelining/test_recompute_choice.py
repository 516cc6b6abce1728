"""Plans that choose, task by task and layer by layer, what backward runs again."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from pipeline_cases import LLM, Case
from test_model_stages import built, drop, planned
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchmm.parallel import activation
from torchmm.parallel.activation import apply_activation_checkpoint, set_layer_modes
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.schedules.layouts import Cut, build_layout

CUTS = {"vision": [Cut(n, (0,)) for n in (1, 3)], "llm": [Cut(n, (0,)) for n in (2, 2)]}
ONE = 1
"""Seed of a step with one microbatch."""
MODES = ("none", "selective", "full", "offload")


def choosing(plan: PipelinePlan, seed: int) -> PipelinePlan:
    """Random modes for most tasks."""
    rng = random.Random(seed)
    chosen = {}
    for task in plan.graph.tasks():
        stage = plan.graph.layout.stages[task.stage]
        if plan.graph.needs_backward(task.stage, task.microbatch) and rng.random() < 0.8:
            chosen[task] = tuple(rng.choice(MODES) for _ in range(stage.start, stage.stop))
    return replace(plan, recompute=chosen)


class Count(nn.Module):
    """Counts forwards of a layer, those in backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_any_choice_gives_the_same_gradients_and_dropout(split):
    case = Case("chosen", encoder="clip", recompute="tuned", tied=False)
    layout = build_layout(case.modules(), CUTS)
    model, stages = built(case, layout)
    for stage in stages.values():
        for layer in stage.module.layers:
            layer.mlp.register_forward_hook(drop)
    for seed in (2, 4):
        batch, plan = planned(case, layout, seed, split=split)
        found = []
        for choice in (plan, choosing(plan, seed), choosing(plan, seed + 1)):
            validate_plan(choice).raise_for_problems()
            model.zero_grad()
            torch.manual_seed(5)
            losses = PipelineRuntime(0, stages, None).step(choice, batch).losses
            state = torch.get_rng_state()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            found.append((losses, gradients, state))
        for losses, gradients, state in found[1:]:
            assert losses == found[0][0]
            assert torch.equal(state, found[0][2]), "later steps drop the same"
            for name, grad in found[0][1].items():
                torch.testing.assert_close(gradients[name], grad, rtol=1e-5, atol=1e-6)


def test_layers_run_again_as_often_as_chosen():
    case = Case("counted", encoder="clip", recompute="tuned", tied=False)
    layout = build_layout(case.modules(), CUTS)
    _, stages = built(case, layout)
    batch, plan = planned(case, layout, 4)
    counter = Count()
    for stage in stages.values():
        for layer in stage.module.layers:
            layer.mlp.register_forward_pre_hook(counter)
    for choice in (plan, choosing(plan, 3)):
        counter.count = 0
        PipelineRuntime(0, stages, None).step(choice, batch)
        layers = [layout.stages[t.stage].stop - layout.stages[t.stage].start
                  for t in plan.graph.tasks()]  # fmt: skip
        again = sum(mode != "none" for modes in choice.recompute.values() for mode in modes)
        assert counter.count == sum(layers) + again
    assert again > 0


def test_choices_that_do_not_fit_are_refused():
    case = Case("misfit", encoder="clip", recompute="tuned", freeze=("vision",), tied=False)
    layout = build_layout(case.modules(), CUTS)
    _, stages = built(case, layout)
    batch, plan = planned(case, layout, 4)
    wrong = {
        Task(0, 1, 0): ("full",),
        Task(2, 0): ("full",),
        Task(3, 0): ("full", "sometimes"),
        Task(3, 99): ("none", "none"),
    }
    problems = validate_plan(replace(plan, recompute=wrong)).problems
    texts = [str(p) for p in problems if p.kind == "recompute"]
    assert len(texts) == len(problems) == 4
    for text in (
        "has no backward to recompute in",
        "1 modes of recomputation for 2 layers",
        "no such modes of recomputation: ['sometimes']",
        "a choice for Task(stage=3, ",
    ):
        assert any(text in found for found in texts), (text, texts)
    forwards = replace(plan, recompute={Task(2, 0): ("none", "full")}, training=False)
    assert "recompute" in {p.kind for p in validate_plan(forwards).problems}
    with pytest.raises(ValueError, match="1 modes of recomputation for 2 layers of llm"):
        set_layer_modes(stages[2].module, ["none"])
    _, fixed = built(replace(case, recompute="none"), layout)
    with pytest.raises(ValueError, match='mode = "tuned"'):
        PipelineRuntime(0, fixed, None).step(choosing(plan, 1), batch)


def test_only_inputs_of_offloaded_layers_leave_the_device(monkeypatch):
    case = Case("offloaded", encoder="clip", recompute="tuned", tied=False)
    layout = build_layout(case.modules(), CUTS)
    model, stages = built(case, layout)
    batch, plan = planned(case, layout, ONE)
    moved: list[tuple[torch.Size, bool]] = []
    given: list[StorageWeakRef] = []
    freed: list[bool] = []

    class Host(saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            def pack(tensor: torch.Tensor) -> np.ndarray:
                moved.append((tensor.shape, pin_memory))
                return tensor.detach().numpy().copy()

            def unpack(host: np.ndarray) -> torch.Tensor:
                freed[:] = freed or [reference.expired() for reference in given]
                return torch.from_numpy(host)

            super().__init__(pack, unpack)

    def note(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        given.append(StorageWeakRef(arguments[0].untyped_storage()))

    monkeypatch.setattr(activation, "save_on_cpu", Host)
    gradients = []
    for modes in (("none", "none"), ("offload", "full"), ("offload", "offload")):
        model.zero_grad()
        moved.clear()
        PipelineRuntime(0, stages, None).step(replace(plan, recompute={Task(2, 0): modes}), batch)
        hidden = torch.Size((1, batch[0].input_ids_T.numel(), LLM["hidden_size"]))
        assert moved == [(hidden, False)] * modes.count("offload")
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6)
    freed.clear()
    for index in (2, 3):
        for layer in stages[index].module.layers:
            layer.register_forward_pre_hook(note)
    every = {Task(2, 0): ("full", "offload"), Task(3, 0): ("offload", "offload")}
    PipelineRuntime(0, stages, None).step(replace(plan, recompute=every), batch)
    assert freed == [False, True, False, True], "stay: what is not offloaded, what was received"


@pytest.mark.slow
def test_a_compiled_layer_chooses_too():
    case = Case("compiled", encoder="clip", recompute="none", tied=False)
    layout = build_layout(case.modules(), CUTS)
    model, stages = built(case, layout)
    module = stages[2].module
    apply_activation_checkpoint(module, "tuned")
    module.layers[0].compile(backend="aot_eager", fullgraph=True)
    batch, plan = planned(case, layout, ONE)
    assert len(batch) == 1, "every length is compiled"
    gradients = []
    for mode in ("none", "selective", "full"):
        model.zero_grad()
        chosen = {Task(2, i): (mode, "none") for i in range(plan.graph.microbatches)}
        PipelineRuntime(0, stages, None).step(replace(plan, recompute=chosen), batch)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6)
