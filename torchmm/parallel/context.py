"""Context parallelism: ranks divide the tokens of each packed sequence, and heads in attention.

`parallel.llm.context` of the `shard` ranks form a group that processes the same samples. Each rank
has a slice of the packed sequence (`torchmm.common.sequence_slices`). Norms, linears, experts,
embedding, head and loss use only local tokens. Attention needs all tokens, but not all heads. An
all-to-all before attention exchanges local tokens of all heads for all tokens of local heads, and a
second one after attention does the reverse (DeepSpeed-Ulysses, arXiv 2309.14509):

    context = 2, a packed sequence of 8 tokens, 4 heads
                 linears, norms          attention               linears, norms
    rank 0       tokens 0-3, heads 0-3   tokens 0-7, heads 0-1   tokens 0-3, heads 0-3
    rank 1       tokens 4-7, heads 0-3   tokens 0-7, heads 2-3   tokens 4-7, heads 0-3

Attention processes complete sequences, as on one rank. Packed documents, sliding windows, sinks and
bidirectional blocks need no special handling, and all ranks have the same number of token pairs. If
heads are not divisible by the ranks, some ranks have one more. Each rank receives the key and value
heads that its query heads read. A head that two ranks read is sent to both.

Gated delta nets and short convolutions process a sequence token by token, but their heads and
channels are independent. The same exchange runs before their convolution, which a rank computes for
its channels, and after the recurrence. In delta nets, ranks divide the value heads, which read key
and query heads.

With `parallel.llm.dynamic_context`, smaller groups of ranks exchange tokens for heads. A group
shares complete segments of the packed sequence (`torchmm.common.sequence_slices.group_segments`).
Features of images and loads of experts are exchanged among all context-parallel ranks.

Parameters are sharded as in data parallelism: FSDP2 shards them over `shard`, including the group,
and sums gradients. The sum is correct, because the loss of a rank is the sum over its local target
tokens. Encoders of the ranks process different images, and their outputs are sent to the ranks with
the corresponding tokens. Parameters do not differ between the ranks of a group, so the mesh needs
no additional dimension.

Ring attention would allow more ranks than heads, and its communication overlaps with attention. It
would need a kernel that returns the softmax statistics of each block, and a token order with equal
causal attention work per rank.

Shape legend: T tokens of the packed sequence, S tokens of the local slice, H heads that ranks
divide, G heads that these read, D and E features of a head, K output tokens of an encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.layers import ConvolutionSizes, DeltaSizes
from torchmm.common.sequence_slices import slice_ranges
from torchmm.models.layered import LayeredModule
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.exchange import ExchangeCounts, FeatureExchange, exchange


class ContextParallelRanks(FeatureExchange):
    """Context-parallel ranks (`torchmm.models.layers.sequence_exchange.SequenceRanks`).

    Args:
        mesh: 1-D mesh of the ranks.
        subgroups: Smaller groups of this rank, by number of ranks. Empty if all ranks share all
            sequences.
    """

    def __init__(
        self, mesh: DeviceMesh, subgroups: Mapping[int, dist.ProcessGroup] = MappingProxyType({})
    ) -> None:
        super().__init__(mesh.get_group())
        self.rank = mesh.get_local_rank()
        self._groups = {**subgroups, self.size: self.group}

    def heads(self, tokens: int, ranks: int) -> ContextParallelHeads | None:
        if ranks == 1:
            return None
        return ContextParallelHeads(
            self._groups[ranks],
            self.rank % ranks,
            [len(each) for each in slice_ranges(tokens, ranks)],
        )

    def summed(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total


class ContextParallelHeads:
    """Exchange of tokens for heads (`torchmm.models.layers.sequence_exchange.HeadExchange`).

    Args:
        group: Context-parallel group.
        rank: Rank in the group.
        tokens: Number of tokens of the slice of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tokens: list[int]) -> None:
        self._group = group
        self._rank = rank
        self._tokens = tokens

    def to_local_heads(self, divided_SHD: Tensor, *read_SGD: Tensor) -> list[Tensor]:
        inputs = (divided_SHD, *read_SGD)
        heads = divided_SHD.shape[1]
        owned = slice_ranges(heads, len(self._tokens))
        readers = [heads // x.shape[1] for x in inputs]
        needed = [[_read(local_heads, count) for count in readers] for local_heads in owned]
        # One message per rank with its heads of the first tensor, then of the second tensor, etc.
        messages = [
            [
                x[:, local_heads.start : local_heads.stop].flatten()
                for x, local_heads in zip(inputs, ranges, strict=True)
            ]
            for ranges in needed
        ]
        shapes = [
            (len(local_heads), x.shape[2])
            for x, local_heads in zip(inputs, needed[self._rank], strict=True)
        ]
        per_token = sum(heads * features for heads, features in shapes)
        counts = ExchangeCounts(
            [sum(len(part) for part in message) for message in messages],
            [tokens * per_token for tokens in self._tokens],
        )
        packed = torch.cat([part for message in messages for part in message])
        arrived = self._unpacked(exchange(packed, counts, self._group), shapes)
        local_heads = owned[self._rank]
        return [
            _for_readers(x, local_heads, count, dim=1)
            for x, count in zip(arrived, readers, strict=True)
        ]

    def _unpacked(self, arrived: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return tensors of all tokens from the messages of all ranks.

        Args:
            arrived: Received messages, sorted by rank.
            shapes: (heads, features) of each tensor.
        """
        sizes = [tokens * heads * features for tokens in self._tokens for heads, features in shapes]
        pieces = arrived.split(sizes)
        return [
            torch.cat([piece.view(-1, *shape) for piece in pieces[place :: len(shapes)]])
            for place, shape in enumerate(shapes)
        ]

    def to_local_tokens(self, out_THE: Tensor, heads: int) -> Tensor:
        tokens = self._tokens[self._rank]
        shares = [len(each) for each in slice_ranges(heads, len(self._tokens))]
        per_token = out_THE[0].numel()
        counts = ExchangeCounts(
            [count * per_token for count in self._tokens],
            [tokens * share * out_THE.shape[2] for share in shares],
        )
        pieces = exchange(out_THE.flatten(), counts, self._group).split(counts.received)
        heads_of_ranks = [
            piece.view(tokens, share, out_THE.shape[2])
            for piece, share in zip(pieces, shares, strict=True)
        ]
        return torch.cat(heads_of_ranks, 1)

    def select_local_heads(self, values: Tensor, heads: int) -> Tensor:
        local_heads = slice_ranges(heads, len(self._tokens))[self._rank]
        readers = heads // len(values)
        read = _read(local_heads, readers)
        return _for_readers(values[read.start : read.stop], local_heads, readers, dim=0)


def _read(local_heads: range, readers: int) -> range:
    """Return the heads that the local heads read, if `readers` heads read the same head."""
    return range(local_heads.start // readers, (local_heads.stop - 1) // readers + 1)


def _for_readers(x: Tensor, local_heads: range, readers: int, dim: int) -> Tensor:
    """Return the heads that the local heads read, for attention with groups of equal size.

    If the numbers of readers per head differ, the result has one head for each reader.
    """
    groups = Counter(head // readers for head in local_heads).values()
    if len(set(groups)) == 1:
        return x
    repeated = [x.narrow(dim, i, 1) for i, size in enumerate(groups) for _ in range(size)]
    return torch.cat(repeated, dim)


def apply_context_parallel(
    model: MultimodalModel,
    mesh: DeviceMesh,
    subgroups: Mapping[int, dist.ProcessGroup] = MappingProxyType({}),
) -> None:
    """Set the context-parallel ranks of all LLM stages of a model, in place.

    Args:
        mesh: 1-D mesh of the ranks.
        subgroups: See `ContextParallelRanks`.
    """
    ranks = ContextParallelRanks(mesh, subgroups)
    for stage in (model.llm, *model.all_stages()):
        if isinstance(stage, LlmModule):
            stage.sequence_ranks = ranks
    if model.llm.balance is not None:
        model.llm.balance.sequence_ranks = ranks


def context_problems(llm: LayeredModule, ranks: int, tensor: int) -> list[str]:
    """Return why ranks cannot divide the sequences of an LLM. Needs no process group.

    Args:
        llm: LLM on the meta device.
        ranks: Number of context-parallel ranks.
        tensor: Number of tensor-parallel ranks, which divide the heads first.
    """
    if ranks == 1:
        return []
    key = f"[parallel.llm] context = {ranks}"
    problems = []
    if not llm.supports_tensor_parallel:
        problems.append(
            f"{key}: {llm.name!r} is not a registered model type (docs/reference/models.md), "
            "for which only pipeline parallelism and sharding are verified; remove it"
        )
    for sizes in dict.fromkeys(llm.layer_sizes()):
        heads = sizes.heads
        unit = "attention heads"
        if isinstance(sizes.mixer, DeltaSizes):
            heads = sizes.mixer.value_heads
            unit = "value heads of delta nets"
        elif isinstance(sizes.mixer, ConvolutionSizes):
            heads = sizes.hidden_size
            unit = "channels of convolutions"
        if heads // tensor < ranks:
            problems.append(
                f"{key} is above the {heads // tensor} {unit} of {llm.name!r} per "
                "tensor-parallel rank, which are split over context ranks; use a smaller "
                "number"
            )
    return list(dict.fromkeys(problems))


def stage_boundary_problems(llm: LayeredModule, ranks: int, stops: Sequence[int]) -> list[str]:
    """Return why ranks cannot divide the sequences of an LLM with these stage boundaries.

    A stage sends features that later layers add to the next stage. The number of these features in
    a slice depends on the positions of images in the sequence, which are unknown before the
    samples are read.
    """
    first = min(stops, default=0)
    if ranks == 1 or not stops or not llm.deepstack_layers or first > max(llm.deepstack_layers):
        return []
    return [
        f"[parallel.llm] context = {ranks}: {llm.name!r} adds image features after its first "
        f"{max(llm.deepstack_layers) + 1} layers, but its first stage ends with layer {first}; use "
        "fewer pipeline ranks or stages, or context = 1"
    ]
