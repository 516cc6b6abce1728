"""Patch embeddings run as matrix products give what the convolutions give."""

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
    "no padding by name": (nn.Conv2d(3, 8, 4, 4, padding="valid"), (2, 3, 8, 8)),
    "less than a patch at the ends": (nn.Conv2d(3, 8, 4, 4), (1, 3, 11, 14)),
    "of frames": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
    "several patches of frames": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 8, 12)),
}


def outcomes(module: nn.Module, x: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """Output, and gradients of inputs and parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    assert x.grad is not None
    return [output.detach(), x.grad, *parameters]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_equal_convolutions(name: str) -> None:
    convolution, shape = CONVOLUTIONS[name]
    product = copy.deepcopy(convolution)
    patch_embed_as_matmul(product)
    assert type(product) is not type(convolution)
    assert isinstance(product, type(convolution))
    assert product.state_dict().keys() == convolution.state_dict().keys()
    x = torch.randn(shape)
    for ours, theirs in zip(outcomes(product, x), outcomes(convolution, x), strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 5e-6


def test_values_of_a_patch_in_another_order_are_noticed() -> None:
    """What a mistake in reading the kernels would give."""
    convolution, shape = CONVOLUTIONS["several patches of frames"]
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
def test_other_modules_stay(convolution: nn.Module) -> None:
    kind = type(convolution)
    patch_embed_as_matmul(convolution)
    assert type(convolution) is kind


@pytest.mark.parametrize("family", [name for name in ENCODERS if name not in AUDIO])
def test_no_tower_of_images_convolves(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    with CountTraffic() as counter:
        encoder(make_inputs(family)).sum().backward()
    assert counter.calls["mm"] + counter.calls["addmm"]
    assert not [name for name in counter.calls if "convolution" in name]


def test_the_product_compiles_whole() -> None:
    convolution, shape = CONVOLUTIONS["several patches of frames"]
    product = copy.deepcopy(convolution)
    patch_embed_as_matmul(product)
    x = torch.randn(shape)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), convolution(x)) < 5e-6
