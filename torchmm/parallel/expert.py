"""Expert parallelism: each rank of an expert group has some experts, and tokens are exchanged.

`parallel.expert` of the `shard` ranks form a group. Each rank routes its local tokens, sends each
token to the ranks of its experts, computes the received tokens, and returns the results. FSDP2
all-gathers only the 1 / `expert` of the expert weights that a rank uses, over the ranks with the
same experts.

    shard = 4, expert = 2:   ranks       0      1      2      3
                             experts     0-3    4-7    0-3    4-7
                             tokens      0 <--> 1      2 <--> 3      all-to-all, in every layer
                             weights     0 <---------> 2             all-gather and reduce-scatter
                                                1 <---------> 3

Invariant: all ranks of a group run the same forward and backward passes of the LLM in the same
order. `torchmm.recipe.check_parallel` therefore rejects schedules that depend on the data of each
replica.

Experts have an unlimited capacity. A limit would drop tokens, so losses would depend on the
parallelism degrees. The alternative of one all-gather of all tokens (`ShardedExperts` in tensor
parallelism) has traffic that does not decrease with the fraction of tokens per expert.

Shape legend: T tokens of this rank, K experts per token, S = T x K rows to send, R received rows, D
features.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchmm.models.layered import LayeredModule
from torchmm.models.layers.experts import expert_modules
from torchmm.parallel.exchange import ExchangeCounts, exchange
from torchmm.parallel.tensor.styles import shard_experts


def apply_expert_parallel(module: LayeredModule, mesh: DeviceMesh) -> None:
    """Divide the experts of a module among the ranks of a 1-D mesh, in place, on any device.

    The number of experts must be a multiple of the number of ranks (`expert_problems`).
    """
    for experts in expert_modules(module.layers):
        _apply_to_experts(experts, mesh)


def expert_problems(module: LayeredModule, ranks: int) -> list[str]:
    """Return why the experts of a module cannot be divided. Needs no process group."""
    if ranks == 1:
        return []
    counts = {sizes.experts for sizes in module.layer_sizes()} - {0}
    if not counts:
        return [
            f"[parallel] expert = {ranks}, but no layer of {module.name!r} has experts; remove it"
        ]
    # `forward` calls experts with rows, the experts of each row, and weights.
    unsupported = [
        part
        for part in expert_modules(module.layers)
        if "top_k_index" not in signature(type(part).forward).parameters
    ]
    if unsupported:
        return [
            f"[parallel] expert = {ranks} is not supported for experts of class "
            f"{type(unsupported[0]).__name__} in {module.name!r}; use 1"
        ]
    return [
        f"[parallel] expert = {ranks} must divide the {count} experts of a layer of "
        f"{module.name!r}; use a divisor"
        for count in sorted(counts)
        if count % ranks
    ]


def _apply_to_experts(experts: Any, mesh: DeviceMesh) -> None:
    compute = shard_experts(experts, mesh, has_remote_rows=False)
    local_experts = experts.num_experts // mesh.size()
    group = mesh.get_group()

    def compute_local(rows_RD: Tensor, expert_R: Tensor) -> Tensor:
        weights_R1 = rows_RD.new_ones(len(rows_RD), 1)  # routing weights are applied to the results
        out_RD = compute(rows_RD, expert_R[:, None], weights_R1)
        if len(rows_RD):
            return out_RD
        # Without tokens, the backward pass must still run: other ranks wait for this rank in the
        # exchange, and in the gradient reduction of FSDP.
        weights = (p.to_local().sum() for p in experts.parameters(recurse=False))
        return out_RD + 0.0 * (rows_RD.sum() + sum(weights))

    def forward(rows_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        expert_S, order_S = index_TK.flatten().sort(stable=True)
        counts, local_expert_R = _exchange_counts(expert_S, local_experts, group)
        tokens_S = order_S // index_TK.shape[1]
        received_RD = exchange(rows_TD[tokens_S], counts, group)
        results_RD = compute_local(received_RD, local_expert_R)
        results_SD = exchange(results_RD, counts.reversed, group)
        # Summing in token order is deterministic, unlike adding rows in arbitrary order.
        results_TKD = results_SD[order_S.argsort()].view(*index_TK.shape, -1)
        return (results_TKD * weights_TK[..., None]).sum(1).to(rows_TD.dtype)

    experts.forward = forward


def _exchange_counts(
    expert_S: Tensor, local_experts: int, group: dist.ProcessGroup
) -> tuple[ExchangeCounts, Tensor]:
    """Exchange row counts, and return them with the local expert index of each received row.

    The host needs the message sizes, so this synchronizes with the device once per layer and
    forward pass.

    Args:
        expert_S: Expert of each row to send, in ascending order.
        local_experts: Number of experts per rank.
        group: Expert-parallel group.
    """
    ranks = group.size()
    ones_S = torch.ones_like(expert_S)
    sent_E = expert_S.new_zeros(ranks * local_experts).index_add(0, expert_S, ones_S)
    received_E = torch.empty_like(sent_E)  # sorted by sender, then by local expert
    dist.all_to_all_single(received_E, sent_E, group=group)
    both = torch.stack([sent_E, received_E]).view(2, ranks, local_experts).sum(-1)
    sent, received = both.tolist()
    local_experts_E = torch.arange(local_experts, device=expert_S.device).repeat(ranks)
    local_expert_R = local_experts_E.repeat_interleave(received_E, output_size=sum(received))
    return ExchangeCounts(sent, received), local_expert_R
