"""Muon (Jordan et al. 2024): a matrix moves by its momentum, made orthogonal.

The algorithm is that of torch.optim.Muon, with the size of updates of "Muon is Scalable" (arXiv
2502.16982), for which learning rates and weight decay of AdamW fit. The class of torch is not used:
it always iterates in bfloat16, and on sharded matrices every product of an iteration communicates.
Here, matrices are gathered once, and the ranks that share them take turns: each makes some of them
orthogonal, then all ranks receive their shards. Each expert in a stacked tensor is one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchmm.models.hf.load import local_slices
from torchmm.parallel.torch_private import local_tensors, placed_like
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
        for turn in split_turns(parameters):
            gradients = local_gradients(turn)
            moments = local_tensors([self.state[p]["momentum_buffer"] for p in turn])
            updates = [
                update_momentum(
                    moment, gradient, self._momentum, self._dtype, self.grad_scale, self.found_inf
                )
                for moment, gradient in zip(moments, gradients, strict=True)
            ]
            made = orthogonal_shared(updates, turn)
            for parameter, value, update in zip(turn, local_tensors(turn), made, strict=True):
                move_matrix(value, update, parameter.shape, group, self.found_inf)


def update_momentum(
    moment: Tensor,
    gradient: Tensor,
    momentum: float,
    dtype: torch.dtype,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Tensor:
    """Update a moment in place and return the matrix to make orthogonal, in `dtype`.

    Args:
        moment: float32, like `gradient`.
        grad_scale, found_inf: see `RunOptimizer`.
    """
    if grad_scale is not None:
        gradient = gradient / grad_scale
    gradient = unless_skipped(found_inf, gradient, torch.zeros_like(gradient))
    moment.lerp_(gradient, unless_skipped(found_inf, 1 - momentum, 0.0))
    return gradient.lerp(moment, momentum).to(dtype)


def move_matrix(
    value: Tensor,
    update: Tensor,
    shape: torch.Size,
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Decay a float32 value and move it by its update, in place.

    Args:
        shape: Shape of the unsharded parameter.
        group: Parameter group, for the learning rate and weight decay.
    """
    lr = group["lr"]
    value.mul_(unless_skipped(found_inf, 1 - lr * group["weight_decay"], 1.0))
    change = unless_skipped(found_inf, update, torch.zeros_like(update))
    value.add_(change.reshape(value.shape), alpha=-lr * update_scale(shape))


def unless_skipped(found_inf: Tensor | None, value: Any, otherwise: Any) -> Any:
    """Return `value`, or `otherwise` if the step is skipped; both may be numbers."""
    if found_inf is None:
        return value
    return torch.where(found_inf == 0, value, otherwise)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly U V^T of each U S V^T, with singular values of about 0.7 to 1.2, by Newton-Schulz.

    Args:
        matrices: (..., rows, columns), in the dtype to compute in.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def update_scale(shape: Sequence[int]) -> float:
    """Return the factor that gives orthogonal matrices the root mean square of AdamW updates."""
    return 0.2 * sqrt(max(shape[-2:]))


def turns(parameter: Tensor) -> int:
    """Return the number of ranks that share a parameter."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


def split_turns(parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """Yield groups of one parameter per rank of their mesh, so that all ranks have work."""
    size = turns(parameters[0])
    for start in range(0, len(parameters), size):
        yield parameters[start : start + size]


def orthogonal_shared(updates: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each matrix, made orthogonal as a whole; collective over their mesh.

    Args:
        updates: this rank's parts, in the dtype to compute in.
        parameters: whose they are, of one mesh; best as many as it has ranks.
    """
    if not isinstance(parameters[0], DTensor):
        return [orthogonal(update) for update in updates]
    made = []
    for turn, (update, parameter) in enumerate(zip(updates, parameters, strict=True)):
        assert isinstance(parameter, DTensor)
        whole = placed_like(update, parameter, parameter.shape).full_tensor()
        # Only the one whose turn it is keeps what was gathered.
        own = turn % turns(parameter) == _own_turn(parameter)
        made.append(orthogonal(whole) if own else torch.zeros_like(whole))
    made.reverse()  # each is let go of as soon as its sum is there
    return [_own_part(made.pop(), parameter) for parameter in parameters]


def _own_turn(parameter: DTensor) -> int:
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    number = 0
    for size, own in zip(mesh.shape, place, strict=True):
        number = number * size + own
    return number


def _own_part(made: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of what one rank has and others have zeros for."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    somewhere = DTensor.from_local(made, mesh, [Partial()] * mesh.ndim, run_check=False)
    whole = somewhere.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    return whole[local_slices(parameter)].clone()  # a view would hold the whole
