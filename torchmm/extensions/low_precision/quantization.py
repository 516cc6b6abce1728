"""Conversion of frozen linear layers in transformer layers to 4-bit weights (`nf4.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torchmm.extensions.low_precision.nf4 import BLOCK, Nf4Format, convert_linear, multiply
from torchmm.extensions.low_precision.section import QuantizationConfig
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.tensor.linears import MULTIPLY
from torchmm.planning.converters import ModelConverter
from torchmm.recipe.recipe import Recipe


class QuantizationConverter(ModelConverter):
    """Converter of frozen linear layers in transformer layers to NF4 weights."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = QuantizationConfig.from_parent(recipe)

    def annotate(self, module: LayeredModule) -> None:
        """Set the weight formats of a module."""
        module.weight_formats = {
            name: Nf4Format(linear.weight.dtype)
            for name, linear in find_quantized_linears(module, self._config).items()
        }

    def find_problems(
        self, modules: Sequence[LayeredModule], device: torch.device, tensor: Mapping[str, int]
    ) -> list[str]:
        """Return why the modules cannot be quantized."""
        return quantization_problems(modules, self._config, tensor)

    def convert(self, module: LayeredModule) -> None:
        """Replace the weights of a stage in place, on the meta device."""
        for linear in find_quantized_linears(module, self._config).values():
            convert_linear(linear)
            setattr(linear, MULTIPLY, multiply)

    def summary_lines(self, model: MultimodalModel) -> dict[str, str]:
        """Return the line on quantized linear layers."""
        counts = [
            f"{len(module.weight_formats)} linear layers of {module.name}"
            for module in model.modality_modules()
            if module.weight_formats
        ]
        return {"quantization": f"{self._config.quant_type}: {', '.join(counts)}"} if counts else {}


def find_quantized_linears(
    module: LayeredModule, config: QuantizationConfig
) -> dict[str, nn.Linear]:
    """Return the linear layers of this stage that the recipe quantizes, by name.

    Linear layers whose input features are not complete blocks keep their weights.
    """
    if not config.applies_to(module.name):
        return {}
    return {
        f"{module.layers_fqn}.{index}.{name}": linear
        for index, layer in module.indexed_layers()
        for name, linear in layer.named_modules()
        if type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and linear.in_features % BLOCK == 0
    }


def quantization_problems(
    modules: Sequence[LayeredModule], config: QuantizationConfig, tensor: Mapping[str, int]
) -> list[str]:
    """Return why the modules of a run cannot be quantized.

    Args:
        modules: Modules of the run.
        config: Section [quantization] of the recipe.
        tensor: Tensor-parallel sizes by module.
    """
    problems = []
    for module in modules:
        linears = set(find_quantized_linears(module, config).values())
        if not config.applies_to(module.name):
            continue
        if any(layer.experts for layer in module.layer_sizes()):
            problems.append(
                f"quantization.modules: the layers of {module.name!r} have experts, whose stacked "
                "weights cannot be quantized; remove the module"
            )
        elif not linears:
            problems.append(
                f"quantization.modules: {module.name!r} has no linear layer whose number of input "
                f"features is a multiple of {BLOCK}; remove the module"
            )
        size = tensor.get(module.name, 1)
        divided = {
            linear.in_features
            for pattern, style in module.tensor_parallel_plan().items()
            for linear in module.matching_submodules(pattern)
            if linear in linears and isinstance(linear, nn.Linear) and style == "rowwise"
        }
        problems += [
            f"[parallel] tensor = {size} splits {inputs} input features of linear layers of "
            f"{module.name!r} into shards that are not multiples of {BLOCK}, the block size of "
            "quantization; use a smaller number"
            for inputs in sorted(divided)
            if inputs % (BLOCK * size)
        ]
    return problems
