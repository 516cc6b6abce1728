"""Tensor-parallel LLMs and multimodal models of every family equal the unsharded model."""

from dataclasses import dataclass, field

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from model_cases import (
    COMPOSITES,
    LLMS,
    SPEECH,
    build,
    composite_config,
    gradient_limit,
    microbatch,
)
from omni_cases import images_and_audio
from proofs import proves
from speech_cases import three_samples
from test_multimodal import two_samples_with_images
from torch.distributed.tensor import DTensor

from torchmm.common.batch import Microbatch
from torchmm.extensions.async_tp.linear import Overlap
from torchmm.extensions.async_tp.styles import AsyncStyles
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig


@dataclass(frozen=True)
class Case:
    """A model family with a layout."""

    family: str
    sequence_parallel: bool = False
    chunks: int = 0
    """Blocks per slice of async tensor parallelism. 0 disables it."""
    changes: dict = field(default_factory=dict)
    composite: bool = False

    def model_config(self) -> ModelConfig:
        if self.composite:
            return composite_config(self.family)
        return ModelConfig(llm=LlmConfig(config={**LLMS[self.family], **self.changes}))

    def microbatch(self) -> Microbatch:
        """Return a microbatch, with images if the model has a vision encoder."""
        if not self.composite:
            return microbatch([5, 9, 9])
        if self.family in SPEECH:
            return three_samples(self.family)[0]
        if "omni" in self.family:
            return images_and_audio(self.family)
        batch, _ = two_samples_with_images(self.family)
        if self.family.startswith(("qwen", "glm")):
            batch.position_ids = batch.position_ids.expand(3, -1) * torch.tensor([[1], [2], [3]])
        return batch


CASES = [Case(family, split) for family in LLMS for split in (False, True)]
CASES += [Case(family, True, chunks=2) for family in ("phi3", "olmo2", "gemma3_text")]
CASES += [Case("qwen3_5", True, chunks=2), Case("lfm2", True, chunks=2)]
CASES += [Case("lfm2", changes={"conv_bias": True})]
CASES += [Case("phi3", changes={"num_key_value_heads": 1})]
CASES += [Case("gemma4_moe", True, changes={"num_global_key_value_heads": 1})]
CASES += [
    Case("qwen3_moe", split, changes={"output_router_logits": True}) for split in (False, True)
]
CASES += [Case(name, name != "gemma3", composite=True) for name in COMPOSITES]
CASES += [Case("qwen3_vl", composite=True), Case("qwen3_vl", True, chunks=2, composite=True)]
CASES += [Case("qwen2_5_omni", True, chunks=2, composite=True)]


@proves("tensor", LLMS, every=1)
@proves("sequence", LLMS, every=1)
@proves("tensor", COMPOSITES, every=1)
@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.campaign)])
def test_tensor_parallel_llms_equal_unsharded(every):
    for outcomes in zip(*run_distributed(_compare_all, 2, CASES[::every]), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


def _compare_all(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [(case, _compare(case)) for case in cases]


def _compare(case: Case) -> dict[str, float]:
    """Return errors of the loss and the gradients that exceed the tolerance.

    The tolerance is 1e-5 (relative) for most parameters.
    """
    full = build(case.model_config())
    split = build_model(case.model_config(), FreezeConfig())
    mesh = mesh_for(ParallelConfig(shard=1, tensor=2))
    overlap = None
    if case.chunks:
        overlap = AsyncStyles(
            Overlap("ring", mesh.module_mesh.tensor.get_group().group_name, case.chunks)
        )
    for module in split.modality_modules():
        apply_tensor_parallel(module, mesh.module_mesh.tensor, case.sequence_parallel, overlap)
    materialize(split, "cpu")
    init_weights(split, seed=0)
    weights = full.state_dict()
    for name, tensor in split.state_dict(keep_vars=True).items():  # including persistent buffers
        copy_slice(tensor, weights[name])
    batch = case.microbatch()
    losses = []
    for model in (full, split):
        if model.llm.balance is not None:
            model.llm.balance.scale = 1.0
        losses.append(model(batch))
        losses[-1].backward()
    errors = {"loss": abs(losses[1].item() / losses[0].item() - 1)}
    gradients = {n: p.grad for n, p in full.named_parameters() if p.requires_grad}
    scale = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for name, parameter in split.named_parameters():
        if not parameter.requires_grad:  # fixed positions of audio encoders
            continue
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        expected = gradients.pop(name)
        size = expected.norm().item()
        # Gradients of key biases are zero except for rounding: use the norm of all gradients.
        error = (grad - expected).norm().item() / (size if size > 1e-6 * scale else scale)
        errors[name] = error
    assert not gradients
    return {name: error for name, error in errors.items() if not error <= gradient_limit(name)}
