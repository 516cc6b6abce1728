"""Tests of plans that choose recomputation per task and layer."""

import random
from dataclasses import replace

import pytest
import torch
from pipeline_cases import LLM, Case
from test_model_stages import built, drop, planned
from torch import nn

from torchmm.models.layers.attention import Segments
from torchmm.parallel.activation import apply_activation_checkpoint, set_recompute_modes
from torchmm.parallel.compilation import MAX_GRAPHS, Compilation
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageLayout, Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout

CUTS = {
    "vision": [StageSplit(n, (0,)) for n in (1, 3)],
    "llm": [StageSplit(n, (0,)) for n in (2, 2)],
}
ONE = 1
"""Seed of a step with one microbatch."""
MODES = ("none", "selective", "full", "offload")


def with_random_modes(plan: PipelinePlan, seed: int) -> PipelinePlan:
    """Choose random modes for most tasks."""
    rng = random.Random(seed)
    modes = {}
    for task in plan.graph.tasks():
        stage = plan.graph.layout.stages[task.stage]
        if plan.graph.needs_backward(task.stage, task.microbatch) and rng.random() < 0.8:
            modes[task] = tuple(rng.choice(MODES) for _ in range(stage.start, stage.stop))
    return replace(plan, recompute=modes)


class CallCounter(nn.Module):
    """Counter of forward passes of a layer, including recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_any_choice_keeps_gradients_and_dropout(split):
    case = Case("chosen", encoder="clip", recompute="auto", tied=False)
    layout = build_layout(case.modules(), CUTS)
    model, stages = built(case, layout)
    for stage in stages.values():
        for layer in stage.module.layers:
            layer.mlp.register_forward_hook(drop)
    for seed in (2, 4):
        batch, plan = planned(case, layout, seed, split=split)
        results = []
        for choice in (plan, with_random_modes(plan, seed), with_random_modes(plan, seed + 1)):
            validate_plan(choice).raise_for_problems()
            model.zero_grad()
            torch.manual_seed(5)
            losses = PipelineRuntime(0, stages, None).step(choice, batch).losses
            state = torch.get_rng_state()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            results.append((losses, gradients, state))
        for losses, gradients, state in results[1:]:
            assert losses == results[0][0]
            assert torch.equal(state, results[0][2]), "the random state of later steps differs"
            for name, grad in results[0][1].items():
                torch.testing.assert_close(gradients[name], grad, rtol=1e-5, atol=1e-6)


def test_layers_are_recomputed_as_chosen():
    case = Case("counted", encoder="clip", recompute="auto", tied=False)
    layout = build_layout(case.modules(), CUTS)
    _, stages = built(case, layout)
    batch, plan = planned(case, layout, 4)
    counter = CallCounter()
    for stage in stages.values():
        for layer in stage.module.layers:
            layer.mlp.register_forward_pre_hook(counter)
    for choice in (plan, with_random_modes(plan, 3)):
        counter.count = 0
        PipelineRuntime(0, stages, None).step(choice, batch)
        layers = [layout.stages[t.stage].stop - layout.stages[t.stage].start
                  for t in plan.graph.tasks()]  # fmt: skip
        again = sum(mode != "none" for modes in choice.recompute.values() for mode in modes)
        assert counter.count == sum(layers) + again
    assert again > 0


def test_invalid_recomputation_choices_are_rejected():
    case = Case("misfit", encoder="clip", recompute="auto", freeze=("vision",), tied=False)
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
        "has no backward pass for recomputation",
        "1 recomputation modes for 2 layers",
        "unknown recomputation modes: ['sometimes']",
        "Task(stage=3, ",
    ):
        assert any(text in problem for problem in texts), (text, texts)
    forwards = replace(plan, recompute={Task(2, 0): ("none", "full")}, training=False)
    assert "recompute" in {p.kind for p in validate_plan(forwards).problems}
    with pytest.raises(ValueError, match="1 recomputation modes for 2 layers of llm"):
        set_recompute_modes(stages[2].module, ["none"])
    _, fixed = built(replace(case, recompute="none"), layout)
    with pytest.raises(ValueError, match='mode = "auto"'):
        PipelineRuntime(0, fixed, None).step(with_random_modes(plan, 1), batch)


def saved_bytes(output: torch.Tensor, excluded: set[int]) -> int:
    """Return the bytes that an autograd graph saves, without the excluded storage addresses."""
    sizes: dict[int, int] = {}
    todo = [output.grad_fn]
    visited = set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        todo += [following for following, _ in node.next_functions]
        tensors = list(getattr(node, "_tensors_no_vc_check", ()))  # of compiled code
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                tensors += [s.data for s in (saved if isinstance(saved, tuple) else (saved,))]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for address, nbytes in sizes.items() if address not in excluded)


def compiled(case: Case, layout: StageLayout) -> tuple[nn.Module, dict, Compilation]:
    """Return a model, stages with compiled layers that support all modes, and the compilation."""
    model, stages = built(replace(case, recompute="none"), layout)
    torch.compiler.reset()  # dynamic sizes that other tests have compiled
    compilation = Compilation("aot_eager")
    for stage in stages.values():
        apply_activation_checkpoint(stage.module, "auto", compilation)
    return model, stages, compilation


@pytest.mark.slow
def test_compiled_layers_support_modes_with_few_graphs():
    case = Case("compiled", encoder="siglip2", recompute="auto", tied=False)
    layout = build_layout(case.modules(), CUTS)
    plain, plain_stages = built(case, layout)
    model, stages, compilation = compiled(case, layout)
    graphs = []
    for seed in (2, 4, 6):
        batch, plan = planned(case, layout, seed, split=0.0)
        plain.zero_grad()
        model.zero_grad()
        expected = PipelineRuntime(0, plain_stages, None).step(plan, batch).losses
        losses = PipelineRuntime(0, stages, None).step(with_random_modes(plan, seed), batch).losses
        for task, loss in expected.items():
            torch.testing.assert_close(losses[task], loss, rtol=1e-6, atol=0)
        expected_parameters = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, expected_parameters[name].grad, rtol=1e-5, atol=1e-6
            )
        graphs += compilation.new_graphs()
    kinds = {f"layers like 0 of {name}" for name in ("vision", "llm")}
    graph_kinds = {g.kind for g in graphs}
    assert kinds < graph_kinds <= kinds | {f"{kind}, selective" for kind in kinds}
    assert max(g.number for g in graphs) <= MAX_GRAPHS


@pytest.mark.slow
def test_recomputed_compiled_layers_save_no_tensors():
    """Inspect the graph, because some tensors of compiled code bypass saved-tensor hooks."""
    case = Case("compiled", encoder="clip", recompute="auto", tied=False)
    layout = build_layout(case.modules(), CUTS)
    model, stages, _ = compiled(case, layout)
    layer = stages[2].module.layers[0]
    hidden = torch.randn(1, 8, LLM["hidden_size"], requires_grad=True)
    rotary = model.llm.text_model.rotary_emb(hidden, torch.arange(8)[None])
    segments = Segments.from_starts([0, 3, 8], hidden.device)
    tensors = (hidden, *rotary, segments.cu_seqlens, segments.cu_seqlens_host, *model.parameters())
    excluded = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept = {}
    for mode in MODES:
        set_recompute_modes(stages[2].module, [mode, "none"])
        output = layer(hidden, position_embeddings=rotary, cu_seq_lens_q=segments)
        kept[mode] = saved_bytes(output, excluded)
        output.sum().backward()
    assert kept["none"] > kept["selective"] > 0
    assert kept["full"] == kept["offload"] == 0
