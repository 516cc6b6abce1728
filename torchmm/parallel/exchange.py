"""Differentiable all-to-all of rows. The backward pass sends gradients back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchmm.common.sequence_slices import FeatureRoute, SliceContext
from torchmm.parallel.mesh import ParallelMesh


class ExchangeCounts(NamedTuple):
    """Numbers of rows that this rank sends to and receives from each rank."""

    sent: list[int]
    received: list[int]

    @property
    def reversed(self) -> ExchangeCounts:
        """Counts of the opposite direction."""
        return ExchangeCounts(self.received, self.sent)


def exchange(rows: Tensor, counts: ExchangeCounts, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows among the ranks of a group. Collective, as is the backward pass.

    Args:
        rows: (S, ...), sorted by destination rank.
        counts: Numbers of rows per rank.
        group: Process group.

    Returns:
        (R, ...), sorted by source rank.
    """
    return _Exchange.apply(rows, counts, group)


class FeatureExchange:
    """Ranks that exchange features of images: the rank of an image can differ from its sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()

    def exchange_rows(self, rows: Tensor, route: FeatureRoute) -> Tensor:
        """Return the rows (R, D) that arrive by a route.

        Args:
            rows: (S, D). Rows that the route does not name are dropped.
        """
        counts = ExchangeCounts(route.sent, route.received)
        return exchange(rows.index_select(0, route.rows_K), counts, self.group)

    def exchange_features(
        self, features: Mapping[str, Tensor], row: SliceContext
    ) -> dict[str, Tensor]:
        """Return the features (K, D) of the local tokens, by encoder.

        One all-to-all exchanges the features of all encoders. In the backward pass, a second one
        returns the gradients.

        Args:
            features: Features (K, D) of the images that this rank encodes, by encoder. Rows that
                the route does not name, those of dummy images, are dropped.
            row: Routes of the encoders that have images in the packed sequence.
        """
        merged = row.merged
        if merged is None:
            return {
                name: self.exchange_rows(features[name], route)
                for name, route in row.routes.items()
            }
        units = merged.units
        all_UD = torch.cat(
            [
                features[name][: len(route.rows_K)].reshape(
                    -1, features[name].shape[1] // units[name]
                )
                for name, route in row.routes.items()
            ]
        )
        counts = ExchangeCounts(merged.sent, merged.received)
        received_UD = exchange(all_UD.index_select(0, merged.sent_U), counts, self.group)
        received_UD = received_UD.index_select(0, merged.received_U)
        sizes = [sum(route.received) * units[name] for name, route in row.routes.items()]
        return {
            name: part_UD.reshape(-1, features[name].shape[1]).to(features[name].dtype)
            for name, part_UD in zip(row.routes, received_UD.split(sizes), strict=True)
        }


def data_parallel_feature_exchange(mesh: ParallelMesh) -> FeatureExchange:
    """Return the data-parallel ranks with the same tensor-parallel rank. Collective."""
    # Separate groups, because FSDP2 all-gathers in its own groups at the same time.
    groups = [[*ranks] for ranks in zip(*(share[0] for share in mesh.global_ranks), strict=True)]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return FeatureExchange(group)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, whose gradients are sent back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, counts: ExchangeCounts, group: dist.ProcessGroup
    ) -> Tensor:
        context: Any = ctx
        context.counts, context.group = counts, group
        return _all_to_all(rows, counts, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context: Any = ctx
        return _all_to_all(gradients[0], context.counts.reversed, context.group), None, None


def _all_to_all(rows: Tensor, counts: ExchangeCounts, group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(counts.received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), counts.received, counts.sent, group=group)
    return arrived
