"""Shapes and dtypes of everything that stages hand to each other, before anything is computed.

They follow from the sizes of the modules and the number of patches and tokens of each image, so
whoever plans a step knows them, and receivers can allocate without asking. Rejected: inferring
them from a forward on the meta device, as torch's pipelining does once per run; here they change
with every microbatch.

Shape legend: N images, S positions of an image, P patches, K output tokens (or context tokens of a
generator), T tokens, D features, E features of an embedded time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from torchmm.batch import ImageMeta, MicrobatchMeta, even_ranges
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import DUMMY, GeneratorModule
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.pipelining.graph import Message, StageGraph
from torchmm.pipelining.plan import MessageSpecs, TensorSpec

T = TypeVar("T")


def message_specs(
    graph: StageGraph,
    modules: Mapping[str, LayeredModule],
    microbatches: Sequence[MicrobatchMeta],
    dtype: torch.dtype,
) -> MessageSpecs:
    """The tensors of every message of a step.

    Between encoder stages: (N, S, D), (1, P, D) or (P, D), by family; from the last one: (K, D of
    the LLM); between LLM stages: (T, D); from the last one to a generator: (K, D of the LLM);
    between generator stages: (N, P, D), (K, D) and (N, E).

    Args:
        graph: of the step.
        modules: by name; whole or cut, on any device: only sizes are read.
        microbatches: one for each of the graph's.
        dtype: in which modules compute.

    Raises:
        ValueError: the graph has another number of microbatches, or more sub-microbatches than
            there are images.
        TypeError: a module is of a kind whose messages are not known.
    """
    if len(microbatches) != graph.microbatches:
        raise ValueError(
            f"metadata of {len(microbatches)} microbatches for a graph of {graph.microbatches}"
        )
    specs: dict[Message, tuple[TensorSpec, ...]] = {}
    for task in graph.tasks():
        meta = microbatches[task.microbatch]
        for message in graph.outgoing(task):
            shapes = _shapes(graph, message, modules, meta)
            specs[message] = tuple(TensorSpec(shape, dtype) for shape in shapes)
    return specs


def _shapes(
    graph: StageGraph, message: Message, modules: Mapping[str, LayeredModule], meta: MicrobatchMeta
) -> list[tuple[int, ...]]:
    """Shapes of the tensors of a message."""
    ends = message.source, message.destination
    source, destination = (modules[graph.layout.stages[stage].module] for stage in ends)
    leaves = source is not destination
    if isinstance(source, EncoderModule):
        every = meta.images_read_by(source.name) or [source.dummy_image()]
        own = _part(every, graph, message, message.source)
        return [_encoder_shape(source, own, leaves)]
    if isinstance(source, LlmModule) and not leaves:
        return [(meta.tokens, source.text_config.hidden_size)]
    if isinstance(destination, GeneratorModule):
        drawn = _part(meta.generated or [DUMMY], graph, message, message.destination)
        context = sum(image.context for image in drawn)
        if leaves:
            return [(context, destination.spec.llm_hidden_size)]
        spec, times = destination.spec, (len(drawn), destination.time_features())
        return [destination.hidden_shape(drawn), (context, spec.hidden_size), times]
    raise TypeError(
        f"{source.name} -> {destination.name}: messages from a {type(source).__name__} to a "
        f"{type(destination).__name__} are not known"
    )


def _part(every: list[T], graph: StageGraph, message: Message, stage: int) -> list[T]:
    """The images of a message's sub-microbatch, which a stage at one of its ends has."""
    parts = even_ranges(len(every), graph.parts(stage, message.microbatch))
    return [every[i] for i in parts[message.sub_microbatch]]


def _encoder_shape(
    module: EncoderModule, images: Sequence[ImageMeta], leaves: bool
) -> tuple[int, ...]:
    """Of what goes to the LLM (`leaves`) or to another stage of the encoder."""
    if leaves:
        return sum(image.tokens for image in images), module.spec.llm_hidden_size
    patches = [image.patches for image in images]
    return module.family.hidden_shape(module.spec.config, patches)
