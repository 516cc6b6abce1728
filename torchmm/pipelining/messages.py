"""Shapes and dtypes of everything that stages hand to each other, before anything is computed.

They follow from the sizes of the modules and the number of patches and tokens of each image, so
whoever plans a step knows them, and receivers can allocate without asking. Rejected: inferring
them from a forward on the meta device, as torch's pipelining does once per run; here they change
with every microbatch.

Shape legend: N images, S positions of an image, P patches, K output tokens, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchmm.batch import ImageMeta, MicrobatchMeta, even_ranges
from torchmm.models.encoders import EncoderModule
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.pipelining.graph import Message, StageGraph
from torchmm.pipelining.plan import MessageSpecs, TensorSpec


def message_specs(
    graph: StageGraph,
    modules: Mapping[str, LayeredModule],
    microbatches: Sequence[MicrobatchMeta],
    dtype: torch.dtype,
) -> MessageSpecs:
    """The tensors of every message of a step.

    Between encoder stages: (N, S, D), (1, P, D) or (P, D), by family; from the last one: (K, D of
    the LLM); between LLM stages: (T, D).

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
    images = {
        name: [_images(meta, name) for meta in microbatches]
        for name in graph.layout.sub_microbatched
    }
    specs: dict[Message, tuple[TensorSpec, ...]] = {}
    for task in graph.tasks():
        name = graph.layout.stages[task.stage].module
        module = modules[name]
        for message in graph.outgoing(task):
            shape: tuple[int, ...]
            if isinstance(module, EncoderModule):
                every = images[name][task.microbatch] or [module.dummy_image()]
                parts = even_ranges(len(every), graph.parts(task.stage, task.microbatch))
                own = [every[i] for i in parts[task.sub_microbatch]]
                leaves = graph.layout.stages[message.destination].module != name
                shape = _encoder_shape(module, own, leaves)
            elif isinstance(module, LlmModule):
                shape = (microbatches[task.microbatch].tokens, module.text_config.hidden_size)
            else:
                raise TypeError(f"{name}: messages of a {type(module).__name__} are not known")
            specs[message] = (TensorSpec(shape, dtype),)
    return specs


def _encoder_shape(
    module: EncoderModule, images: Sequence[ImageMeta], leaves: bool
) -> tuple[int, ...]:
    """Of what goes to the LLM (`leaves`) or to another stage of the encoder."""
    if leaves:
        return sum(image.tokens for image in images), module.spec.llm_hidden_size
    patches = [image.patches for image in images]
    return module.family.hidden_shape(module.spec.config, patches)


def _images(meta: MicrobatchMeta, encoder: str) -> list[ImageMeta]:
    return [i for sample in meta.samples if sample.encoder == encoder for i in sample.images]
