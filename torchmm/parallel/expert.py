"""Expert parallelism: each rank of an expert group has some of the experts, and tokens travel.

`parallel.expert` ranks out of the `shard` ranks form a group. Every rank routes its own tokens,
sends each to the ranks that have its experts, computes what it receives with its own experts, and
sends the results back. Weights of experts stay where they are: FSDP2 gathers only the 1 / `expert`
part that a rank computes with, over the ranks that have the same experts, instead of all of them
over all shards.

    shard = 4, expert = 2:   ranks       0      1      2      3
                             experts     0-3    4-7    0-3    4-7
                             tokens      0 <--> 1      2 <--> 3      all-to-all, in every layer
                             weights     0 <---------> 2             all-gather and reduce-scatter
                                                1 <---------> 3

All ranks of a group have to run the same forwards and backwards of the LLM in the same order, so
schedules that follow each replica's own data are refused (`torchmm.recipe.check_parallel`).

Rejected: a capacity per expert, which drops tokens, so that layouts would give other losses; one
all-gather of all tokens (what tensor parallelism does with experts, `ExpertsOfRanks`), whose
traffic does not fall with the share of tokens that an expert gets.

Shape legend: T tokens of this rank, K experts per token, S = T x K rows that are sent, R rows that
arrive, D features.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchmm.models.layered import LayeredModule
from torchmm.models.layers.experts import expert_parts
from torchmm.parallel.exchange import Counts, exchange
from torchmm.parallel.tensor.styles import own_experts


def apply_expert_parallel(module: LayeredModule, mesh: DeviceMesh) -> None:
    """Divides the experts of `module` among the ranks of the 1-D `mesh`, in place, on any device.

    Their number has to be a multiple of the ranks (`expert_problems`).
    """
    for experts in expert_parts(module.layers):
        _divide(experts, mesh)


def expert_problems(module: LayeredModule, ranks: int) -> list[str]:
    """Why the experts of a module cannot be divided among `ranks`; needs no process group."""
    if ranks == 1:
        return []
    counts = {sizes.experts for sizes in module.layer_sizes()} - {0}
    if not counts:
        return [
            f"[parallel] expert = {ranks}, but no layer of {module.name!r} has experts; remove it"
        ]
    # `forward` calls experts with rows, the experts of each row, and weights.
    unlike = [
        part
        for part in expert_parts(module.layers)
        if "top_k_index" not in signature(type(part).forward).parameters
    ]
    if unlike:
        return [
            f"[parallel] expert = {ranks} is not supported for experts of class "
            f"{type(unlike[0]).__name__} in {module.name!r}; use 1"
        ]
    return [
        f"[parallel] expert = {ranks} must divide the {count} experts of a layer of "
        f"{module.name!r}; use a divisor"
        for count in sorted(counts)
        if count % ranks
    ]


def _divide(experts: Any, mesh: DeviceMesh) -> None:
    compute = own_experts(experts, mesh, some_elsewhere=False)
    own = experts.num_experts // mesh.size()
    group = mesh.get_group()

    def compute_own(rows_RD: Tensor, expert_R: Tensor) -> Tensor:
        weights_R1 = rows_RD.new_ones(len(rows_RD), 1)  # those of the routing wait for the results
        out_RD = compute(rows_RD, expert_R[:, None], weights_R1)
        if len(rows_RD):
            return out_RD
        # Nobody's tokens: the backward has to come by all the same, as other ranks wait for this
        # rank in the exchange, and for the gradients of its weights in FSDP's reduction.
        weights = (p.to_local().sum() for p in experts.parameters(recurse=False))
        return out_RD + 0.0 * (rows_RD.sum() + sum(weights))

    def forward(rows_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        expert_S, order_S = index_TK.flatten().sort(stable=True)
        counts, arriving_R = _announce(expert_S, own, group)
        tokens_S = order_S // index_TK.shape[1]
        arrived_RD = exchange(rows_TD[tokens_S], counts, group)
        results_RD = compute_own(arrived_RD, arriving_R)
        results_SD = exchange(results_RD, counts.back, group)
        # In the order of the tokens again, rather than added to rows in any order: the same bits.
        results_TKD = results_SD[order_S.argsort()].view(*index_TK.shape, -1)
        return (results_TKD * weights_TK[..., None]).sum(1).to(rows_TD.dtype)

    experts.forward = forward


def _announce(expert_S: Tensor, own: int, group: dist.ProcessGroup) -> tuple[Counts, Tensor]:
    """How many rows go where, and which of its own experts every row is for that arrives here.

    Lengths of messages have to be known to the host: this waits for the device, once per layer and
    forward.

    Args:
        expert_S: by row, in ascending order.
        own: experts of a rank.
    """
    ranks = group.size()
    ones_S = torch.ones_like(expert_S)
    sent_E = expert_S.new_zeros(ranks * own).index_add(0, expert_S, ones_S)
    received_E = torch.empty_like(sent_E)  # by sender, then by own expert
    dist.all_to_all_single(received_E, sent_E, group=group)
    both = torch.stack([sent_E, received_E]).view(2, ranks, own).sum(-1)
    sent, received = both.tolist()
    own_experts_E = torch.arange(own, device=expert_S.device).repeat(ranks)
    arriving_R = own_experts_E.repeat_interleave(received_E, output_size=sum(received))
    return Counts(sent, received), arriving_R
