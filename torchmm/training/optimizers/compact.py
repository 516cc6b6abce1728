"""AdamW and Muon in float32 on tensors that rest in fewer bytes, or in the host's memory.

A step goes through the parameters portion by portion: what rests (`forms.py`) becomes float32,
torch's own fused AdamW updates it, and the result is put to rest again. So only a portion is ever
there in float32, and the numbers are torch's. Where states are on the host, portions visit the
device (`host.py`). Muon's matrices are portions as they are (`muon.py`).

Rejected: torchao's AdamW8bit and relatives. Their rounding makes replicas and tied copies differ,
their blocks and their choice of what has 8 bits follow the shards, and their states are
tensor subclasses that a checkpoint cannot take apart for other layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchmm.models.hf.load import local_tensor
from torchmm.parallel.torch_private import placed_like
from torchmm.recipe.training_section import UPDATE_PORTION
from torchmm.training.optimizers.forms import (
    BFloat16,
    Float32,
    Form,
    RandomBits,
    StateDtype,
    Stored,
    as_rows,
    places_of,
    state_form,
)
from torchmm.training.optimizers.host import HostVisits
from torchmm.training.optimizers.muon import orthogonal_shared, turns, update_scale

PORTION = UPDATE_PORTION
"""Elements that are updated together: 64 MiB of each tensor in float32."""
Rule = Literal["adamw", "muon"]
_MOMENTS: dict[Rule, dict[str, bool]] = {
    "adamw": {"exp_avg": True, "exp_avg_sq": False},
    "muon": {"momentum_buffer": True},
}
"""Names of states, as torch has them, and whether they may be below 0."""


@dataclass(frozen=True)
class Settings:
    """What is the same for all groups.

    Attributes:
        betas, eps: of AdamW.
        momentum: of Muon.
        state_dtype: how moments rest.
        at_random: whether bfloat16 parameters are rounded at random.
        offload: whether states are in the host's memory.
        muon_dtype: in which matrices are made orthogonal.
    """

    betas: tuple[float, float]
    eps: float
    momentum: float
    state_dtype: StateDtype
    at_random: bool
    offload: bool
    muon_dtype: torch.dtype


@dataclass(frozen=True)
class _Piece:
    """Some rows of one parameter."""

    parameter: nn.Parameter
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Its rows of the parameter, its gradient or a state."""
        return as_rows(local_tensor(tensor))[self.rows]


class CompactOptimizer(torch.optim.Optimizer):
    """A step updates every parameter that has a gradient; collective if a group's rule is Muon.

    States are made in the first step. State tensors that belong to elements are DTensors like
    their parameters, on the host if states are offloaded.

    Attributes:
        grad_scale: divisor of the gradients, a float32 device scalar.
        found_inf: 1 if the step must change nothing, else 0; a float32 device scalar.

    Args:
        groups: with `lr`, `weight_decay`, `rule`, and parameters of one mesh each.
        names: by parameter's id; the same in all layouts, and for copies of one parameter.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: Settings,
        names: Mapping[int, str],
    ) -> None:
        super().__init__(groups, {"rule": "adamw", "weight_decay": 0.0})
        self._settings = settings
        self._keys = {number: crc32(name.encode()) for number, name in names.items()}
        every = (local_tensor(p) for group in self.param_groups for p in group["params"])
        device = next((own.device for own in every), None)
        self._visits = HostVisits(device) if settings.offload and device is not None else None

    def new_state(self, parameter: nn.Parameter, rule: Rule) -> dict[str, Tensor]:
        """States of zeros."""
        own = local_tensor(parameter)
        found = {"step": torch.zeros((), device=own.device)}
        for moment, form in self._forms(parameter, rule).items():
            wholes = form.shapes(parameter.shape)
            for suffix, (shape, dtype) in form.shapes(own.shape).items():
                zeros = self._zeros(shape, dtype, own.device)
                if isinstance(parameter, DTensor):
                    zeros = placed_like(zeros, parameter, wholes[suffix][0])
                found[moment + suffix] = zeros
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter, group["rule"])
            if not parameters:
                continue
            count_step([self.state[p]["step"] for p in parameters], self.found_inf)
            adam = group["rule"] == "adamw"
            portions = [*(_portions(parameters) if adam else _rounds(parameters))]
            update = self._adamw if adam else self._muon
            for portion, states in self._at_hand(portions, group["rule"]):
                with self._unchanged_if_found_inf(portion, states):
                    update(group, portion, states)

    @contextmanager
    def _unchanged_if_found_inf(
        self, portion: list[_Piece], states: list[dict[str, Stored]]
    ) -> Iterator[None]:
        """Restore parameters and states after the body if `found_inf` is 1."""
        if self.found_inf is None:
            yield
            return
        tensors = [piece.of(piece.parameter) for piece in portion]
        tensors += [t for own in states for stored in own.values() for t in stored.values()]
        before = [tensor.clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(self.found_inf.bool(), old, tensor))

    def _at_hand(
        self, portions: list[list[_Piece]], rule: Rule
    ) -> Iterator[tuple[list[_Piece], list[dict[str, Stored]]]]:
        """Portions with the states of their pieces on the device, by moment."""
        if self._visits is None:
            for portion in portions:
                yield portion, [self._stored(piece, rule) for piece in portion]
            return

        def hosts(portion: list[_Piece]) -> list[Tensor]:
            every = (self._stored(piece, rule) for piece in portion)
            return [tensor for own in every for one in own.values() for tensor in one.values()]

        for portion, copies in self._visits.each(portions, hosts):
            left = iter(copies)
            yield (
                portion,
                [
                    {
                        moment: {suffix: next(left) for suffix in stored}
                        for moment, stored in self._stored(piece, rule).items()
                    }
                    for piece in portion
                ],
            )

    def _adamw(
        self, group: dict[str, Any], portion: list[_Piece], states: list[dict[str, Stored]]
    ) -> None:
        values = [self._parameter_form(p.parameter).read({"": p.of(p.parameter)}) for p in portion]
        forms = [self._forms(piece.parameter, "adamw") for piece in portion]
        moments = {
            name: [own[name].read(stored[name]) for own, stored in zip(forms, states, strict=True)]
            for name in _MOMENTS["adamw"]
        }
        beta1, beta2 = self._settings.betas
        adamw(
            values,
            [self._gradient(piece) for piece in portion],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            [self.state[piece.parameter]["step"] - 1 for piece in portion],  # it adds 1 itself
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._settings.eps,
            maximize=False,
        )
        for index, (piece, stored) in enumerate(zip(portion, states, strict=True)):
            updated = {name: of_each[index] for name, of_each in moments.items()}
            self._put_to_rest(piece, values[index], updated, stored)

    def _muon(
        self, group: dict[str, Any], portion: list[_Piece], states: list[dict[str, Stored]]
    ) -> None:
        momentum = self._settings.momentum
        moments, updates = [], []
        for piece, stored in zip(portion, states, strict=True):
            form = self._forms(piece.parameter, "muon")["momentum_buffer"]
            moment = form.read(stored["momentum_buffer"])
            gradient = self._gradient(piece)
            moment.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(moment, momentum).to(self._settings.muon_dtype)
            moments.append(moment)
            updates.append(update.view(local_tensor(piece.parameter).shape))
        made = orthogonal_shared(updates, [piece.parameter for piece in portion])
        for piece, stored, moment, update in zip(portion, states, moments, made, strict=True):
            value = self._parameter_form(piece.parameter).read({"": piece.of(piece.parameter)})
            value.mul_(1 - group["lr"] * group["weight_decay"])
            scale = update_scale(piece.parameter.shape)
            value.add_(update.reshape(value.shape), alpha=-group["lr"] * scale)
            self._put_to_rest(piece, value, {"momentum_buffer": moment}, stored)

    def _put_to_rest(
        self,
        piece: _Piece,
        value_RC: Tensor,
        moments: Mapping[str, Tensor],
        stored: Mapping[str, Stored],
    ) -> None:
        parameter = piece.parameter
        rule: Rule = "adamw" if "exp_avg" in moments else "muon"
        places = places_of(parameter).of_rows(piece.rows)
        key = self.state[parameter]["step"].long() * 0x5851F42D + self._keys[id(parameter)]
        target = {"": piece.of(parameter)}
        self._parameter_form(parameter).write(target, value_RC, RandomBits(places, key))
        for number, (name, form) in enumerate(self._forms(parameter, rule).items(), 1):
            form.write(stored[name], moments[name], RandomBits(places, key + number * 0x14057B7E))

    def _parameter_form(self, parameter: nn.Parameter) -> Form:
        narrow = parameter.dtype == torch.bfloat16
        return BFloat16(self._settings.at_random) if narrow else Float32()

    def _forms(self, parameter: nn.Parameter, rule: Rule) -> dict[str, Form]:
        """Of a parameter's moments."""
        dtype = self._settings.state_dtype
        return {
            moment: state_form(dtype, signed, parameter.ndim)
            for moment, signed in _MOMENTS[rule].items()
        }

    def _stored(self, piece: _Piece, rule: Rule) -> dict[str, Stored]:
        """A piece's states where they rest, by moment."""
        state = self.state[piece.parameter]
        shape = piece.parameter.shape
        return {
            moment: {suffix: piece.of(state[moment + suffix]) for suffix in form.shapes(shape)}
            for moment, form in self._forms(piece.parameter, rule).items()
        }

    def _gradient(self, piece: _Piece) -> Tensor:
        """Return the gradient of a piece in float32, divided by `grad_scale`."""
        assert piece.parameter.grad is not None
        gradient = piece.of(piece.parameter.grad).float()
        return gradient if self.grad_scale is None else gradient / self.grad_scale

    def _zeros(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._visits is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def count_step(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to the step counters, or 0 if `found_inf` is 1."""
    if found_inf is None:
        torch._foreach_add_(steps, 1.0)
    else:  # without alpha, torch reads the scalar on the host
        torch._foreach_add_(steps, 1.0 - found_inf, alpha=1.0)


def _portions(parameters: Sequence[nn.Parameter]) -> Iterator[list[_Piece]]:
    """All rows, in portions of about `PORTION` elements."""
    portion: list[_Piece] = []
    left = PORTION
    for parameter in parameters:
        rows, columns = as_rows(local_tensor(parameter)).shape
        if not columns:
            continue
        start = 0
        while start < rows:
            stop = min(rows, start + max(1, left // columns))
            portion.append(_Piece(parameter, slice(start, stop)))
            left -= (stop - start) * columns
            start = stop
            if left <= 0:
                yield portion
                portion, left = [], PORTION
    if portion:
        yield portion


def _rounds(parameters: Sequence[nn.Parameter]) -> Iterator[list[_Piece]]:
    """Whole parameters, as many as ranks share them."""
    size = turns(parameters[0])
    for start in range(0, len(parameters), size):
        yield [_Piece(parameter, slice(None)) for parameter in parameters[start : start + size]]
