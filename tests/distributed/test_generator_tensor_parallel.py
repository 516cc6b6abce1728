"""A generator split over ranks: loss and gradients of the whole, what its ranks keep, and controls.

Images differ in numbers of patches that the ranks do not divide, and one has fewer than ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from generator_cases import generator_config, generator_inputs
from launch import run_distributed
from meshes import mesh_for
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.common.generated import GeneratedMeta, GeneratorInputs
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution
from torchmm.costs.sizes import generator_sizes
from torchmm.extensions.generation.generator import DitModule
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.fsdp import apply_fsdp
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel, tensor_problems
from torchmm.parallel.tensor.sequence import LocalNorm, SequenceSlices
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig

pytest.importorskip("diffusers")

IMAGES = {
    "different": ([(1, 3, 3), (2, 2, 4), (1, 1, 1)], [5, 3, 4]),
    "alike": ([(1, 3, 3), (1, 3, 3)], [4, 4]),
    "one patch": ([(1, 1, 1)], [1]),
}
"""Grids and contexts."""


@dataclass(frozen=True)
class Case:
    sequence_parallel: bool
    activation: str = "gelu-approximate"
    recompute: str = "none"
    freeze: tuple[str, ...] = ()
    sharded: bool = False


CASES = [
    *(Case(sliced, a) for sliced in (False, True) for a in ("gelu-approximate", "geglu", "swiglu")),
    *(Case(sliced, recompute=m) for sliced in (False, True) for m in ("full", "selective")),
    *(Case(sliced, freeze=("generator",)) for sliced in (False, True)),
    Case(True, freeze=("generator", "generator.connector")),
]
DEFECTS: dict[str, Callable[[], AbstractContextManager]] = {
    "gradients of times are not summed": lambda: patch.object(
        SequenceSlices, "read", lambda self, values: values
    ),
    "nor those of a layer's table": lambda: patch.object(
        LocalNorm, "_apply", lambda self, module, mesh: module
    ),
}


@pytest.mark.slow
def test_a_split_generator_equals_the_whole():
    for outcomes in zip(*run_distributed(compare_all, 2, CASES), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


@pytest.mark.slow
def test_on_four_ranks_of_which_two_share_parameters():
    cases = [Case(True, sharded=True), Case(False, "geglu", sharded=True)]
    for outcomes in zip(*run_distributed(compare_all, 4, cases), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_not_summed_is_found(defect):
    for ((_, errors),) in run_distributed(compare_all, 2, [Case(True)], defect):
        assert errors and all("different" not in name for name in errors), errors


@pytest.mark.slow
def test_ranks_keep_what_costs_say():
    for found in run_distributed(kept_by_layers, 2):
        for sliced, (kept, predicted, whole) in found.items():
            assert kept == pytest.approx(predicted, rel=0.03), sliced
            assert kept < (0.6 if sliced else 0.8) * whole


def test_heads_have_to_divide():
    generator = a_generator("gelu-approximate")
    assert tensor_problems(generator, 2) == tensor_problems(generator, 4) == []
    (problem,) = tensor_problems(generator, 3)
    assert "heads of 'generator'" in problem


def a_model(activation: str, freeze: tuple[str, ...] = ()) -> MultimodalModel:
    config = generator_config(encoder=None, activation_fn=activation)
    return build_model(config, FreezeConfig(modules=list(freeze)))


def a_generator(activation: str) -> DitModule:
    generator = a_model(activation).generator
    assert generator is not None
    return generator


def compare_all(cases: list[Case], defect: str = "") -> list[tuple[Case, dict[str, float]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    with DEFECTS[defect]() if defect else nullcontext():
        return [(case, compare(case)) for case in cases]


def compare(case: Case) -> dict[str, float]:
    """What differs by more than 1e-5, relative: losses, gradients of contexts and parameters."""
    shard = torch.distributed.get_world_size() // 2
    mesh = mesh_for(ParallelConfig(shard=shard, tensor=2))
    whole, split = (a_model(case.activation, case.freeze) for _ in range(2))
    assert split.generator is not None
    apply_tensor_parallel(split.generator, mesh.own.tensor, case.sequence_parallel)
    apply_activation_checkpoint(split.generator, case.recompute)
    if case.sharded:
        apply_fsdp(split.generator, mesh.own.fsdp, torch.float32)
    found: list[dict[str, Tensor]] = []
    for model in (whole, split):
        fill(model)
        generator = model.generator
        assert generator is not None
        ranks = shard if case.sharded and model is whole else 1
        result = {}
        for name, (grids, contexts) in IMAGES.items():
            for _ in range(ranks):  # FSDP adds up what its ranks find: here the same
                inputs = generator_inputs(grids, contexts)
                context_KD = a_context(generator, sum(contexts))
                loss = generator(inputs, context_KD)
                loss.backward()
            result[f"loss of {name}"] = loss.detach()
            assert context_KD.grad is not None
            result[f"context of {name}"] = context_KD.grad
        for name, parameter in generator.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                assert grad is not None, name
                result[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found.append(result)
    expected, own = found
    assert expected.keys() == own.keys()
    gradients = [g.norm() for n, g in expected.items() if " of " not in n]
    scale = torch.stack(gradients).norm().item() if gradients else 1.0
    return {
        name: e
        for name, wanted in expected.items()
        if (e := error(own[name], wanted, scale)) > 1e-5
    }


def error(found: Tensor, wanted: Tensor, scale: float) -> float:
    """Of a gradient that is zero but for rounding (of a key's bias): against all of them."""
    size = wanted.norm().item()
    return (found - wanted).norm().item() / (size if size > 1e-6 * scale else scale)


def a_context(generator: DitModule, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(tokens, generator.spec.llm_hidden_size, generator=draw).requires_grad_()


@torch.no_grad()
def fill(model: MultimodalModel) -> None:
    """The same values in every layout, nowhere zero: an untrained generator has no gradients behind
    its output."""
    materialize(model, "cpu")
    init_weights(model, seed=1)
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        copy_slice(parameter, values + 0.05 * torch.randn(parameter.shape, generator=draw))


def kept_by_layers() -> dict[bool, tuple[float, float, float]]:
    """By whether the sequence is divided: bytes that a forward leaves for its backward, what costs
    say of that, and the same of a generator in one piece."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    grids, contexts = [(1, 24, 24), (1, 24, 24)], [16, 16]
    inputs = generator_inputs(grids, contexts)
    found = {}
    for sliced in (False, True):
        mesh = mesh_for(ParallelConfig(shard=1, tensor=2))
        model = a_model("gelu-approximate")
        generator = model.generator
        assert generator is not None
        described = generator.describe()
        apply_tensor_parallel(generator, mesh.own.tensor, sliced)
        fill(model)
        kept = left_for_backward(generator, inputs)
        predicted = [
            predicted_bytes(described, Execution(tensor=n, sequence_parallel=sliced and n > 1))
            for n in (2, 1)
        ]
        found[sliced] = kept, *predicted
    return found


def left_for_backward(generator: DitModule, inputs: GeneratorInputs) -> float:
    """Bytes of all that autograd saves, beside parameters."""
    weights = (p.to_local() if isinstance(p, DTensor) else p for p in generator.parameters())
    known = {p.untyped_storage().data_ptr() for p in weights}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        saved[own.untyped_storage().data_ptr()] = own
        return tensor

    context_KD = a_context(generator, sum(inputs.contexts))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        generator(inputs, context_KD)
    return sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in known)


def predicted_bytes(described: ModuleDescription, execution: Execution) -> float:
    model = CostModel(load_profile("cpu"), "float32", {described.name: execution})
    drawn = [GeneratedMeta((1, 24, 24), 16)] * 2
    sizes = generator_sizes([drawn], padding=True)
    costs = model.stage_costs(described, 0, len(described.layers), sizes, True)
    return float(costs.kept_bytes[0])
