"""Patch embeddings as matrix multiplications equal convolutions."""

import copy

import pytest
import torch
from counting import CountTraffic
from model_cases import (
    AUDIO,
    ENCODERS,
    build,
    make_inputs,
    pair_config,
    relative_error,
)
from torch import Tensor, nn

from torchmm.models.layers import patch_embedding
from torchmm.models.layers.patch_embedding import patch_embed_as_matmul

CONVOLUTIONS = {
    "flat": (nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 8)),
    "without bias": (nn.Conv2d(3, 8, (2, 4), (2, 4), bias=False), (2, 3, 6, 8)),
    "valid padding": (nn.Conv2d(3, 8, 4, 4, padding="valid"), (2, 3, 8, 8)),
    "incomplete patches at the ends": (nn.Conv2d(3, 8, 4, 4), (1, 3, 11, 14)),
    "frames": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
    "several patches per frame": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 8, 12)),
}


def outcomes(module: nn.Module, x: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """Return the output, and the gradients of inputs and parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    assert x.grad is not None
    return [output.detach(), x.grad, *parameters]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patch_matmul_matches_convolution(name: str) -> None:
    convolution, shape = CONVOLUTIONS[name]
    matmul = copy.deepcopy(convolution)
    patch_embed_as_matmul(matmul)
    assert type(matmul) is not type(convolution)
    assert isinstance(matmul, type(convolution))
    assert matmul.state_dict().keys() == convolution.state_dict().keys()
    x = torch.randn(shape)
    for ours, theirs in zip(outcomes(matmul, x), outcomes(convolution, x), strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 5e-6


def test_reordered_patch_values_change_output() -> None:
    """Check an error in reading the kernel weights."""
    convolution, shape = CONVOLUTIONS["several patches per frame"]
    x = torch.randn(shape)
    weight = convolution.weight.detach()
    wrong = patch_embedding.patch_matmul(x, weight.transpose(3, 4), convolution.bias)
    assert relative_error(wrong, convolution(x)) > 0.1


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(3, 8, 4, 2),
        nn.Conv2d(3, 8, 4, 4, padding=1),
        nn.Conv2d(3, 8, 3, 1, padding="same"),
        nn.Conv2d(4, 8, 4, 4, groups=2),
        nn.Conv2d(3, 8, 2, 2, dilation=2),
        nn.Conv1d(3, 8, 4, 4),
        nn.Linear(3, 8),
    ],
)
def test_unsupported_modules_are_unchanged(convolution: nn.Module) -> None:
    kind = type(convolution)
    patch_embed_as_matmul(convolution)
    assert type(convolution) is kind


@pytest.mark.parametrize("family", [name for name in ENCODERS if name not in AUDIO])
def test_image_encoders_use_no_convolutions(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    with CountTraffic() as counter:
        encoder(make_inputs(family)).sum().backward()
    assert counter.calls["mm"] + counter.calls["addmm"]
    assert not [name for name in counter.calls if "convolution" in name]


def test_patch_matmul_compiles_as_one_graph() -> None:
    convolution, shape = CONVOLUTIONS["several patches per frame"]
    matmul = copy.deepcopy(convolution)
    patch_embed_as_matmul(matmul)
    x = torch.randn(shape)
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), convolution(x)) < 5e-6
