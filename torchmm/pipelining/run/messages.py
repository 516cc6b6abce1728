"""Shapes and dtypes of everything that stages hand to each other, before anything is computed.

They follow from the sizes of the modules and the number of patches and tokens of each image, so
the planner of a step knows them, and receivers can allocate without asking. Rejected: inferring
them from a forward on the meta device, as torch's pipelining does once per run; here they change
with every microbatch.

Shape legend: N images, S positions of an image, P patches (A of all images), K output tokens (or
context tokens of a generator), T tokens, D features, E features of an embedded time, V latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from torchmm.common.batch import ImageMeta, MicrobatchMeta
from torchmm.common.module_names import VISION
from torchmm.common.row_slices import task_images
from torchmm.extensions.generation.generator import DUMMY, GeneratorModule
from torchmm.models.encoders import EncoderModule
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs, TensorSpec

T = TypeVar("T")
TIMES, LATENTS = 2, 3
"""Places of tensors in the messages of a generator."""


@dataclass(frozen=True)
class MessageSizes:
    """What shapes of a module's messages follow from: picklable, without weights.

    Attributes:
        kind: of the module.
        hidden_size: of its layers.
        hidden_shape: encoders: of hidden states, from the patches of each image.
        llm_hidden_size: of what an encoder gives to the LLM (with the blocks of its taps), and a
            generator gets from it.
        taps: encoders: layers whose outputs travel on; LLMs: those that add blocks.
        dummy: encoders: the image that stands in for none.
        time_features: generators: size of an embedded time.
        learns_times: whether embedded times get gradients.
        latent_values: generators: of a patch of what is drawn, where that is latents; 0: pixels.
    """

    kind: Literal["encoder", "llm", "generator"]
    hidden_size: int = 0
    hidden_shape: Callable[[list[int]], tuple[int, ...]] | None = None
    llm_hidden_size: int = 0
    taps: tuple[int, ...] = ()
    dummy: ImageMeta | None = None
    time_features: int = 0
    learns_times: bool = True
    latent_values: int = 0

    @property
    def without_gradients(self) -> set[int]:
        """Which tensors of a message between two stages of the module have none."""
        if self.kind != "generator":
            return set()
        return {LATENTS} if self.learns_times else {TIMES, LATENTS}


def message_sizes(module: LayeredModule) -> MessageSizes:
    """Of a module, whole or cut, on any device.

    Raises:
        TypeError: it is of a kind whose messages are not known.
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
        spec = module.spec
        return MessageSizes(
            "generator",
            spec.hidden_size,
            llm_hidden_size=spec.llm_hidden_size,
            time_features=module.time_features(),
            learns_times=module.describe().trainable,
            latent_values=spec.images.latent_values,
        )
    raise TypeError(f"{module.name}: messages of a {type(module).__name__} are not known")


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
    the last one to a generator: (K, D of the LLM); between generator stages: (N, P, D), (K, D),
    (N, E) and, where latents are drawn, (A, V). Which slices of them tensor-parallel ranks send,
    the graph says (`StageGraph.slices`).

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
            f"metadata of {len(microbatches)} microbatches for a graph of {graph.microbatches}"
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
        return [_encoder_shape(source, own, leaves)] * (1 + tapped)
    if source.kind == "llm" and not leaves:
        stop = graph.layout.stages[message.source].stop
        blocks = sum(tap >= stop for tap in source.taps)
        images = meta.images_read_by(VISION) if blocks else []
        added = [(sum(i.tokens for i in images), blocks * source.hidden_size)] if images else []
        return [(meta.tokens, source.hidden_size), *added]
    drawn = _part(meta.generated or [DUMMY], graph, message, message.destination)
    context = sum(image.context for image in drawn)
    if leaves:
        return [(context, destination.llm_hidden_size)]
    hidden = destination.hidden_size
    times = len(drawn), destination.time_features
    patches = [image.patches for image in drawn]
    values = destination.latent_values
    latents = [(sum(patches), values)] if values else []
    return [(len(drawn), max(patches), hidden), (context, hidden), times, *latents]


def _part(every: list[T], graph: StageGraph, message: Message, stage: int) -> list[T]:
    """The images of a message's sub-microbatch, which a stage at one of its ends has."""
    parts = graph.parts(stage, message.microbatch)
    return [every[i] for i in task_images(len(every), parts, message.sub_microbatch, graph.context)]


def _encoder_shape(
    sizes: MessageSizes, images: Sequence[ImageMeta], leaves: bool
) -> tuple[int, ...]:
    """Of what goes to the LLM (`leaves`) or to another stage of the encoder."""
    if leaves:
        return sum(image.tokens for image in images), sizes.llm_hidden_size
    assert sizes.hidden_shape is not None
    return sizes.hidden_shape([image.patches for image in images])
