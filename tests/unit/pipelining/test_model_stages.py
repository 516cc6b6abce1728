"""Tests of model stages on one rank: message specifications and gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_cases import (
    KINDS,
    LAYERS,
    Case,
    gradient_errors,
    reference_losses,
    step_of,
    varied_microbatch,
)
from random_orders import random_order
from torch import Tensor, nn
from torch.nn import functional

from torchmm.models.encoders import EncoderModule
from torchmm.models.initialize import init_weights
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import PipelineStage, StageOutput, make_stage
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout


class CheckedStage(PipelineStage):
    """Stage that compares every message with its specification."""

    def __init__(self, inner: PipelineStage, plan: PipelinePlan) -> None:
        super().__init__(inner.module)
        self.inner, self.plan, self.checked = inner, plan, 0

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        output = self.inner.forward(task, inputs, microbatch, graph)
        for message, tensors in zip(graph.outgoing(task), output.messages, strict=True):
            actual = [(tuple(t.shape), t.dtype) for t in tensors]
            assert actual == [spec[:2] for spec in self.plan.specs[message]], message
            self.checked += 1
        return output


def built(
    case: Case, layout: StageLayout, dtype: torch.dtype = torch.float32
) -> tuple[MultimodalModel, dict[int, PipelineStage]]:
    """Return a model that is split for a pipeline of one rank, and its stages."""
    model = case.build(dtype)
    modules = split_model_for_rank(model, layout, 0)
    for module in modules.values():
        apply_activation_checkpoint(module, case.recompute)
    materialize(model, "cpu")
    init_weights(model, seed=1)
    return model, {index: make_stage(module) for index, module in modules.items()}


@functools.lru_cache(maxsize=1)
def modules_of(case: Case) -> dict[str, LayeredModule]:
    """Return the unsharded modules of a case by name, on the meta device."""
    return {module.name: module for module in case.build().modality_modules()}


def planned(case: Case, layout: StageLayout, seed: int, dtype: torch.dtype = torch.float32,
            split: float | None = None):  # fmt: skip
    batch, parts = step_of(case, seed)
    graph = StageGraph(layout, len(batch), parts)
    specs = message_specs(graph, modules_of(case), [m.meta for m in batch], dtype)
    return batch, lower_plan(random_order(graph, seed, split), graph, specs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_match_predicted_shapes_and_dtypes(kind, dtype):
    case = Case(kind, encoder=kind, tied=False)
    cuts = {name: [StageSplit(1, (0,))] * LAYERS for name in (*case.kinds, "llm")}
    layout = build_layout(case.modules(), cuts)
    _, stages = built(case, layout, dtype)
    for seed in (1, 2, 4):
        batch, plan = planned(case, layout, seed, dtype)
        checking = {index: CheckedStage(stage, plan) for index, stage in stages.items()}
        PipelineRuntime(0, checking, None).step(plan, batch)
        assert sum(stage.checked for stage in checking.values()) == len(plan.specs) > 0


@pytest.mark.parametrize("freeze", [(), ("vision",), ("llm",), ("vision", "llm")])
@pytest.mark.parametrize(
    "kinds",
    [("qwen2_5_vl", None), ("siglip, folded", None), ("clip", "siglip2"), ("qwen3_vl", None)],
)
def test_random_stages_match_complete_model(kinds, freeze):
    case = Case(f"{kinds} {freeze}", encoder=kinds[0], second=kinds[1], freeze=freeze, tied=False)
    layout = case.layout()
    model, stages = built(case, layout)
    reference = case.build()
    materialize(reference, "cpu")
    init_weights(reference, seed=1)
    for seed in (0, 1, 9):
        batch, plan = planned(case, layout, seed)
        targets = sum(m.target_count for m in batch)
        model.zero_grad()
        result = PipelineRuntime(0, stages, None).step(plan, batch, loss_scale=1 / targets)
        (losses,) = reference_losses(reference, [batch], targets)
        actual = [result.losses[i].item() for i in range(len(batch))]
        assert actual == pytest.approx(losses, rel=1e-5)
        errors = gradient_errors(model, reference)
        assert max(errors.values()) <= 1e-5, errors


def test_split_backward_of_tied_llm_is_correct():
    case = Case("tied", encoder="clip")
    cuts = {"vision": [StageSplit(LAYERS, (0,))], "llm": [StageSplit(LAYERS, (0,))]}
    layout = build_layout(case.modules(), cuts)
    model, stages = built(case, layout)
    reference = case.build()
    materialize(reference, "cpu")
    init_weights(reference, seed=1)
    batch, plan = planned(case, layout, 3, split=1.0)
    PipelineRuntime(0, stages, None).step(plan, batch)
    reference_losses(reference, [batch], 1)
    errors = gradient_errors(model, reference)
    assert max(errors.values()) <= 1e-5, errors


def drop(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return functional.dropout(output, 0.3)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("split", [0.0, 1.0])
def test_recomputation_repeats_dropout_masks(mode, split):
    gradients = []
    for recompute in ("none", mode):
        case = Case("dropout", encoder="clip", recompute=recompute, tied=False)
        cuts = {
            "vision": [StageSplit(n, (0,)) for n in (1, 3)],
            "llm": [StageSplit(n, (0,)) for n in (2, 2)],
        }
        layout = build_layout(case.modules(), cuts)
        model, stages = built(case, layout)
        for stage in stages.values():
            for layer in stage.module.layers:
                layer.mlp.register_forward_hook(drop)
        batch, plan = planned(case, layout, 2, split=split)
        torch.manual_seed(5)
        PipelineRuntime(0, stages, None).step(plan, batch)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-5, atol=1e-6)


def test_encoder_without_images_does_not_run(monkeypatch):
    case = Case("no images", tied=False)
    layout = case.layout()
    _, stages = built(case, layout)

    def fail(*_: Any) -> None:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(EncoderModule, "forward", fail)
    batch, plan = planned(case, layout, 9)
    assert all(not m.encoders for m in batch)
    assert len(PipelineRuntime(0, stages, None).step(plan, batch).losses) == len(batch)


def test_metadata_must_match_the_graph():
    case = Case("misfit", tied=False)
    layout = case.layout()
    modules = {module.name: module for module in case.build().modality_modules()}
    meta = varied_microbatch(0, {"vision": 2}, case.kinds).meta
    graph = StageGraph(layout, 1, {"vision": (3,)})
    with pytest.raises(ValueError, match="2 images cannot be split into 3 parts"):
        message_specs(graph, modules, [meta], torch.float32)
    with pytest.raises(ValueError, match="metadata of 2 microbatches for a graph of 1"):
        message_specs(graph, modules, [meta, meta], torch.float32)


def test_other_modules_are_not_stages():
    with pytest.raises(TypeError, match="Linear is not supported as a pipeline stage"):
        make_stage(nn.Linear(2, 2))  # type: ignore[arg-type]
