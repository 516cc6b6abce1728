"""Small models of families as torchmm builds them, and what a device computes with them.

On another device the same weights and samples give gradients that differ by rounding alone. How
much that is, no constant says: in bfloat16 a router may choose another expert. So the measure is
the CPU's own rounding, that of the same dtype against float32.
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
"""Relative difference of gradients that is rounding in any case."""
TIMES = 3.0
"""How much more than the CPU's own rounding a device's may be."""


def build_family(family: Family) -> MultimodalModel:
    """The model with random weights, on the CPU, in float32."""
    if family.composite:
        config = ModelConfig(config=family.config)
    else:
        config = ModelConfig(llm=LlmConfig(config=family.config))
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, SEED)
    return model.train()


class Difference(NamedTuple):
    """Between a device's gradients and the CPU's in float32.

    Attributes:
        share: norm of the difference of all gradients over the norm of all gradients.
        most: what that may be if it is rounding.
        worst: the parameter with the largest part of it.
    """

    share: float
    most: float
    worst: str


def device_differences(
    family: Family, samples: list[Sample], device: torch.device
) -> Iterator[tuple[str, Difference]]:
    """In float32 and bfloat16, by the dtype's name. Needs a process group of this one rank."""
    model = build_family(family)
    packed, _ = batches(model, samples)
    expected = _gradients(model, packed, CPU, torch.float32)
    for name, least in LEAST.items():
        exact = DTYPES[name] == torch.float32
        own = expected if exact else _gradients(model, packed, CPU, DTYPES[name])
        off = _minus(_gradients(model, packed, device, DTYPES[name]), expected)
        worst = max(off, key=lambda parameter: off[parameter].norm().item())
        share, rounding = (_norm(d) / _norm(expected) for d in (off, _minus(own, expected)))
        yield name, Difference(share, max(least, TIMES * rounding), worst)


def _gradients(
    model: MultimodalModel, batch: Microbatch, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """By name, on the CPU; of a model that is cast and sharded as in a run of one rank."""
    there = deepcopy(model).to(device)
    mesh = init_device_mesh(device.type, (1,))
    for module in there.modality_modules():
        apply_fsdp(module, mesh, dtype)
    batch = batch.to(device)
    (there(batch) / batch.target_count).backward()
    found = {name: p.grad for name, p in there.named_parameters() if p.grad is not None}
    return {name: gradient.to_local().cpu() for name, gradient in found.items()}


def _minus(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of equal names; a gradient that only one side has is a difference as large as itself."""
    none = torch.zeros(())
    return {n: left.get(n, none) - right.get(n, none) for n in left.keys() | right.keys()}


def _norm(gradients: dict[str, Tensor]) -> float:
    return nn.utils.get_total_norm(gradients.values()).item()
