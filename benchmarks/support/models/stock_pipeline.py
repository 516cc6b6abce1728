"""The image-text model in torch's own pipeline schedules, as far as they can carry it.

A stage has fixed input and output shapes and all stages form one line. So the tower is in
front of the LLM; what is in a microbatch reaches every stage through its number, which is an
argument. Where the tower itself is cut, the hidden states of its images are padded to the largest
number of images of any microbatch; padding is sent, but not computed with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from support.models.pipeline_model import GRID, views_of_chain
from torchmm.common.batch import Microbatch
from torchmm.models.multimodal import MultimodalModel

CPU = torch.device("cpu")
Split = tuple[int, ...]
"""Layers of each stage, of the chain that the tower's and the LLM's layers form."""


class TimedStage(PipelineStage):
    """Adds up the time of forwards and backwards."""

    busy_s = 0.0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = super().forward_one_chunk(*args, **kwargs)
        self.busy_s += time.perf_counter() - begin_s
        return result

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = super().backward_one_chunk(*args, **kwargs)
        self.busy_s += time.perf_counter() - begin_s
        return result


class Step:
    """The microbatches that stages look into."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Microbatch] = ()
        self.loss_scale = 1.0


class ChainStage(nn.Module):
    """Layers [start, stop) of the chain."""

    def __init__(
        self, model: MultimodalModel, start: int, stop: int, most_images: int, step: Step
    ) -> None:
        super().__init__()
        self.tower, self.llm = views_of_chain(model, start, stop)
        self.most_images = most_images
        self.current = step

    def forward(self, x: Tensor, *, index: Tensor) -> Tensor:
        """Return hidden states or, in the last stage, the loss (1,); the first ignores x."""
        # gloo sends contiguous tensors only.
        return self._run(self.current.microbatches[int(index)], x).contiguous()

    def _run(self, microbatch: Microbatch, x: Tensor) -> Tensor:
        if self.tower is not None:
            x = self._encode(microbatch, x)
        if self.llm is None:
            return x
        features = {"vision": x} if self.tower is not None and x.is_floating_point() else {}
        output = self.llm(microbatch, features if self.llm.is_first else x)
        return output.reshape(1) if self.llm.is_last else output

    def _encode(self, microbatch: Microbatch, x: Tensor) -> Tensor:
        assert self.tower is not None
        inputs = microbatch.encoders.get("vision")
        if inputs is None:
            if self.tower.is_first and not self.tower.is_last:
                # No layer runs, but the schedule expects a gradient.
                parameter = next(self.tower.parameters())
                width = self.tower.spec.config.hidden_size
                return torch.zeros(self.most_images, GRID**2, width) + 0 * parameter.sum()
            return x if self.tower.is_last else x * 1
        count = len(inputs.grids_thw)
        hidden = self.tower(inputs, None if self.tower.is_first else x[:count])
        if self.tower.is_last:
            return hidden
        return F.pad(hidden, (0, 0, 0, 0, 0, self.most_images - count))


class StockSchedule:
    """`Schedule1F1B`, or `ScheduleInterleaved1F1B` if a rank has several stages.

    Args:
        build: the module with layers [start, stop) of the chain; it is called with what the stage
            before gave (the first: with the microbatch's number) and `index`, that number.
        split: layers of each stage; stage i is on rank i modulo the number of ranks.
        shape: of what goes into the stage that starts at a layer; after the last: of the loss.
        loss_scale: factor of the last stage's output in backward.
    """

    def __init__(
        self,
        build: Callable[[int, int], nn.Module],
        split: Split,
        shape: Callable[[int], tuple[int, ...]],
        microbatches: int,
        loss_scale: Callable[[], float],
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.index_M = torch.arange(microbatches)
        starts = [sum(split[:i]) for i in range(len(split) + 1)]
        examples = [torch.empty(shape(start), requires_grad=True) for start in starts]
        examples[0] = self.index_M[:1]
        self.stages = [
            TimedStage(
                build(starts[i], starts[i + 1]),
                i,
                len(split),
                CPU,
                input_args=examples[i],
                output_args=examples[i + 1],
            )
            for i in range(rank, len(split), ranks)
        ]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return output.sum() * loss_scale()

        self.schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if len(self.stages) == 1:
            self.schedule = Schedule1F1B(self.stages[0], microbatches, loss, scale_grads=False)
        else:
            stages = list(self.stages)
            self.schedule = ScheduleInterleaved1F1B(stages, microbatches, loss, scale_grads=False)

    def run(self) -> float:
        """Run a step and return the seconds of forwards and backwards on this rank."""
        for stage in self.stages:
            stage.busy_s = 0.0
        arguments = (self.index_M,) if self.is_first else ()
        target = self.index_M if self.is_last else None
        self.schedule.step(*arguments, index=self.index_M, target=target, return_outputs=False)
        return sum(stage.busy_s for stage in self.stages)


class StockProgram:
    """Steps of the image-text model.

    Args:
        steps: microbatches of every step; the same number in each.
        split: as in `StockSchedule`.
    """

    def __init__(
        self,
        name: str,
        model: MultimodalModel,
        steps: Sequence[Sequence[Microbatch]],
        split: Split,
    ) -> None:
        self.name, self.split = name, split
        self.model, self.steps = model, steps
        current = self.current = Step()
        most = max(m.meta.image_count for step in steps for m in step)
        tokens = steps[0][0].meta.tokens
        self.schedule = StockSchedule(
            lambda start, stop: ChainStage(model, start, stop, most, current),
            split,
            lambda start: message_shape(model, start, most, tokens),
            len(steps[0]),
            lambda: current.loss_scale,
        )

    def step(self, index: int) -> float:
        microbatches = self.steps[index]
        self.model.zero_grad()
        self.current.microbatches = microbatches
        self.current.loss_scale = 1 / sum(m.target_count for m in microbatches)
        return self.schedule.run()


def message_shape(
    model: MultimodalModel, start: int, most_images: int, tokens: int
) -> tuple[int, ...]:
    """Return the input shape of the stage that starts at a layer; after the last: the loss."""
    vision, llm = model.modality_modules()
    depth = len(vision.layers)
    if start < depth:
        return most_images, GRID**2, vision.spec.config.hidden_size
    if start == depth + len(llm.layers):
        return (1,)
    return tokens, llm.text_config.hidden_size
