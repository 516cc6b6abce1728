"""What a stage does: a task's received tensors in, its messages and loss out.

The runtime knows stages only by `PipelineStage`. Three adapters make stages of the layered modules:
an encoder's stage runs one sub-microbatch (some of a microbatch's images) at a time, an LLM's
runs whole microbatches, joins the outputs of all sub-microbatches of all encoders and parts the
context of those of the generator, whose stages run one sub-microbatch (some of the images to be
drawn) at a time. An encoder or generator without images in a microbatch has no tasks for it and
does not run; only where FSDP gathers layer by layer, on all data-parallel ranks alike, does it have
one task, with a dummy image.

Around all of them, `PipelineStage.run` stands between what tasks compute with and the slices that
tensor-parallel ranks send each other (`StageGraph.slices`). Both ways are differentiable: where a
forward takes a slice, the backward gathers, and the reverse, so gradients travel in slices too.
These collectives are part of the tasks at both ends, which all tensor-parallel ranks run in the
same order, and not of the actions that send and receive: mirrors differ in what stays on a rank.

Shape legend: T tokens of a microbatch, K output tokens of one encoder or context tokens of the
generator, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.batch import Microbatch, even_ranges
from torchmm.common.device_copies import to_device
from torchmm.common.generated import DUMMY, GeneratorInputs
from torchmm.common.row_slices import SlicedMicrobatch, task_images
from torchmm.models.between import RowsOfRanks
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import GeneratorModule
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.token_cache import PackedCache
from torchmm.models.llm import Given, LlmModule
from torchmm.parallel.activation import host_inputs, set_layer_modes
from torchmm.parallel.exchange import FeatureRanks
from torchmm.parallel.fsdp import Sharding
from torchmm.parallel.host_inputs import Waiting
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import LayerMode, MessageSpecs, TensorSpec


@dataclass
class StageOutput:
    """What the forward of a task leaves.

    Attributes:
        messages: one tuple of tensors for each of `StageGraph.outgoing(task)`, in that order.
        loss: float32 scalar, not yet scaled; of the last stage.
    """

    messages: Sequence[tuple[Tensor, ...]]
    loss: Tensor | None = None


class PipelineStage(ABC):
    """One stage on one rank.

    Args:
        module: what holds its parameters.
        sharding: how they are gathered and reduced; None: they are whole on every rank.
    """

    def __init__(self, module: nn.Module, sharding: Sharding | None = None) -> None:
        self.module = module
        self.sharding = sharding
        self.splits_backward = not (isinstance(module, LayeredModule) and module.recomputes)
        """Whether backward may be done in two parts, I and W. Layers that are recomputed would be
        so in both, and torch's selective recomputation allows it only once."""

    def run(
        self,
        task: Task,
        inputs: Sequence[tuple[Tensor, ...]],
        microbatch: Any,
        graph: StageGraph,
        specs: MessageSpecs,
    ) -> StageOutput:
        """The forward of a task, from what this rank was sent to what it sends; arguments as in
        `forward`, `specs` of the step's messages."""
        if not graph.layout.tensor:  # nothing travels in slices
            return self.forward(task, inputs, microbatch, graph)
        rows = self.module.rows if isinstance(self.module, LayeredModule) else None
        given = [
            _all_rows(tensors, specs[message], rows)
            for message, tensors in zip(graph.incoming(task), inputs, strict=True)
        ]
        output = self.forward(task, given, microbatch, graph)
        sent = [
            tuple(
                _own_slice(tensor, spec, message, graph, rows) if spec.is_cut else tensor
                for tensor, spec in zip(tensors, specs[message], strict=True)
            )
            for message, tensors in zip(graph.outgoing(task), output.messages, strict=True)
        ]
        return StageOutput(sent, output.loss)

    @abstractmethod
    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Runs the stage's layers.

        Args:
            task: of this stage.
            inputs: one tuple of tensors for each of `graph.incoming(task)`, in that order.
            microbatch: all of the microbatch; the task may be a part of it.
            graph: of the step.
        """

    def recompute(self, modes: Sequence[LayerMode] | None) -> Waiting | None:
        """Says which layers the backward of the next forward runs again.

        Args:
            modes: one for each layer; None: as the module always does.

        Returns:
            what the forward leaves in the host's memory for its backward; None: nothing.

        Raises:
            ValueError: the module was built with one mode for all tasks, or has other layers.
        """
        module = self.module
        if isinstance(module, LayeredModule) and module.layer_modes:
            set_layer_modes(module, modes or ("none",) * len(module.layer_modes))
        elif modes is not None and set(modes) != {"none"}:
            raise ValueError(
                f"the plan selects recomputation per layer, which {type(module).__name__} "
                'does not support; set [activation_checkpoint] mode = "tuned"'
            )
        if modes is None or "offload" not in modes:
            return None
        assert isinstance(module, LayeredModule)
        inputs = host_inputs(module)
        return None if inputs is None else inputs.begin()

    def settle(self) -> None:
        """A forward is over: what it has sent to the host is let go of."""
        if isinstance(self.module, LayeredModule) and (inputs := host_inputs(self.module)):
            inputs.settle()

    def trained_parameters(self) -> list[nn.Parameter]:
        """Parameters that need gradients; between gathering and resharding, the gathered ones."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def tied_parameter(self) -> nn.Parameter:
        """The weight of which another stage holds a copy.

        Raises:
            ValueError: this kind of stage has none.
        """
        raise ValueError(f"{type(self).__name__} has no tied weight; remove StageSpec.tied_to")


class EncoderStage(PipelineStage):
    """Consecutive layers of an image encoder."""

    module: EncoderModule

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """One sub-microbatch: hidden states or pixels in; hidden states (perhaps with those of
        tapped layers), or (K, D_llm) out."""
        encoder = microbatch.encoders.get(self.module.name)
        parts = graph.parts(task.stage, task.microbatch)
        if parts > 1 and encoder is not None:
            count = len(encoder.grids_thw)
            images = task_images(count, parts, task.sub_microbatch, graph.context)
            encoder = encoder.select(images) if images else None
        if encoder is None:
            encoder = self.module.dummy_inputs(microbatch.input_ids_T.device)
        given = inputs[0] if inputs else None
        return _to_all(self.module(encoder.values(), given), task, graph)


class LlmStage(PipelineStage):
    """Consecutive layers of the LLM; the first embeds, the last gives the loss."""

    module: LlmModule

    def __init__(self, module: LlmModule, sharding: Sharding | None = None) -> None:
        super().__init__(module, sharding)
        self.feature_ranks: FeatureRanks | None = None
        """Ranks that encode and generate the images of each other. If None, those that share
        rows."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Encoder outputs or hidden states (T, D) in; hidden states or the summed loss out. Beside
        hidden states may be features that later layers add.

        With a generator: the loss and the context (K, D) of each of its sub-microbatches.
        """
        output = self.module(*self._given(task, inputs, microbatch, graph))
        if not self.module.is_last:
            return _to_all(output, task, graph)
        if not self.module.feeds_generator:
            return StageOutput((), output)
        loss, context_KD = output
        if isinstance(microbatch, SlicedMicrobatch) and microbatch.row.contexts is not None:
            assert self.feature_ranks is not None
            context_KD = self.feature_ranks.rows(context_KD, microbatch.row.contexts)
            if microbatch.generator is None:
                # The generator runs on a dummy image. Its context is connected to the exchange, so
                # that all ranks run the backward pass of the exchange.
                dummy_KD = context_KD.new_zeros(DUMMY.context, context_KD.shape[1])
                context_KD = torch.cat([context_KD, dummy_KD])
        return StageOutput(self._contexts(context_KD, microbatch, task, graph), loss)

    def _contexts(
        self, context_KD: Tensor, microbatch: Any, task: Task, graph: StageGraph
    ) -> list[tuple[Tensor, ...]]:
        parts = len(graph.outgoing(task))
        if parts <= 1:
            return [(context_KD,)] * parts
        contexts = microbatch.generator.contexts
        sizes = [sum(contexts[i] for i in own) for own in even_ranges(len(contexts), parts)]
        return [(part,) for part in context_KD.split(sizes)]

    def _given(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> tuple[Microbatch, Given]:
        """The microbatch as the LLM sees it, and what the stage before returned; for the first
        stage (K, D) by encoder: the outputs of its sub-microbatches, one after the other, or what
        ranks that share the row have found for this one's tokens."""
        row = None
        if isinstance(microbatch, SlicedMicrobatch):
            row = microbatch.row
            microbatch = microbatch.for_llm()
        if not self.module.is_first:
            return microbatch, inputs[0][0] if len(inputs[0]) == 1 else inputs[0]
        parts: dict[str, list[Tensor]] = {}
        for message, (features,) in zip(graph.incoming(task), inputs, strict=True):
            parts.setdefault(graph.layout.stages[message.source].module, []).append(features)
        found = {name: p[0] if len(p) == 1 else torch.cat(p) for name, p in parts.items()}
        ranks = self.feature_ranks or self.module.row_ranks
        if row is not None and row.routes:
            assert ranks is not None
            found |= ranks.features(found, row)
        return microbatch, found

    def tied_parameter(self) -> nn.Parameter:
        module = self.module
        if module.is_first == module.is_last:
            raise ValueError(
                f"{module.name}: only the first and the last of several stages can be tied"
            )
        holder = module.embedding if module.is_first else module.head
        return holder.weight


class TextStage(LlmStage):
    """A stage of the LLM when generating text.

    Attributes:
        cache: what its layers keep of the tokens so far; None: every row is whole.
    """

    def __init__(self, module: LlmModule, sharding: Sharding | None = None) -> None:
        super().__init__(module, sharding)
        self.cache: PackedCache | None = None

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Return hidden states as in training, or logits if this is the last stage.

        Logits (B, V) follow the last token of each of B prompts. If ranks share the packed
        sequence, each rank returns the logits of prompts whose last token is in its slice.
        """
        seen, given = self._given(task, inputs, microbatch, graph)
        if not self.module.is_last:
            return _to_all(self.module(seen, given, self.cache), task, graph)
        last = [stop - 1 for stop in microbatch.cu_seqlens[1:]]
        if isinstance(microbatch, SlicedMicrobatch):
            start = microbatch.row.start
            local = range(start, start + len(microbatch.input_ids_T))
            last = [position - start for position in last if position in local]
        last_B = to_device(torch.tensor(last, dtype=torch.int64), microbatch.input_ids_T.device)
        return StageOutput((), self.module.logits(seen, given, last_B, self.cache))


class GeneratorStage(PipelineStage):
    """Consecutive layers of a generator; the last gives the loss."""

    module: GeneratorModule

    def __init__(self, module: GeneratorModule, sharding: Sharding | None = None) -> None:
        super().__init__(module, sharding)
        if module.is_first:
            # Its layers' hidden states do not come from its input, the context, but meet it in one
            # layer after the other; torch then counts a weight's gradient once for each meeting.
            self.splits_backward = False

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """One sub-microbatch: its context (K, D_llm), or what the stage before made of it, in; the
        same or the summed loss out."""
        output = self.compute(*self._given(task, inputs, microbatch, graph))
        if self.module.is_last:
            return StageOutput((), output)
        tensors = tuple(tensor for tensor in output if tensor is not None)
        return StageOutput([tensors] * len(graph.outgoing(task)))

    def compute(self, drawn: GeneratorInputs, given: Tensor | tuple[Tensor, ...]) -> Any:
        """Runs the module."""
        return self.module(drawn, given)

    def _given(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> tuple[GeneratorInputs, Tensor | tuple[Tensor, ...]]:
        drawn = microbatch.generator
        if drawn is None:
            drawn = self.module.dummy_inputs(microbatch.input_ids_T.device)
        parts = graph.parts(task.stage, task.microbatch)
        if parts > 1:
            drawn = drawn.select(even_ranges(len(drawn.contexts), parts)[task.sub_microbatch])
        given = inputs[0][0] if self.module.is_first else inputs[0]
        return drawn.values(), given


class VelocityStage(GeneratorStage):
    """The generator's last stage when drawing: the velocities of all patches, not the loss."""

    def compute(self, drawn: GeneratorInputs, given: Tensor | tuple[Tensor, ...]) -> Tensor:
        """float32 (A, V), of all images, one after the other."""
        return self.module.velocity(drawn, given)


class FinishingStage(GeneratorStage):
    """The same in the last step from noise, where latents are drawn: pixels."""

    def compute(self, drawn: GeneratorInputs, given: Tensor | tuple[Tensor, ...]) -> Tensor:
        """float32 (A, X), of all images, one after the other."""
        return self.module.finished(drawn, given)


def make_stage(module: LayeredModule, sharding: Sharding | None = None) -> PipelineStage:
    """The stage that runs a layered module, cut or whole.

    Raises:
        TypeError: there is no stage for this kind of module.
    """
    if isinstance(module, EncoderModule):
        return EncoderStage(module, sharding)
    if isinstance(module, LlmModule):
        return LlmStage(module, sharding)
    if isinstance(module, GeneratorModule):
        return GeneratorStage(module, sharding)
    raise TypeError(
        f"{type(module).__name__} is not supported as a pipeline stage; use an encoder, an "
        "LLM or a generator"
    )


def _to_all(output: Tensor | tuple[Tensor, ...], task: Task, graph: StageGraph) -> StageOutput:
    tensors = (output,) if isinstance(output, Tensor) else output
    return StageOutput([tensors] * len(graph.outgoing(task)))


def _own_slice(
    tensor: Tensor, spec: TensorSpec, message: Message, graph: StageGraph, ranks: RowsOfRanks | None
) -> Tensor:
    """What this rank sends of a tensor.

    Args:
        ranks: the source's tensor-parallel ranks; None: it has one.
    """
    missing = spec.rows - tensor.shape[-2]
    rows = functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    if graph.parts_mirrors(message):
        # A mirror is consecutive ones of the destination's ranks. All of the source's ranks hand
        # slices to as many of them, which follow each other, in one turn.
        turns = graph.layout.mirrors_handed(*message[:2])
        turn = graph.layout.stages[message.destination].mirror * turns // graph.layout.mirrors
        rows = rows.narrow(-2, turn * (spec.rows // turns), spec.rows // turns)
    return rows if ranks is None else ranks.own_rows(rows)


def _all_rows(
    tensors: Sequence[Tensor], specs: Sequence[TensorSpec], ranks: RowsOfRanks | None
) -> tuple[Tensor, ...]:
    """What a task is handed of a message.

    Args:
        tensors: what this rank has got.
        ranks: the destination's tensor-parallel ranks; None: it has one.
    """
    found = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if not spec.is_cut:
            found.append(tensor)
            continue
        padded = tensor if ranks is None else ranks.every_row(tensor)
        found.append(padded[..., : spec.shape[-2], :])
    return tuple(found)
