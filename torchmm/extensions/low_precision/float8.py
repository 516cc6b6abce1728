"""Float8 matrix products in the linears of transformer layers, by torchao.

Inputs, weights and output gradients are cast to float8 before each of the three products of a
linear. Parameters, sums and optimizer states do not change. Scales are computed from each tensor
that is cast: one for each row and column ("rowwise"), or one for the tensor ("tensorwise", faster
and less exact).

A rank must cast the same values as a single process. This holds for FSDP2, which gathers weights,
and for pipelines. If ranks share a sequence, the gradient of a weight sums over the tokens of one
rank. If ranks divide a linear, products sum over some of its features. Scales then cover only these
values. Scales of rows are powers of two in torchao, and change only numbers that are too small for
all digits of float8. Scales of tensors are not, so `checks.py` rejects them. Experts, embeddings,
heads and connectors are not converted.

Rejected: products of our own, which torchao has tested on devices that we have not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from torchmm.common.errors import install_command
from torchmm.common.layers import Rounded
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.tensor.linears import MULTIPLY
from torchmm.planning.converters import ModelConverter
from torchmm.recipe.recipe import Recipe

_MULTIPLE = 16
"""Of what the kernels want the sizes of matrices to be multiples."""
_CAPABILITY = (8, 9)
"""The first CUDA devices with float8 products: Ada; then Hopper."""


class Float8Converter(ModelConverter):
    """Replacement of the linears of transformer layers by float8 linears of torchao."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = Float8Config.of(recipe)

    def annotate(self, module: LayeredModule) -> None:
        module.rounded = rounded_linears(module, self._config)

    def find_problems(
        self, modules: Sequence[LayeredModule], device: torch.device, tensor: Mapping[str, int]
    ) -> list[str]:
        return float8_problems(modules, self._config, device, tensor)

    def convert(self, module: LayeredModule) -> None:
        apply_float8(module, self._config)

    def summary_lines(self, model: MultimodalModel) -> dict[str, str]:
        config = self._config
        modules = [m for m in model.modality_modules() if config.concerns(m.name)]
        if not modules:
            return {}
        counts = [f"{len(float8_linears(m, config))} linear layers of {m.name}" for m in modules]
        how = f"{config.scaling} scales" + (", emulated" if config.emulate else "")
        return {"float8": f"{how}: {', '.join(counts)}"}


def float8_linears(module: LayeredModule, config: Float8Config) -> list[nn.Linear]:
    """The linears of this stage's layers that the recipe wants to compute in float8."""
    return [linear for own in _by_layer(module, config).values() for linear in own]


def rounded_linears(module: LayeredModule, config: Float8Config) -> dict[int, Rounded]:
    """What planners have to know of them, by layer; nothing if the module takes no part."""
    if not config.concerns(module.name):
        return {}
    calls = {"rowwise": 14, "tensorwise": 11}[config.scaling]
    found = {}
    for index, linears in _by_layer(module, config).items():
        sizes = {(linear.in_features, linear.out_features) for linear in linears}
        if sizes:
            found[index] = Rounded(tuple(sorted(sizes)), calls, not config.emulate)
    return found


def _by_layer(module: LayeredModule, config: Float8Config) -> dict[int, list[nn.Linear]]:
    layers = len(module.layer_sizes())
    inner = range(config.first_layers, layers - config.last_layers)
    return {
        index: [
            linear
            for name, linear in _plain_linears(layer)
            if not any(fnmatch(name, pattern) for pattern in config.exclude)
            and not any(size % _MULTIPLE for size in linear.weight.shape)
        ]
        for index, layer in module.indexed_layers()
        if index in inner
    }


def float8_problems(
    modules: Sequence[LayeredModule],
    config: Float8Config,
    device: torch.device,
    tensor: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """Why a run with these modules cannot compute in float8, on this kind of device.

    Args:
        tensor: by module: ranks that divide its linears, if it is more than one.
    """
    wanted = [module for module in modules if config.concerns(module.name)]
    if not wanted:
        return []
    if importlib.util.find_spec("torchao") is None:
        return [
            f'float8.scaling = "{config.scaling}": torchao is not installed; '
            f"{install_command('float8')}"
        ]
    problems = [] if config.emulate else _device_problems(config, device)
    for module in wanted:
        if not float8_linears(module, config):
            problems.append(
                f"float8.modules: {module.name!r} has no linear layer for float8: it must not "
                f"be in the first {config.first_layers} or last {config.last_layers} of "
                f"{len(module.layer_sizes())} layers or in float8.exclude, and its sizes must "
                f"be multiples of {_MULTIPLE}; remove the module"
            )
        if not config.emulate:
            problems += _uneven_parts(module, config, tensor.get(module.name, 1))
    return problems


def _uneven_parts(module: LayeredModule, config: Float8Config, tensor: int) -> list[str]:
    """What kernels cannot multiply when `tensor` ranks divide it."""
    chosen = set(float8_linears(module, config))
    divided = {
        linear.weight.shape[style == "rowwise"]
        for pattern, style in module.tensor_parallel_plan().items()
        for linear in module.matching(pattern)
        if linear in chosen and isinstance(linear, nn.Linear) and style in ("colwise", "rowwise")
    }
    return [
        f"[parallel] tensor = {tensor} splits {size} features of linear layers of "
        f"{module.name!r} into shards that are not multiples of {_MULTIPLE}; use a smaller "
        "number, or float8.exclude"
        for size in sorted(divided)
        if tensor > 1 and size // tensor % _MULTIPLE
    ]


def _device_problems(config: Float8Config, device: torch.device) -> list[str]:
    remedy = 'set float8.emulate = true for a slow emulation, or recipe = "none"'
    if device.type != "cuda":
        return [f'float8.scaling = "{config.scaling}": requires a GPU; {remedy}']
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return [
            f'float8.scaling = "{config.scaling}": {name} does not support float8 matmuls; {remedy}'
        ]
    return []


def apply_float8(module: LayeredModule, config: Float8Config) -> None:
    """Replaces the linears of a stage, in place, on the meta device; names and parameters stay."""
    if not config.concerns(module.name):
        return
    # An extra, and its import takes seconds.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415
    from torchao.float8.float8_linear import (  # noqa: PLC0415
        Float8Linear,
        matmul_with_hp_or_float8_args,
    )

    def multiply(linear: Float8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a `Float8Linear` does, with parts of its weight and bias."""
        product: Tensor = matmul_with_hp_or_float8_args.apply(
            x, weight.t(), linear.linear_mm_config, linear.config
        )
        if bias is None:
            return product
        return product + bias.to(product.dtype)

    settings = Float8LinearConfig.from_recipe_name(config.scaling)
    # Tokens are an inner size of one of the products, of which there may be any number.
    settings = replace(settings, emulate=config.emulate, pad_inner_dim=True)
    chosen = set(float8_linears(module, config))
    for layer in module.layers:
        convert_to_float8_training(
            layer, module_filter_fn=lambda linear, _: linear in chosen, config=settings
        )
        for part in layer.modules():
            if isinstance(part, Float8Linear):
                setattr(part, MULTIPLY, partial(multiply, part))


def _plain_linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Those whose forward is torch's own, which is all that torchao would replace."""
    for name, part in layer.named_modules():
        if type(part) is nn.Linear and "forward" not in vars(part):
            yield name, part
