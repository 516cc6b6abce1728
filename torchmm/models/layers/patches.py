"""Patch embeddings as matrix products.

A convolution whose stride is its kernel reads each value once: it is a linear over patches. On a
CPU its bf16 kernel for three dimensions is a hundred times slower than the product, on GPUs
libraries choose among algorithms made for overlapping windows. The module stays what Hugging Face
built, with the names and shapes of its weights; only what its forward calls is another function,
which reads the weights from the module whenever it runs and so sees what FSDP has gathered.
Rejected: an `nn.Linear` in its place, whose weights would need another shape in every file.

Shape legend: N images, C channels, D features, P patches along a dimension, K values of a kernel
along it, "..." one or several of these.
"""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn
from torch.nn import functional


def embed_by_products(module: nn.Module) -> None:
    """Lets a patch embedding run as a matrix product, in place, if it is one: a convolution in two
    or three dimensions without overlap, padding, holes or groups. Others stay as they are."""
    for convolution, product in _PRODUCTS.items():
        if type(module) is convolution and _is_product(module):
            module.__class__ = product


def patch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a convolution gives whose stride is its kernel.

    Args:
        x: (N, C, ...): whole patches, and at the ends less than one, which is left out.
        weight: (D, C, K...).
        bias: (D,).

    Returns:
        (N, D, P...), features last in memory.
    """
    kernel = weight.shape[2:]
    counts = [length // size for length, size in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, kernel, strict=True), 2):
        x = x.narrow(dim, 0, count * size)
    pairs = chain.from_iterable(zip(counts, kernel, strict=True))
    x = x.reshape(*x.shape[:2], *pairs)  # (N, C, P, K, ...)
    of_patches = range(2, x.ndim, 2)
    of_kernels = range(3, x.ndim, 2)
    patches = x.permute(0, *of_patches, 1, *of_kernels).flatten(1 + len(counts))
    return functional.linear(patches, weight.flatten(1), bias).movedim(-1, 1)


class _Product2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return patch_product(input, weight, bias)


class _Product3d(nn.Conv3d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return patch_product(input, weight, bias)


_PRODUCTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: _Product2d,
    nn.Conv3d: _Product3d,
}


def _is_product(module: nn.Module) -> bool:
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    padded = any(module.padding) if isinstance(module.padding, tuple) else module.padding != "valid"
    separate = module.stride == module.kernel_size and not padded
    return separate and set(module.dilation) == {1} and module.groups == 1
