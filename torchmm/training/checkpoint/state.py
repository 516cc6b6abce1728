"""Model and optimizer as one flat dictionary of named tensors, the same in every layout.

"model.FQN" names parameters and persistent buffers, "optimizer.FQN.NAME" optimizer state, "ema.FQN"
the moving average of a parameter. A tied parameter has one entry, under the first of its names; so
has one of which pipeline stages hold copies, which are bit-equal. Values are the live tensors
(DTensors where sharded), so loading writes into the model itself. Plain tensors count as
replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.models.multimodal import MultimodalModel
from torchmm.training.checkpoint.storage import dtype_named
from torchmm.training.optimizers.optimizer import RunOptimizer

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")
OptimizerState = dict[Tensor, dict[str, Tensor]]
MODEL_PREFIX = "model."
"""Of the names of parameters and persistent buffers."""
AVERAGE_PREFIX = "ema."
"""Of the names of moving averages."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """ "model.FQN" -> parameter or persistent buffer; wrappers leave no trace in names.

    A copy has the name of its original.
    """
    copies = model.tied_copies() if isinstance(model, MultimodalModel) else {}
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; only tensors can be saved")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"{MODEL_PREFIX}{_plain_name(copies.get(name, name))}"] = value
    return tensors


def optimizer_tensors(model: nn.Module, state: OptimizerState) -> dict[str, Tensor]:
    """ "optimizer.FQN.NAME" -> state tensor; parameters without state have no entry."""
    names = parameter_names(model)
    return {
        f"optimizer.{names[id(parameter)]}.{key}": value
        for parameter, values in state.items()
        for key, value in values.items()
    }


def average_tensors(model: nn.Module, averages: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    """ "ema.FQN" -> the average of a parameter."""
    names = parameter_names(model)
    return {f"{AVERAGE_PREFIX}{names[id(p)]}": average for p, average in averages.items()}


def trainable_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """FQNs of the optimizer's parameters, sorted."""
    names = parameter_names(model)
    return sorted(names[id(p)] for group in optimizer.param_groups for p in group["params"])


def empty_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: dict[str, Any]
) -> OptimizerState:
    """State tensors to load into, as the optimizer itself would create them, zero-filled.

    What exists is decided by the checkpoint: a parameter that never had a gradient has no state.
    Where what is saved has other names, shapes or dtypes, that is reported (`find_mismatches`).
    """
    entries: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, entry in index.items():
        if name.startswith("optimizer."):
            fqn, key = name.removeprefix("optimizer.").rsplit(".", 1)
            entries[fqn][key] = entry
    names = parameter_names(model)
    state: OptimizerState = {}
    for group in optimizer.param_groups:
        # Fused and capturable kernels read the step count on the device, others on the host.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if isinstance(optimizer, RunOptimizer):
                if entries[names[id(parameter)]]:
                    state[parameter] = optimizer.new_state(parameter, group)
                continue
            values = {
                key: _empty_like(parameter, key, entry, on_device)
                for key, entry in entries[names[id(parameter)]].items()
            }
            if values:
                state[parameter] = values
    return state


def find_mismatches(index: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Why `tensors` cannot be filled from a checkpoint with this index: one line per tensor."""
    problems = []
    for name, tensor in tensors.items():
        entry = index.get(name)
        if entry is None:
            problems.append(f"missing from the checkpoint: {name}")
        elif list(tensor.shape) != entry["shape"]:
            problems.append(f"{name}: shape {entry['shape']} saved, {list(tensor.shape)} wanted")
        elif tensor.dtype != (saved := dtype_named(entry["dtype"])):
            problems.append(f"{name}: {saved} saved, {tensor.dtype} wanted")
    return problems


@dataclass(frozen=True)
class Wish:
    """What one rank wants to load."""

    mismatches: list[str]
    """From `find_mismatches`."""
    names: list[str]
    """Names of the tensors; together the ranks must want all there are."""
    trainable: list[str] | None
    """From `trainable_names`; None if only the model is loaded."""
    averages: bool = False
    """Whether averages are loaded; the same on all ranks."""


def find_misfits(
    index: dict[str, Any], saved_trainable: list[str], wishes: list[Wish]
) -> list[str]:
    """Why a checkpoint does not fit what all ranks together want, one line per name, sorted."""
    problems = {problem for wish in wishes for problem in wish.mismatches}
    wanted = {name for wish in wishes for name in wish.names}
    kinds: tuple[str, ...] = (MODEL_PREFIX,)
    if wishes[0].trainable is not None:
        kinds = (MODEL_PREFIX, "optimizer.")
        now = {name for wish in wishes for name in wish.trainable or ()}
        before = set(saved_trainable)
        problems |= {f"trained when saved, frozen now: {name}" for name in before - now}
        problems |= {f"frozen when saved, trained now: {name}" for name in now - before}
    if wishes[0].averages:
        kinds = (*kinds, AVERAGE_PREFIX)
    extra = {name for name in index if name.startswith(kinds)} - wanted
    problems |= {f"not in the model: {name}" for name in extra}
    return sorted(problems)


def _empty_like(
    parameter: nn.Parameter, key: str, entry: dict[str, Any], on_device: bool
) -> Tensor:
    dtype = dtype_named(entry["dtype"])
    if key == "step":
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    return torch.zeros_like(parameter, dtype=dtype)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Name by id, the same in every layout; a copy has that of its original."""
    return {id(t): name.removeprefix(MODEL_PREFIX) for name, t in model_tensors(model).items()}


def _plain_name(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name
