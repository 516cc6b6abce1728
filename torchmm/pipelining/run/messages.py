"""Shapes and dtypes of everything that stages hand to each other, before anything is computed.

They follow from the sizes of the modules and the number of patches and tokens of each image, so
the planner of a step knows them, and receivers can allocate without asking. Rejected: inferring
them from a forward on the meta device, as torch's pipelining does once per run; here they change
with every microbatch.

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
from torchmm.common.generated import DUMMY
from torchmm.common.module_names import VISION
from torchmm.common.row_slices import task_images
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import GeneratorModule, MessageShapes
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, TensorSpec

T = TypeVar("T")


@dataclass(frozen=True)
class MessageSizes:
    """Sizes that determine the message shapes of a module: picklable, without weights.

    Attributes:
        kind: Kind of the module.
        hidden_size: LLMs: features of the hidden states.
        hidden_shape: Encoders: maps the patches of each image to the shape of the hidden states.
        llm_hidden_size: Features that an encoder sends to the LLM (with the blocks of its taps),
            or that the LLM sends to a generator.
        taps: Encoders: layers whose outputs are sent too. LLMs: layers that add blocks.
        dummy: Encoders: the image for microbatches without images.
        generator_shapes: Generators: maps images to the shapes of messages between stages.
        without_gradients: Indices of the tensors between stages that have no gradient.
    """

    kind: Literal["encoder", "llm", "generator"]
    hidden_size: int = 0
    hidden_shape: Callable[[list[int]], tuple[int, ...]] | None = None
    llm_hidden_size: int = 0
    taps: tuple[int, ...] = ()
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
            taps=module.taps,
            dummy=module.dummy_image(),
        )
    if isinstance(module, LlmModule):
        return MessageSizes("llm", module.text_config.hidden_size, taps=module.taps)
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
    """The tensors of every message of a step.

    Between encoder stages: (N, S, D), (1, P, D) or (P, D), by family, once more for each tapped
    layer before; from the last one: (K, D of the LLM), wider by one D for each of these; between
    LLM stages: (T, D), and (K, D for each block that later layers add) if there are images; from
    the last one to a generator: (K, D of the LLM); between generator stages: the shapes of
    `GeneratorModule.message_shapes`. Which slices of them tensor-parallel ranks send, the graph
    says (`StageGraph.slices`).

       Args:
           graph: of the step.
           modules: by name, or their sizes.
           microbatches: one for each of the graph's; of ranks that share rows, the part of one of
               them (`slice_meta`).
           dtype: in which modules compute.
           tasks: whose outputs are wanted; None: of all.

       Raises:
           ValueError: the graph has another number of microbatches, or more sub-microbatches than
               there are images.
           TypeError: a module is of a kind whose messages are not known.
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
                    slices.hidden if index < hidden else slices.others,
                )
                for index, shape in enumerate(shapes)
            )
    return specs


def _shapes(
    graph: StageGraph, message: Message, sizes: Mapping[str, MessageSizes], meta: MicrobatchMeta
) -> list[tuple[int, ...]]:
    """Shapes of the tensors of a message."""
    names = [graph.layout.stages[i].module for i in (message.source, message.destination)]
    source, destination = (sizes[name] for name in names)
    leaves = names[0] != names[1]
    if source.kind == "encoder":
        assert source.dummy is not None
        every = meta.images_read_by(names[0])
        if not every and graph.context == 1:
            every = [source.dummy]
        own = _part(every, graph, message, message.source) or [source.dummy]
        stop = graph.layout.stages[message.source].stop
        tapped = 0 if leaves else sum(tap < stop for tap in source.taps)
        if leaves:
            shape: tuple[int, ...] = sum(image.tokens for image in own), source.llm_hidden_size
        else:
            assert source.hidden_shape is not None
            shape = source.hidden_shape([image.patches for image in own])
        return [shape] * (1 + tapped)
    if source.kind == "llm" and not leaves:
        stop = graph.layout.stages[message.source].stop
        blocks = sum(tap >= stop for tap in source.taps)
        images = meta.images_read_by(VISION) if blocks else []
        added = [(sum(i.tokens for i in images), blocks * source.hidden_size)] if images else []
        return [(meta.tokens, source.hidden_size), *added]
    drawn = _part(meta.generated or [DUMMY], graph, message, message.destination)
    if leaves:
        return [(sum(image.context for image in drawn), destination.llm_hidden_size)]
    assert destination.generator_shapes is not None
    return destination.generator_shapes(drawn)


def _part(every: list[T], graph: StageGraph, message: Message, stage: int) -> list[T]:
    """The images of a message's sub-microbatch, which a stage at one of its ends has."""
    parts = graph.parts(stage, message.microbatch)
    return [every[i] for i in task_images(len(every), parts, message.sub_microbatch, graph.context)]
