"""Image encoders that are not registered: their structure, and a small copy of their config.

The supported structure is that of ViT: modules that compute hidden states from pixels, a list of
layers that are called with hidden states only, and optional norms between and after them. These
modules are found in the forward pass of the Hugging Face model, by the tensor that each module
receives, and not by their names. An operation between modules (an addition, a reordering) breaks
this chain, and the model is rejected. The structure alone does not prove that the split model
computes the same numbers. `extensions/auto_models/parity.py` proves that.

Before the layers, a pixel may affect only the position of its patch. Positions must be in patch
order, after positions without a patch, because features are distinguished by position.

The common names of modules ("embeddings", "layernorm") are not sufficient, because they do not
determine the order of the calls.

Shape legend: N images, S positions of one image, P patches of one image, D features.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.extensions.auto_models.encoder_structure import (
    EncoderStructure,
    example_pixels,
    ffn_size,
    find_layer_list,
    hidden_states_of,
)
from torchmm.models.families.encoders.family import EncoderFamily, patches_per_row, side
from torchmm.models.families.introspection import small_config
from torchmm.models.families.small_configs import shrink_encoder_settings
from torchmm.models.layers.attention import PACKED


class DetectedEncoderFamily(EncoderFamily):
    """Family of a tower whose structure was detected."""

    is_registered = False
    is_llava_compatible = False
    tensor_parallel: ClassVar[dict[str, str]] = {}

    def __init__(self, form: EncoderStructure) -> None:
        self.form = form
        self.layers = form.layers
        self.pre = form.pre
        self.patch_embedding = form.patch_embedding
        self.final_norm = form.final_norm
        self.unused = form.unused
        self.has_class_token = form.num_prefix_tokens > 0
        self.legacy_names = form.legacy_names
        self.renames = _renames(form)
        self.processor_class = form.processor_class

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        return build_encoder_model(config, dtype, PACKED)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        weight = tower.get_submodule(self.patch_embedding).weight
        hidden = inputs.pixels.to(weight.dtype)
        for name in self.pre:
            hidden = hidden_states_of(tower.get_submodule(name)(hidden))
        return hidden

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        return hidden_states_of(layer(hidden, **dict.fromkeys(self.form.none_arguments)))

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden[:, self.form.num_prefix_tokens :].flatten(0, 1)

    def num_prefix_tokens(self, config: Any) -> int:
        return self.form.num_prefix_tokens

    def processor(self, config: Any) -> dict[str, Any]:
        size = side(config.image_size)
        square = {"height": size, "width": size}
        cls = getattr(transformers, f"{self.processor_class}Pil", None)
        if getattr(cls, "do_center_crop", False):
            return super().processor(config)
        return {"size": square}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        rows = patches_per_row(config)
        return tuple(example_pixels(config, 1).shape), (1, rows, rows)

    def ffn_size(self, config: Any) -> int:
        return ffn_size(config)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        heads = config.num_attention_heads
        width = config.hidden_size
        return LayerDescription(
            hidden_size=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            ffn_size=self.ffn_size(config),
            gated_ffn=self.form.gated_ffn,
            causal=False,
            norm="rms" if self.form.rms else "layer",
            activation=str(getattr(config, "hidden_act", "gelu")),
            rotary=False,
            batched=True,
        )


def build_encoder_model(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Return the tower of a config.

    Raises:
        ConfigError: Transformers has no class for it.
    """
    cls = encoder_class(config)
    return cls._from_config(config, dtype=dtype, attn_implementation=attention)


def encoder_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the Hugging Face class of a tower.

    Some towers of dual encoders have a class that `AutoModel` does not support.

    Raises:
        ConfigError: Transformers has no class, or the class does not read pixels.
    """
    if type(config) in MODEL_MAPPING:
        known = MODEL_MAPPING[type(config)]
        classes = list(known) if isinstance(known, tuple) else [known]
    else:
        module = type(config).__module__.replace(".configuration_", ".modeling_")
        classes = [
            cls
            for cls in vars(import_module(module)).values()
            if isinstance(cls, type)
            and issubclass(cls, PreTrainedModel)
            and getattr(cls, "config_class", None) is type(config)
            and re.search(r"(?<!PreTrained)(Model|Transformer)$", cls.__name__)
        ]
    towers = [cls for cls in classes if cls and cls.main_input_name == "pixel_values"]
    if len(towers) != 1:
        raise ConfigError(f"transformers has no image encoder for {config.model_type!r}")
    return towers[0]


def _renames(form: EncoderStructure) -> tuple[tuple[str, str], ...]:
    """Return the prefixes of tower names in files of the tower and of models that contain it."""
    (top, *other_names) = {name.partition(".")[0] for name in (*form.pre, form.layers)}
    head = rf"({form.prefix}\.)?" if form.prefix else ""
    if not other_names and f"{top}." in form.layers:  # a wrapper around all modules
        return ((rf"{head}(vision_model\.)?{top}\.", f"tower.{top}."),)
    return ((rf"{form.prefix}\.", "tower."),) if form.prefix else ()


def small_encoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same type whose tower is small and has every type of layer.

    Raises:
        ConfigError: No small copy has every type of layer, or images are not squares of one size.
    """
    if not getattr(config, "image_size", None) or not getattr(config, "patch_size", None):
        raise ConfigError(
            "its config has no image_size and patch_size, so images have no fixed size"
        )
    if getattr(config, "num_hidden_layers", None) is None:
        raise ConfigError("its config has no num_hidden_layers, so the list of layers is unknown")
    patches_per_row(config)
    return small_config(config, _layers, shrink_encoder_settings)


def patch_order_problem(family: DetectedEncoderFamily, tower: PreTrainedModel) -> str:
    """Return why positions before the layers are not those of patches in row order, or ""."""
    config: Any = tower.config
    rows = patches_per_row(config)
    size = side(config.patch_size)
    pixels = example_pixels(config, 1).repeat(rows * rows + 1, 1, 1, 1)
    for patch in range(rows * rows):
        row, column = divmod(patch, rows)
        pixels[patch, :, row * size : (row + 1) * size, column * size : (column + 1) * size] += 1
    grids = [(1, rows, rows)] * len(pixels)
    inputs = EncoderInputs(pixels, grids, torch.empty(0))
    with torch.no_grad():
        hidden = family.embed(tower, inputs, None)
    # A rounding difference in another row of a batch is not an effect of a pixel.
    changed = (hidden[:-1] - hidden[-1:]).abs().amax(-1) > 1e-4
    for patch in range(rows * rows):
        affected = changed[patch].nonzero().flatten().tolist()
        if affected != [family.form.num_prefix_tokens + patch]:
            return (
                f"pixels of patch {patch} change positions {affected} before the layers instead "
                f"of only {family.form.num_prefix_tokens + patch}"
            )
    return ""


def resolve_processor_class(config: PreTrainedConfig, settings: dict[str, Any]) -> str:
    """Return the image processor class of a tower.

    It is the class in its files, or else the class in transformers for its type or its dual
    encoder.

    Args:
        config: Config of the tower.
        settings: Settings of the image processor, in its files and the recipe.

    Raises:
        ConfigError: No image processor class is found.
    """
    folder = type(config).__module__.split(".")[-2]
    types = [t for t in IMAGE_PROCESSOR_MAPPING_NAMES if model_type_to_module_name(t) == folder]
    candidates = [config.model_type, *types]
    names = [settings.get("image_processor_type")]
    names += [n for t in candidates for n in (IMAGE_PROCESSOR_MAPPING_NAMES.get(t) or {}).values()]
    class_name = next((name for name in names if name), None)
    if class_name is None:
        raise ConfigError(
            f"no image processor is registered for {config.model_type!r}; set processor = "
            '{image_processor_type = "..."}'
        )
    return str(class_name).removesuffix("Fast").removesuffix("Pil")


def _layers(config: PreTrainedConfig) -> nn.ModuleList:
    tower = build_encoder_model(config, torch.float32, "eager")
    layers = tower.get_submodule(find_layer_list(tower))
    assert isinstance(layers, nn.ModuleList)
    return layers
