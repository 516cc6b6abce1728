"""Assign image decoding to ranks, and exchange decoded pixels between them.

The first stage of an encoder reads pixels. The first and last stages of a generator read the pixels
of target images. The *readers* of a module are ranks that have such a stage and train on the same
samples. They are a tensor-parallel group, in which every rank reads all images, or the replicas of
an encoder, each of which reads the images of its tasks in the plan.

    data loader              all-to-all per module      tasks in the plan
    reader 0: images 0 1 2   <-----------------------> reader 0: images 0 3
    reader 1: images 3 4 5                             reader 1: images 1 2 4 5

Invariants:

- Every image is decoded once, by one reader (`torchmm.common.sequence_slices.DecodeAssignment`).
  Decoding starts before the plan exists, so the images of a reader are a fixed split and not those
  of its tasks.
- All sizes follow from metadata and the plan, which all readers have. The exchange needs no
  additional communication and no host synchronization.
- Ranks without such a stage have no pixels and do not take part. Context-parallel ranks read
  different images of a sequence, so each of them exchanges only with readers of its own part.

A single reader that decodes all images and broadcasts them would leave the CPU cores of the other
readers idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta, split_evenly
from torchmm.common.generated import GeneratorInputs
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.common.sequence_slices import (
    DecodeAssignment,
    RankShare,
    assign_step_images,
    slice_meta,
    task_images,
)
from torchmm.parallel.exchange import ExchangeCounts, exchange
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task

Inputs = EncoderInputs | GeneratorInputs
Images = list[list[int]]
"""Indices of images of each microbatch, in ascending order."""


@dataclass(frozen=True)
class ReaderGroup:
    """Ranks that read pixels of the same samples for a module."""

    group: dist.ProcessGroup
    plan_ranks: list[int]
    """Rank within plans of each rank of the group."""
    group_rank: int
    """Rank of this process within the group."""


class PixelExchange:
    """Assignment of images to decode, and exchange of decoded pixels.

    The constructor is collective over all ranks, because it creates process groups.

    Args:
        layout: Stages of the run.
        mesh: Parallelism of the run.
    """

    def __init__(self, layout: StageLayout, mesh: ParallelMesh) -> None:
        self._device = mesh.device
        self._context = RankShare(mesh.context_rank, mesh.context_size)
        self._readers: dict[str, ReaderGroup] = {}
        shares: dict[str, RankShare] = {}
        process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for module, stages in reading_stages(layout).items():
            plan_ranks = sorted({rank for stage in stages for rank in layout.stages[stage].ranks})
            groups = _reader_groups(mesh, plan_ranks)
            key = tuple(rank for group in groups for rank in group)
            if len(groups[0]) > 1 and key not in process_groups:
                process_groups[key] = _process_group(mesh, groups, plan_ranks)
            own_group = next((group for group in groups if mesh.rank in group), None)
            if own_group is None:
                continue
            shares[module] = RankShare(own_group.index(mesh.rank), len(own_group))
            process_group = process_groups.get(key)
            if process_group is not None:
                ranks = mesh.plan_ranks
                reader_plan_ranks = [
                    next(p for p in range(len(ranks)) if r in ranks[p]) for r in own_group
                ]
                self._readers[module] = ReaderGroup(
                    process_group, reader_plan_ranks, shares[module].rank
                )
        self.assignment = DecodeAssignment(shares, self._context)
        """Images that this rank decodes."""

    def distribute(self, graph: StageGraph, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the microbatches with the pixels that tasks of this rank read, on the device.

        Collective over readers.

        Args:
            graph: Tasks of the step.
            microbatches: Local part of each microbatch. Pixels that all readers decoded are kept.
        """
        result = list(microbatches)
        metas = [slice_meta(microbatch.meta, *self._context) for microbatch in result]
        for module, readers in self._readers.items():
            all_inputs = [
                m.generator if module == GENERATOR else m.encoders.get(module) for m in result
            ]
            inputs = [module_inputs for module_inputs in all_inputs if module_inputs is not None]
            numbers = [
                number
                for number, module_inputs in enumerate(all_inputs)
                if module_inputs is not None
            ]
            if all(module_inputs.local_images is None for module_inputs in inputs):
                continue
            routes = pixel_routes(graph, module, readers.plan_ranks, metas)
            # Only microbatches with images of this module take part.
            routes = [[[images[n] for n in numbers] for images in to] for to in routes]
            for number, module_inputs in zip(
                numbers, self._exchange(readers, routes, inputs), strict=True
            ):
                if isinstance(module_inputs, GeneratorInputs):
                    result[number] = replace(result[number], generator=module_inputs)
                else:
                    encoders = {**result[number].encoders, module: module_inputs}
                    result[number] = replace(result[number], encoders=encoders)
        return result

    def _exchange(
        self, readers: ReaderGroup, routes: Sequence[Sequence[Images]], inputs: Sequence[Inputs]
    ) -> list[Inputs]:
        """Return the inputs with the pixels that tasks of this rank read.

        Args:
            readers: Readers of the module.
            routes: Result of `pixel_routes` for the same microbatches.
            inputs: Inputs with locally decoded pixels.
        """
        group_rank = readers.group_rank
        ranks = range(len(routes))
        pixels = [_local_pixels(each, self._device) for each in inputs]
        parts = {rank: _select_pixels(inputs, pixels, routes[group_rank][rank]) for rank in ranks}
        pixel_rows = [each.pixel_rows for each in inputs]
        sizes = {
            rank: [
                sum(rows[image] for image in images)
                for rows, images in zip(pixel_rows, routes[rank][group_rank], strict=True)
            ]
            for rank in ranks
        }
        # All readers have the same routes, so either all of them exchange pixels or none.
        if any(any(routes[a][b]) for a in ranks for b in ranks if a != b):
            sent = [0 if rank == group_rank else sum(map(len, parts[rank])) for rank in ranks]
            received = [0 if rank == group_rank else sum(sizes[rank]) for rank in ranks]
            packed = [part for rank in ranks if rank != group_rank for part in parts[rank]]
            rows = torch.cat([pixels[0][:0], *packed])
            received_pixels = exchange(rows, ExchangeCounts(sent, received), readers.group).split(
                received
            )
            for rank in ranks:
                if rank != group_rank:
                    parts[rank] = list(received_pixels[rank].split(sizes[rank]))
        exchanged: list[Inputs] = []
        for number, each in enumerate(inputs):
            # Readers decode consecutive images, so concatenation in rank order sorts the images.
            image_indices = [image for rank in ranks for image in routes[rank][group_rank][number]]
            present = [parts[rank][number] for rank in ranks if sizes[rank][number]]
            exchanged.append(
                _with_pixels(each, torch.cat(present or [pixels[number][:0]]), image_indices)
            )
        return exchanged


def reading_stages(layout: StageLayout) -> dict[str, list[int]]:
    """Return the stages that read pixels, by module."""
    stops = {stage.module: stage.stop for stage in layout.stages}
    readers: dict[str, list[int]] = {}
    for stage in layout.stages:
        ends = stage.module == GENERATOR and stage.stop == stops[GENERATOR]
        if stage.module != LLM and (stage.start == 0 or ends):
            readers.setdefault(stage.module, []).append(stage.index)
    return readers


def pixel_routes(
    graph: StageGraph, module: str, plan_ranks: Sequence[int], metas: Sequence[MicrobatchMeta]
) -> list[list[Images]]:
    """Return the images that each reader (first index) sends to each reader (second index).

    Args:
        graph: Tasks of the step.
        module: Module whose images are read.
        plan_ranks: Rank within plans of each reader.
        metas: Metadata of the local part of each microbatch.
    """
    decoded = assign_step_images(metas, module, len(plan_ranks))
    read = {
        plan_rank: _images_read(graph, module, plan_rank, metas) for plan_rank in set(plan_ranks)
    }
    return [
        [
            [
                [image for image in images if image in needed]
                for images, needed in zip(decoded[source], read[plan_rank], strict=True)
            ]
            for plan_rank in plan_ranks
        ]
        for source in range(len(plan_ranks))
    ]


def _images_read(
    graph: StageGraph, module: str, plan_rank: int, metas: Sequence[MicrobatchMeta]
) -> list[set[int]]:
    """Return the images of each microbatch that tasks of a rank of the plan read."""
    read: list[set[int]] = []
    for microbatch, meta in enumerate(metas):
        images: set[int] = set()
        count = meta.module_image_count(module)
        for stage in reading_stages(graph.layout)[module] if count else ():
            parts = graph.task_count(stage, microbatch)
            for part in range(parts):
                if graph.rank(Task(stage, microbatch, part)) != plan_rank:
                    continue
                if module == GENERATOR:
                    images |= set(split_evenly(count, parts)[part])
                else:
                    images |= set(task_images(count, parts, part, graph.context))
        read.append(images)
    return read


def _reader_groups(mesh: ParallelMesh, plan_ranks: Sequence[int]) -> list[list[int]]:
    """Return the readers for each data-parallel share and context-parallel rank."""
    groups = []
    for share in mesh.global_ranks:
        for context in range(mesh.context_size):
            group: list[int] = []
            for plan_rank in plan_ranks:
                ranks = share[plan_rank]
                size = len(ranks) // mesh.context_size  # context is the outer dimension
                group += ranks[context * size : (context + 1) * size]
            groups.append(sorted(group))
    return groups


def _process_group(
    mesh: ParallelMesh, groups: list[list[int]], plan_ranks: Sequence[int]
) -> dist.ProcessGroup | None:
    """Return the process group of this rank, or None. Collective over all ranks."""
    own_group = next((group for group in groups if mesh.rank in group), None)
    if len(plan_ranks) == 1:  # the tensor-parallel group exists already
        group = None if own_group is None else mesh.module_mesh.tensor.get_group()
        assert group is None or dist.get_process_group_ranks(group) == own_group
        return group
    process_group, _ = dist.new_subgroups_by_enumeration(groups)
    return process_group if own_group is not None else None


def _local_pixels(inputs: Inputs, device: torch.device) -> Tensor:
    """Return the locally decoded pixels on the device.

    For target images, each row has the bytes of the pixels followed by those of the noise.
    """
    if isinstance(inputs, EncoderInputs):
        return inputs.pixels.to(device, non_blocking=True)
    both = (inputs.patches_PV, inputs.noise_PV)
    moved = [values.to(device, non_blocking=True).contiguous() for values in both]
    return torch.cat([values.view(torch.uint8) for values in moved], dim=1)


def _with_pixels(inputs: Inputs, pixels: Tensor, held: list[int]) -> Inputs:
    """Return the inputs with the pixels of some images, in the format of `_local_pixels`."""
    if isinstance(inputs, EncoderInputs):
        return replace(inputs, pixels=pixels, local_images=held)
    both = inputs.patches_PV, inputs.noise_PV
    parts = pixels.split([values.shape[1] * values.itemsize for values in both], dim=1)
    patches_PV, noise_PV = (
        part.clone(memory_format=torch.contiguous_format).view(values.dtype)
        for part, values in zip(parts, both, strict=True)
    )
    return replace(inputs, patches_PV=patches_PV, noise_PV=noise_PV, local_images=held)


def _select_pixels(
    inputs: Sequence[Inputs], pixels: Sequence[Tensor], images: Images
) -> list[Tensor]:
    """Return the pixel rows of some local images of each microbatch."""
    rows_of_images = []
    for each, local_pixels, selected in zip(inputs, pixels, images, strict=True):
        rows = each.pixel_rows
        held = range(len(rows)) if each.local_images is None else each.local_images
        stops = list(accumulate(rows[image] for image in held))
        ends = dict(zip(held, stops, strict=True))
        slices = [
            local_pixels[ends[run[0]] - rows[run[0]] : ends[run[-1]]]
            for run in _consecutive_runs(selected)
        ]
        rows_of_images.append(
            torch.cat([local_pixels[:0], *slices]) if len(slices) != 1 else slices[0]
        )
    return rows_of_images


def _consecutive_runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive numbers."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
