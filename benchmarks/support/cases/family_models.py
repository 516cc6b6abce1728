"""Small models of families in torchmm, and the differences of their gradients on a device.

With the same weights and samples, gradients of another device differ only by rounding. No constant
bounds this difference: in bfloat16, a router may select another expert. Therefore the measure is
the rounding of the CPU, which is the difference between the same dtype and float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.cases.family_batches import Sample, batches
from support.cases.family_cases import Family
from torchmm.common.batch import Microbatch
from torchmm.common.dtypes import DTYPES
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.fsdp import apply_fsdp
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

CPU = torch.device("cpu")
SEED = 0
LEAST = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative difference of gradients that always counts as rounding."""
TIMES = 3.0
"""Maximum ratio of the difference on a device to the rounding of the CPU."""


def build_family(family: Family) -> MultimodalModel:
    """Return the model with random weights, on the CPU, in float32."""
    if family.composite:
        config = ModelConfig(config=family.config)
    else:
        config = ModelConfig(llm=LlmConfig(config=family.config))
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, SEED)
    return model.train()


class Difference(NamedTuple):
    """Difference between gradients of a device and those of the CPU in float32.

    Attributes:
        share: Norm of the difference of all gradients over the norm of all gradients.
        most: Maximum share that counts as rounding.
        worst: Parameter with the largest difference.
    """

    share: float
    most: float
    worst: str


def device_differences(
    family: Family, samples: list[Sample], device: torch.device
) -> Iterator[tuple[str, Difference]]:
    """Yield the dtype name and the difference for float32 and bfloat16.

    The function needs a process group of this one rank.
    """
    model = build_family(family)
    packed, _ = batches(model, samples)
    expected = _gradients(model, packed, CPU, torch.float32)
    for name, minimum in LEAST.items():
        exact = DTYPES[name] == torch.float32
        rounded = expected if exact else _gradients(model, packed, CPU, DTYPES[name])
        difference = _minus(_gradients(model, packed, device, DTYPES[name]), expected)
        worst = max(difference, key=lambda parameter: difference[parameter].norm().item())
        share, rounding = (
            _norm(d) / _norm(expected) for d in (difference, _minus(rounded, expected))
        )
        yield name, Difference(share, max(minimum, TIMES * rounding), worst)


def _gradients(
    model: MultimodalModel, batch: Microbatch, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return gradients on the CPU by name, of a model with the dtype and sharding of one rank."""
    copy = deepcopy(model).to(device)
    mesh = init_device_mesh(device.type, (1,))
    for module in copy.modality_modules():
        apply_fsdp(module, mesh, dtype)
    batch = batch.to(device)
    (copy(batch) / batch.target_count).backward()
    gradients = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
    return {name: gradient.to_local().cpu() for name, gradient in gradients.items()}


def _minus(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return differences by name; a missing gradient counts as zero."""
    none = torch.zeros(())
    return {n: left.get(n, none) - right.get(n, none) for n in left.keys() | right.keys()}


def _norm(gradients: dict[str, Tensor]) -> float:
    return nn.utils.get_total_norm(gradients.values()).item()
