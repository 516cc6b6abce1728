"""A tensor-parallel generator: loss, gradients and saved activations, with negative controls.

Patch counts are not multiples of the number of ranks, and one image has fewer patches than ranks.
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
    "uniform": ([(1, 3, 3), (1, 3, 3)], [4, 4]),
    "one patch": ([(1, 1, 1)], [1]),
}
"""Grids and context lengths."""


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
    "timestep gradients are not summed": lambda: patch.object(
        SequenceSlices, "use_replicated", lambda self, values: values
    ),
    "gradients of the scale-shift table are not summed": lambda: patch.object(
        LocalNorm, "_apply", lambda self, module, mesh: module
    ),
}


@pytest.mark.slow
def test_split_generator_equals_unsharded():
    for outcomes in zip(*run_distributed(compare_all, 2, CASES), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


@pytest.mark.slow
def test_split_generator_with_fsdp_equals_unsharded():
    cases = [Case(True, sharded=True), Case(False, "geglu", sharded=True)]
    for outcomes in zip(*run_distributed(compare_all, 4, cases), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_missing_gradient_sum_is_detected(defect):
    for ((_, errors),) in run_distributed(compare_all, 2, [Case(True)], defect):
        assert errors and all("different" not in name for name in errors), errors


@pytest.mark.slow
def test_saved_activations_match_cost_model():
    for results in run_distributed(saved_activation_bytes, 2):
        for sliced, (saved, predicted, unsharded) in results.items():
            assert saved == pytest.approx(predicted, rel=0.03), sliced
            assert saved < (0.6 if sliced else 0.8) * unsharded


def test_indivisible_heads_are_rejected():
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
    """Return relative errors above 1e-5 of losses and of context and parameter gradients."""
    shard = torch.distributed.get_world_size() // 2
    mesh = mesh_for(ParallelConfig(shard=shard, tensor=2))
    full, split = (a_model(case.activation, case.freeze) for _ in range(2))
    assert split.generator is not None
    apply_tensor_parallel(split.generator, mesh.module_mesh.tensor, case.sequence_parallel)
    apply_activation_checkpoint(split.generator, case.recompute)
    if case.sharded:
        apply_fsdp(split.generator, mesh.module_mesh.fsdp, torch.float32)
    results: list[dict[str, Tensor]] = []
    for model in (full, split):
        fill(model)
        generator = model.generator
        assert generator is not None
        ranks = shard if case.sharded and model is full else 1
        result = {}
        for name, (grids, contexts) in IMAGES.items():
            for _ in range(ranks):  # FSDP sums the gradients of ranks with equal inputs
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
        results.append(result)
    expected, actual = results
    assert expected.keys() == actual.keys()
    gradients = [g.norm() for n, g in expected.items() if " of " not in n]
    scale = torch.stack(gradients).norm().item() if gradients else 1.0
    return {
        name: e
        for name, value in expected.items()
        if (e := error(actual[name], value, scale)) > 1e-5
    }


def error(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Return the relative error.

    Gradients of key biases are zero except for rounding. Their errors are relative to `scale`.
    """
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size if size > 1e-6 * scale else scale)


def a_context(generator: DitModule, tokens: int) -> Tensor:
    seeded = torch.Generator().manual_seed(7)
    return torch.randn(tokens, generator.spec.llm_hidden_size, generator=seeded).requires_grad_()


@torch.no_grad()
def fill(model: MultimodalModel) -> None:
    """Fill all parameters with equal nonzero values in every layout.

    An untrained generator has no gradients before its output layer.
    """
    materialize(model, "cpu")
    init_weights(model, seed=1)
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        copy_slice(parameter, values + 0.05 * torch.randn(parameter.shape, generator=draw))


def saved_activation_bytes() -> dict[bool, tuple[float, float, float]]:
    """Return saved activation bytes, with and without sequence parallelism.

    Returns:
        Measured bytes, predicted bytes, and predicted bytes of an unsharded generator.
    """
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    grids, contexts = [(1, 24, 24), (1, 24, 24)], [16, 16]
    inputs = generator_inputs(grids, contexts)
    results = {}
    for sliced in (False, True):
        mesh = mesh_for(ParallelConfig(shard=1, tensor=2))
        model = a_model("gelu-approximate")
        generator = model.generator
        assert generator is not None
        description = generator.describe()
        apply_tensor_parallel(generator, mesh.module_mesh.tensor, sliced)
        fill(model)
        saved_bytes = measured_bytes(generator, inputs)
        predicted = [
            predicted_bytes(description, Execution(tensor=n, sequence_parallel=sliced and n > 1))
            for n in (2, 1)
        ]
        results[sliced] = saved_bytes, *predicted
    return results


def measured_bytes(generator: DitModule, inputs: GeneratorInputs) -> float:
    """Return the bytes that autograd saves, without parameters."""
    weights = (p.to_local() if isinstance(p, DTensor) else p for p in generator.parameters())
    parameter_pointers = {p.untyped_storage().data_ptr() for p in weights}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        saved[local.untyped_storage().data_ptr()] = local
        return tensor

    context_KD = a_context(generator, sum(inputs.contexts))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        generator(inputs, context_KD)
    return sum(
        t.untyped_storage().nbytes() for p, t in saved.items() if p not in parameter_pointers
    )


def predicted_bytes(description: ModuleDescription, execution: Execution) -> float:
    model = CostModel(load_profile("cpu"), "float32", {description.name: execution})
    images = [GeneratedMeta((1, 24, 24), 16)] * 2
    sizes = generator_sizes([images], padding=True)
    costs = model.stage_costs(description, 0, len(description.layers), sizes, True)
    return float(costs.saved_bytes[0])
