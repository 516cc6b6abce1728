"""Slices of a packed sequence that context-parallel ranks share.

The LLM of a rank processes a slice of the sequence: adjacent tokens, about equally many on each
rank. The encoders of a rank process a share of the images: adjacent images with about equally many
patches on each rank, wherever their tokens are. A `FeatureRoute` describes how features are sent
from the ranks that encode images to the ranks with their tokens:

    tokens     | image 0  text  image 1 | image 1  image 2  text |
    LLM        rank 0                   | rank 1
    encoder    rank 0: images 0, 1      | rank 1: image 2          rank 0 sends a part of image 1

With dynamic context parallelism, ranks form smaller groups that share complete segments of the
sequence (`group_segments`). Segments are sorted by group, and each group divides its tokens:

    segments   | video                  | chat 0     | chats 1, 2 |
    LLM        rank 0       | rank 1    | rank 2     | rank 3     |

Slices, shares and routes are computed on the CPU from the metadata of the sequence, before it is
copied to a device. Ranks need no communication and no synchronization for this. Slices can have
different lengths, and shares can be empty. Padded slices are not used, because routers of experts
would count padding tokens. Encoding images where their tokens are would leave ranks idle if images
are unevenly distributed.

`DecodeAssignment` defines the images that a rank decodes. Each image or audio input is decoded once
for all ranks that process the same samples, by one of the ranks whose stages need it.

Without context parallelism, data-parallel ranks can encode images for each other
(`data.balance = "images"`, `BalancedMicrobatch`). The same routes then send the features to the
rank that trains on the packed sequence. A second route sends the context of generated images to the
rank that generates them.

Shape legend: T tokens of the packed sequence, S tokens of a slice, K output tokens of an encoder on
this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from math import ceil, gcd
from operator import ge
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchmm.common.batch import (
    EncoderInputs,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
    concatenate_ranges,
    split_evenly,
)
from torchmm.common.generated import GeneratorInputs
from torchmm.common.module_names import GENERATOR


def slice_ranges(count: int, ranks: int) -> list[range]:
    """Split `count` items (tokens, heads) into one range per rank.

    Lengths differ by at most one. Some ranges are empty if there are more ranks than items.
    """
    bounds = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]


def assign_images(patches: Sequence[int], ranks: int) -> list[range]:
    """Assign adjacent images to each rank, with about equal numbers of patches. Some can be empty.

    An image is assigned to the rank whose equal part of all patches contains the image center.
    """
    total = sum(patches)
    middles = [stop - count / 2 for stop, count in zip(accumulate(patches), patches, strict=True)]
    owners = [min(int(middle * ranks / total), ranks - 1) for middle in middles]
    bounds = [sum(owner < rank for owner in owners) for rank in range(ranks + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]


def max_images_per_rank(meta: MicrobatchMeta, encoder: str, ranks: int) -> int:
    """Return the maximum number of images of an encoder on a rank."""
    return max(len(share) for share in assign_images(meta.patches(encoder), ranks))


def task_images(images: int, tasks: int, task: int, ranks: int) -> range:
    """Return the images of one of the tasks of the local share of a microbatch.

    Context-parallel ranks run the same tasks, so some ranks have no images for a task.

    Args:
        images: Number of images of this rank.
        tasks: Number of tasks.
        task: Index of the task.
        ranks: Number of context-parallel ranks.

    Raises:
        ValueError: A task has no images, without context parallelism.
    """
    if ranks > 1 and images < tasks:
        return range(min(task, images), min(task + 1, images))
    return split_evenly(images, tasks)[task]


MAX_IMBALANCE = 0.05
"""Maximum relative excess of the tokens and of the work of a rank over the mean of all ranks, if
ranks form smaller groups."""


class SequenceGroup(NamedTuple):
    """Adjacent context-parallel ranks that share segments of a packed sequence."""

    ranks: range
    segments: list[int]
    """Indices of the segments, ascending."""


def segment_lengths(meta: MicrobatchMeta) -> list[int]:
    """Return the number of tokens of each segment of one packed sequence, and of its padding."""
    padding = meta.tokens - meta.used_tokens
    lengths = [length for sample in meta.samples for length in sample.segment_lengths]
    return lengths + [padding] * (padding > 0)


def group_segments(
    tokens: Sequence[int], costs: Sequence[float], ranks: int
) -> list[SequenceGroup]:
    """Divide context-parallel ranks into groups that share complete segments.

    The number of ranks of a group is a power of two. The result has the smallest groups in which no
    rank has more tokens or more work than `MAX_IMBALANCE` allows. Without such groups, all ranks
    share all segments.

    Args:
        tokens: Number of tokens of each segment.
        costs: Cost of each segment, in any unit.
        ranks: Number of context-parallel ranks, a power of two.
    """
    # The number of ranks that the tokens and the cost of each segment occupy.
    scale = ranks / (1 + MAX_IMBALANCE)
    loads = [
        (scale * count / sum(tokens), scale * cost / sum(costs))
        for count, cost in zip(tokens, costs, strict=True)
    ]
    min_ranks = 1
    while min_ranks < ranks:
        groups = _fill_groups(loads, min_ranks, ranks)
        group_tokens = [sum(tokens[i] for i in group.segments) for group in groups]
        if groups and all(map(ge, group_tokens, (len(group.ranks) for group in groups))):
            return groups
        min_ranks *= 2
    return [SequenceGroup(range(ranks), list(range(len(tokens))))]


def _fill_groups(
    loads: Sequence[tuple[float, float]], min_ranks: int, ranks: int
) -> list[SequenceGroup]:
    """Return groups of at least `min_ranks` ranks, or an empty list if segments do not fit.

    A segment that occupies more than `min_ranks` ranks has a separate group. Smaller segments are
    added to the group with the least work per rank, in descending order.

    Args:
        loads: Number of ranks that the tokens and the cost of each segment occupy.
        min_ranks: Minimum number of ranks of a group, a power of two.
        ranks: Number of ranks of all groups.
    """
    min_sizes = [max(min_ranks, 1 << (ceil(max(load)) - 1).bit_length()) for load in loads]
    order = sorted(range(len(loads)), key=lambda i: (-min_sizes[i], -loads[i][1]))
    sizes = [min_sizes[i] for i in order if min_sizes[i] > min_ranks]
    large = len(sizes)
    if sum(sizes) > ranks:
        return []
    sizes += [min_ranks] * ((ranks - sum(sizes)) // min_ranks)
    used = [(0.0, 0.0)] * len(sizes)
    segments: list[list[int]] = [[] for _ in sizes]
    for position, i in enumerate(order):
        totals = [(tokens + loads[i][0], cost + loads[i][1]) for tokens, cost in used]
        fitting = [n for n, size in enumerate(sizes) if max(totals[n]) <= size >= min_sizes[i]]
        if position < large:
            fitting = [position]
        if not fitting:
            return []
        group = min(fitting, key=lambda n: totals[n][1] / sizes[n])
        used[group] = totals[group]
        segments[group].append(i)
    starts = accumulate(sizes, initial=0)
    return [
        SequenceGroup(range(start, start + size), sorted(indices))
        for start, size, indices in zip(starts, sizes, segments, strict=False)
    ]


def group_slices(lengths: Sequence[int], groups: Sequence[SequenceGroup]) -> list[range]:
    """Return the tokens of each rank in the sequence whose segments are sorted by group."""
    slices = []
    start = 0
    for group in groups:
        tokens = sum(lengths[i] for i in group.segments)
        local = slice_ranges(tokens, len(group.ranks))
        slices += [range(start + each.start, start + each.stop) for each in local]
        start += tokens
    return slices


def sort_segments(microbatch: Microbatch, order: Sequence[int]) -> Microbatch:
    """Return the microbatch with its segments in another order. Images keep their order."""
    starts = microbatch.cu_seqlens
    device = microbatch.input_ids_T.device
    source_T = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in order])
    position_T = source_T.argsort()
    encoders = {
        name: replace(inputs, positions_K=position_T[inputs.positions_K])
        for name, inputs in microbatch.encoders.items()
    }
    sources_T = microbatch.sources_T
    answers_T = microbatch.answers_T
    return replace(
        microbatch,
        input_ids_T=microbatch.input_ids_T[source_T],
        targets_T=microbatch.targets_T[source_T],
        position_ids=microbatch.position_ids[..., source_T],
        sources_T=None if sources_T is None else sources_T[source_T],
        answers_T=None if answers_T is None else answers_T[source_T],
        cu_seqlens=[0, *accumulate(starts[i + 1] - starts[i] for i in order)],
        encoders=encoders,
        target_positions_L=None,  # type: ignore[arg-type]  # computed from the targets
    )


class RankShare(NamedTuple):
    """Index of a part, and the number of parts."""

    rank: int
    ranks: int


FULL_SHARE = RankShare(0, 1)


@dataclass(frozen=True)
class DecodeAssignment:
    """Images that a rank decodes in the microbatches of its data-parallel rank.

    Several ranks can need the same images: ranks of a tensor-parallel group, and replicas of an
    encoder, because the plan of a step assigns images to replicas. Each decodes a share, and they
    exchange pixels before the step (`torchmm.pipelining.run.pixel_exchange`). The plan cannot
    select the decoding rank, because plans are built after the data is loaded.
    """

    shares: Mapping[str, RankShare]
    """Share of the images that this rank decodes, by module with pixel inputs."""
    context: RankShare = FULL_SHARE
    """Share of each packed sequence. Images are those of this share only."""

    def images(self, metas: Sequence[MicrobatchMeta], module: str) -> list[range] | None:
        """Return the images of a module that this rank decodes, for each microbatch of a step.

        None means all images, if no other rank needs them.
        """
        share = self.shares.get(module)
        if share is None:
            return [range(0)] * len(metas)
        if share.ranks == self.context.ranks == 1:
            return None
        firsts = [0] * len(metas)
        if self.context.ranks > 1:
            part, ranks = self.context
            firsts = [assign_images(m.patches(module), ranks)[part].start for m in metas]
            metas = [slice_meta(meta, part, ranks) for meta in metas]
        local_shares = assign_step_images(metas, module, share.ranks)[share.rank]
        return [
            range(first + images.start, first + images.stop)
            for first, images in zip(firsts, local_shares, strict=True)
        ]


def assign_step_images(
    metas: Sequence[MicrobatchMeta], module: str, ranks: int
) -> list[list[range]]:
    """Return the images that each rank decodes, by rank and microbatch of a step.

    Images are adjacent within the step, with about equal numbers of patches per rank. If
    microbatches have few images, a rank decodes no images of some microbatches.
    """
    patches = [[image.patches for image in meta.module_images(module)] for meta in metas]
    stops = list(accumulate(map(len, patches), initial=0))
    return [
        [
            range(
                min(max(share.start, first), stop) - first,
                min(max(share.stop, first), stop) - first,
            )
            for first, stop in pairwise(stops)
        ]
        for share in assign_images([count for row in patches for count in row], ranks)
    ]


class FeatureRoute(NamedTuple):
    """Rows of an encoder output that a rank sends and receives."""

    rows_K: Tensor
    """Local output tokens, sorted by destination rank, int64."""
    sent: list[int]
    """Number of rows sent to each rank."""
    received: list[int]
    """Number of rows received from each rank."""


class MergedRoute(NamedTuple):
    """Messages with the features of all encoders, one per rank. Widths may differ.

    The features of a token consist of one or more units, which have the same width in all encoders.
    A message has the units of the first encoder, then those of the second, and so on.
    """

    units: dict[str, int]
    """Units of a token by encoder."""
    sent_U: Tensor
    """Units to send, sorted by rank, as indices into the units of all encoders, int64."""
    received_U: Tensor
    """Received units, sorted by encoder, as indices into the messages, int64."""
    sent: list[int]
    """Number of units sent to each rank."""
    received: list[int]
    """Number of units received from each rank."""


def merge_routes(routes: Mapping[str, FeatureRoute], widths: Mapping[str, int]) -> MergedRoute:
    """Return the route of the features of all encoders.

    Args:
        routes: Route of each encoder.
        widths: Widths of the features, in any unit.
    """
    unit = gcd(*(widths[name] for name in routes))
    units = {name: widths[name] // unit for name in routes}
    rows, offset = [], 0
    for name, route in routes.items():
        expanded_KU = route.rows_K[:, None] * units[name] + torch.arange(units[name])
        rows.append(offset + expanded_KU.flatten())
        offset += len(rows[-1])
    units_E1 = np.array([[units[name]] for name in routes])
    sent_ER = np.array([route.sent for route in routes.values()]) * units_E1
    received_ER = np.array([route.received for route in routes.values()]) * units_E1
    return MergedRoute(
        units,
        torch.cat(rows)[_transposed_order(sent_ER)],
        _transposed_order(received_ER.T),
        sent_ER.sum(0).tolist(),
        received_ER.sum(0).tolist(),
    )


def _transposed_order(counts_AB: np.ndarray) -> Tensor:
    """Return indices that sort units by b, then by a, if they are sorted by a, then by b.

    Args:
        counts_AB: Number of units of each pair (a, b).
    """
    starts_AB = (np.cumsum(counts_AB) - counts_AB.flatten()).reshape(counts_AB.shape)
    return torch.from_numpy(concatenate_ranges(starts_AB.T.flatten(), counts_AB.T.flatten()))


@dataclass
class SliceContext:
    """Data of the packed sequence that the LLM of a rank needs in addition to its slice.

    With dynamic context parallelism, the sequence consists of the segments of the group of the
    rank.
    """

    start: int
    """Index of the first token of the slice in the packed sequence."""
    ranks: int
    """Number of ranks that share the packed sequence."""
    input_ids_T: Tensor
    """Token IDs of the full packed sequence."""
    targets_T: Tensor
    """Targets of the full packed sequence."""
    encoders: dict[str, EncoderInputs]
    """Encoder inputs of the LLM, without pixels. `positions_K` are positions of received features
    within the slice."""
    routes: dict[str, FeatureRoute]
    """Route of each encoder with images in the packed sequence."""
    merged: MergedRoute | None
    """Route of the features of all encoders. If None, there are fewer than two encoders."""
    generator: GeneratorInputs | None = None
    """Generated images of the packed sequence, without pixels, if any rank may generate them."""
    contexts: FeatureRoute | None = None
    """Route of the context of these images. If None, this rank generates the images."""

    def map(self, function: Callable[[Tensor], Tensor]) -> SliceContext:
        """Return a copy with `function` applied to every tensor."""
        merged = self.merged
        if merged is not None:
            merged = merged._replace(
                sent_U=function(merged.sent_U), received_U=function(merged.received_U)
            )
        return SliceContext(
            self.start,
            self.ranks,
            function(self.input_ids_T),
            function(self.targets_T),
            {
                name: replace(e, pixels=function(e.pixels), positions_K=function(e.positions_K))
                for name, e in self.encoders.items()
            },
            {
                name: route._replace(rows_K=function(route.rows_K))
                for name, route in self.routes.items()
            },
            merged,
            self.generator and self.generator.map(function),
            self.contexts and self.contexts._replace(rows_K=function(self.contexts.rows_K)),
        )


@dataclass
class SlicedMicrobatch(Microbatch):
    """Slice of a microbatch on one rank.

    Tokens, targets and positions are those of the slice. `encoders` has the images that this rank
    encodes. `cu_seqlens` is that of the packed sequence in `slice_context`, and `meta` that of the
    microbatch.
    """

    slice_context: SliceContext = field(kw_only=True)

    def for_llm(self) -> SlicedMicrobatch:
        """Return the microbatch with the images of the slice instead of the images read."""
        generator = (
            self.generator if self.slice_context.contexts is None else self.slice_context.generator
        )
        return replace(self, encoders=self.slice_context.encoders, generator=generator)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        moved = super()._map(function)
        assert isinstance(moved, SlicedMicrobatch)
        return replace(moved, slice_context=self.slice_context.map(function))


def full_sequence(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return the (T,) token IDs and targets of a microbatch, or of the sequence of a slice."""
    row = microbatch.slice_context if isinstance(microbatch, SlicedMicrobatch) else microbatch
    return row.input_ids_T, row.targets_T


def slice_microbatch(
    microbatch: Microbatch,
    rank: int,
    ranks: int,
    widths: Mapping[str, int],
    groups: Sequence[SequenceGroup] = (),
) -> Microbatch:
    """Return the slice of a microbatch for a rank. With one rank, the microbatch itself.

    Args:
        widths: Widths of the features of each encoder, in any unit.
        groups: Ranks that share segments. Empty if all ranks share all segments.
    """
    if ranks == 1:
        return microbatch
    slices = slice_ranges(len(microbatch.input_ids_T), ranks)
    group_ranks = range(ranks)
    cu_seqlens = microbatch.cu_seqlens
    if len(groups) > 1:
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        slices = group_slices(lengths, groups)
        microbatch = sort_segments(microbatch, [i for group in groups for i in group.segments])
        group_ranks, segments = next(group for group in groups if rank in group.ranks)
        cu_seqlens = [0, *accumulate(lengths[i] for i in segments)]
    sequence = slice(slices[group_ranks[0]].start, slices[group_ranks[-1]].stop)
    local_slice = slices[rank]
    local_encoders: dict[str, EncoderInputs] = {}
    llm_encoders: dict[str, EncoderInputs] = {}
    routes: dict[str, FeatureRoute] = {}
    for name, inputs in microbatch.encoders.items():
        shares = assign_images(microbatch.meta.patches(name), ranks)
        parts = [inputs.select(share) if share else None for share in shares]
        no_positions = inputs.positions_K[:0]
        positions = [no_positions if part is None else part.positions_K for part in parts]
        if (part := parts[rank]) is not None:
            local_encoders[name] = part
        routes[name] = _feature_route(positions, slices, rank)
        received_K = torch.cat(
            [_positions_in(positions_K, local_slice) for positions_K in positions]
        )
        llm_encoders[name] = replace(
            inputs.without_pixels(), positions_K=received_K - local_slice.start
        )
    tokens = slice(local_slice.start, local_slice.stop)
    values: dict[str, Any] = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
    return SlicedMicrobatch(
        **values
        | {
            "input_ids_T": microbatch.input_ids_T[tokens],
            "targets_T": microbatch.targets_T[tokens],
            "position_ids": microbatch.position_ids[..., tokens],
            "sources_T": None if microbatch.sources_T is None else microbatch.sources_T[tokens],
            "answers_T": None if microbatch.answers_T is None else microbatch.answers_T[tokens],
            "cu_seqlens": cu_seqlens,
            "target_positions_L": None,
            "encoders": local_encoders,
        },
        slice_context=SliceContext(
            local_slice.start - sequence.start,
            len(group_ranks),
            microbatch.input_ids_T[sequence],
            microbatch.targets_T[sequence],
            llm_encoders,
            routes,
            _merged_route(routes, widths),
        ),
    )


@dataclass
class BalancedMicrobatch(Microbatch):
    """Microbatch whose images are encoded and generated by any data-parallel rank.

    `encoders` and `generator` have the images of the packed sequences without pixels, `meta` has
    their sizes. `image_sources` and `image_owners` have an entry for each encoder of the model, and
    for the generator if the model has one.
    """

    rank_encoders: dict[str, EncoderInputs] = field(kw_only=True)
    """Images that this rank encodes, by encoder. Encoders without images have no entry."""
    rank_generator: GeneratorInputs | None = field(kw_only=True)
    """Images that this rank generates. Their context positions are not used."""
    image_sources: dict[str, list[int]] = field(kw_only=True)
    """Data-parallel rank whose samples contain each image in `rank_encoders` or `rank_generator`,
    ascending."""
    image_owners: dict[str, list[int]] = field(kw_only=True)
    """Data-parallel rank that encodes or generates each image of the packed sequences."""
    rank_meta: MicrobatchMeta = field(kw_only=True)
    """Sizes of the tasks of this rank: its tokens, and the images in `rank_encoders`."""

    @property
    def task_meta(self) -> MicrobatchMeta:
        return self.rank_meta

    def _map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        moved = super()._map(function)
        assert isinstance(moved, BalancedMicrobatch)
        read = {
            name: replace(e, pixels=function(e.pixels), positions_K=function(e.positions_K))
            for name, e in self.rank_encoders.items()
        }
        return replace(
            moved,
            rank_encoders=read,
            rank_generator=self.rank_generator and self.rank_generator.map(function),
        )


def slice_balanced_microbatch(
    microbatch: BalancedMicrobatch, ranks: int, widths: Mapping[str, int]
) -> SlicedMicrobatch:
    """Return the microbatch with the inputs of encoders, LLM and generator of a rank.

    Features arrive in the order of the ranks that encode them, and of each rank in the order of
    the images. Contexts of generated images arrive in the order of the ranks that train on them.

    Args:
        ranks: Number of data-parallel ranks.
        widths: Widths of the features of each encoder, in any unit.
    """
    llm_encoders: dict[str, EncoderInputs] = {}
    routes: dict[str, FeatureRoute] = {}
    for name, read_by in microbatch.image_owners.items():
        if name == GENERATOR:
            continue
        tokens = [image.tokens for image in microbatch.meta.images_of_encoder(name)]
        encoded_tokens = [image.tokens for image in microbatch.rank_meta.images_of_encoder(name)]
        order = sorted(range(len(tokens)), key=read_by.__getitem__)
        sent_counts = _sum_by_owner(encoded_tokens, microbatch.image_sources[name], ranks)
        routes[name] = FeatureRoute(
            torch.arange(sum(sent_counts)), sent_counts, _sum_by_owner(tokens, read_by, ranks)
        )
        inputs = microbatch.encoders.get(name)
        if inputs is None:
            llm_encoders[name] = EncoderInputs(
                torch.empty(0), [], torch.empty(0, dtype=torch.int64)
            )
            continue
        positions = inputs.positions_K.split(tokens)
        llm_encoders[name] = replace(
            inputs.without_pixels(),
            positions_K=torch.cat([positions[image] for image in order]),
            grids_thw=[inputs.grids_thw[image] for image in order],
            tile_regions=inputs.tile_regions and [inputs.tile_regions[image] for image in order],
        )
    row = SliceContext(
        0,
        1,
        microbatch.input_ids_T,
        microbatch.targets_T,
        llm_encoders,
        routes,
        _merged_route(routes, widths),
    )
    values: dict[str, Any] = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
    values |= {"encoders": microbatch.rank_encoders, "meta": microbatch.rank_meta}
    if GENERATOR in microbatch.image_owners:
        values["generator"] = microbatch.rank_generator
        route = _context_route(microbatch, ranks)
        row = replace(row, generator=microbatch.generator, contexts=route)
    return SlicedMicrobatch(**values, slice_context=row)


def _context_route(microbatch: BalancedMicrobatch, ranks: int) -> FeatureRoute:
    """Return the route of context tokens to the ranks that generate the images."""
    owners = microbatch.image_owners[GENERATOR]
    sources = microbatch.image_sources[GENERATOR]
    sizes = [image.context for image in microbatch.meta.generated]
    received_sizes = [image.context for image in microbatch.rank_meta.generated]
    starts = list(accumulate(sizes, initial=0))
    order = sorted(range(len(sizes)), key=owners.__getitem__)
    rows = [torch.arange(starts[image], starts[image + 1]) for image in order]
    rows_K = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
    return FeatureRoute(
        rows_K, _sum_by_owner(sizes, owners, ranks), _sum_by_owner(received_sizes, sources, ranks)
    )


def _merged_route(
    routes: Mapping[str, FeatureRoute], widths: Mapping[str, int]
) -> MergedRoute | None:
    return merge_routes(routes, widths) if len(routes) > 1 else None


def _sum_by_owner(values: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Return the sum of the values of each owner."""
    sums = [0] * ranks
    for value, owner in zip(values, owners, strict=True):
        sums[owner] += value
    return sums


def _feature_route(positions: Sequence[Tensor], slices: Sequence[range], rank: int) -> FeatureRoute:
    """Return the route of the features of one encoder.

    Args:
        positions: Positions in the sequence of the tokens that each rank encodes.
        slices: Slice of each rank.
        rank: This rank.
    """
    stops = torch.tensor([each.stop for each in slices], device=positions[rank].device)
    owner_K = torch.searchsorted(stops, positions[rank], right=True)
    sent = torch.bincount(owner_K, minlength=len(slices)).tolist()
    received = [len(_positions_in(positions_K, slices[rank])) for positions_K in positions]
    return FeatureRoute(owner_K.argsort(stable=True), sent, received)


def _positions_in(positions_K: Tensor, token_range: range) -> Tensor:
    return positions_K[(positions_K >= token_range.start) & (positions_K < token_range.stop)]


def slice_meta(
    meta: MicrobatchMeta, rank: int, ranks: int, groups: Sequence[SequenceGroup] = ()
) -> MicrobatchMeta:
    """Return the sizes of the slice of a rank: tokens of the slice, and images that it encodes.

    Args:
        groups: See `slice_microbatch`.
    """
    if ranks == 1:
        return meta
    slices = group_slices(segment_lengths(meta), groups) if groups else None
    tokens = len((slices or slice_ranges(meta.tokens, ranks))[rank])
    owners: dict[str | None, Iterator[int]] = {}
    for encoder in _encoder_names(meta):
        shares = assign_images(meta.patches(encoder), ranks)
        owners[encoder] = iter([reader for reader, share in enumerate(shares) for _ in share])
    return MicrobatchMeta(tuple(_with_local_images(s, owners, rank) for s in meta.samples), tokens)


def _encoder_names(meta: MicrobatchMeta) -> list[str]:
    named = (i.encoder or s.encoder for s in meta.samples for i in s.images)
    return list(dict.fromkeys(name for name in named if name is not None))


def _with_local_images(
    sample: SampleMeta, rank_iterators: Mapping[str | None, Iterator[int]], rank: int
) -> SampleMeta:
    """Return a sample with the images that one rank encodes.

    Args:
        sample: Sample with all images.
        rank_iterators: Iterators over the ranks of the next images, by encoder.
        rank: Rank whose images are selected.
    """
    local_images = [
        i for i in sample.images if next(rank_iterators[i.encoder or sample.encoder]) == rank
    ]
    return replace(sample, images=tuple(local_images))
