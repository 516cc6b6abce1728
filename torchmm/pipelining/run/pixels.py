"""Assign image decoding to ranks, and exchange decoded pixels between them.

The first stage of an encoder reads pixels. The first and last stages of a generator read the pixels
of target images. The *readers* of a module are ranks that have such a stage and train on the same
samples. They are a tensor-parallel group, in which every rank reads all images, or the replicas of
an encoder, each of which reads the images of its tasks in the plan.

    data loader              all-to-all per module      tasks in the plan
    reader 0: images 0 1 2   <-----------------------> reader 0: images 0 3
    reader 1: images 3 4 5                             reader 1: images 1 2 4 5

Invariants:

- Every image is decoded once, by one reader (`torchmm.common.row_slices.Reads`). Decoding starts
  before the plan exists, so the images of a reader are a fixed split and not those of its tasks.
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

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta, even_ranges
from torchmm.common.generated import GeneratorInputs
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.common.row_slices import Reads, Share, slice_meta, step_shares, task_images
from torchmm.parallel.exchange import Counts, exchange
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task

Inputs = EncoderInputs | GeneratorInputs
Images = list[list[int]]
"""Indices of images of each microbatch, in ascending order."""


@dataclass(frozen=True)
class Readers:
    """Ranks that read pixels of the same samples for a module."""

    group: dist.ProcessGroup
    places: list[int]
    """Rank within plans of each rank of the group."""
    own: int
    """Rank of this process within the group."""


class PixelRanks:
    """Assignment of images to decode, and exchange of decoded pixels.

    The constructor is collective over all ranks, because it creates process groups.

    Args:
        layout: Stages of the run.
        mesh: Parallelism of the run.
    """

    def __init__(self, layout: StageLayout, mesh: ParallelMesh) -> None:
        self._device = mesh.device
        self._context = Share(mesh.context_rank, mesh.context_size)
        self._readers: dict[str, Readers] = {}
        shares: dict[str, Share] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for module, stages in reading_stages(layout).items():
            places = sorted({rank for stage in stages for rank in layout.stages[stage].ranks})
            groups = _groups(mesh, places)
            key = tuple(rank for group in groups for rank in group)
            if len(groups[0]) > 1 and key not in made:
                made[key] = _process_group(mesh, groups, places)
            mine = next((group for group in groups if mesh.rank in group), None)
            if mine is None:
                continue
            shares[module] = Share(mine.index(mesh.rank), len(mine))
            process_group = made.get(key)
            if process_group is not None:
                ranks = mesh.plan_ranks
                own_places = [next(p for p in range(len(ranks)) if r in ranks[p]) for r in mine]
                self._readers[module] = Readers(process_group, own_places, shares[module].part)
        self.reads = Reads(shares, self._context)
        """Images that this rank decodes."""

    def deliver(self, graph: StageGraph, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the microbatches with the pixels that tasks of this rank read, on the device.

        Collective over readers.

        Args:
            graph: Tasks of the step.
            microbatches: Local part of each microbatch. Pixels that all readers decoded are kept.
        """
        delivered = list(microbatches)
        metas = [slice_meta(microbatch.meta, *self._context) for microbatch in delivered]
        for module, readers in self._readers.items():
            every = [
                m.generator if module == GENERATOR else m.encoders.get(module) for m in delivered
            ]
            inputs = [each for each in every if each is not None]
            numbers = [number for number, each in enumerate(every) if each is not None]
            if all(each.held is None for each in inputs):
                continue
            routes = pixel_routes(graph, module, readers.places, metas)
            # Only microbatches with images of this module take part.
            routes = [[[images[n] for n in numbers] for images in to] for to in routes]
            for number, each in zip(numbers, self._exchange(readers, routes, inputs), strict=True):
                if isinstance(each, GeneratorInputs):
                    delivered[number] = replace(delivered[number], generator=each)
                else:
                    encoders = {**delivered[number].encoders, module: each}
                    delivered[number] = replace(delivered[number], encoders=encoders)
        return delivered

    def _exchange(
        self, readers: Readers, routes: Sequence[Sequence[Images]], inputs: Sequence[Inputs]
    ) -> list[Inputs]:
        """Return the inputs with the pixels that tasks of this rank read.

        Args:
            readers: Readers of the module.
            routes: Result of `pixel_routes` for the same microbatches.
            inputs: Inputs with locally decoded pixels.
        """
        own = readers.own
        ranks = range(len(routes))
        pixels = [_pixels(each, self._device) for each in inputs]
        parts = {rank: _cut(inputs, pixels, routes[own][rank]) for rank in ranks}
        pixel_rows = [each.pixel_rows for each in inputs]
        sizes = {
            rank: [
                sum(rows[image] for image in images)
                for rows, images in zip(pixel_rows, routes[rank][own], strict=True)
            ]
            for rank in ranks
        }
        # All readers have the same routes, so either all of them exchange pixels or none.
        if any(any(routes[a][b]) for a in ranks for b in ranks if a != b):
            sent = [0 if rank == own else sum(map(len, parts[rank])) for rank in ranks]
            received = [0 if rank == own else sum(sizes[rank]) for rank in ranks]
            packed = [part for rank in ranks if rank != own for part in parts[rank]]
            rows = torch.cat([pixels[0][:0], *packed])
            arrived = exchange(rows, Counts(sent, received), readers.group).split(received)
            for rank in ranks:
                if rank != own:
                    parts[rank] = list(arrived[rank].split(sizes[rank]))
        exchanged: list[Inputs] = []
        for number, each in enumerate(inputs):
            # Readers decode consecutive images, so concatenation in rank order sorts the images.
            held = [image for rank in ranks for image in routes[rank][own][number]]
            present = [parts[rank][number] for rank in ranks if sizes[rank][number]]
            exchanged.append(_holding(each, torch.cat(present or [pixels[number][:0]]), held))
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
    graph: StageGraph, module: str, places: Sequence[int], metas: Sequence[MicrobatchMeta]
) -> list[list[Images]]:
    """Return the images that each reader (first index) sends to each reader (second index).

    Args:
        graph: Tasks of the step.
        module: Module whose images are read.
        places: Rank within plans of each reader.
        metas: Metadata of the local part of each microbatch.
    """
    decoded = step_shares(metas, module, len(places))
    read = {place: _images_read(graph, module, place, metas) for place in set(places)}
    return [
        [
            [
                [image for image in images if image in wanted]
                for images, wanted in zip(decoded[source], read[place], strict=True)
            ]
            for place in places
        ]
        for source in range(len(places))
    ]


def _images_read(
    graph: StageGraph, module: str, place: int, metas: Sequence[MicrobatchMeta]
) -> list[set[int]]:
    """Return the images of each microbatch that tasks of a rank of the plan read."""
    read: list[set[int]] = []
    for microbatch, meta in enumerate(metas):
        images: set[int] = set()
        count = meta.images_of(module)
        for stage in reading_stages(graph.layout)[module] if count else ():
            parts = graph.parts(stage, microbatch)
            for part in range(parts):
                if graph.rank(Task(stage, microbatch, part)) != place:
                    continue
                if module == GENERATOR:
                    images |= set(even_ranges(count, parts)[part])
                else:
                    images |= set(task_images(count, parts, part, graph.context))
        read.append(images)
    return read


def _groups(mesh: ParallelMesh, places: Sequence[int]) -> list[list[int]]:
    """Return the readers for each data-parallel share and context-parallel rank."""
    groups = []
    for share in mesh.shares:
        for context in range(mesh.context_size):
            group: list[int] = []
            for place in places:
                ranks = share[place]
                size = len(ranks) // mesh.context_size  # context is the outer dimension
                group += ranks[context * size : (context + 1) * size]
            groups.append(sorted(group))
    return groups


def _process_group(
    mesh: ParallelMesh, groups: list[list[int]], places: Sequence[int]
) -> dist.ProcessGroup | None:
    """Return the process group of this rank, or None. Collective over all ranks."""
    mine = next((group for group in groups if mesh.rank in group), None)
    if len(places) == 1:  # the tensor-parallel group exists already
        group = None if mine is None else mesh.own.tensor.get_group()
        assert group is None or dist.get_process_group_ranks(group) == mine
        return group
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own if mine is not None else None


def _pixels(inputs: Inputs, device: torch.device) -> Tensor:
    """Return the locally decoded pixels on the device.

    For target images, each row has the bytes of the pixels followed by those of the noise.
    """
    if isinstance(inputs, EncoderInputs):
        return inputs.pixels.to(device, non_blocking=True)
    both = (inputs.patches_PV, inputs.noise_PV)
    moved = [values.to(device, non_blocking=True).contiguous() for values in both]
    return torch.cat([values.view(torch.uint8) for values in moved], dim=1)


def _holding(inputs: Inputs, pixels: Tensor, held: list[int]) -> Inputs:
    """Return the inputs with the pixels of some images, in the format of `_pixels`."""
    if isinstance(inputs, EncoderInputs):
        return replace(inputs, pixels=pixels, held=held)
    both = inputs.patches_PV, inputs.noise_PV
    parts = pixels.split([values.shape[1] * values.itemsize for values in both], dim=1)
    patches_PV, noise_PV = (
        part.clone(memory_format=torch.contiguous_format).view(values.dtype)
        for part, values in zip(parts, both, strict=True)
    )
    return replace(inputs, patches_PV=patches_PV, noise_PV=noise_PV, held=held)


def _cut(inputs: Sequence[Inputs], pixels: Sequence[Tensor], images: Images) -> list[Tensor]:
    """Return the pixel rows of some local images of each microbatch."""
    rows_of_images = []
    for each, own, wanted in zip(inputs, pixels, images, strict=True):
        rows = each.pixel_rows
        held = range(len(rows)) if each.held is None else each.held
        stops = list(accumulate(rows[image] for image in held))
        ends = dict(zip(held, stops, strict=True))
        slices = [own[ends[run[0]] - rows[run[0]] : ends[run[-1]]] for run in _runs(wanted)]
        rows_of_images.append(torch.cat([own[:0], *slices]) if len(slices) != 1 else slices[0])
    return rows_of_images


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive numbers."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
