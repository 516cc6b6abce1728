"""Who decodes which pixels, and how they come from there to the tasks that read them.

An encoder's first stage reads pixels, and a generator's first and last stages read those of what
they draw. Ranks that have such a stage and work on the same samples are a module's *readers*: a
tensor-parallel group, all whose ranks read all images; or replicas of an encoder (colocated, or on
ranks of its own), each of which reads the images of the tasks that the plan of a step gives it.
Every image is decoded by one reader (`torchmm.common.row_slices.Reads`). When the plan of a step is
there, readers exchange pixels: one all-to-all for each module, from device to device. All sizes
follow from metadata and plan, so no rank asks another and nobody waits for a device. Ranks without
such a stage have no pixels and no part in this.

Ranks that share rows (context parallelism) read different images of a row, so each of them
exchanges with the readers of its own part alone.

Rejected: one reader that decodes all and broadcasts (its cores would have all the work while those
of its group idle); to decode where the plan says (it is made when the data are there, with times
measured until then).
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
"""Of every microbatch: numbers of some of its images, ascending."""


@dataclass(frozen=True)
class Readers:
    """The ranks that read a module's pixels of the same samples."""

    group: dist.ProcessGroup
    places: list[int]
    """By rank of the group: its rank in plans."""
    own: int
    """Which of them this one is."""


class PixelRanks:
    """Decides what this rank decodes, and brings pixels to where they are read.

    Args:
        layout: of all ranks.

    Collective over all ranks.
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
        """What this rank decodes."""

    def deliver(self, graph: StageGraph, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The microbatches with the pixels that this rank's tasks read, on its device; collective
        over readers.

        Args:
            graph: of the step.
            microbatches: this rank's part of each. Pixels that every reader has are left alone.
        """
        found = list(microbatches)
        metas = [slice_meta(microbatch.meta, *self._context) for microbatch in found]
        for module, readers in self._readers.items():
            every = [m.generator if module == GENERATOR else m.encoders.get(module) for m in found]
            inputs = [each for each in every if each is not None]
            numbers = [number for number, each in enumerate(every) if each is not None]
            if all(each.held is None for each in inputs):
                continue
            routes = pixel_routes(graph, module, readers.places, metas)
            own = [[[images[n] for n in numbers] for images in to] for to in routes]
            for number, each in zip(numbers, self._exchange(readers, own, inputs), strict=True):
                if isinstance(each, GeneratorInputs):
                    found[number] = replace(found[number], generator=each)
                else:
                    encoders = {**found[number].encoders, module: each}
                    found[number] = replace(found[number], encoders=encoders)
        return found

    def _exchange(
        self, readers: Readers, routes: Sequence[Sequence[Images]], inputs: Sequence[Inputs]
    ) -> list[Inputs]:
        """The inputs with what this rank's tasks read.

        Args:
            routes: from `pixel_routes`, of the same microbatches.
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
        found: list[Inputs] = []
        for number, each in enumerate(inputs):
            # Ranks decode neighbouring images, in the order of their ranks.
            held = [image for rank in ranks for image in routes[rank][own][number]]
            here = [parts[rank][number] for rank in ranks if sizes[rank][number]]
            found.append(_holding(each, torch.cat(here or [pixels[number][:0]]), held))
        return found


def reading_stages(layout: StageLayout) -> dict[str, list[int]]:
    """By module: the stages that read pixels."""
    stops = {stage.module: stage.stop for stage in layout.stages}
    found: dict[str, list[int]] = {}
    for stage in layout.stages:
        ends = stage.module == GENERATOR and stage.stop == stops[GENERATOR]
        if stage.module != LLM and (stage.start == 0 or ends):
            found.setdefault(stage.module, []).append(stage.index)
    return found


def pixel_routes(
    graph: StageGraph, module: str, places: Sequence[int], metas: Sequence[MicrobatchMeta]
) -> list[list[Images]]:
    """By reader that decodes and reader that reads: the images that go this way.

    Args:
        places: of the readers, in plans.
        metas: of their part of the microbatches.
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
    """Of every microbatch: images that the tasks of a rank of the plan read."""
    found: list[set[int]] = []
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
        found.append(images)
    return found


def _groups(mesh: ParallelMesh, places: Sequence[int]) -> list[list[int]]:
    """The readers at these places of plans: by share of the batch and part of its rows."""
    found = []
    for share in mesh.shares:
        for context in range(mesh.context_size):
            group: list[int] = []
            for place in places:
                alike = share[place]
                size = len(alike) // mesh.context_size  # context is the outer dimension
                group += alike[context * size : (context + 1) * size]
            found.append(sorted(group))
    return found


def _process_group(
    mesh: ParallelMesh, groups: list[list[int]], places: Sequence[int]
) -> dist.ProcessGroup | None:
    """That of this rank's group; None: it is in none. Collective over all ranks."""
    mine = next((group for group in groups if mesh.rank in group), None)
    if len(places) == 1:  # these are tensor-parallel and have a group already
        group = None if mine is None else mesh.own.tensor.get_group()
        assert group is None or dist.get_process_group_ranks(group) == mine
        return group
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own if mine is not None else None


def _pixels(inputs: Inputs, device: torch.device) -> Tensor:
    """What this rank has decoded, on the device; of drawings the bytes of pixels and, beside them,
    of noise."""
    if isinstance(inputs, EncoderInputs):
        return inputs.pixels.to(device, non_blocking=True)
    both = (inputs.patches_PV, inputs.noise_PV)
    moved = [values.to(device, non_blocking=True).contiguous() for values in both]
    return torch.cat([values.view(torch.uint8) for values in moved], dim=1)


def _holding(inputs: Inputs, pixels: Tensor, held: list[int]) -> Inputs:
    """The inputs with the pixels of these images, as `_pixels` gives them."""
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
    """Of every microbatch: the rows of some of the images that are here."""
    found = []
    for each, own, wanted in zip(inputs, pixels, images, strict=True):
        rows = each.pixel_rows
        held = range(len(rows)) if each.held is None else each.held
        stops = list(accumulate(rows[image] for image in held))
        ends = dict(zip(held, stops, strict=True))
        slices = [own[ends[run[0]] - rows[run[0]] : ends[run[-1]]] for run in _runs(wanted)]
        found.append(torch.cat([own[:0], *slices]) if len(slices) != 1 else slices[0])
    return found


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring numbers together."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
