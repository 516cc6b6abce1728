"""Detect the structure of an image encoder from its forward pass.

The forward method of the tower runs once. The inputs of each module show what runs before the
layers, which arguments layers receive, and what runs after them, independent of module names.

Shape legend: N images, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from torchmm.common.errors import ConfigError
from torchmm.models.families.encoders.family import patches_per_row, side
from torchmm.models.families.introspection import is_outermost_list


@dataclass(frozen=True)
class EncoderStructure:
    """Structure of a tower: the names of the modules that a layered module requires."""

    layers: str
    pre: tuple[str, ...]
    """Modules that compute hidden states from pixels, in call order."""
    patch_embedding: str
    final_norm: str
    """Name of the norm after the layers, or "" without a norm."""
    unused: tuple[str, ...]
    num_prefix_tokens: int
    none_arguments: tuple[str, ...]
    """Required arguments of layers that are always None."""
    gated_ffn: bool
    rms: bool
    legacy_names: tuple[tuple[str, str], ...]
    prefix: str
    """Prefix of the names of the tower in files of models with heads."""
    processor_class: str


def ffn_size(config: Any) -> int:
    """Return the hidden size of the feed-forward network if the config has it."""
    size = getattr(config, "intermediate_size", None)
    return size or int(config.hidden_size * getattr(config, "mlp_ratio", 4))


def detect_encoder_structure(tower: PreTrainedModel, processor_class: str) -> EncoderStructure:
    """Return the form of a small tower from one forward pass.

    Raises:
        ConfigError: The tower does not have the form.
    """
    layers = find_layer_list(tower)
    pixels = example_pixels(tower.config, 2)
    calls, outputs = _record(tower, layers, pixels)
    pre = _modules_before_layers(calls[f"{layers}.0"], outputs, pixels)

    # Each layer must be called with the result of the previous layer.
    layer_calls = [calls[f"{layers}.{index}"] for index in range(tower.config.num_hidden_layers)]
    for index, (previous, following) in enumerate(pairwise(layer_calls)):
        if following.other_arguments or following.hidden is not previous.result:
            raise ConfigError(f"the input of layer {index + 1} is not the output of layer {index}")
    last = layer_calls[-1].result
    patches = patches_per_row(tower.config) ** 2
    if last.ndim != 3 or len(last) != len(pixels) or last.shape[1] < patches:
        raise ConfigError(f"hidden states {tuple(last.shape)} for 2 images of {patches} patches")
    if strange := _weights_outside(tower, last, (*pre, layers)):
        raise ConfigError(f"weights outside of embeddings and layers: {', '.join(strange)}")

    convolutions = [
        f"{part}.{name}" if name else part
        for part in pre
        for name, module in tower.get_submodule(part).named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    if len(convolutions) != 1:
        raise ConfigError(f"{len(convolutions)} convolutions over pixels instead of 1")
    norms = [
        name
        for name, call in outputs.items()
        if call.hidden is last and "Norm" in type(tower.get_submodule(name)).__name__
    ]
    layer = tower.get_submodule(f"{layers}.0")
    _, *other_parameters = signature(layer.forward).parameters.values()
    # transformers also splits tensors of some old files. These files are not supported.
    legacy_names = [
        (str(old), str(conversion.target_patterns[0]))
        for conversion in get_model_conversion_mapping(tower)
        if isinstance(conversion, WeightRenaming)
        for old in conversion.source_patterns
    ]
    return EncoderStructure(
        layers=layers,
        pre=pre,
        patch_embedding=convolutions[0],
        final_norm=min(norms, key=len, default=""),
        unused=_unused(tower, last, pre, (*pre, layers, *norms)),
        num_prefix_tokens=last.shape[1] - patches,
        none_arguments=tuple(
            argument.name
            for argument in other_parameters
            if argument.kind is Parameter.POSITIONAL_OR_KEYWORD
            and argument.default is Parameter.empty
        ),
        gated_ffn=_is_gated(layer, tower.config),
        rms=any("RMS" in type(part).__name__ for part in layer.modules()),
        legacy_names=tuple(legacy_names),
        prefix=tower.base_model_prefix,
        processor_class=processor_class,
    )


def _modules_before_layers(
    entered: _ModuleCall, outputs: dict[str, _ModuleCall], pixels: Tensor
) -> tuple[str, ...]:
    """Return the modules between pixels and the first layer, in call order."""
    if entered.other_arguments:
        raise ConfigError(f"layers have inputs besides hidden states: {entered.other_arguments}")
    hidden: Tensor | None = entered.hidden
    pre: list[str] = []
    while hidden is not pixels:
        producers = [
            n for n, call in outputs.items() if call.result is hidden and not call.unchanged
        ]
        if not producers:
            after = f"after {pre[0]}" if pre else "before the layers"
            raise ConfigError(f"an operation that is not a separate module is {after}")
        name = min(producers, key=len)
        if outputs[name].other_arguments:
            raise ConfigError(f"{name} has more than one input: {outputs[name].other_arguments}")
        pre.insert(0, name)
        hidden = outputs[name].hidden
    return tuple(pre)


def example_pixels(config: Any, images: int) -> Tensor:
    """Return random pixels (N, C, H, W)."""
    size = side(config.image_size)
    return torch.randn(images, getattr(config, "num_channels", 3), size, size)


class _ModuleCall(NamedTuple):
    hidden: Tensor | None
    """First tensor argument of a module."""
    other_arguments: list[str]
    """Names of its other arguments."""
    result: Tensor

    @property
    def unchanged(self) -> bool:
        return self.result is self.hidden


def _record(
    tower: PreTrainedModel, layers: str, pixels: Tensor
) -> tuple[dict[str, _ModuleCall], dict[str, _ModuleCall]]:
    """Return inputs and outputs of layers, and of modules outside the layers."""
    calls: dict[str, _ModuleCall] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            arguments = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
            tensors = [value for _, value in arguments if isinstance(value, Tensor)]
            hidden = tensors[0] if tensors else None
            # Empty and false arguments do not change the result of a module.
            other_arguments = [
                key
                for key, value in arguments
                if value is not hidden and (isinstance(value, Tensor) or bool(value))
            ]
            result = hidden_states_of(output)
            if isinstance(result, Tensor):
                calls[name] = _ModuleCall(hidden, other_arguments, result)

        return hook

    handles = [
        module.register_forward_hook(listen(name), with_kwargs=True)
        for name, module in tower.named_modules()
        if name and not f"{layers}.".startswith(f"{name}.")
    ]
    was_training = tower.training
    try:
        tower.eval()(pixels)
    finally:
        tower.train(was_training)
        for handle in handles:
            handle.remove()
    inside = {n: call for n, call in calls.items() if n.rpartition(".")[0] == layers}
    outside = {n: call for n, call in calls.items() if not n.startswith(f"{layers}.")}
    return inside, outside


def hidden_states_of(output: Any) -> Any:
    """Return the hidden states of a module output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) and output else output


def find_layer_list(tower: PreTrainedModel) -> str:
    """Return the name of the list of layers.

    Raises:
        ConfigError: The tower has no such list, or several.
    """
    count = getattr(tower.config, "num_hidden_layers", None)
    lists = [
        name
        for name, part in tower.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count and is_outermost_list(tower, name)
    ]
    if len(lists) != 1:
        names = ", ".join(lists) or "none"
        raise ConfigError(f"no list of num_hidden_layers = {count} layers: {names}")
    return lists[0]


def _gradients(last: Tensor, weights: dict[str, nn.Parameter]) -> tuple[Tensor | None, ...]:
    parameters = list(weights.values())
    return torch.autograd.grad(last.sum(), parameters, retain_graph=True, allow_unused=True)


def _weights_outside(tower: PreTrainedModel, last: Tensor, parts: Iterable[str]) -> list[str]:
    """Return weights that affect the output of the last layer but are not in any of `parts`."""
    outside = {
        name: value
        for name, value in tower.named_parameters()
        if not name.startswith(tuple(f"{part}." for part in parts))
    }
    if not outside:
        return []
    gradients = _gradients(last, outside)
    return [name for name, grad in zip(outside, gradients, strict=True) if grad is not None]


def _unused(
    tower: PreTrainedModel, last: Tensor, pre: tuple[str, ...], retained: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the largest modules with weights outside `retained`, and unused weights inside."""
    within = {
        name: value
        for name, value in tower.named_parameters()
        if name.startswith(tuple(f"{part}." for part in pre))
    }
    gradients = _gradients(last, within)
    unread = [name for name, grad in zip(within, gradients, strict=True) if grad is None]
    names: dict[str, None] = dict.fromkeys(unread)
    for name, _ in tower.named_parameters():
        if name.startswith(tuple(f"{part}." for part in retained)):
            continue
        parts = name.split(".")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        unused_prefixes = [
            p for p in prefixes if not any(f"{k}.".startswith(f"{p}.") for k in retained)
        ]
        names[unused_prefixes[0]] = None
    return tuple(names)


def _is_gated(layer: nn.Module, config: Any) -> bool:
    """Return True if the feed-forward network has three matrices instead of two."""
    sizes = {config.hidden_size, ffn_size(config)}
    matrices = [
        part
        for part in layer.modules()
        if isinstance(part, nn.Linear) and {part.in_features, part.out_features} == sizes
    ]
    return len(matrices) == 3
