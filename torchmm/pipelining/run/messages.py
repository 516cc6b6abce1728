"""Shapes and dtypes of pipeline messages.

Shapes follow from the module sizes and from the number of patches and tokens of each image. The
planner therefore knows them before a step, and receivers allocate buffers without communication.
torch.distributed.pipelining infers shapes once per run with a forward pass on the meta device, but
here they change with every microbatch.

Shape legend: N images, S positions of an image, P patches, K output tokens (or context tokens of a
generator), T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from torchmm.common.batch import ImageMeta, MicrobatchMeta
from torchmm.common.generated import DUMMY_IMAGE
from torchmm.common.module_names import VISION
from torchmm.common.sequence_slices import task_images
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import GeneratorModule, MessageShapes
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, TensorSpec

T = TypeVar("T")


@dataclass(frozen=True)
class MessageSizes:
    """Sizes that determine the message shapes of a module. Picklable, without weights.

    Attributes:
        kind: Type of the module.
        hidden_size: Hidden size of an LLM.
        hidden_shape: Function of an encoder that maps the patches of each image to the shape of the
            hidden states.
        llm_hidden_size: Number of features that an encoder sends to the LLM, including DeepStack
            features, or that the LLM sends to a generator.
        taps: Encoder layers whose outputs are DeepStack features, or LLM layers that add them.
        dummy: Image of an encoder for microbatches without images.
        generator_shapes: Function of a generator that maps images to shapes of messages.
        without_gradients: Indices of tensors between stages that have no gradient.
    """

    kind: Literal["encoder", "llm", "generator"]
    hidden_size: int = 0
    hidden_shape: Callable[[list[int]], tuple[int, ...]] | None = None
    llm_hidden_size: int = 0
    deepstack_layers: tuple[int, ...] = ()
    dummy: ImageMeta | None = None
    generator_shapes: MessageShapes | None = None
    without_gradients: frozenset[int] = frozenset()


def message_sizes(module: LayeredModule) -> MessageSizes:
    """Return the sizes of a module or of its stages, on any device.

    Raises:
        TypeError: The module is not an encoder, an LLM or a generator.
    """
    if isinstance(module, EncoderModule):
        shape = partial(module.family.hidden_shape, module.spec.config)
        return MessageSizes(
            "encoder",
            hidden_shape=shape,
            llm_hidden_size=module.output_features,
            deepstack_layers=module.deepstack_layers,
            dummy=module.dummy_image(),
        )
    if isinstance(module, LlmModule):
        return MessageSizes(
            "llm", module.text_config.hidden_size, deepstack_layers=module.deepstack_layers
        )
    if isinstance(module, GeneratorModule):
        return MessageSizes(
            "generator",
            llm_hidden_size=module.llm_hidden_size,
            generator_shapes=module.message_shapes(),
            without_gradients=module.messages_without_gradients(),
        )
    raise TypeError(f"{module.name}: messages of {type(module).__name__} are not supported")


def message_specs(
    graph: StageGraph,
    modules: Mapping[str, LayeredModule] | Mapping[str, MessageSizes],
    microbatches: Sequence[MicrobatchMeta],
    dtype: torch.dtype,
    tasks: Iterable[Task] | None = None,
) -> MessageSpecs:
    """Return the tensors of each message of a step.

    | from             | to              | shapes                                              |
    |------------------|-----------------|-----------------------------------------------------|
    | encoder stage    | encoder stage   | (N, S, D), (1, P, D) or (P, D) depending on the     |
    |                  |                 | family, and one more tensor per DeepStack feature   |
    | last encoder     | first LLM stage | (K, D of the LLM times 1 + DeepStack features)      |
    | LLM stage        | LLM stage       | (T, D), and (K, D per remaining DeepStack feature)  |
    | last LLM stage   | generator       | (K, D of the LLM)                                   |
    | generator stage  | generator stage | `GeneratorModule.message_shapes`                    |

    `StageGraph.slices` defines the slices that tensor-parallel ranks send.

    Args:
        graph: Tasks of the step.
        modules: Modules by name, or their message sizes.
        microbatches: Metadata of each microbatch. With context parallelism, those of one rank
            (`slice_meta`).
        dtype: Compute dtype.
        tasks: Tasks whose outputs are returned. Defaults to all tasks.

    Raises:
        ValueError: The graph has a different number of microbatches, or more sub-microbatches than
            images.
        TypeError: The type of a module is not supported.
    """
    if len(microbatches) != graph.microbatches:
        raise ValueError(
            f"metadata of {len(microbatches)} microbatches for a graph of "
            f"{graph.microbatches} microbatches"
        )
    sizes = {n: m if isinstance(m, MessageSizes) else message_sizes(m) for n, m in modules.items()}
    specs: dict[Message, tuple[TensorSpec, ...]] = {}
    for task in graph.tasks() if tasks is None else tasks:
        meta = microbatches[task.microbatch]
        for message in graph.outgoing(task):
            source = sizes[graph.layout.stages[message.source].module]
            shapes = _shapes(graph, message, sizes, meta)
            slices = graph.slices(message)
            hidden = len(shapes) if source.kind == "encoder" else 1
            specs[message] = tuple(
                TensorSpec(
                    shape,
                    dtype,
                    index not in source.without_gradients,
                    slices.hidden if index < hidden else slices.additional,
                )
                for index, shape in enumerate(shapes)
            )
    return specs


def _shapes(
    graph: StageGraph, message: Message, sizes: Mapping[str, MessageSizes], meta: MicrobatchMeta
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a message."""
    names = [graph.layout.stages[i].module for i in (message.source, message.destination)]
    source, destination = (sizes[name] for name in names)
    leaves_module = names[0] != names[1]
    if source.kind == "encoder":
        assert source.dummy is not None
        module_images = meta.images_of_encoder(names[0])
        if not module_images and graph.context == 1:
            module_images = [source.dummy]
        local_images = _sub_microbatch_items(module_images, graph, message, message.source) or [
            source.dummy
        ]
        stop = graph.layout.stages[message.source].stop
        encoder_features = (
            0 if leaves_module else sum(tap < stop for tap in source.deepstack_layers)
        )
        if leaves_module:
            shape: tuple[int, ...] = (
                sum(image.tokens for image in local_images),
                source.llm_hidden_size,
            )
        else:
            assert source.hidden_shape is not None
            shape = source.hidden_shape([image.patches for image in local_images])
        return [shape] * (1 + encoder_features)
    if source.kind == "llm" and not leaves_module:
        stop = graph.layout.stages[message.source].stop
        llm_features = sum(tap >= stop for tap in source.deepstack_layers)
        images = meta.images_of_encoder(VISION) if llm_features else []
        deepstack = (
            [(sum(i.tokens for i in images), llm_features * source.hidden_size)] if images else []
        )
        return [(meta.tokens, source.hidden_size), *deepstack]
    generated = _sub_microbatch_items(
        meta.generated or [DUMMY_IMAGE], graph, message, message.destination
    )
    if leaves_module:
        return [(sum(image.context for image in generated), destination.llm_hidden_size)]
    assert destination.generator_shapes is not None
    return destination.generator_shapes(generated)


def _sub_microbatch_items(
    every: list[T], graph: StageGraph, message: Message, stage: int
) -> list[T]:
    """Return the images of the sub-microbatch of a message."""
    parts = graph.task_count(stage, message.microbatch)
    return [every[i] for i in task_images(len(every), parts, message.sub_microbatch, graph.context)]
