"""Context parallelism: ranks divide the tokens of every packed row, and heads inside attention.

`parallel.llm.context` ranks out of the `shard` ranks form a group that works on the same samples.
Each has a slice of the row (`torchmm.common.row_slices`): norms, linears, experts, embedding, head
and loss only see its own tokens. Attention needs all tokens, but not all heads. Before it an
all-to-all turns some tokens of all heads into all tokens of some heads, behind it another one turns
the result back (DeepSpeed-Ulysses, arXiv 2309.14509):

    context = 2, a row of 8 tokens, 4 heads
                 linears, norms          attention               linears, norms
    rank 0       tokens 0-3, heads 0-3   tokens 0-7, heads 0-1   tokens 0-3, heads 0-3
    rank 1       tokens 4-7, heads 0-3   tokens 0-7, heads 2-3   tokens 4-7, heads 0-3

So attention sees whole rows, as on one rank: packed segments, windows, sinks and blocks that see
each other both ways need nothing more, and every rank has as many pairs of tokens to compute. Heads
need not divide among ranks: some then have one more. Ranks get the key and value heads that their
query heads read, a head twice where two ranks read it.

Gated delta nets and short convolutions go through a row token by token, but their heads and
channels know nothing of each other. So the same exchange stands before their convolution, which a
rank computes for its channels, and behind the recurrence. In delta nets ranks divide the heads of
values, which read those of keys and queries.

Parameters are those of data parallelism: FSDP2 shards them over `shard`, the group included, and
adds gradients up, which is right because every rank's loss is the sum over its own targets. The
ranks' encoders read different images, and what they find goes to the ranks with its tokens.

What ring attention would add: more ranks than heads (keys and values pass by, heads stay), and
traffic that attention hides, as it needs one block of keys after the other. It would take an
attention kernel that gives out its row sums for each block, and an order of tokens in which causal
masks leave every rank as much to do.

Rejected: a dimension of the mesh beside `shard`, for parameters do not differ along it.

Shape legend: T tokens of the row, S of this rank's slice, H heads that the ranks divide, G heads
that these read, D and E features of a head, K output tokens of an encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.layers import ConvolutionSizes, DeltaSizes
from torchmm.common.row_slices import slice_ranges
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.exchange import Counts, FeatureRanks, exchange


class ContextRanks(FeatureRanks):
    """The ranks that share rows (`torchmm.models.layers.shared_rows.RowRanks`).

    Args:
        mesh: 1-D.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.get_group())
        self.rank = mesh.get_local_rank()

    def heads(self, tokens: int) -> ContextHeads:
        return ContextHeads(
            self.group, self.rank, [len(own) for own in slice_ranges(tokens, self.size)]
        )

    def summed(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total


class ContextHeads:
    """Their exchange of tokens for heads (`torchmm.models.layers.shared_rows.RowHeads`).

    Args:
        rank: in the group.
        tokens: by rank, of its slice.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tokens: list[int]) -> None:
        self._group = group
        self._rank = rank
        self._tokens = tokens

    def whole_rows(self, divided_SHD: Tensor, *read_SGD: Tensor) -> list[Tensor]:
        inputs = (divided_SHD, *read_SGD)
        heads = divided_SHD.shape[1]
        owned = slice_ranges(heads, len(self._tokens))
        readers = [heads // x.shape[1] for x in inputs]
        needed = [[_read(own, count) for count in readers] for own in owned]
        # One message for all: what a rank needs of the first tensor, then of the second, and so on.
        messages = [
            [x[:, own.start : own.stop].flatten() for x, own in zip(inputs, ranges, strict=True)]
            for ranges in needed
        ]
        shapes = [(len(own), x.shape[2]) for x, own in zip(inputs, needed[self._rank], strict=True)]
        per_token = sum(heads * features for heads, features in shapes)
        counts = Counts(
            [sum(len(part) for part in message) for message in messages],
            [tokens * per_token for tokens in self._tokens],
        )
        packed = torch.cat([part for message in messages for part in message])
        arrived = self._unpacked(exchange(packed, counts, self._group), shapes)
        own = owned[self._rank]
        return [
            _for_readers(x, own, count, dim=1) for x, count in zip(arrived, readers, strict=True)
        ]

    def _unpacked(self, arrived: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The tensors of all tokens, from the messages of all ranks.

        Args:
            shapes: heads and features of each tensor.
        """
        sizes = [tokens * heads * features for tokens in self._tokens for heads, features in shapes]
        pieces = arrived.split(sizes)
        return [
            torch.cat([piece.view(-1, *shape) for piece in pieces[place :: len(shapes)]])
            for place, shape in enumerate(shapes)
        ]

    def own_tokens(self, out_THE: Tensor, heads: int) -> Tensor:
        tokens = self._tokens[self._rank]
        shares = [len(own) for own in slice_ranges(heads, len(self._tokens))]
        per_token = out_THE[0].numel()
        counts = Counts(
            [count * per_token for count in self._tokens],
            [tokens * share * out_THE.shape[2] for share in shares],
        )
        pieces = exchange(out_THE.flatten(), counts, self._group).split(counts.received)
        heads_of_ranks = [
            piece.view(tokens, share, out_THE.shape[2])
            for piece, share in zip(pieces, shares, strict=True)
        ]
        return torch.cat(heads_of_ranks, 1)

    def own_heads(self, values: Tensor, heads: int) -> Tensor:
        own = slice_ranges(heads, len(self._tokens))[self._rank]
        readers = heads // len(values)
        read = _read(own, readers)
        return _for_readers(values[read.start : read.stop], own, readers, dim=0)


def _read(own: range, readers: int) -> range:
    """The heads that own heads read, where so many read the same one."""
    return range(own.start // readers, (own.stop - 1) // readers + 1)


def _for_readers(x: Tensor, own: range, readers: int, dim: int) -> Tensor:
    """The heads that own heads read. Attention and delta nets take groups of equal size only: where
    ranks cut groups, every own head gets one for itself."""
    groups = Counter(head // readers for head in own).values()
    if len(set(groups)) == 1:
        return x
    repeated = [x.narrow(dim, i, 1) for i, size in enumerate(groups) for _ in range(size)]
    return torch.cat(repeated, dim)


def apply_context_parallel(model: MultimodalModel, mesh: DeviceMesh) -> None:
    """Lets the LLM's stages compute slices of rows that the ranks of a 1-D mesh share, in place."""
    ranks = ContextRanks(mesh)
    for stage in (model.llm, *model.all_stages()):
        if isinstance(stage, LlmModule):
            stage.row_ranks = ranks
    if model.llm.balance is not None:
        model.llm.balance.row_ranks = ranks


def context_problems(llm: LayeredModule, ranks: int, tensor: int) -> list[str]:
    """Why `ranks` cannot share the rows of an LLM; needs no process group.

    Args:
        tensor: tensor-parallel ranks, which have a part of the heads each.
    """
    if ranks == 1:
        return []
    key = f"[parallel.llm] context = {ranks}"
    problems = []
    if not llm.splits:
        problems.append(
            f"{key}: {llm.name!r} is not a registered model type (docs/reference/models.md), "
            "for which only pipeline parallelism and sharding are verified; remove it"
        )
    for sizes in dict.fromkeys(llm.layer_sizes()):
        heads = sizes.heads
        what = "attention heads"
        if isinstance(sizes.mixer, DeltaSizes):
            heads = sizes.mixer.value_heads
            what = "value heads of delta nets"
        elif isinstance(sizes.mixer, ConvolutionSizes):
            heads = sizes.hidden_size
            what = "channels of convolutions"
        if heads // tensor < ranks:
            problems.append(
                f"{key} is above the {heads // tensor} {what} of {llm.name!r} per "
                "tensor-parallel rank, which are split over context ranks; use a smaller "
                "number"
            )
    return list(dict.fromkeys(problems))


def cut_problems(llm: LayeredModule, ranks: int, stops: Sequence[int]) -> list[str]:
    """Why `ranks` cannot share the rows of an LLM that is cut behind these layers.

    A stage hands features that later layers add to the next one. Of a slice, how many there are
    does not follow from what is known of a row before it is read: where in it images stand.
    """
    first = min(stops, default=0)
    if ranks == 1 or not stops or not llm.taps or first > max(llm.taps):
        return []
    return [
        f"[parallel.llm] context = {ranks}: {llm.name!r} adds image features after its first "
        f"{max(llm.taps) + 1} layers, but its first stage ends with layer {first}; use fewer "
        "pipeline ranks or stages, or context = 1"
    ]
