"""Model and optimizer as one flat dictionary of named tensors, independent of parallelism.

"model.FQN" names parameters and persistent buffers, "optimizer.FQN.NAME" optimizer states, and
"ema.FQN" the moving average of a parameter. A tied parameter has one entry, under the first of its
names. A parameter that several pipeline stages replicate also has one entry. Values are the live
tensors (DTensors if sharded), so loading writes into the model itself. Regular tensors are treated
as replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.health.peers import SideGroup
from torchmm.training.checkpoint.storage import dtype_from_name
from torchmm.training.optimizers.optimizer import RunOptimizer

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")
OptimizerState = dict[Tensor, dict[str, Tensor]]
MODEL_PREFIX = "model."
"""Prefix of parameters and persistent buffers."""
AVERAGE_PREFIX = "ema."
"""Prefix of moving averages."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by "model.FQN", without the names of wrappers.

    A tied replica has the name of its original.
    """
    copies = model.tied_replicas() if isinstance(model, MultimodalModel) else {}
    tensors: dict[str, Tensor] = {}
    visited: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; only tensors can be saved")
        if id(value) not in visited:
            visited.add(id(value))
            original_name = copies.get(name, name)
            for wrapper in _WRAPPER_PREFIXES:
                original_name = original_name.replace(wrapper, "")
            tensors[f"{MODEL_PREFIX}{original_name}"] = value
    return tensors


def optimizer_tensors(model: nn.Module, state: OptimizerState) -> dict[str, Tensor]:
    """Return state tensors by "optimizer.FQN.NAME". Parameters without state have no entry."""
    names = parameter_names(model)
    return {
        f"optimizer.{names[id(parameter)]}.{key}": value
        for parameter, values in state.items()
        for key, value in values.items()
    }


def average_tensors(model: nn.Module, averages: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the averages of parameters by "ema.FQN"."""
    names = parameter_names(model)
    return {f"{AVERAGE_PREFIX}{names[id(p)]}": average for p, average in averages.items()}


def trainable_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the sorted FQNs of the parameters of the optimizer."""
    names = parameter_names(model)
    return sorted(names[id(p)] for group in optimizer.param_groups for p in group["params"])


def empty_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: dict[str, Any]
) -> OptimizerState:
    """Return zero-filled state tensors to load into, as the optimizer would create them.

    The checkpoint determines the existing tensors: a parameter that never had a gradient has no
    state. `find_mismatches` reports different names, shapes and dtypes.
    """
    entries: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, entry in index.items():
        if name.startswith("optimizer."):
            fqn, key = name.removeprefix("optimizer.").rsplit(".", 1)
            entries[fqn][key] = entry
    names = parameter_names(model)
    state: OptimizerState = {}
    for group in optimizer.param_groups:
        # Fused and capturable kernels read the step count on the device, other kernels on the host.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            saved = entries[names[id(parameter)]]
            if saved and isinstance(optimizer, RunOptimizer):
                state[parameter] = optimizer.new_state(parameter, group)
            elif saved:
                values: dict[str, Tensor] = {}
                for key, entry in saved.items():
                    dtype = dtype_from_name(entry["dtype"])
                    if key == "step":
                        device = parameter.device if on_device else "cpu"
                        values[key] = torch.zeros((), dtype=dtype, device=device)
                    else:
                        values[key] = torch.zeros_like(parameter, dtype=dtype)
                state[parameter] = values
    return state


def find_mismatches(
    index: dict[str, Any],
    saved_trainable: list[str],
    tensors: Mapping[str, Tensor],
    trainable: list[str] | None,
    averages: bool,
    group: SideGroup,
) -> list[str]:
    """Return the differences between a checkpoint and the tensors of all ranks, sorted. Collective.

    Args:
        index: Index of the checkpoint.
        saved_trainable: Names of the parameters that were trained when it was saved.
        tensors: Tensors of this rank. Together the ranks must have all tensors of the checkpoint.
        trainable: Trained parameters of this rank. None if only the model is loaded.
        averages: Whether averages are loaded, identical on all ranks.
        group: All ranks.
    """
    local: set[str] = set()
    for name, tensor in tensors.items():
        entry = index.get(name)
        if entry is None:
            local.add(f"missing from the checkpoint: {name}")
        elif list(tensor.shape) != entry["shape"]:
            local.add(
                f"{name}: shape {entry['shape']} in the checkpoint, {list(tensor.shape)} in the "
                "model"
            )
        elif tensor.dtype != (saved := dtype_from_name(entry["dtype"])):
            local.add(f"{name}: {saved} in the checkpoint, {tensor.dtype} in the model")
    of_ranks = group.gather((local, set(tensors), set(trainable or ())))
    problems = {problem for rank_problems, _, _ in of_ranks for problem in rank_problems}
    required = {name for _, names, _ in of_ranks for name in names}
    kinds = [MODEL_PREFIX]
    if trainable is not None:
        kinds.append("optimizer.")
        now = {name for _, _, names in of_ranks for name in names}
        before = set(saved_trainable)
        problems |= {
            f"trainable in the checkpoint, but frozen in the recipe: {name}"
            for name in before - now
        }
        problems |= {
            f"frozen in the checkpoint, but trainable in the recipe: {name}"
            for name in now - before
        }
    if averages:
        kinds.append(AVERAGE_PREFIX)
    extra = {name for name in index if name.startswith(tuple(kinds))} - required
    problems |= {f"not in the model: {name}" for name in extra}
    return sorted(problems)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return parameter names by id. A tied replica has the name of its original."""
    return {id(t): name.removeprefix(MODEL_PREFIX) for name, t in model_tensors(model).items()}
