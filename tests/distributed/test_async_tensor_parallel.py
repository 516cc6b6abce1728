"""Overlapped linear layers equal unsharded layers, with every backend and when compiled.

test_layouts.py and test_encoder_tensor_parallel.py compare complete models, and test_train.py
compares complete runs.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from launch import run_distributed
from microbatches import MODEL, random_microbatch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchmm.common.errors import ConfigError
from torchmm.extensions.async_tp.linear import Overlap, gather_linear, linear_scatter
from torchmm.extensions.async_tp.selection import choose_backend, time_chunks, try_symmetric_memory
from torchmm.extensions.async_tp.styles import AsyncStyles, PrecomputedColumn
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig

FEATURES = 12
BFLOAT16_ERROR = 1e-2
"""Relative error. Rounding to bfloat16 is 2**-9 = 2e-3, and three matmuls are chained."""


@dataclass(frozen=True)
class Case:
    """A gated MLP that is split over all ranks."""

    backend: str
    rows: int
    chunks: int = 1
    dtype: torch.dtype = torch.float32
    trained: tuple[str, ...] = ("x", "gate", "up", "down", "gate_bias", "down_bias")


CASES = [Case(b, rows) for b, rows in product(("ring", "collective"), (1, 3, 8, 13))]
CASES += [Case("ring", rows, chunks=3) for rows in (2, 8, 13)]
CASES += [Case(b, 13, dtype=torch.bfloat16) for b in ("ring", "collective", "symmetric_memory")]
CASES += [Case("symmetric_memory", rows) for rows in (1, 8, 13)]
CASES += [
    Case(backend, 13, chunks=2, trained=trained)
    for backend in ("ring", "collective", "symmetric_memory")
    for trained in (("x",), ("gate", "down"), ("x", "up"), ("x", "gate_bias", "down_bias"))
]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """Return the results of two ranks. All tests with two ranks share one launch."""
    return run_distributed(_run_on_two_ranks, 2)


def _run_on_two_ranks() -> dict[str, object]:
    _start()
    return {"choice": _choose(), "linears": _compare_linears(CASES)}


@pytest.mark.slow
def test_overlapped_linears_equal_unsharded_on_two_ranks(two_ranks):
    for results in two_ranks:
        _check_linears(results["linears"])


@pytest.mark.slow
def test_overlapped_linears_equal_unsharded_on_four_ranks():
    for results in run_distributed(_compare_on_four_ranks, 4):
        _check_linears(results)


def _compare_on_four_ranks() -> list[tuple[Case, dict[str, float]]]:
    _start()
    return _compare_linears(CASES)


def _check_linears(outcomes: list[tuple[Case, dict[str, float]]]) -> None:
    assert len(outcomes) == len(CASES)
    for case, errors in outcomes:
        limit = BFLOAT16_ERROR if case.dtype == torch.bfloat16 else 1e-5
        assert errors.keys() == {"output", *case.trained}
        assert max(errors.values()) <= limit, (case, errors)


@pytest.mark.slow
def test_backend_choice_is_equal_on_all_ranks(two_ranks):
    first, second = (results["choice"] for results in two_ranks)
    backend, reason = first["auto"]
    assert backend == "ring" and "requires CUDA" in reason
    assert first["collective"] == ("collective", "set in the recipe")
    assert "requires CUDA" in first["forced"] and '"auto"' in first["forced"]
    assert first["times_ms"] == second["times_ms"] and list(first["times_ms"]) == [1, 2, 4, 8]
    assert first["right"] is None and second["right"] is None
    assert first["wrong"] == "a test run failed on another rank"
    assert second["wrong"] == "a test run returned wrong values"
    assert first["missing"].startswith("a test run failed")


@pytest.mark.campaign
def test_compiled_layers_have_no_graph_breaks():
    for results in run_distributed(_compile, 2):
        assert results == {length: {} for length in (24, 31)}


def _start() -> None:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))


def _compare_linears(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    _use_reference_operators()
    return [(case, _compare_linear(case)) for case in cases]


def _compare_linear(case: Case) -> dict[str, float]:
    """Return relative errors of the output and of the gradients of trained tensors."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = -(-case.rows // ranks)
    full = _mlp_tensors(case, ranks)
    grad_TD = full.pop("grad")
    expected = functional.linear(
        functional.silu(functional.linear(full["x"], full["gate"], full["gate_bias"]))
        * functional.linear(full["x"], full["up"]),
        full["down"],
        full["down_bias"],
    )
    expected.backward(grad_TD)

    def local_slice(rows_TD: Tensor) -> Tensor:
        padded = functional.pad(rows_TD, (0, 0, 0, size * ranks - case.rows))
        return padded[rank * size : (rank + 1) * size]

    split = {
        "x": local_slice,
        "gate": lambda w: w.chunk(ranks)[rank],
        "gate_bias": lambda w: w.chunk(ranks)[rank],
        "up": lambda w: w.chunk(ranks)[rank],
        "down": lambda w: w.chunk(ranks, dim=1)[rank],
        "down_bias": lambda w: w,
    }
    local = {n: split[n](t.detach()).to(case.dtype, copy=True) for n, t in full.items()}
    for name in case.trained:
        local[name].requires_grad_()
    overlap = Overlap(case.backend, dist.group.WORLD.group_name, case.chunks)
    weights, biases = [local["gate"], local["up"]], [local["gate_bias"], None]
    gate_TF, up_TF = gather_linear(local["x"], weights, biases, case.rows, overlap)
    hidden_TF = functional.silu(gate_TF) * up_TF
    output = linear_scatter(hidden_TF, local["down"], local["down_bias"], size, overlap)
    if case.trained:
        output.backward(local_slice(grad_TD).to(case.dtype))
    errors = {"output": _relative(output, local_slice(expected), expected)}
    for name in local.keys() - set(case.trained):
        assert local[name].grad is None, name
    for name in case.trained:
        grad = local[name].grad
        if name == "down_bias":  # sums the local tokens only
            dist.all_reduce(grad)
        errors[name] = _relative(grad, split[name](full[name].grad), full[name].grad)
    return errors


def _mlp_tensors(case: Case, ranks: int) -> dict[str, Tensor]:
    """Return random tensors that are exact in the dtype of the case."""
    generator = torch.Generator().manual_seed(case.rows)
    width = 4 * ranks
    shapes = {
        "x": (case.rows, FEATURES),
        "gate": (width, FEATURES),
        "gate_bias": (width,),
        "up": (width, FEATURES),
        "down": (FEATURES, width),
        "down_bias": (FEATURES,),
        "grad": (case.rows, FEATURES),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: t.to(case.dtype).float().requires_grad_(n != "grad") for n, t in tensors.items()}


def _relative(actual: Tensor, expected: Tensor, full: Tensor) -> float:
    return (actual.float() - expected).norm().item() / full.norm().item()


def _choose() -> dict[str, object]:
    group, device = dist.group.WORLD, torch.device("cpu")
    results: dict[str, object] = {"missing": try_symmetric_memory(group, device)}
    results["auto"] = choose_backend(group, device)
    results["collective"] = choose_backend(group, device, "collective")
    try:
        choose_backend(group, device, "symmetric_memory")
    except ConfigError as error:
        results["forced"] = str(error)
    layer = build_model(MODEL, FreezeConfig()).llm.layer_sizes()[0]
    overlap = Overlap("ring", group.group_name)
    results["times_ms"] = time_chunks(overlap, layer, device, torch.float32, tokens=16)
    _use_reference_operators()
    results["right"] = try_symmetric_memory(group, device)
    _use_reference_operators(added=dist.get_rank())
    results["wrong"] = try_symmetric_memory(group, device)
    return results


def _use_reference_operators(added: int = 0) -> None:
    """Replace the fused operators with the unfused reference operators of torch, which run on CPU.

    Args:
        added: Value that is added to the results, to make them wrong.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    unfused_gather = symmetric_memory._fused_all_gather_matmul_fallback
    unfused_scatter = symmetric_memory._fused_matmul_reduce_scatter_fallback
    functional_collectives = torch.ops._c10d_functional

    def gather_matmul(x, matrices, dim, group, *, return_A=True):
        gathered, products = unfused_gather(x, matrices, dim, group, return_A=return_A)
        return gathered, [p + added for p in products]

    def gather(x, group):
        return functional_collectives.all_gather_into_tensor(x, dist.get_world_size(), group)

    def scatter(x, operation, group):
        ranks = dist.get_world_size()
        return functional_collectives.reduce_scatter_tensor(x, operation, ranks, group)

    implementations = {
        "fused_all_gather_matmul": gather_matmul,
        "fused_matmul_reduce_scatter": unfused_scatter,
        "_low_contention_all_gather": gather,
        "_low_contention_reduce_scatter": scatter,
    }
    for name, function in implementations.items():
        library.impl(name, function, "CPU", allow_override=True)
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""References to the libraries, whose operators exist only as long as their library."""


def _compile() -> dict[int, dict[str, float]]:
    """Return parameters with a wrong gradient, by sequence length."""
    _start()
    mesh = build_mesh(ParallelConfig(shard=1, tensor=2), torch.device("cpu"))
    config = MODEL.model_copy(deep=True)
    config.llm.config["num_hidden_layers"] = 2
    full, split = (build_model(config, FreezeConfig()) for _ in range(2))
    overlap = AsyncStyles(Overlap("ring", mesh.module_mesh.tensor.get_group().group_name, 2))
    apply_tensor_parallel(split.llm, mesh.module_mesh.tensor, True, overlap)
    apply_activation_checkpoint(split.llm, "selective")
    for model in (full, split):
        materialize(model, "cpu")
        init_weights(model, seed=1)
    for layer in split.llm.layers:
        assert isinstance(layer.mlp.up_proj.forward, PrecomputedColumn)
        layer.compile(fullgraph=True, backend="aot_eager")
    return {length: _wrong_gradients(full.llm, split.llm, length) for length in (24, 31)}


def _wrong_gradients(full: LlmModule, split: LlmModule, length: int) -> dict[str, float]:
    microbatch = random_microbatch(0, 0, length)
    for llm in (full, split):
        llm.zero_grad()
        llm(microbatch, {}).backward()
    errors = {}
    for (name, parameter), reference in zip(
        split.named_parameters(), full.parameters(), strict=True
    ):
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = _relative(grad, reference.grad, reference.grad)
        if error > 1e-5:
            errors[name] = error
    return errors
