"""Patch embeddings as matmuls.

A convolution with stride equal to its kernel size is a linear layer over patches. On CPUs the bf16
kernel of 3D convolutions is a hundred times slower than a matmul. On GPUs, libraries select from
algorithms for overlapping windows.

Names and shapes of the weights do not change, so that they match the files. Only the function that
the module forward calls is replaced. It reads the weights from the module in each call, so that it
uses the parameters that FSDP has all-gathered.

Shape legend: N images, C channels, D features, P patches along a dimension, K kernel size along a
dimension, "..." two or three dimensions.
"""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn
from torch.nn import functional


def patch_embed_as_matmul(module: nn.Module) -> None:
    """Make a patch embedding compute a matmul, in place.

    This applies to 2D and 3D convolutions without overlap, padding, dilation and groups. Other
    modules do not change.
    """
    for convolution, product in _MATMUL_CLASSES.items():
        if type(module) is convolution and _is_matmul(module):
            module.__class__ = product


def patch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a convolution whose stride is its kernel size.

    Args:
        x: (N, C, ...), pixels. Incomplete patches at the end of a dimension are dropped.
        weight: (D, C, K...).
        bias: (D,), or None.

    Returns:
        (N, D, P...), in channels-last memory format.
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


class _MatmulConv2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return patch_matmul(input, weight, bias)


class _MatmulConv3d(nn.Conv3d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return patch_matmul(input, weight, bias)


_MATMUL_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: _MatmulConv2d,
    nn.Conv3d: _MatmulConv3d,
}


def _is_matmul(module: nn.Module) -> bool:
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    padded = any(module.padding) if isinstance(module.padding, tuple) else module.padding != "valid"
    separate = module.stride == module.kernel_size and not padded
    return separate and set(module.dilation) == {1} and module.groups == 1
