"""The interface of optimizers, and the lookup of optimizers by recipe.

A new optimizer is a subclass of `RunOptimizer` in a file and an entry with its name. Entries of the
core are in `OPTIMIZERS` (`torchmm.recipe.training_section`), and entries of extensions in the table
"optimizers" (`torchmm.common.extensions`). The name is then a value of `optimizer.name`.

An entry "compact_NAME" is the optimizer NAME for parameters or states that are not stored in
float32 on the device (`optimizer.state_dtype`, `optimizer.offload`, `training.parameter_dtype`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmm.common.layers import ModuleDescription
from torchmm.parallel.torch_compat import local_tensors
from torchmm.recipe.training_section import OptimizerConfig, optimizer_entry


class RunOptimizer(torch.optim.Optimizer):
    """Base class of optimizers.

    `step` updates the parameters that have a gradient. It does not wait for the device. States are
    tensors by name. States with elements are DTensors like their parameters. They include "step", a
    float32 scalar on the device.

    Subclasses are constructed with these arguments:

        groups: Parameter groups with "lr", "weight_decay", and parameters of one device mesh each.
            "rule" is the name of the optimizer for matrices of layers, and "adamw" for others.
        config: Section [optimizer] of the recipe.
        names: Parameter names by id, independent of parallelism and equal for tied replicas.
        dtype: Compute dtype of the modules.
    """

    grad_scale: Tensor | None = None
    """Divisor of the gradients, a float32 device scalar."""
    found_inf: Tensor | None = None
    """Float32 device scalar: 1 if the step must not change parameters and states, else 0."""

    @abstractmethod
    def new_state(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return zero states of a parameter of this group, into which a checkpoint is loaded."""

    @classmethod
    def find_problems(
        cls, config: OptimizerConfig, module: ModuleDescription, tensor: int
    ) -> list[str]:
        """Return why the optimizer cannot update a module. Called before the process group starts.

        Args:
            config: Section [optimizer] of the recipe.
            module: Module to update.
            tensor: Number of tensor-parallel ranks of the module.
        """
        return []


def find_optimizer(config: OptimizerConfig, *, is_narrow: bool) -> type[RunOptimizer]:
    """Return the optimizer of a recipe.

    Args:
        config: Section [optimizer] of the recipe.
        is_narrow: Whether parameters are stored in bfloat16.
    """
    entry = optimizer_entry(config, is_narrow=is_narrow)
    assert entry is not None, "checked with the recipe"
    optimizer: type[RunOptimizer] = entry.load()
    return optimizer


def count_step(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to the step counters, or 0 if `found_inf` is 1."""
    if not steps:
        return
    if found_inf is None:
        torch._foreach_add_(steps, 1.0)
    else:  # without alpha, torch reads the scalar on the host
        torch._foreach_add_(steps, 1.0 - found_inf, alpha=1.0)


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the local gradients of parameters that have one, sharded like the parameters.

    Collective if a gradient is not sharded like its parameter, for example a partial sum.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            placements = parameter.placements  # type: ignore[attr-defined]
            if gradient.placements != placements:
                gradient = parameter.grad = gradient.redistribute(placements=placements)
        assert gradient is not None
        gradients.append(gradient)
    return local_tensors(gradients)
