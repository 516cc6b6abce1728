"""Small stages for any stage graph, and the same step in a single autograd graph as the reference.

A stage has two weights and uses one of them twice. Its output depends on all inputs, and its number
of rows on the microbatch and the sub-microbatch. Stages with several consumers send the same tensor
to all of them, or views of one tensor if the consumers are sub-microbatches; some add an integer
tensor, which has no gradient. The last stages of modules without sub-microbatches, and all stages
without consumers, return a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, TensorSpec
from torchmm.pipelining.run.stage import PipelineStage, StageOutput

WIDTH = 4


class ToyModule(nn.Module):
    def __init__(self, index: int, trainable: bool, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        weights = (torch.randn(WIDTH, WIDTH, generator=generator) * 0.6 for _ in range(2))
        self.first, self.twice = (nn.Parameter(w, requires_grad=trainable) for w in weights)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.dropout(x) @ self.first @ self.twice)
        return torch.tanh(x) + torch.sin(hidden @ self.twice)


class ToyStage(PipelineStage):
    """A stage whose `microbatch` is a number that determines its data."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        x = torch.randn(rows(task), WIDTH, generator=torch.Generator().manual_seed(microbatch))
        for number, (first, *integers) in enumerate(inputs, 1):
            tensor = first
            for each in integers:
                tensor = tensor[each % len(tensor)]
            x = x + torch.tanh(tensor.mean(0) * tensor[-1]) / number
        x = self.module(x)
        messages = [(self.part(x, m), *integers_of(m)) for m in graph.outgoing(task)]
        loss = x.square().sum() if gives_loss(task.stage, graph) else None
        return StageOutput(messages, loss)

    def part(self, x: Tensor, message: Message) -> Tensor:
        return x[message.sub_microbatch :] if has_views(message) else x


def rows(task: Task) -> int:
    return 4 + (5 * task.stage + 3 * task.microbatch + 2 * task.sub_microbatch) % 5


def has_views(message: Message) -> bool:
    return (message.source + message.destination + message.microbatch) % 2 == 0


def integers_of(message: Message) -> tuple[Tensor, ...]:
    if (message.source + message.microbatch) % 3:
        return ()
    return (torch.arange(3 + message.microbatch),)


def gives_loss(stage: int, graph: StageGraph) -> bool:
    spec = graph.layout.stages[stage]
    following = [graph.layout.stages[d].module for d in graph.layout.destinations[stage]]
    return not following or (
        not graph.layout.has_sub_microbatches(stage) and spec.module not in following
    )


def toy_specs(graph: StageGraph) -> MessageSpecs:
    specs = {}
    for task in graph.tasks():
        for message in graph.outgoing(task):
            count = rows(task) - (message.sub_microbatch if has_views(message) else 0)
            integers = [TensorSpec(tuple(i.shape), i.dtype, False) for i in integers_of(message)]
            specs[message] = (TensorSpec((count, WIDTH), torch.float32), *integers)
    return specs


def toy_stages(graph: StageGraph, rank: int | None = None) -> dict[int, ToyStage]:
    """Return the stages of a rank, or all."""
    return {
        s.index: ToyStage(ToyModule(s.index, s.trainable))
        for s in graph.layout.stages
        if rank is None or rank in s.ranks
    }


def reference(
    graph: StageGraph, seeds: Sequence[int], loss_scale: float
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Return losses by microbatch and gradients by name, from one autograd graph of all stages."""
    stages = toy_stages(graph)
    outputs: dict[Message, tuple[Tensor, ...]] = {}
    losses: dict[int, Tensor] = {}
    for task in graph.tasks():
        inputs = [outputs[message] for message in graph.incoming(task)]
        output = stages[task.stage].forward(task, inputs, seeds[task.microbatch], graph)
        outputs.update(zip(graph.outgoing(task), output.messages, strict=True))
        if output.loss is not None:
            losses[task.microbatch] = losses.get(task.microbatch, 0.0) + output.loss
    total = torch.stack(list(losses.values())).sum() * loss_scale
    if total.requires_grad:
        total.backward()
    return {m: loss.item() for m, loss in losses.items()}, gradients(stages)


def gradients(stages: dict[int, ToyStage]) -> dict[str, Tensor]:
    """Return gradients by stage and name, zeros for trained weights without a gradient."""
    return {
        f"{index}.{name}": torch.zeros_like(p) if p.grad is None else p.grad
        for index, stage in stages.items()
        for name, p in stage.module.named_parameters()
        if p.requires_grad
    }


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return relative errors above 1e-5 of gradients."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    scale = max([1e-12, *(w.norm().item() for w in wanted.values())])
    errors = {}
    for name, expected in wanted.items():
        size = expected.norm().item()
        error = (found[name] - expected).norm().item() / (size if size > 1e-6 * scale else scale)
        if not error <= 1e-5:
            errors[name] = error
    return errors
