"""The base class of encoder families, which split a Hugging Face encoder into pipeline stages.

    embed --hidden--> run_layer ... run_layer --hidden--> finish (--> fold) --> connector
       ^                  ^                                  ^
       +------------------+---- context (from grids only) ---+

A family defines the Hugging Face class, the part before the layers (`embed`), the inputs that each
stage computes from the image grids (`context`), the layer call (`run_layer`) and the part after the
layers (`finish`). Hugging Face forwards of encoders cannot start in the middle, because they
contain steps such as the window permutation of Qwen and the padding of SigLIP2.

Shape legend: N images, P patches of all images, S positions of one image (class token included),
D features, C channels.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import AudioChunks, EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.tiling import Tiling
from torchmm.models.layered import LinearSizes
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.connectors import fold_patches


def side(size: Any) -> int:
    """Return the side of a square, which a config has as one number or as two equal numbers.

    Raises:
        ConfigError: The two numbers differ.
    """
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise ConfigError(f"[model] size {size} is not a square; only square sizes are supported")
    return int(sides.pop())


def patches_per_row(config: Any) -> int:
    """Return the number of patches per row of an image of fixed size."""
    return side(config.image_size) // side(config.patch_size)


class EncoderFamily:
    """The base class of all encoder families. Defaults are those of CLIP."""

    modality: Literal["image", "audio"] = "image"
    inputs: Literal["fixed", "patches"] = "fixed"
    processor_class = "CLIPImageProcessor"
    layers = "encoder.layers"
    pre: tuple[str, ...] = ("embeddings", "pre_layrnorm")
    patch_embedding = "embeddings.patch_embedding"
    final_norm: str = "post_layernorm"
    """Name of the norm after the last layer, or "". Only some multimodal models apply it."""
    unused: tuple[str, ...] = ()
    """Names of other submodules and parameters that do not affect the features."""
    has_class_token = True
    is_registered = True
    """Whether the family is registered. Otherwise, the extension `auto_models` has verified it,
    without tensor parallelism."""
    is_llava_compatible = True
    """Whether LLaVA and similar Hugging Face classes support the encoder. They build it with
    `AutoModel` and use all positions but a class token as patches."""
    is_clip_equivalent = False
    """Whether the encoder is equal to CLIP except for its name, so that exports can use CLIP."""
    replaced_processor: str = ""
    """Processor class in the files that `processor_class` replaces, or "". Hugging Face provides it
    only with torchvision."""
    crops = True
    """Whether the image processor crops images to a square. Otherwise, it resizes them."""
    tiling: Tiling | None = None
    """Tiling of images by the image processor in the files, or None without tiles."""
    renames: tuple[tuple[str, str], ...] = ()
    """Additional renames for files of full models (see `WeightFiles`)."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    fused_tensors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    optional_suffixes: tuple[str, ...] = ()
    """Differences between files and encoder (see `WeightFiles`)."""
    fixed_merge = False
    """Whether the encoder itself merges patches. Feature layer and connectors are then fixed."""
    merger_styles: ClassVar[dict[str, str]] = {"mlp.0": "colwise", "mlp.2": "rowwise"}
    """Tensor-parallel style of each linear layer in the result of `detach_merger`."""
    merger_norms: tuple[str, ...] = ()
    """Submodules of the merger that apply a norm before their linear layers."""
    splits_clips = False
    """Whether each group of video frames is a separate image, if patches span several frames."""
    pooled = 1
    """Number of consecutive audio positions that `finish` averages into one."""
    merger: tuple[str, ...] = ()
    """Submodules with parameters that merge positions, if any."""
    tensor_parallel: ClassVar[dict[str, str]] = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
        "layer_norm1": "sequence",
        "layer_norm2": "sequence",
    }
    """Tensor-parallel style of each linear layer and norm of a layer."""

    def variant(self, config: Any) -> EncoderFamily:
        """Return the family for `config`, because models of one type may differ in structure.

        Raises:
            ConfigError: The family does not support the config.
        """
        return self

    def styles(self, config: Any) -> dict[str, str]:
        """Return the tensor-parallel styles of the submodules of a layer, by name."""
        return self.tensor_parallel

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Build the complete Hugging Face encoder."""
        return AutoModel.from_config(
            config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
        )

    def deepstack_layers(self, config: Any) -> tuple[int, ...]:
        """Return the increasing indices of layers whose outputs the LLM also reads (DeepStack)."""
        return ()

    def detach_merger(self, tower: Any) -> nn.Module:
        """Remove the patch merger from the encoder and return it, for use as the connector."""
        merger = tower.merger
        tower.merger = None
        return merger

    def linears_before(self, tower: Any) -> LinearSizes:
        """Return (input, output features) of the linear layers per patch before the layers."""
        weight = tower.get_submodule(self.patch_embedding).weight
        return ((weight.numel() // len(weight), len(weight)),)

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Any:
        """Return layer inputs that depend only on the grids, such as segments and rotary tables."""
        return None

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        """Return the hidden states before the first layer: (N, S, D)."""
        hidden_NSD = tower.embeddings(inputs.pixels)
        return tower.pre_layrnorm(hidden_NSD) if "pre_layrnorm" in self.pre else hidden_NSD

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        """Return the output of one layer. Shapes are those of `hidden`."""
        return layer(hidden, context)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        """Return the (P, D) outputs, image after image, in the order of their placeholders."""
        if self.inputs == "patches":
            return hidden[0]
        return (hidden[:, 1:] if drop_class_token else hidden).flatten(0, 1)

    def fold(self, x_PD: Tensor, grids_thw: list[tuple[int, int, int]], shuffle: int) -> Tensor:
        """Return (P / shuffle**2, D shuffle**2), the concatenated features of adjacent patches."""
        return fold_patches(x_PD, grids_thw, shuffle)

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        """Return the shape of hidden states between layers, given the patches of each image."""
        if self.inputs == "patches":
            return 1, sum(patches), self.width(config)
        return len(patches), patches[0] + self.num_prefix_tokens(config), self.width(config)

    def num_prefix_tokens(self, config: Any) -> int:
        """Return the number of positions of an image before its patches, such as class tokens."""
        return int(self.has_class_token)

    def output_size(self, config: Any) -> int:
        """Return the number of features D of the result of `finish`."""
        return self.width(config)

    def merge(self, config: Any) -> int:
        """Return the number of patches along rows and columns that `finish` merges into one."""
        return 1

    def processor(self, config: Any) -> dict[str, Any]:
        """Return the settings of the image processor that follow from the config."""
        size = side(config.image_size)
        square = {"height": size, "width": size}
        if self.crops:
            return {"size": {"shortest_edge": size}, "crop_size": square}
        return {"size": square}

    def resolve_processor_class(self, name: str) -> str:
        """Return the image processor class to use for a class name in files."""
        replaced = name.removesuffix("Fast") == self.replaced_processor
        return self.processor_class if replaced else name

    def patch_size(self, config: Any) -> int:
        """Return the side of a patch in pixels, or the number of samples of an audio position."""
        return side(config.patch_size)

    def max_patches(self, config: Any) -> int:
        """Return the maximum number of positions of an audio, or 0 for no limit and for images."""
        return 0

    def sound_chunks(self, config: Any) -> AudioChunks | None:
        """Return the chunks into which audio is split, or None without chunks."""
        return None

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Return the pixel shape and (frames, rows, columns) of the smallest valid image."""
        size = side(config.image_size)
        patches = patches_per_row(config)
        return (1, config.num_channels, size, size), (1, patches, patches)

    def smallest_folded(
        self, config: Any, shuffle: int
    ) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Return the same for the smallest image that `fold` supports."""
        return self.smallest_image(config)

    def width(self, config: Any) -> int:
        """Return the number of features D in the layers."""
        return config.hidden_size

    def ffn_size(self, config: Any) -> int:
        """Return the hidden size of the MLP."""
        return config.intermediate_size

    def layer_count(self, config: Any) -> int:
        """Return the number of layers of the complete encoder."""
        return config.num_hidden_layers

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        """Return the shapes of a layer."""
        heads, width = config.num_attention_heads, self.width(config)
        return LayerDescription(
            hidden_size=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            ffn_size=self.ffn_size(config),
            gated_ffn=False,
            causal=False,
            norm="layer",
            activation=config.hidden_act,
            rotary=False,
            batched=self.inputs == "fixed",
        )


def image_starts(grids_thw: list[tuple[int, int, int]]) -> list[int]:
    """Return the starts of segments of one image each, and the total length."""
    return segment_starts([prod(grid) for grid in grids_thw])


def frame_starts(grids_thw: list[tuple[int, int, int]]) -> list[int]:
    """Return the starts of segments of one frame each, and the total length."""
    return segment_starts(
        [rows * columns for frames, rows, columns in grids_thw for _ in range(frames)]
    )


def segment_starts(lengths: list[int]) -> list[int]:
    """Return the starts of segments with the given lengths, and the total length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
