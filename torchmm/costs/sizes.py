"""How much there is to process in tasks: positions, attention segments, outputs.

Everything that costs are made of is an array over tasks, so one pass over a layer's operators gives
the costs of all tasks of a step. Sizes follow from metadata alone.

Shape suffix: N tasks of one module; S attention segments of all of them.

`module_tasks` lists the tasks of a step, module by module. All stages of a module have the same
tasks, so sizes are worked out once per module; which gradients a task needs differs from stage to
stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import ImageMeta, MicrobatchMeta, even_ranges
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.row_slices import image_shares, task_images
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.orders import inputs_need_gradient

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TaskSizes:
    """Sizes of the tasks of one module.

    Attributes:
        inputs_N: units before the layers: patches, or the LLM's tokens.
        outputs_N: units after the layers: an encoder's tokens for the LLM, positions with a
            target, a generator's patches.
        images_N: images or clips.
        lengths_S: positions in the layers, by segment in which attention works, task after task.
        task_S: which task a segment belongs to; rises.
        contexts_S: generators: tokens a segment attends to besides its own; else zeros.
        given_N: generators: of these tokens, those that come from the LLM: all but padding.
        share: of the positions, and in attention of the heads, that a rank has of all segments,
            where several divide them (`inputs_N` and `outputs_N` are a rank's).
        frames: generators: what is drawn in a task, without padding: each frame's patches.
    """

    inputs_N: Array
    outputs_N: Array
    images_N: Array
    lengths_S: Array
    task_S: NDArray[np.int64]
    contexts_S: Array
    given_N: Array
    share: float = 1.0
    frames: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def drawn_N(self) -> Array:
        """Patches of all frames."""
        return np.array([sum(own) for own in self.frames], float)

    @cached_property
    def frames_N(self) -> Array:
        """How many there are."""
        return np.array([len(own) for own in self.frames], float)

    @cached_property
    def frame_pairs_N(self) -> Array:
        """Pairs of patches of a frame."""
        return np.array([sum(n * n for n in own) for own in self.frames], float)

    @cached_property
    def largest_frame_N(self) -> Array:
        """Patches of the largest."""
        return np.array([max(own, default=0) for own in self.frames], float)

    @property
    def tasks(self) -> int:
        """N."""
        return len(self.inputs_N)

    def joined(self, others: Sequence[TaskSizes]) -> TaskSizes:
        """Return the sizes of these tasks, followed by the tasks of `others`."""
        every = (self, *others)

        def joined(name: str) -> Array:
            return np.concatenate([getattr(own, name) for own in every])

        first = np.cumsum([0, *(own.tasks for own in every)])
        tasks = [own.task_S + start for own, start in zip(every, first[:-1], strict=True)]
        return replace(
            self,
            inputs_N=joined("inputs_N"),
            outputs_N=joined("outputs_N"),
            images_N=joined("images_N"),
            lengths_S=joined("lengths_S"),
            task_S=np.concatenate(tasks),
            contexts_S=joined("contexts_S"),
            given_N=joined("given_N"),
            frames=tuple(frames for own in every for frames in own.frames),
        )

    @cached_property
    def units_N(self) -> Array:
        """Positions in the layers, on a rank."""
        return self.share * self._sum(self.lengths_S)

    @cached_property
    def contexts_N(self) -> Array:
        """Tokens attended to across."""
        return self._sum(self.contexts_S)

    @cached_property
    def cross_pairs_N(self) -> Array:
        """Pairs of a position and a token that it attends to across."""
        return self._sum(self.lengths_S * self.contexts_S)

    def pairs_N(self, window: int | None, apart: bool) -> Array:
        """Pairs of positions of which one attends to the other, without a causal mask; a rank's
        share of them, as it has of heads.

        Args:
            window: positions that one attends to; None: all of its segment.
            apart: whether windows follow one another, as in encoders; otherwise each position has
                one of its own.
        """
        return self._pairs(window, apart)

    def chunks_N(self, tokens_N: Array) -> Array:
        """Chunks of so many positions, each of one segment; a rank's share of them, as it has of
        heads."""
        return self.share * self._sum(np.ceil(self.lengths_S / tokens_N[self.task_S]))

    @cached_property
    def longest_N(self) -> Array:
        """Positions of the longest segment."""
        found_N = np.zeros(self.tasks)
        np.maximum.at(found_N, self.task_S, self.lengths_S)
        return found_N

    @cached_property
    def segments_N(self) -> Array:
        """Segments."""
        return self._sum(np.ones(len(self.lengths_S)))

    def causal_pairs_N(self, window: int | None, block: int) -> Array:
        """The same of pairs that a kernel computes which skips the masked half, in blocks."""
        reach_S = self._reach(window)
        return self.share * self._sum(self.lengths_S * np.minimum(reach_S, (reach_S + block) / 2))

    def calls_N(self, window: int | None) -> Array:
        """Runs of equally long neighbouring segments: calls of a kernel for equal lengths."""
        reach_S = self._reach(window)
        new_S = np.ones(len(reach_S))
        new_S[1:] = (reach_S[1:] != reach_S[:-1]) | (self.task_S[1:] != self.task_S[:-1])
        return self._sum(new_S)

    @cached_property
    def _pairs(self):  # type: ignore[no-untyped-def]  # a cache per object, not per class
        return cache(self._count_pairs)

    def _count_pairs(self, window: int | None, apart: bool) -> Array:
        pairs_S = self.lengths_S * self._reach(window)
        if window is not None and apart:
            rest_S = self.lengths_S % window
            pairs_S = (self.lengths_S - rest_S) * window + rest_S**2
        return self.share * self._sum(pairs_S)

    def _reach(self, window: int | None) -> Array:
        return self.lengths_S if window is None else np.minimum(self.lengths_S, window)

    def _sum(self, values_S: Array) -> Array:
        return np.bincount(self.task_S, weights=values_S, minlength=self.tasks).astype(float)


def encoder_sizes(module: ModuleDescription, tasks: Sequence[Sequence[ImageMeta]]) -> TaskSizes:
    """Sizes of an encoder's tasks from the images of each; none: a stand-in for an image."""
    patches = module.dummy_patches
    dummy = ImageMeta(0, 0, patches, patches // module.patches_per_token)
    shown = [list(images) or [dummy] for images in tasks]
    lengths = [
        [length for i in images for length in _frames(i, module.extra_tokens)] for images in shown
    ]
    return _sizes(
        inputs=[sum(i.patches for i in images) for images in shown],
        outputs=[sum(i.tokens for i in images) for images in shown],
        images=[len(images) for images in shown],
        lengths=lengths,
        contexts=[[0] * len(of_task) for of_task in lengths],
    )


def llm_sizes(
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int],
    *,
    padding: bool,
    context: int = 1,
) -> TaskSizes:
    """Sizes of the LLM's tasks.

    Args:
        targets: positions that count in the loss, by microbatch.
        padding: whether padding, which is computed as a segment of its own, counts.
        context: ranks that share a row, of which this is one.
    """
    lengths = [[sample.tokens for sample in meta.samples] for meta in microbatches]
    if padding:
        gaps = [meta.tokens - meta.used_tokens for meta in microbatches]
        lengths = [[*own, gap] if gap > 0 else own for own, gap in zip(lengths, gaps, strict=True)]
    sizes = _sizes(
        inputs=[sum(own) for own in lengths],
        outputs=list(targets),
        images=[meta.image_count for meta in microbatches],
        lengths=lengths,
        contexts=[[0] * len(own) for own in lengths],
    )
    if context == 1:
        return sizes
    return replace(
        sizes,
        inputs_N=sizes.inputs_N / context,
        outputs_N=sizes.outputs_N / context,
        share=1 / context,
    )


def generator_sizes(
    tasks: Sequence[Sequence[GeneratedMeta]], *, padding: bool = False
) -> TaskSizes:
    """Sizes of a generator's tasks from what each has to draw.

    Args:
        padding: whether padding counts: the images of a task are rows of a batch, all as long as
            the longest, and so are their contexts.
    """
    lengths = [[image.patches for image in images] for images in tasks]
    frames = tuple(tuple(n for image in images for n in _frames_of(image)) for images in tasks)
    contexts = [[image.context for image in images] for images in tasks]
    given = [sum(own) for own in contexts]
    if padding:
        lengths, contexts = (
            [[max(own)] * len(own) if own else [] for own in each] for each in (lengths, contexts)
        )
    found = _sizes(
        inputs=[sum(own) for own in lengths],
        outputs=[sum(own) for own in lengths],
        images=[len(own) for own in lengths],
        lengths=lengths,
        contexts=contexts,
        given=given,
    )
    return replace(found, frames=frames)


def pack_sizes(
    module: ModuleDescription, packs: Sequence[MicrobatchMeta]
) -> tuple[NDArray[np.int64], TaskSizes | None]:
    """Which packs, each a microbatch of its own, have something for a module, and how much.

    Returns:
        indices of these packs; sizes of one task for each, None if there are none.
    """
    if module.kind == "llm":
        targets = [text_tokens(pack) for pack in packs]
        return np.arange(len(packs)), llm_sizes(packs, targets, padding=True)
    if module.kind == "generator":
        drawn = [pack.generated for pack in packs]
        at = np.flatnonzero([bool(own) for own in drawn])
        # In how many parts they are drawn decides about padding; without, bounds are bounds.
        return at, generator_sizes([drawn[i] for i in at]) if len(at) else None
    shown = [pack.images_read_by(module.name) for pack in packs]
    at = np.flatnonzero([bool(own) for own in shown])
    return at, encoder_sizes(module, [shown[i] for i in at]) if len(at) else None


def text_tokens(meta: MicrobatchMeta) -> int:
    """Return the number of tokens that may be targets: no images, no padding."""
    images = sum(i.tokens for s in meta.samples for i in s.images)
    if meta.balanced:  # the listed images are in the sequences of any rank
        images = sum(tokens for _, tokens in meta.arriving)
    # Tiles may share tokens (`ImageMeta.tokens`).
    return max(0, meta.used_tokens - images)


def _frames_of(image: GeneratedMeta) -> list[int]:
    """Patches of each frame of what is drawn."""
    frames, rows, columns = image.grid_thw
    return [rows * columns] * frames


def _frames(image: ImageMeta, extra_tokens: int) -> list[int]:
    """Attention segments of an image: one, or one per frame of a video."""
    return [image.patches // image.frames + extra_tokens] * image.frames


def _sizes(
    inputs: Sequence[int],
    outputs: Sequence[int],
    images: Sequence[int],
    lengths: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]],
    given: Sequence[int] = (),
) -> TaskSizes:
    return TaskSizes(
        np.array(inputs, float),
        np.array(outputs, float),
        np.array(images, float),
        np.array([n for own in lengths for n in own], float),
        np.repeat(np.arange(len(lengths)), [len(own) for own in lengths]),
        np.array([n for own in contexts for n in own], float),
        np.array(given or [0] * len(lengths), float),
    )


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ModuleTasks:
    """The tasks of each stage of one module.

    Attributes:
        keys: (microbatch, sub-microbatch) of each of the N tasks.
        sizes: what is computed, padding included; where ranks share rows, by the one with most.
        useful: without padding, by all of them together.
        others: sizes of the same tasks on each of the other ranks that run the layers in lockstep.
    """

    module: ModuleDescription
    keys: list[tuple[int, int]]
    sizes: TaskSizes
    useful: TaskSizes
    others: tuple[TaskSizes, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks that run the layers in lockstep."""
        return 1 + len(self.others)

    @cached_property
    def of_ranks(self) -> TaskSizes:
        """Sizes of the tasks of all these ranks, rank by rank; those of `sizes` are the first."""
        return self.sizes.joined(self.others) if self.others else self.sizes

    def gradient_arrives_N(self, graph: StageGraph, stage: int) -> NDArray[np.bool_]:
        """By task: whether a gradient goes back from this stage to the one before."""
        flags = [inputs_need_gradient(graph, stage, i) for i in range(graph.microbatches)]
        return np.array([flags[i] for i, _ in self.keys], bool)


def module_tasks(
    graph: StageGraph,
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int],
) -> ModuleTasks:
    """The tasks of a module's stages.

    Args:
        graph: of the step.
        module: whole.
        microbatches: of the graph.
        targets: positions that count in the loss, by microbatch.

    Raises:
        ValueError: there are not as many microbatches as the graph has, or a microbatch has more
            sub-microbatches than images.
    """
    if not len(microbatches) == len(targets) == graph.microbatches:
        raise ValueError(
            f"metadata of {len(microbatches)} microbatches and {len(targets)} target counts "
            f"for a graph of {graph.microbatches} microbatches; pass one of each per "
            "microbatch"
        )
    if module.kind == "llm":
        keys = [(i, 0) for i in range(graph.microbatches)]
        sizes = llm_sizes(microbatches, targets, padding=True, context=graph.context)
        return ModuleTasks(module, keys, sizes, llm_sizes(microbatches, targets, padding=False))
    parts = graph.sub_microbatches.get(module.name, (1,) * graph.microbatches)
    keys = [(i, part) for i, count in enumerate(parts) for part in range(count)]
    if module.kind == "encoder":
        seen = [meta.images_read_by(module.name) for meta in microbatches]
        if graph.context > 1:
            shares = [_shared_groups(*own, graph.context) for own in zip(seen, parts, strict=True)]
            most = [max(of_ranks, key=_patches) for own in shares for of_ranks in own]
            every = [[i for share in of_ranks for i in share] for own in shares for of_ranks in own]
            useful = encoder_sizes(module, every)
            return ModuleTasks(module, keys, encoder_sizes(module, most), useful)
        sizes = encoder_sizes(module, _groups(module.name, seen, parts))
    else:
        drawn = _groups(module.name, [meta.generated for meta in microbatches], parts)
        sizes = generator_sizes(drawn, padding=True)
        return ModuleTasks(module, keys, sizes, generator_sizes(drawn))
    return ModuleTasks(module, keys, sizes, sizes)


def _shared_groups(
    images: Sequence[ImageMeta], tasks: int, ranks: int
) -> list[list[Sequence[ImageMeta]]]:
    """A microbatch's images by task and rank, where ranks share it."""
    shares = [
        images[own.start : own.stop] for own in image_shares([i.patches for i in images], ranks)
    ]
    places = [[task_images(len(own), tasks, i, ranks) for own in shares] for i in range(tasks)]
    return [
        [own[at.start : at.stop] for own, at in zip(shares, of_ranks, strict=True)]
        for of_ranks in places
    ]


def _patches(images: Sequence[ImageMeta]) -> int:
    return sum(image.patches for image in images)


def _groups(name: str, images: Sequence[list[T]], parts: Sequence[int]) -> list[list[T]]:
    """The images of every task; none where one task has a microbatch without images."""
    groups: list[list[T]] = []
    for index, (own, count) in enumerate(zip(images, parts, strict=True)):
        if count == 1 or not own:
            groups += [own] * count
            continue
        if count > len(own):
            raise ValueError(
                f"{name}: {count} sub-microbatches for the {len(own)} images of microbatch "
                f"{index}; use at most one per image"
            )
        if count:
            groups += [own[r.start : r.stop] for r in even_ranges(len(own), count)]
    return groups
