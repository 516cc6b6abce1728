"""Float8 matmuls in the linear layers of transformer layers, by torchao.

Inputs, weights and output gradients are cast to float8 before each of the three matmuls of a linear
layer. Parameters, sums and optimizer states do not change. Scales are computed from each tensor
that is cast: one for each row and column ("rowwise"), or one for the tensor ("tensorwise", faster
and less accurate).

A rank must cast the same values as a single process. This is true for FSDP2, which all-gathers
weights, and for pipelines. If ranks share a sequence, the gradient of a weight sums over the tokens
of one rank. If ranks shard a linear layer, matmuls sum over some of its features. Scales then cover
only these values. Row scales are powers of two in torchao, and change only numbers that are too
small for all digits of float8. Tensor scales are not, so `checks.py` rejects them. Experts,
embeddings, heads and connectors are not converted.

torchao is used instead of custom kernels, because it is tested on more devices.
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
from torchmm.common.layers import Float8Linears
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.tensor.linears import MULTIPLY
from torchmm.planning.converters import ModelConverter
from torchmm.recipe.recipe import Recipe

_MULTIPLE = 16
"""Factor of the matrix sizes that the kernels support."""
_CAPABILITY = (8, 9)
"""First CUDA compute capability with float8 matmuls: Ada, followed by Hopper."""


class Float8Converter(ModelConverter):
    """Converter of linear layers in transformer layers to float8 linear layers of torchao."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = Float8Config.from_parent(recipe)

    def annotate(self, module: LayeredModule) -> None:
        module.rounded = describe_float8_linears(module, self._config)

    def find_problems(
        self, modules: Sequence[LayeredModule], device: torch.device, tensor: Mapping[str, int]
    ) -> list[str]:
        return float8_problems(modules, self._config, device, tensor)

    def convert(self, module: LayeredModule) -> None:
        apply_float8(module, self._config)

    def summary_lines(self, model: MultimodalModel) -> dict[str, str]:
        config = self._config
        modules = [m for m in model.modality_modules() if config.applies_to(m.name)]
        if not modules:
            return {}
        counts = [
            f"{len(find_float8_linears(m, config))} linear layers of {m.name}" for m in modules
        ]
        how = f"{config.scaling} scales" + (", emulated" if config.emulate else "")
        return {"float8": f"{how}: {', '.join(counts)}"}


def find_float8_linears(module: LayeredModule, config: Float8Config) -> list[nn.Linear]:
    """Return the linear layers of this stage that the recipe computes in float8."""
    return [
        linear
        for linears_of_layer in _by_layer(module, config).values()
        for linear in linears_of_layer
    ]


def describe_float8_linears(
    module: LayeredModule, config: Float8Config
) -> dict[int, Float8Linears]:
    """Return the float8 linear layers by layer index, for planners.

    The result is empty if the module does not use float8.
    """
    if not config.applies_to(module.name):
        return {}
    calls = {"rowwise": 14, "tensorwise": 11}[config.scaling]
    linears_by_layer = {}
    for index, linears in _by_layer(module, config).items():
        sizes = {(linear.in_features, linear.out_features) for linear in linears}
        if sizes:
            linears_by_layer[index] = Float8Linears(tuple(sorted(sizes)), calls, not config.emulate)
    return linears_by_layer


def _by_layer(module: LayeredModule, config: Float8Config) -> dict[int, list[nn.Linear]]:
    layers = len(module.layer_sizes())
    inner = range(config.first_layers, layers - config.last_layers)
    return {
        index: [
            linear
            for name, linear in _convertible_linears(layer)
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
    """Return why a run with these modules cannot use float8 on this type of device.

    Args:
        modules: Modules of the run.
        config: Section [float8] of the recipe.
        device: Device of the run.
        tensor: Tensor-parallel sizes above 1, by module.
    """
    float8_modules = [module for module in modules if config.applies_to(module.name)]
    if not float8_modules:
        return []
    if importlib.util.find_spec("torchao") is None:
        return [
            f'float8.scaling = "{config.scaling}": torchao is not installed; '
            f"{install_command('float8')}"
        ]
    problems = [] if config.emulate else _device_problems(config, device)
    for module in float8_modules:
        if not find_float8_linears(module, config):
            problems.append(
                f"float8.modules: {module.name!r} has no linear layer for float8: it must not "
                f"be in the first {config.first_layers} or last {config.last_layers} of "
                f"{len(module.layer_sizes())} layers or in float8.exclude, and its sizes must "
                f"be multiples of {_MULTIPLE}; remove the module"
            )
        if not config.emulate:
            problems += _unsupported_shard_sizes(module, config, tensor.get(module.name, 1))
    return problems


def _unsupported_shard_sizes(module: LayeredModule, config: Float8Config, tensor: int) -> list[str]:
    """Return linear layers whose shards on `tensor` ranks have unsupported sizes."""
    chosen = set(find_float8_linears(module, config))
    divided = {
        linear.weight.shape[style == "rowwise"]
        for pattern, style in module.tensor_parallel_plan().items()
        for linear in module.matching_submodules(pattern)
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
    fix = 'set float8.emulate = true for a slow emulation, or recipe = "none"'
    if device.type != "cuda":
        return [f'float8.scaling = "{config.scaling}": requires a GPU; {fix}']
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return [
            f'float8.scaling = "{config.scaling}": {name} does not support float8 matmuls; {fix}'
        ]
    return []


def apply_float8(module: LayeredModule, config: Float8Config) -> None:
    """Replace the linear layers of a stage in place, on the meta device.

    Names and parameters do not change.
    """
    if not config.applies_to(module.name):
        return
    # An optional dependency, whose import takes seconds.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415
    from torchao.float8.float8_linear import (  # noqa: PLC0415
        Float8Linear,
        matmul_with_hp_or_float8_args,
    )

    def multiply(linear: Float8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a `Float8Linear` with slices of its weight and bias."""
        product: Tensor = matmul_with_hp_or_float8_args.apply(
            x, weight.t(), linear.linear_mm_config, linear.config
        )
        if bias is None:
            return product
        return product + bias.to(product.dtype)

    settings = Float8LinearConfig.from_recipe_name(config.scaling)
    # The number of tokens is an inner size of one of the matmuls, and can be any number.
    settings = replace(settings, emulate=config.emulate, pad_inner_dim=True)
    chosen = set(find_float8_linears(module, config))
    for layer in module.layers:
        convert_to_float8_training(
            layer, module_filter_fn=lambda linear, _: linear in chosen, config=settings
        )
        for part in layer.modules():
            if isinstance(part, Float8Linear):
                setattr(part, MULTIPLY, partial(multiply, part))


def _convertible_linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers with the forward method of torch, which torchao replaces."""
    for name, part in layer.named_modules():
        if type(part) is nn.Linear and "forward" not in vars(part):
            yield name, part
