"""Pipeline stages: map received tensors of a task to messages and loss.

The runtime uses the interface `PipelineStage`. Three adapters wrap the layered modules:

- `EncoderStage` runs one sub-microbatch, which is a subset of the images of a microbatch.
- `LlmStage` runs a full microbatch. It concatenates the outputs of all encoder sub-microbatches,
  and splits the context among the generator sub-microbatches.
- `GeneratorStage` runs one sub-microbatch of target images.

An encoder or generator has no tasks for microbatches without images. With FSDP2 per layer, all
data-parallel ranks must run the same collectives, so the module has one task with a dummy image.

`PipelineStage.run` converts between the tensors of tasks and the slices that tensor-parallel ranks
send (`StageGraph.slices`). The conversion is differentiable: the backward pass of a slice is an
all-gather and vice versa, so gradients are sent as slices, too. These collectives belong to tasks
and not to SEND and RECV actions, because all tensor-parallel ranks run tasks in the same order,
while mirrors differ in the messages that stay on a rank.

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

from torchmm.common.batch import Microbatch, split_evenly
from torchmm.common.device_copies import to_device
from torchmm.common.generated import DUMMY_IMAGE, GeneratorInputs
from torchmm.common.sequence_slices import SlicedMicrobatch, task_images
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import GeneratorModule
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.kv_cache import PackedCache
from torchmm.models.llm import LlmModule, StageInput
from torchmm.models.sequence_layout import RowSharding
from torchmm.parallel.activation import get_activation_offload, set_recompute_modes
from torchmm.parallel.activation_offload import PendingInputs
from torchmm.parallel.exchange import FeatureExchange
from torchmm.parallel.fsdp import Sharding
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, RecomputeMode, TensorSpec


@dataclass
class StageOutput:
    """Output of the forward pass of a task.

    Attributes:
        messages: Tensors of each message of `StageGraph.outgoing(task)`, in the same order.
        loss: Unscaled float32 loss of the last stage.
    """

    messages: Sequence[tuple[Tensor, ...]]
    loss: Tensor | None = None


class PipelineStage(ABC):
    """A pipeline stage on one rank.

    Args:
        module: Module with the parameters of the stage.
        sharding: Sharding of the parameters. None if they are replicated.
    """

    def __init__(self, module: nn.Module, sharding: Sharding | None = None) -> None:
        self.module = module
        self.sharding = sharding
        self.splits_backward = not (isinstance(module, LayeredModule) and module.uses_recomputation)
        """Whether the backward pass can be split into I and W. Recomputed layers would run twice,
        and selective checkpointing in torch supports only one recomputation."""

    def run(
        self,
        task: Task,
        inputs: Sequence[tuple[Tensor, ...]],
        microbatch: Any,
        graph: StageGraph,
        specs: MessageSpecs,
    ) -> StageOutput:
        """Run the forward pass of a task on received slices, and return the slices to send.

        Args:
            task: Task of this stage.
            inputs: Received tensors of each message of `graph.incoming(task)`.
            microbatch: Full microbatch.
            graph: Tasks of the step.
            specs: Tensors of each message of the step.
        """
        if not graph.layout.tensor_parallel:  # messages are not sliced
            return self.forward(task, inputs, microbatch, graph)
        rows = self.module.rows if isinstance(self.module, LayeredModule) else None
        received = [
            _gather_slices(tensors, specs[message], rows)
            for message, tensors in zip(graph.incoming(task), inputs, strict=True)
        ]
        output = self.forward(task, received, microbatch, graph)
        sent = [
            tuple(
                _local_slice(tensor, spec, message, graph, rows)
                if spec.needs_all_gather
                else tensor
                for tensor, spec in zip(tensors, specs[message], strict=True)
            )
            for message, tensors in zip(graph.outgoing(task), output.messages, strict=True)
        ]
        return StageOutput(sent, output.loss)

    @abstractmethod
    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Run the layers of the stage.

        Args:
            task: Task of this stage.
            inputs: Unsliced tensors of each message of `graph.incoming(task)`.
            microbatch: Full microbatch. The task can be a sub-microbatch of it.
            graph: Tasks of the step.
        """

    def set_recompute_modes(self, modes: Sequence[RecomputeMode] | None) -> PendingInputs | None:
        """Set the recomputation mode of each layer for the next forward pass.

        Args:
            modes: Mode of each layer. If None, the module uses its default.

        Returns:
            The activations that the forward pass offloads to host memory, or None.

        Raises:
            ValueError: The module has one mode for all tasks, or a different number of layers.
        """
        module = self.module
        if isinstance(module, LayeredModule) and module.recompute_modes:
            set_recompute_modes(module, modes or ("none",) * len(module.recompute_modes))
        elif modes is not None and set(modes) != {"none"}:
            raise ValueError(
                f"the plan selects recomputation per layer, which {type(module).__name__} "
                'does not support; set [activation_checkpoint] mode = "auto"'
            )
        if modes is None or "offload" not in modes:
            return None
        assert isinstance(module, LayeredModule)
        inputs = get_activation_offload(module)
        return None if inputs is None else inputs.begin_task()

    def free_offloaded(self) -> None:
        """Free device copies of activations that the forward pass has offloaded."""
        if isinstance(self.module, LayeredModule) and (
            inputs := get_activation_offload(self.module)
        ):
            inputs.wait_for_offloads()

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters. These are unsharded between UNSHARD and RESHARD."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def tied_parameter(self) -> nn.Parameter:
        """Return the weight that is tied to a weight of another stage.

        Raises:
            ValueError: This type of stage has no tied weight.
        """
        raise ValueError(f"{type(self).__name__} has no tied weight; remove StageSpec.tied_to")


class EncoderStage(PipelineStage):
    """Consecutive layers of an encoder."""

    module: EncoderModule

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Run a sub-microbatch.

        The first stage reads pixels, and later stages read hidden states. The last stage returns
        (K, D_llm), and other stages return hidden states, including DeepStack features.
        """
        encoder = microbatch.encoders.get(self.module.name)
        parts = graph.task_count(task.stage, task.microbatch)
        if parts > 1 and encoder is not None:
            count = len(encoder.grids_thw)
            images = task_images(count, parts, task.sub_microbatch, graph.context)
            encoder = encoder.select(images) if images else None
        if encoder is None:
            encoder = self.module.dummy_inputs(microbatch.input_ids_T.device)
        hidden = inputs[0] if inputs else None
        return _send_to_all(self.module(encoder.values(), hidden), task, graph)


class LlmStage(PipelineStage):
    """Consecutive layers of the LLM. The first stage embeds tokens, the last computes the loss."""

    module: LlmModule

    def __init__(self, module: LlmModule, sharding: Sharding | None = None) -> None:
        super().__init__(module, sharding)
        self.feature_exchange: FeatureExchange | None = None
        """Ranks that encode and generate images for each other. Defaults to the context-parallel
        ranks."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Run a microbatch.

        The first stage reads encoder outputs, and later stages read hidden states (T, D) and
        remaining DeepStack features. The last stage returns the summed loss, and with a generator
        also the context (K, D) of each generator sub-microbatch.
        """
        output = self.module(*self._stage_inputs(task, inputs, microbatch, graph))
        if not self.module.is_last:
            return _send_to_all(output, task, graph)
        if not self.module.feeds_generator:
            return StageOutput((), output)
        loss, context_KD = output
        if (
            isinstance(microbatch, SlicedMicrobatch)
            and microbatch.slice_context.contexts is not None
        ):
            assert self.feature_exchange is not None
            context_KD = self.feature_exchange.exchange_rows(
                context_KD, microbatch.slice_context.contexts
            )
            if microbatch.generator is None:
                # The generator runs on a dummy image. Its context is connected to the exchange, so
                # that all ranks run the backward pass of the exchange.
                dummy_KD = context_KD.new_zeros(DUMMY_IMAGE.context, context_KD.shape[1])
                context_KD = torch.cat([context_KD, dummy_KD])
        return StageOutput(self._contexts(context_KD, microbatch, task, graph), loss)

    def _contexts(
        self, context_KD: Tensor, microbatch: Any, task: Task, graph: StageGraph
    ) -> list[tuple[Tensor, ...]]:
        parts = len(graph.outgoing(task))
        if parts <= 1:
            return [(context_KD,)] * parts
        contexts = microbatch.generator.contexts
        sizes = [
            sum(contexts[i] for i in part_images)
            for part_images in split_evenly(len(contexts), parts)
        ]
        return [(part,) for part in context_KD.split(sizes)]

    def _stage_inputs(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> tuple[Microbatch, StageInput]:
        """Return the microbatch of the LLM and the inputs of the stage.

        The inputs are hidden states, or for the first stage (K, D) by encoder: the concatenated
        outputs of the sub-microbatches. With context parallelism, these are the features of the
        local tokens, which other ranks may have encoded.
        """
        row = None
        if isinstance(microbatch, SlicedMicrobatch):
            row = microbatch.slice_context
            microbatch = microbatch.for_llm()
        if not self.module.is_first:
            return microbatch, inputs[0][0] if len(inputs[0]) == 1 else inputs[0]
        parts: dict[str, list[Tensor]] = {}
        for message, (features,) in zip(graph.incoming(task), inputs, strict=True):
            parts.setdefault(graph.layout.stages[message.source].module, []).append(features)
        features_of = {name: p[0] if len(p) == 1 else torch.cat(p) for name, p in parts.items()}
        ranks = self.feature_exchange or self.module.sequence_ranks
        if row is not None and row.routes:
            assert ranks is not None
            features_of |= ranks.exchange_features(features_of, row)
        return microbatch, features_of

    def tied_parameter(self) -> nn.Parameter:
        module = self.module
        if module.is_first == module.is_last:
            raise ValueError(
                f"{module.name}: only the first and the last of several stages can be tied"
            )
        holder = module.embedding if module.is_first else module.head
        return holder.weight


class TextStage(LlmStage):
    """A stage of the LLM for text generation.

    Attributes:
        cache: KV cache of the layers. If None, each sequence is processed from its first token.
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
        llm_batch, llm_inputs = self._stage_inputs(task, inputs, microbatch, graph)
        if not self.module.is_last:
            return _send_to_all(self.module(llm_batch, llm_inputs, self.cache), task, graph)
        last = [stop - 1 for stop in microbatch.cu_seqlens[1:]]
        if isinstance(microbatch, SlicedMicrobatch):
            start = microbatch.slice_context.start
            local = range(start, start + len(microbatch.input_ids_T))
            last = [position - start for position in last if position in local]
        last_B = to_device(torch.tensor(last, dtype=torch.int64), microbatch.input_ids_T.device)
        return StageOutput((), self.module.logits(llm_batch, llm_inputs, last_B, self.cache))


class AnswerStage(LlmStage):
    """A stage of the LLM that returns log-probabilities of answers instead of the loss."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Return hidden states, or the result of `LlmModule.answer_log_probs` if it is last."""
        if not self.module.is_last:
            return super().forward(task, inputs, microbatch, graph)
        stage_inputs = self._stage_inputs(task, inputs, microbatch, graph)
        return StageOutput((), self.module.answer_log_probs(*stage_inputs))


class GeneratorStage(PipelineStage):
    """Consecutive layers of a generator. The last stage computes the loss."""

    module: GeneratorModule

    def __init__(self, module: GeneratorModule, sharding: Sharding | None = None) -> None:
        super().__init__(module, sharding)
        if module.is_first:
            # Hidden states of the first stage do not depend on its input, the context, which joins
            # in each layer. torch would then accumulate the gradient of a weight once per layer.
            self.splits_backward = False

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        """Run a sub-microbatch.

        The first stage reads the context (K, D_llm), and later stages read the tensors of the
        preceding stage. The last stage returns the summed loss.
        """
        output = self.compute(*self._stage_inputs(task, inputs, microbatch, graph))
        if self.module.is_last:
            return StageOutput((), output)
        tensors = tuple(tensor for tensor in output if tensor is not None)
        return StageOutput([tensors] * len(graph.outgoing(task)))

    def compute(self, images: GeneratorInputs, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        """Run the module on the inputs of a stage."""
        return self.module(images, inputs)

    def _stage_inputs(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> tuple[GeneratorInputs, Tensor | tuple[Tensor, ...]]:
        images = microbatch.generator
        if images is None:
            images = self.module.dummy_inputs(microbatch.input_ids_T.device)
        parts = graph.task_count(task.stage, task.microbatch)
        if parts > 1:
            images = images.select(split_evenly(len(images.contexts), parts)[task.sub_microbatch])
        stage_inputs = inputs[0][0] if self.module.is_first else inputs[0]
        return images.values(), stage_inputs


class VelocityStage(GeneratorStage):
    """Last stage of a generator that generates images: returns velocities instead of the loss."""

    def compute(self, images: GeneratorInputs, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the velocities of the patches of all images: (A, V), float32."""
        return self.module.velocity(images, inputs)


class LatentDecodeStage(GeneratorStage):
    """Last stage of a latent generator in the last sampling step: returns decoded pixels."""

    def compute(self, images: GeneratorInputs, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the pixels of the patches of all images: (A, X), float32."""
        return self.module.decode_latents(images, inputs)


def make_stage(module: LayeredModule, sharding: Sharding | None = None) -> PipelineStage:
    """Return the stage of a module, or of a part of it.

    Raises:
        TypeError: The type of the module is not supported.
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


def _send_to_all(output: Tensor | tuple[Tensor, ...], task: Task, graph: StageGraph) -> StageOutput:
    tensors = (output,) if isinstance(output, Tensor) else output
    return StageOutput([tensors] * len(graph.outgoing(task)))


def _local_slice(
    tensor: Tensor, spec: TensorSpec, message: Message, graph: StageGraph, ranks: RowSharding | None
) -> Tensor:
    """Return the slice of a tensor that this rank sends.

    Args:
        tensor: Tensor with all tokens.
        spec: Shape and slices of the tensor.
        message: Message of the tensor.
        graph: Tasks of the step.
        ranks: Tensor-parallel ranks of the source. None without tensor parallelism.
    """
    padding = spec.padded_tokens - tensor.shape[-2]
    rows = functional.pad(tensor, (0, 0, 0, padding)) if padding else tensor
    if graph.splits_among_mirrors(message):
        # Consecutive ranks of the destination form a mirror. In each turn, the ranks of the source
        # send slices to the same number of consecutive destination ranks.
        mirror_groups = graph.layout.mirrors_per_source(*message[:2])
        mirror_group = (
            graph.layout.stages[message.destination].mirror
            * mirror_groups
            // graph.layout.mirror_count
        )
        rows = rows.narrow(
            -2,
            mirror_group * (spec.padded_tokens // mirror_groups),
            spec.padded_tokens // mirror_groups,
        )
    return rows if ranks is None else ranks.local_rows(rows)


def _gather_slices(
    tensors: Sequence[Tensor], specs: Sequence[TensorSpec], ranks: RowSharding | None
) -> tuple[Tensor, ...]:
    """Return the tensors of a message with all tokens.

    Args:
        tensors: Tensors that this rank received.
        specs: Shapes and slices of the tensors.
        ranks: Tensor-parallel ranks of the destination. None without tensor parallelism.
    """
    gathered = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if not spec.needs_all_gather:
            gathered.append(tensor)
            continue
        padded = tensor if ranks is None else ranks.all_gather_rows(tensor)
        gathered.append(padded[..., : spec.shape[-2], :])
    return tuple(gathered)
