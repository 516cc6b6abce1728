"""Muon (Jordan et al. 2024): a matrix moves by its momentum, made orthogonal.

As torch.optim.Muon does it, with the size of updates of "Muon is Scalable" (arXiv 2502.16982), for
which AdamW's learning rates and weight decay fit. That class is not used: it iterates in bfloat16
whatever a run computes in, and on sharded matrices every product of an iteration communicates. Here
matrices are gathered once, and the ranks that share them take turns: each makes some of them
orthogonal, then all get theirs. Experts that are stacked in one tensor count as a matrix each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchmm.models.hf.load import local_slices
from torchmm.parallel.torch_private import placed_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
_EPSILON = 1e-7


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
    """What gives an orthogonal matrix about the root mean square of AdamW's updates."""
    return 0.2 * sqrt(max(shape[-2:]))


def turns(parameter: Tensor) -> int:
    """How many ranks share a parameter, and with it the work."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


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
