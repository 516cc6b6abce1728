"""Compiled layers with tensor parallelism: gradients are correct for varying sequence lengths."""

from typing import Any

import pytest
import torch
from launch import run_distributed
from microbatches import MODEL, random_microbatch
from torch.distributed.tensor import DTensor

from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig

LENGTHS = (24, 31)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"sequence_parallel": False, "method": None},
    "sequence parallel, DoRA": {"sequence_parallel": True, "method": "dora"},
}


@pytest.mark.slow
def test_compiled_layers_equal_unsharded_for_varying_lengths():
    """Compile with the styles of torchmm: those of torch 2.13 never finish tracing backward."""
    for results in run_distributed(_compile_all, 2):
        for variant, (errors, graphs) in results.items():
            assert errors == {length: {} for length in LENGTHS}, variant
            # Sequence lengths that the ranks do not divide are padded, which is a separate graph.
            assert graphs == (2 if VARIANTS[variant]["sequence_parallel"] else 1), variant


def _compile_all() -> dict[str, tuple[dict[int, dict[str, float]], int]]:
    """Return parameters with a wrong gradient by sequence length, and the number of graphs."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return {variant: _compile(**settings) for variant, settings in VARIANTS.items()}


def _compile(
    sequence_parallel: bool, method: str | None
) -> tuple[dict[int, dict[str, float]], int]:
    mesh = build_mesh(ParallelConfig(shard=1, tensor=2), torch.device("cpu"))
    config = MODEL.model_copy(deep=True)
    config.llm.config["num_hidden_layers"] = 1
    section = {"modules": ["llm"], "rank": 3, "method": method}
    adapters = {"a": AdapterConfig.model_validate(section)} if method else {}
    full, sharded = (build_model(config, FreezeConfig(), adapters=adapters) for _ in range(2))
    apply_tensor_parallel(sharded.llm, mesh.module_mesh.tensor, sequence_parallel)
    compilation = Compilation("aot_eager")
    apply_activation_checkpoint(sharded.llm, "selective", compilation)
    for model in (full, sharded):
        materialize(model, "cpu")
        init_weights(model, seed=1)
        for name, parameter in model.named_parameters():
            if name.endswith("lora.up"):
                copy_slice(
                    parameter, torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape)
                )
    errors = {length: _wrong_gradients(full.llm, sharded.llm, length) for length in LENGTHS}
    return errors, len(compilation.new_graphs())


def _wrong_gradients(full: LlmModule, sharded: LlmModule, length: int) -> dict[str, float]:
    microbatch = random_microbatch(0, 0, length)
    for llm in (full, sharded):
        llm.zero_grad()
        llm(microbatch, {}).backward()
    errors = {}
    for (name, parameter), reference in zip(
        sharded.named_parameters(), full.parameters(), strict=True
    ):
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = (grad - reference.grad).norm() / reference.grad.norm()
        if not error <= 1e-5:
            errors[name] = float(error)
    return errors
