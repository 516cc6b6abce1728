"""AdamW and Muon in float32 on tensors that rest in fewer bytes, or in the host's memory.

On CUDA, AdamW is one compiled function (`fused.py`), without float32 copies. Other devices update
portions of the parameters: the stored tensors (`forms.py`) are converted to float32, updated by the
fused AdamW of torch, and stored again. Offloaded states visit the device in portions (`host.py`).
Muon always updates complete matrices (`muon.py`).

Rejected: torchao's AdamW8bit and relatives. Their rounding makes replicas and tied copies differ,
their blocks and their choice of what has 8 bits follow the shards, and their states are
tensor subclasses that a checkpoint cannot take apart for other layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchmm.common.processes import missing_compiler
from torchmm.extensions.low_precision import fused
from torchmm.extensions.low_precision.forms import (
    BFloat16,
    Float32,
    Form,
    Places,
    RandomBits,
    StateDtype,
    Stored,
    as_int32,
    as_rows,
    places_of,
    state_form,
)
from torchmm.extensions.low_precision.host import HostVisits
from torchmm.models.hf.load import local_tensor
from torchmm.parallel.torch_private import placed_like
from torchmm.recipe.training_section import UPDATE_PORTION
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
    """AdamW and Muon; a step updates every parameter that has a gradient.

    A step is collective if the rule of a group is Muon. The first step creates the states. States
    with elements are DTensors like their parameters, on the host if states are offloaded.
    Set `grad_scale` and `found_inf`, float32 scalars on the device, before a step: gradients are
    divided by `grad_scale`, and a step with a `found_inf` of 1 changes neither parameters nor
    states.

    Args:
        groups: with `lr`, `weight_decay`, `rule`, and parameters of one mesh each.
        names: by parameter's id; the same in all layouts, and for copies of one parameter.
    """

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
        self._fuses = device is not None and fuses_updates(device)
        self._places: dict[int, Places] = {}
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

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
        """Update all parameters that have a gradient."""
        assert closure is None
        fused_groups: dict[nn.Parameter, dict[str, Any]] = {}
        updated = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        self._count_step(updated)
        for group, parameters in zip(self.param_groups, updated, strict=True):
            if not parameters:
                continue
            if group["rule"] == "muon":
                for portion, states in self._at_hand([*_rounds(parameters)], "muon"):
                    self._muon(group, portion, states)
            elif self._fuses:
                fused_groups |= dict.fromkeys(parameters, group)
            else:
                for portion, states in self._at_hand([*_portions(parameters)], "adamw"):
                    self._adamw(group, portion, states)
        if fused_groups:
            # Fused updates have no float32 copies, whose size portions limit.
            size = sys.maxsize if self._visits is None else PORTION
            for portion, states in self._at_hand([*_portions([*fused_groups], size)], "adamw"):
                self._adamw_fused(fused_groups, portion, states)

    def _count_step(self, updated: Sequence[Sequence[nn.Parameter]]) -> None:
        """Create missing states and count the step, unless it is skipped.

        Args:
            updated: parameters with a gradient, by group.
        """
        for group, parameters in zip(self.param_groups, updated, strict=True):
            for parameter in parameters:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter, group["rule"])
        every = (parameter for parameters in updated for parameter in parameters)
        count_step([self.state[parameter]["step"] for parameter in every], self.found_inf)

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

    def _adamw_fused(
        self,
        groups: Mapping[nn.Parameter, dict[str, Any]],
        portion: list[_Piece],
        states: list[dict[str, Stored]],
    ) -> None:
        constants = fused.Constants(*self._settings.betas, self._settings.eps)
        pieces = []
        for piece, stored in zip(portion, states, strict=True):
            parameter = piece.parameter
            assert parameter.grad is not None
            first, second = self._forms(parameter, "adamw").values()
            forms = (self._parameter_form(parameter), first, second)
            pieces.append(
                fused.Piece(
                    kind=fused.Kind(forms, constants.beta1 <= 0.5),
                    target=piece.of(parameter),
                    gradient=piece.of(parameter.grad),
                    moments=(stored["exp_avg"], stored["exp_avg_sq"]),
                    places=self._places_of(piece),
                    step=self.state[parameter]["step"],
                    name_key=self._keys[id(parameter)],
                    lr=groups[parameter]["lr"],
                    weight_decay=groups[parameter]["weight_decay"],
                )
            )
        fused.update_pieces(pieces, constants, self.grad_scale, self.found_inf)

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
            [_gradient(piece) for piece in portion],
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
            grad_scale=self.grad_scale,
            found_inf=None if self.found_inf is None else (self.found_inf != 0).float(),
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
            gradient = _gradient(piece)
            if self.grad_scale is not None:
                gradient = gradient / self.grad_scale
            gradient = self._unless_skipped(gradient, torch.zeros_like(gradient))
            moment.lerp_(gradient, self._unless_skipped(1 - momentum, 0.0))
            update = gradient.lerp(moment, momentum).to(self._settings.muon_dtype)
            moments.append(moment)
            updates.append(update.view(local_tensor(piece.parameter).shape))
        made = orthogonal_shared(updates, [piece.parameter for piece in portion])
        for piece, stored, moment, update in zip(portion, states, moments, made, strict=True):
            value = self._parameter_form(piece.parameter).read({"": piece.of(piece.parameter)})
            value.mul_(self._unless_skipped(1 - group["lr"] * group["weight_decay"], 1.0))
            scale = update_scale(piece.parameter.shape)
            change = self._unless_skipped(update, torch.zeros_like(update))
            value.add_(change.reshape(value.shape), alpha=-group["lr"] * scale)
            self._put_to_rest(piece, value, {"momentum_buffer": moment}, stored)

    def _unless_skipped(self, value: Any, otherwise: Any) -> Any:
        """Return `value`, or `otherwise` if the gradients are not finite; both may be numbers."""
        if self.found_inf is None:
            return value
        return torch.where(self.found_inf == 0, value, otherwise)

    def _put_to_rest(
        self,
        piece: _Piece,
        value_RC: Tensor,
        moments: Mapping[str, Tensor],
        stored: Mapping[str, Stored],
    ) -> None:
        """Store float32 results in the storage forms of the parameter and its states."""
        parameter = piece.parameter
        rule: Rule = "adamw" if "exp_avg" in moments else "muon"
        key = self.state[parameter]["step"].int() * fused.STEP_KEY
        key += as_int32(self._keys[id(parameter)])
        forms = [self._parameter_form(parameter), *self._forms(parameter, rule).values()]
        targets = [{"": piece.of(parameter)}, *(stored[name] for name in moments)]
        values = [value_RC, *moments.values()]
        for number, (form, target, value) in enumerate(zip(forms, targets, values, strict=True)):
            bits = RandomBits(self._places_of(piece), key + as_int32(number * fused.MOMENT_KEY))
            for suffix, encoded in form.encode(value, bits).items():
                if encoded is not target[suffix]:
                    target[suffix].copy_(self._unless_skipped(encoded, target[suffix]))

    def _places_of(self, piece: _Piece) -> Places:
        number = id(piece.parameter)
        if number not in self._places:
            self._places[number] = places_of(piece.parameter)
        return self._places[number].of_rows(piece.rows)

    def _parameter_form(self, parameter: nn.Parameter) -> Form:
        narrow = parameter.dtype == torch.bfloat16
        return BFloat16(self._settings.at_random) if narrow else Float32()

    def _forms(self, parameter: nn.Parameter, rule: Rule) -> dict[str, Form]:
        """Of a parameter's moments."""
        dtype = self._settings.state_dtype
        return {
            moment: state_form(dtype, signed, parameter.ndim > 1, parameter.device)
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

    def _zeros(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._visits is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def fuses_updates(device: torch.device) -> bool:
    """Return True if AdamW updates of compact tensors on `device` are compiled (`fused.py`)."""
    return device.type == "cuda" and not missing_compiler(device.type)


def _gradient(piece: _Piece) -> Tensor:
    assert piece.parameter.grad is not None
    return piece.of(piece.parameter.grad).float()


def count_step(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to the step counters, or 0 if `found_inf` is 1."""
    if not steps:
        return
    if found_inf is None:
        torch._foreach_add_(steps, 1.0)
    else:  # without alpha, torch reads the scalar on the host
        torch._foreach_add_(steps, 1.0 - found_inf, alpha=1.0)


def _portions(
    parameters: Sequence[nn.Parameter], size: int | None = None
) -> Iterator[list[_Piece]]:
    """Yield all rows, in portions of about `size` elements; `PORTION` if it is None."""
    size = size or PORTION
    portion: list[_Piece] = []
    left = size
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
                portion, left = [], size
    if portion:
        yield portion


def _rounds(parameters: Sequence[nn.Parameter]) -> Iterator[list[_Piece]]:
    """Whole parameters, as many as ranks share them."""
    size = turns(parameters[0])
    for start in range(0, len(parameters), size):
        yield [_Piece(parameter, slice(None)) for parameter in parameters[start : start + size]]
