"""AdamW and Muon in float32 on tensors that are stored in fewer bytes, or in host memory.

On CUDA, AdamW is one compiled function (`fused_update.py`), without float32 copies. Other devices
update the parameters in chunks: the stored tensors (`state_formats.py`) are converted to float32,
updated by the fused AdamW of torch, and stored again. Offloaded states are copied to the device in
chunks (`cpu_offload.py`). Muon always updates complete matrices
(`torchmm.training.optimizers.muon`).

AdamW8bit and similar classes of torchao are not used. Their rounding makes replicas and tied copies
differ. Their blocks and their selection of 8-bit tensors depend on the shards. Their states are
tensor subclasses that a checkpoint cannot split for other parallelism configs.
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

from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import find_missing_compiler
from torchmm.extensions.low_precision import fused_update
from torchmm.extensions.low_precision.cpu_offload import OffloadTransfer
from torchmm.extensions.low_precision.state_formats import (
    BFloat16Format,
    Float32Format,
    RandomBits,
    ShardPositions,
    StorageFormat,
    StoredTensors,
    as_int32,
    as_rows,
    block_problems,
    shard_positions,
    state_format,
)
from torchmm.models.hf.load import local_tensor
from torchmm.parallel.torch_compat import dtensor_like
from torchmm.recipe.training_section import UPDATE_CHUNK, OptimizerConfig
from torchmm.training.optimizers.muon import (
    apply_matrix_update,
    group_by_mesh_size,
    orthogonalize_distributed,
    update_momentum,
    where_not_skipped,
)
from torchmm.training.optimizers.optimizer import RunOptimizer, count_step

CHUNK_ELEMENTS = UPDATE_CHUNK
"""Number of elements that are updated together: 64 MiB of each tensor in float32."""
UpdateRule = Literal["adamw", "muon"]
_MOMENTS: dict[UpdateRule, dict[str, bool]] = {
    "adamw": {"exp_avg": True, "exp_avg_sq": False},
    "muon": {"momentum_buffer": True},
}
"""Names of states, as in torch, and whether they may be negative."""


@dataclass(frozen=True)
class _ParameterSlice:
    """Rows of one parameter."""

    parameter: nn.Parameter
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of the parameter, its gradient or a state."""
        return as_rows(local_tensor(tensor))[self.rows]


class LowPrecisionOptimizer(RunOptimizer):
    """AdamW and Muon on tensors that are stored in fewer bytes or in host memory.

    A step is collective if the rule of a group is "muon". The first step creates the states.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        names: Mapping[int, str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {"rule": "adamw", "weight_decay": 0.0})
        self._config = config
        self._dtype = dtype
        self._keys = {number: crc32(name.encode()) for number, name in names.items()}
        parameters = (local_tensor(p) for group in self.param_groups for p in group["params"])
        device = next((parameter.device for parameter in parameters), None)
        self._transfer = OffloadTransfer(device) if config.offload and device is not None else None
        self._uses_fused_update = device is not None and uses_fused_update(device)
        self._positions: dict[int, ShardPositions] = {}

    @classmethod
    def find_problems(
        cls, config: OptimizerConfig, module: ModuleDescription, tensor: int
    ) -> list[str]:
        return block_problems(module, tensor) if config.state_dtype == "int8" else []

    def new_state(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        local = local_tensor(parameter)
        state = {"step": torch.zeros((), device=local.device)}
        for moment, storage_format in self._moment_formats(parameter, group["rule"]).items():
            full_shapes = storage_format.shapes(parameter.shape)
            for suffix, (shape, dtype) in storage_format.shapes(local.shape).items():
                zeros = self._zeros(shape, dtype, local.device)
                if isinstance(parameter, DTensor):
                    zeros = dtensor_like(zeros, parameter, full_shapes[suffix][0])
                state[moment + suffix] = zeros
        return state

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
                rounds = [
                    [_ParameterSlice(parameter, slice(None)) for parameter in batch]
                    for batch in group_by_mesh_size(parameters)
                ]
                for chunk, states in self._chunks_with_states(rounds, "muon"):
                    self._muon(group, chunk, states)
            elif self._uses_fused_update:
                fused_groups |= dict.fromkeys(parameters, group)
            else:
                for chunk, states in self._chunks_with_states(
                    [*_split_into_chunks(parameters)], "adamw"
                ):
                    self._adamw(group, chunk, states)
        if fused_groups:
            # Fused updates require no float32 copies, so chunks need not limit their size.
            size = sys.maxsize if self._transfer is None else CHUNK_ELEMENTS
            for chunk, states in self._chunks_with_states(
                [*_split_into_chunks([*fused_groups], size)], "adamw"
            ):
                self._adamw_fused(fused_groups, chunk, states)

    def _count_step(self, updated: Sequence[Sequence[nn.Parameter]]) -> None:
        """Create missing states and count the step, unless it is skipped.

        Args:
            updated: Parameters with a gradient, by group.
        """
        for group, parameters in zip(self.param_groups, updated, strict=True):
            for parameter in parameters:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter, group)
        all_parameters = (parameter for parameters in updated for parameter in parameters)
        count_step([self.state[parameter]["step"] for parameter in all_parameters], self.found_inf)

    def _chunks_with_states(
        self, chunks: list[list[_ParameterSlice]], rule: UpdateRule
    ) -> Iterator[tuple[list[_ParameterSlice], list[dict[str, StoredTensors]]]]:
        """Yield chunks with their states on the device, by moment."""
        if self._transfer is None:
            for chunk in chunks:
                yield chunk, [self._stored(rows, rule) for rows in chunk]
            return

        def host_tensors(chunk: list[_ParameterSlice]) -> list[Tensor]:
            stored_states = (self._stored(rows, rule) for rows in chunk)
            return [
                tensor
                for state in stored_states
                for stored in state.values()
                for tensor in stored.values()
            ]

        for chunk, copies in self._transfer.chunks_on_device(chunks, host_tensors):
            remaining = iter(copies)
            yield (
                chunk,
                [
                    {
                        moment: {suffix: next(remaining) for suffix in stored}
                        for moment, stored in self._stored(rows, rule).items()
                    }
                    for rows in chunk
                ],
            )

    def _adamw_fused(
        self,
        groups: Mapping[nn.Parameter, dict[str, Any]],
        chunk: list[_ParameterSlice],
        states: list[dict[str, StoredTensors]],
    ) -> None:
        beta1, beta2 = self._config.betas
        constants = fused_update.AdamWConstants(beta1, beta2, self._config.eps)
        slices = []
        for rows, stored in zip(chunk, states, strict=True):
            parameter = rows.parameter
            assert parameter.grad is not None
            first, second = self._moment_formats(parameter, "adamw").values()
            formats = (self._parameter_format(parameter), first, second)
            slices.append(
                fused_update.UpdateSlice(
                    kind=fused_update.GraphKey(formats, constants.beta1 <= 0.5),
                    target=rows.of(parameter),
                    gradient=rows.of(parameter.grad),
                    moments=(stored["exp_avg"], stored["exp_avg_sq"]),
                    positions=self._positions_of(rows),
                    step=self.state[parameter]["step"],
                    name_key=self._keys[id(parameter)],
                    lr=groups[parameter]["lr"],
                    weight_decay=groups[parameter]["weight_decay"],
                )
            )
        fused_update.update_slices(slices, constants, self.grad_scale, self.found_inf)

    def _adamw(
        self,
        group: dict[str, Any],
        chunk: list[_ParameterSlice],
        states: list[dict[str, StoredTensors]],
    ) -> None:
        values = [self._parameter_format(p.parameter).read({"": p.of(p.parameter)}) for p in chunk]
        formats = [self._moment_formats(rows.parameter, "adamw") for rows in chunk]
        moments = {
            name: [
                format_of[name].read(stored[name])
                for format_of, stored in zip(formats, states, strict=True)
            ]
            for name in _MOMENTS["adamw"]
        }
        beta1, beta2 = self._config.betas
        adamw(
            values,
            [_gradient(rows) for rows in chunk],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            [self.state[rows.parameter]["step"] - 1 for rows in chunk],  # torch adds 1
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._config.eps,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=None if self.found_inf is None else (self.found_inf != 0).float(),
        )
        for index, (rows, stored) in enumerate(zip(chunk, states, strict=True)):
            updated = {name: values_of_moment[index] for name, values_of_moment in moments.items()}
            self._store_results(rows, values[index], updated, stored)

    def _muon(
        self,
        group: dict[str, Any],
        chunk: list[_ParameterSlice],
        states: list[dict[str, StoredTensors]],
    ) -> None:
        moments, updates = [], []
        for rows, stored in zip(chunk, states, strict=True):
            storage_format = self._moment_formats(rows.parameter, "muon")["momentum_buffer"]
            moment = storage_format.read(stored["momentum_buffer"])
            update = update_momentum(
                moment,
                _gradient(rows),
                self._config.momentum,
                self._dtype,
                self.grad_scale,
                self.found_inf,
            )
            moments.append(moment)
            updates.append(update.view(local_tensor(rows.parameter).shape))
        orthogonalized = orthogonalize_distributed(updates, [rows.parameter for rows in chunk])
        for rows, stored, moment, update in zip(
            chunk, states, moments, orthogonalized, strict=True
        ):
            value = self._parameter_format(rows.parameter).read({"": rows.of(rows.parameter)})
            apply_matrix_update(value, update, rows.parameter.shape, group, self.found_inf)
            self._store_results(rows, value, {"momentum_buffer": moment}, stored)

    def _store_results(
        self,
        rows: _ParameterSlice,
        value_RC: Tensor,
        moments: Mapping[str, Tensor],
        stored: Mapping[str, StoredTensors],
    ) -> None:
        """Store float32 results in the storage formats of the parameter and its states."""
        parameter = rows.parameter
        rule: UpdateRule = "adamw" if "exp_avg" in moments else "muon"
        key = self.state[parameter]["step"].int() * fused_update.STEP_KEY
        key += as_int32(self._keys[id(parameter)])
        formats = [
            self._parameter_format(parameter),
            *self._moment_formats(parameter, rule).values(),
        ]
        targets = [{"": rows.of(parameter)}, *(stored[name] for name in moments)]
        values = [value_RC, *moments.values()]
        for number, (storage_format, target, value) in enumerate(
            zip(formats, targets, values, strict=True)
        ):
            bits = RandomBits(
                self._positions_of(rows), key + as_int32(number * fused_update.MOMENT_KEY)
            )
            for suffix, encoded in storage_format.encode(value, bits).items():
                if encoded is not target[suffix]:
                    new = where_not_skipped(self.found_inf, encoded, target[suffix])
                    target[suffix].copy_(new)

    def _positions_of(self, rows: _ParameterSlice) -> ShardPositions:
        number = id(rows.parameter)
        if number not in self._positions:
            self._positions[number] = shard_positions(rows.parameter)
        return self._positions[number].of_rows(rows.rows)

    def _parameter_format(self, parameter: nn.Parameter) -> StorageFormat:
        narrow = parameter.dtype == torch.bfloat16
        return BFloat16Format(self._config.stochastic_rounding) if narrow else Float32Format()

    def _moment_formats(
        self, parameter: nn.Parameter, rule: UpdateRule
    ) -> dict[str, StorageFormat]:
        """Return the storage formats of the moments of a parameter."""
        dtype = self._config.state_dtype
        return {
            moment: state_format(dtype, signed, parameter.ndim > 1, parameter.device)
            for moment, signed in _MOMENTS[rule].items()
        }

    def _stored(self, rows: _ParameterSlice, rule: UpdateRule) -> dict[str, StoredTensors]:
        """Return the stored states of these rows by moment."""
        state = self.state[rows.parameter]
        shape = rows.parameter.shape
        return {
            moment: {
                suffix: rows.of(state[moment + suffix]) for suffix in storage_format.shapes(shape)
            }
            for moment, storage_format in self._moment_formats(rows.parameter, rule).items()
        }

    def _zeros(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._transfer is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def uses_fused_update(device: torch.device) -> bool:
    """Return True if AdamW updates on `device` are compiled (`fused_update.py`)."""
    return device.type == "cuda" and not find_missing_compiler(device.type)


def _gradient(rows: _ParameterSlice) -> Tensor:
    assert rows.parameter.grad is not None
    return rows.of(rows.parameter.grad).float()


def _split_into_chunks(
    parameters: Sequence[nn.Parameter], size: int | None = None
) -> Iterator[list[_ParameterSlice]]:
    """Yield all rows in chunks of about `size` elements, by default `CHUNK_ELEMENTS`."""
    size = size or CHUNK_ELEMENTS
    chunk: list[_ParameterSlice] = []
    remaining = size
    for parameter in parameters:
        rows, columns = as_rows(local_tensor(parameter)).shape
        if not columns:
            continue
        start = 0
        while start < rows:
            stop = min(rows, start + max(1, remaining // columns))
            chunk.append(_ParameterSlice(parameter, slice(start, stop)))
            remaining -= (stop - start) * columns
            start = stop
            if remaining <= 0:
                yield chunk
                chunk, remaining = [], size
    if chunk:
        yield chunk
