"""Sizes of tasks: positions, attention segments and outputs.

Costs are computed from sizes, and sizes are computed from the metadata of microbatches. No pixel
or token is read. Sizes are arrays over tasks, so one pass over the operators of a layer returns
the costs of all tasks of a step.

Shape suffixes are N for the tasks of one module and S for the attention segments of these tasks.
Segments are stored flat, and `task_S` maps each segment to its task:

    task          0              1        2
    images        a         b    c        video of 2 frames
    lengths_S     [ 256  |  64 | 1024  |  196  |  196 ]
    task_S        [   0  |   0 |    1  |    2  |    2 ]
    units_N       [ 320,   1024,  392 ]          sum of lengths_S per task
    pairs_N       [ 256^2 + 64^2, 1024^2, 2 * 196^2 ]

Invariants:

- `task_S` is sorted, so segments of a task are adjacent.
- All stages of a module have the same tasks. Sizes are therefore computed once per module. Only
  the required gradients differ between stages.
- For context parallelism, per-rank sizes are `share` times the sizes of the full sequences.

`module_tasks` returns the tasks of a step for one module, with padding and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import ImageMeta, MicrobatchMeta, split_evenly
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.sequence_slices import assign_images, task_images
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.orders import inputs_need_gradient

Array = NDArray[np.float64]
"""One value per task (suffix N) or per attention segment (suffix S)."""


@dataclass(frozen=True, eq=False)
class TaskSizes:
    """Sizes of the tasks of one module.

    Attributes:
        inputs_N: Number of units before the layers: patches, or tokens of the LLM.
        outputs_N: Number of units after the layers: encoder tokens for the LLM, LLM positions with
            a target, or patches of a generator.
        images_N: Number of images, videos or audio inputs.
        lengths_S: Number of positions of each attention segment, sorted by task.
        task_S: Index of the task of each segment, in ascending order.
        contexts_S: Number of context tokens that a segment cross-attends to. 0 except for
            generators.
        context_inputs_N: Number of context tokens from the LLM, without padding. 0 except for
            generators.
        share: Fraction of the positions, and of the attention heads, of one context-parallel rank.
            `inputs_N` and `outputs_N` are already per rank.
        frames: Number of patches of each generated frame, by task, without padding. Empty except
            for generators.
    """

    inputs_N: Array
    outputs_N: Array
    images_N: Array
    lengths_S: Array
    task_S: NDArray[np.int64]
    contexts_S: Array
    context_inputs_N: Array
    share: float = 1.0
    frames: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def target_patches_N(self) -> Array:
        """Number of patches of all generated frames."""
        return np.array([sum(patches) for patches in self.frames], float)

    @cached_property
    def frames_N(self) -> Array:
        """Number of generated frames."""
        return np.array([len(patches) for patches in self.frames], float)

    @cached_property
    def frame_pairs_N(self) -> Array:
        """Number of pairs of patches of the same frame."""
        return np.array([sum(n * n for n in patches) for patches in self.frames], float)

    @cached_property
    def largest_frame_N(self) -> Array:
        """Number of patches of the largest frame."""
        return np.array([max(patches, default=0) for patches in self.frames], float)

    @property
    def tasks(self) -> int:
        """Number of tasks N."""
        return len(self.inputs_N)

    def concatenate(self, other_sizes: Sequence[TaskSizes]) -> TaskSizes:
        """Return the sizes of these tasks, followed by the tasks of `other_sizes`."""
        all_sizes = (self, *other_sizes)

        def concatenate_field(name: str) -> Array:
            return np.concatenate([getattr(sizes, name) for sizes in all_sizes])

        first = np.cumsum([0, *(sizes.tasks for sizes in all_sizes)])
        tasks = [sizes.task_S + start for sizes, start in zip(all_sizes, first[:-1], strict=True)]
        return replace(
            self,
            inputs_N=concatenate_field("inputs_N"),
            outputs_N=concatenate_field("outputs_N"),
            images_N=concatenate_field("images_N"),
            lengths_S=concatenate_field("lengths_S"),
            task_S=np.concatenate(tasks),
            contexts_S=concatenate_field("contexts_S"),
            context_inputs_N=concatenate_field("context_inputs_N"),
            frames=tuple(frames for sizes in all_sizes for frames in sizes.frames),
        )

    @cached_property
    def units_N(self) -> Array:
        """Number of positions in the layers, per rank."""
        return self.share * self._sum(self.lengths_S)

    @cached_property
    def contexts_N(self) -> Array:
        """Number of context tokens for cross-attention."""
        return self._sum(self.contexts_S)

    @cached_property
    def cross_pairs_N(self) -> Array:
        """Number of (position, context token) pairs of cross-attention."""
        return self._sum(self.lengths_S * self.contexts_S)

    def pairs_N(self, window: int | None, in_blocks: bool) -> Array:
        """Return the number of attention pairs per rank, without a causal mask.

        Context-parallel ranks divide the attention heads, so a rank computes `share` of the pairs.

        Args:
            window: Maximum number of positions that a position attends to. If None, the segment.
            in_blocks: Whether windows are consecutive blocks, as in encoders. Otherwise, the window
                slides with the position.
        """
        return self._pairs(window, in_blocks)

    def chunks_N(self, tokens_N: Array) -> Array:
        """Return the number of chunks of segments per rank, for kernels that work in chunks.

        Args:
            tokens_N: Number of positions per chunk, by task.
        """
        return self.share * self._sum(np.ceil(self.lengths_S / tokens_N[self.task_S]))

    @cached_property
    def longest_N(self) -> Array:
        """Number of positions of the longest segment."""
        found_N = np.zeros(self.tasks)
        np.maximum.at(found_N, self.task_S, self.lengths_S)
        return found_N

    @cached_property
    def segments_N(self) -> Array:
        """Number of segments."""
        return self._sum(np.ones(len(self.lengths_S)))

    def causal_pairs_N(self, window: int | None, block: int) -> Array:
        """Return the number of pairs per rank that a causal kernel computes.

        The kernel skips masked blocks of keys. On average, a position computes half of its range
        plus half a block, and at most the full range.

        Args:
            window: Maximum number of positions that a position attends to. If None, the segment.
            block: Number of keys per block.
        """
        reach_S = self._reach(window)
        return self.share * self._sum(self.lengths_S * np.minimum(reach_S, (reach_S + block) / 2))

    def calls_N(self, window: int | None) -> Array:
        """Return the number of runs of consecutive segments with the same length.

        Attention on CPUs has one kernel call per run.

        Args:
            window: Maximum number of positions that a position attends to. If None, the segment.
        """
        reach_S = self._reach(window)
        new_S = np.ones(len(reach_S))
        new_S[1:] = (reach_S[1:] != reach_S[:-1]) | (self.task_S[1:] != self.task_S[:-1])
        return self._sum(new_S)

    @cached_property
    def _pairs(self):  # type: ignore[no-untyped-def]  # a cache per object, not per class
        return cache(self._count_pairs)

    def _count_pairs(self, window: int | None, in_blocks: bool) -> Array:
        pairs_S = self.lengths_S * self._reach(window)
        if window is not None and in_blocks:
            # Full windows attend to `window` positions, the last window to its `rest_S` positions.
            rest_S = self.lengths_S % window
            pairs_S = (self.lengths_S - rest_S) * window + rest_S**2
        return self.share * self._sum(pairs_S)

    def _reach(self, window: int | None) -> Array:
        return self.lengths_S if window is None else np.minimum(self.lengths_S, window)

    def _sum(self, values_S: Array) -> Array:
        return np.bincount(self.task_S, weights=values_S, minlength=self.tasks).astype(float)


def encoder_sizes(module: ModuleDescription, tasks: Sequence[Sequence[ImageMeta]]) -> TaskSizes:
    """Return the sizes of the tasks of an encoder.

    Args:
        module: Description of the encoder.
        tasks: Images of each task. A task without images processes a dummy image.
    """
    patches = module.dummy_patches
    dummy = ImageMeta(0, 0, patches, patches // module.patches_per_token)
    shown = [list(images) or [dummy] for images in tasks]
    lengths = [
        [length for i in images for length in _segment_lengths(i, module.extra_tokens)]
        for images in shown
    ]
    return _task_sizes(
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
    """Return the sizes of the tasks of the LLM.

    Args:
        microbatches: Metadata of the microbatches, one per task.
        targets: Number of positions that are included in the loss, by microbatch.
        padding: Whether to include padding, which is computed as a separate segment.
        context: Context-parallel size. Sizes are those of one rank.
    """
    lengths = [[n for s in meta.samples for n in s.segment_lengths] for meta in microbatches]
    if padding:
        gaps = [meta.tokens - meta.used_tokens for meta in microbatches]
        lengths = [
            [*of_task, gap] if gap > 0 else of_task
            for of_task, gap in zip(lengths, gaps, strict=True)
        ]
    sizes = _task_sizes(
        inputs=[sum(of_task) for of_task in lengths],
        outputs=list(targets),
        images=[meta.image_count for meta in microbatches],
        lengths=lengths,
        contexts=[[0] * len(of_task) for of_task in lengths],
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
    """Return the sizes of the tasks of a generator.

    Args:
        tasks: Images that each task generates.
        padding: Whether to include padding. The images of a task are one batch, so all images have
            the length of the longest image. The same applies to their contexts.
    """
    lengths = [[image.patches for image in images] for images in tasks]
    frames = tuple(
        tuple(n for image in images for n in _generated_frame_patches(image)) for images in tasks
    )
    contexts = [[image.context for image in images] for images in tasks]
    context_tokens = [sum(of_task) for of_task in contexts]
    if padding:
        lengths, contexts = (
            [[max(of_task)] * len(of_task) if of_task else [] for of_task in each]
            for each in (lengths, contexts)
        )
    sizes = _task_sizes(
        inputs=[sum(of_task) for of_task in lengths],
        outputs=[sum(of_task) for of_task in lengths],
        images=[len(of_task) for of_task in lengths],
        lengths=lengths,
        contexts=contexts,
        context_inputs=context_tokens,
    )
    return replace(sizes, frames=frames)


def sequence_sizes(
    module: ModuleDescription, packs: Sequence[MicrobatchMeta]
) -> tuple[NDArray[np.int64], TaskSizes | None]:
    """Return the packed sequences that a module processes, and their sizes.

    Args:
        module: Description of the module.
        packs: Metadata of packed sequences. Each is a separate microbatch.

    Returns:
        Indices of the sequences with inputs for the module, and the sizes of one task for each of
        them. The sizes are None without such sequences.
    """
    if module.kind == "llm":
        targets = [text_tokens(pack) for pack in packs]
        return np.arange(len(packs)), llm_sizes(packs, targets, padding=True)
    if module.kind == "generator":
        generated = [pack.generated for pack in packs]
        at = np.flatnonzero([bool(images) for images in generated])
        # Padding depends on the number of sub-microbatches. Without padding, bounds stay valid.
        return at, generator_sizes([generated[i] for i in at]) if len(at) else None
    shown = [pack.images_of_encoder(module.name) for pack in packs]
    at = np.flatnonzero([bool(images) for images in shown])
    return at, encoder_sizes(module, [shown[i] for i in at]) if len(at) else None


def text_tokens(meta: MicrobatchMeta) -> int:
    """Return the number of tokens that can be targets, without image tokens and padding."""
    images = sum(i.tokens for s in meta.samples for i in s.images)
    if meta.balanced:  # the listed images are in the sequences of any rank
        images = sum(tokens for _, tokens in meta.received_tokens)
    # Tiles may share tokens (`ImageMeta.tokens`).
    return max(0, meta.used_tokens - images)


def _generated_frame_patches(image: GeneratedMeta) -> list[int]:
    """Return the number of patches of each frame of a generated image or video."""
    frames, rows, columns = image.grid_thw
    return [rows * columns] * frames


def _segment_lengths(image: ImageMeta, extra_tokens: int) -> list[int]:
    """Return the lengths of the attention segments: one per image, or one per video frame."""
    return [image.patches // image.frames + extra_tokens] * image.frames


def _task_sizes(
    inputs: Sequence[int],
    outputs: Sequence[int],
    images: Sequence[int],
    lengths: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]],
    context_inputs: Sequence[int] = (),
) -> TaskSizes:
    return TaskSizes(
        np.array(inputs, float),
        np.array(outputs, float),
        np.array(images, float),
        np.array([n for of_task in lengths for n in of_task], float),
        np.repeat(np.arange(len(lengths)), [len(of_task) for of_task in lengths]),
        np.array([n for of_task in contexts for n in of_task], float),
        np.array(context_inputs or [0] * len(lengths), float),
    )


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ModuleTasks:
    """Tasks of the stages of one module. All stages of a module have the same tasks.

    Attributes:
        module: Complete module.
        keys: (microbatch, sub-microbatch) of each of the N tasks.
        sizes: Computed sizes, including padding. With context parallelism, the sizes of the rank
            with the most patches.
        unpadded_sizes: Sizes without padding, summed over context-parallel ranks. Used for FLOPs.
        lockstep_sizes: Sizes of the same tasks on each of the other ranks that run in lockstep.
    """

    module: ModuleDescription
    keys: list[tuple[int, int]]
    sizes: TaskSizes
    unpadded_sizes: TaskSizes
    lockstep_sizes: tuple[TaskSizes, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks that run the layers in lockstep."""
        return 1 + len(self.lockstep_sizes)

    @cached_property
    def all_rank_sizes(self) -> TaskSizes:
        """Sizes of the tasks of all ranks in lockstep, rank by rank, starting with `sizes`."""
        return self.sizes.concatenate(self.lockstep_sizes) if self.lockstep_sizes else self.sizes

    def sends_gradient_N(self, graph: StageGraph, stage: int) -> NDArray[np.bool_]:
        """Return a flag per task: True if the stage sends a gradient to the preceding stage."""
        flags = [inputs_need_gradient(graph, stage, i) for i in range(graph.microbatches)]
        return np.array([flags[i] for i, _ in self.keys], bool)


def module_tasks(
    graph: StageGraph,
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int],
) -> ModuleTasks:
    """Return the tasks of the stages of a module.

    Args:
        graph: Task graph of the step.
        module: Complete module.
        microbatches: Metadata of the microbatches of the graph.
        targets: Number of positions that are included in the loss, by microbatch.

    Raises:
        ValueError: The number of microbatches differs from the graph, or a microbatch has more
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
        read = [meta.images_of_encoder(module.name) for meta in microbatches]
        if graph.context > 1:
            shares = [_split_images(*pair, graph.context) for pair in zip(read, parts, strict=True)]
            by_rank = [of_ranks for of_tasks in shares for of_ranks in of_tasks]
            largest = [max(of_ranks, key=_patches) for of_ranks in by_rank]
            all_images = [[i for share in of_ranks for i in share] for of_ranks in by_rank]
            useful = encoder_sizes(module, all_images)
            return ModuleTasks(module, keys, encoder_sizes(module, largest), useful)
        sizes = encoder_sizes(module, _images_by_task(module.name, read, parts))
    else:
        generated = _images_by_task(module.name, [meta.generated for meta in microbatches], parts)
        sizes = generator_sizes(generated, padding=True)
        return ModuleTasks(module, keys, sizes, generator_sizes(generated))
    return ModuleTasks(module, keys, sizes, sizes)


def _split_images(
    images: Sequence[ImageMeta], tasks: int, ranks: int
) -> list[list[Sequence[ImageMeta]]]:
    """Split the images of a microbatch between context-parallel ranks, then into tasks.

    Args:
        images: Images of the microbatch.
        tasks: Number of sub-microbatches.
        ranks: Context-parallel size.

    Returns:
        Images by task and rank.
    """
    shares = [
        images[share.start : share.stop]
        for share in assign_images([i.patches for i in images], ranks)
    ]
    positions = [
        [task_images(len(share), tasks, i, ranks) for share in shares] for i in range(tasks)
    ]
    return [
        [
            share[position.start : position.stop]
            for share, position in zip(shares, of_ranks, strict=True)
        ]
        for of_ranks in positions
    ]


def _patches(images: Sequence[ImageMeta]) -> int:
    return sum(image.patches for image in images)


def _images_by_task(name: str, images: Sequence[list[T]], parts: Sequence[int]) -> list[list[T]]:
    """Return the images of each task, which is a sub-microbatch.

    Tasks of a microbatch without images have an empty list.

    Args:
        name: Name of the module, for error messages.
        images: Images of each microbatch.
        parts: Number of sub-microbatches of each microbatch.
    """
    groups: list[list[T]] = []
    for index, (available, count) in enumerate(zip(images, parts, strict=True)):
        if count == 1 or not available:
            groups += [available] * count
            continue
        if count > len(available):
            raise ValueError(
                f"{name}: {count} sub-microbatches for the {len(available)} images of microbatch "
                f"{index}; use at most one per image"
            )
        if count:
            groups += [available[r.start : r.stop] for r in split_evenly(len(available), count)]
    return groups
