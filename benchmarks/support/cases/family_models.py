"""Small models of families as torchmm builds them, and what a device computes with them.

On another device the same weights and samples give a loss and gradients that differ by rounding
alone. How much that is, no constant says: in bfloat16 a router may choose another expert. So the
measure is the CPU's own rounding, that of the same dtype against float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from support.cases.family_batches import Sample, batches
from support.cases.family_cases import Family
from torchmm.common.batch import Microbatch
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.fsdp import apply_fsdp
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

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


@dataclass(frozen=True)
class Difference:
    """Between a device and the CPU in float32.

    Attributes:
        loss: of the losses, relative.
        gradient: norm of the difference of all gradients over the norm of all gradients.
        worst: the parameter with the largest part of it.
        rounding: the CPU's own `gradient` in this dtype; 0 in float32.
    """

    loss: float
    gradient: float
    worst: str
    rounding: float

    @property
    def most(self) -> float:
        """What `gradient` may be if it is rounding."""
        return max(LEAST["bfloat16" if self.rounding else "float32"], TIMES * self.rounding)


def device_differences(
    family: Family, samples: list[Sample], device: torch.device
) -> Iterator[tuple[str, Difference]]:
    """In float32 and bfloat16, by the dtype's name. Needs a process group of this one rank."""
    model = build_family(family)
    packed, _ = batches(model, samples)
    cpu = torch.device("cpu")
    loss, gradients = _gradients(model, packed, cpu, torch.float32)
    norm = _norm(gradients)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        rounding = 0.0
        if dtype != torch.float32:
            _, rounded = _gradients(model, packed, cpu, dtype)
            rounding = _norm(_minus(rounded, gradients)) / norm
        other_loss, found = _gradients(model, packed, device, dtype)
        off = _minus(found, gradients)
        worst = max(off, key=lambda parameter: off[parameter].norm().item())
        yield name, Difference(abs(other_loss / loss - 1), _norm(off) / norm, worst, rounding)


def _gradients(
    model: MultimodalModel, batch: Microbatch, device: torch.device, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and gradients by name, on the CPU; cast and sharded as in a run of one rank."""
    there = deepcopy(model).to(device)
    mesh = init_device_mesh(device.type, (1,))
    for module in there.modality_modules():
        apply_fsdp(module, mesh, dtype)
    batch = batch.to(device)
    loss = there(batch) / batch.target_count
    loss.backward()
    return loss.item(), {
        name: p.grad.to_local().cpu() for name, p in there.named_parameters() if p.grad is not None
    }


def _minus(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of equal names; a gradient that only one side has is a difference as large as itself."""
    none = torch.zeros(())
    return {n: left.get(n, none) - right.get(n, none) for n in left.keys() | right.keys()}


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
