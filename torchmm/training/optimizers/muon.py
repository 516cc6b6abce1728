"""Muon (Jordan et al. 2024): matrices are updated with their orthogonalized momentum.

The algorithm is that of torch.optim.Muon, with the update scale of "Muon is Scalable" (arXiv
2502.16982), which permits learning rates and weight decay of AdamW. The class of torch is not used:
it always iterates in bfloat16, and on sharded matrices every matmul of an iteration communicates.
`LocalMuon` instead all-gathers matrices once. The ranks that share matrices orthogonalize different
matrices in parallel. Then all ranks receive their shards. Each expert in a stacked tensor is one
matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchmm.models.hf.load import local_slices
from torchmm.parallel.torch_compat import dtensor_like, local_tensors
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optimizers.adamw import LocalAdamW
from torchmm.training.optimizers.optimizer import local_gradients

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
_EPSILON = 1e-7


class LocalMuon(LocalAdamW):
    """Muon for matrices of layers and AdamW for other parameters, with float32 states.

    `step` is collective.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        names: Mapping[int, str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, config, names, dtype)
        self._momentum = config.momentum
        self._dtype = dtype

    def new_state(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if group["rule"] != "muon":
            return super().new_state(parameter, group)
        step = torch.zeros((), device=parameter.device)
        return {"step": step, "momentum_buffer": torch.zeros_like(parameter)}

    def _update(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        if group["rule"] != "muon":
            super()._update(group, parameters)
            return
        for batch in group_by_mesh_size(parameters):
            gradients = local_gradients(batch)
            moments = local_tensors([self.state[p]["momentum_buffer"] for p in batch])
            updates = [
                update_momentum(
                    moment, gradient, self._momentum, self._dtype, self.grad_scale, self.found_inf
                )
                for moment, gradient in zip(moments, gradients, strict=True)
            ]
            orthogonalized = orthogonalize_distributed(updates, batch)
            for parameter, value, update in zip(
                batch, local_tensors(batch), orthogonalized, strict=True
            ):
                apply_matrix_update(value, update, parameter.shape, group, self.found_inf)


def update_momentum(
    moment: Tensor,
    gradient: Tensor,
    momentum: float,
    dtype: torch.dtype,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Tensor:
    """Update a moment in place and return the matrix to orthogonalize, in `dtype`.

    Args:
        moment: Momentum of the matrix, float32, with the shape of `gradient`.
        gradient: Local gradient.
        momentum: Decay of the momentum.
        dtype: Dtype of the result.
        grad_scale, found_inf: See `RunOptimizer`.
    """
    if grad_scale is not None:
        gradient = gradient / grad_scale
    gradient = where_not_skipped(found_inf, gradient, torch.zeros_like(gradient))
    moment.lerp_(gradient, where_not_skipped(found_inf, 1 - momentum, 0.0))
    return gradient.lerp(moment, momentum).to(dtype)


def apply_matrix_update(
    value: Tensor,
    update: Tensor,
    shape: torch.Size,
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Apply weight decay and the update to a float32 value, in place.

    Args:
        value: Local shard of the parameter.
        update: Local shard of the orthogonalized matrix.
        shape: Shape of the unsharded parameter.
        group: Parameter group with learning rate and weight decay.
        found_inf: See `RunOptimizer`.
    """
    lr = group["lr"]
    value.mul_(where_not_skipped(found_inf, 1 - lr * group["weight_decay"], 1.0))
    change = where_not_skipped(found_inf, update, torch.zeros_like(update))
    value.add_(change.reshape(value.shape), alpha=-lr * update_scale(shape))


def where_not_skipped(found_inf: Tensor | None, value: Any, otherwise: Any) -> Any:
    """Return `value`, or `otherwise` if the step is skipped. Both may be numbers."""
    if found_inf is None:
        return value
    return torch.where(found_inf == 0, value, otherwise)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately U V^T of each U S V^T, by Newton-Schulz iterations.

    The singular values of the result are about 0.7 to 1.2.

    Args:
        matrices: (..., rows, columns), in the compute dtype.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def update_scale(shape: Sequence[int]) -> float:
    """Return the scale with which orthogonal matrices have the RMS of AdamW updates."""
    return 0.2 * sqrt(max(shape[-2:]))


def mesh_size(parameter: Tensor) -> int:
    """Return the number of ranks that share a parameter."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


def group_by_mesh_size(parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """Yield groups of one parameter per rank of their mesh, so that all ranks have work."""
    size = mesh_size(parameters[0])
    for start in range(0, len(parameters), size):
        yield parameters[start : start + size]


def orthogonalize_distributed(
    updates: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return the local shard of each orthogonalized matrix. Collective over the mesh.

    Args:
        updates: Local shards of the matrices, in the compute dtype.
        parameters: Parameters of these matrices, on one mesh. One parameter per rank is most
            efficient.
    """
    if not isinstance(parameters[0], DTensor):
        return [orthogonalize(update) for update in updates]
    results = []
    for index, (update, parameter) in enumerate(zip(updates, parameters, strict=True)):
        assert isinstance(parameter, DTensor)
        matrix = dtensor_like(update, parameter, parameter.shape).full_tensor()
        # Only the rank that orthogonalizes a matrix retains the all-gathered result.
        is_local = index % mesh_size(parameter) == _mesh_index(parameter)
        results.append(orthogonalize(matrix) if is_local else torch.zeros_like(matrix))
    results.reverse()  # `pop` then frees each matrix when its sum is computed
    return [_local_shard(results.pop(), parameter) for parameter in parameters]


def _mesh_index(parameter: DTensor) -> int:
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = 0
    for size, position in zip(mesh.shape, coordinate, strict=True):
        index = index * size + position
    return index


def _local_shard(matrix_or_zeros: Tensor, parameter: Tensor) -> Tensor:
    """Return the local shard of a matrix that is on one rank, with zeros on the other ranks."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    partial_sum = DTensor.from_local(
        matrix_or_zeros, mesh, [Partial()] * mesh.ndim, run_check=False
    )
    matrix = partial_sum.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    return matrix[local_slices(parameter)].clone()  # a view would keep the full matrix in memory
