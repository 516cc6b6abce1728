"""Experts divided among tensor-parallel ranks.

Each rank has some of the experts whole. All ranks see all tokens and route them alike; a rank
computes what goes to its own experts, and the results are summed like those of a row-wise linear.
No tokens are exchanged. Rejected: splitting every expert's matrices, which makes small products
smaller, and needs gate and up projection, which lie behind each other, cut apart.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchmm.parallel.tensor.sequence import (
    LocalNorm,
    LocalWeights,
    SequenceSlices,
    distribute_parameters,
)


class ExpertsOfRanks(ParallelStyle):
    """A feed-forward network with `gate` (the router) and `experts`; others are left alone.

    Raises:
        ConfigError: the experts do not divide among the ranks, or communication is to overlap.
    """

    def __init__(self, slices: SequenceSlices | None) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "experts"):
            return module
        block: Any = module
        LocalNorm()._apply(block.gate, device_mesh)
        block.gate.balance_share = 1 / device_mesh.size()
        self._split(block.experts, device_mesh)
        whole: Any = type(block).forward

        def forward(hidden: DTensor) -> Tensor:
            # Every rank adds the gradients of its own experts.
            out = whole(block, hidden.to_local(grad_placements=[Partial()]))
            if self._slices is not None:
                return self._slices.reduce(block, (), out)
            partial = DTensor.from_local(out, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

        block.forward = forward
        return module

    def _split(self, experts: Any, mesh: DeviceMesh) -> None:
        placements = {name: Shard(0) for name, _ in experts.named_parameters(recurse=False)}
        distribute_parameters(experts, mesh, **placements)
        own = experts.num_experts // mesh.size()
        first = mesh.get_local_rank() * own
        settings = {k: v for k, v in vars(experts).items() if not k.startswith("_")}
        settings |= dict(experts.named_children())
        settings |= {"num_experts": own, "_is_expert_parallel": True}
        compute: Any = type(experts).forward

        def forward(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            local = {
                name: cast(DTensor, parameter).to_local()
                for name, parameter in experts.named_parameters(recurse=False)
            }
            index = index - first
            others = (index < 0) | (index >= own)
            index = index.masked_fill(others, own)  # Hugging Face's number for "not here"
            return compute(LocalWeights(type(experts), settings, local), rows, index, weights)

        experts.forward = forward
