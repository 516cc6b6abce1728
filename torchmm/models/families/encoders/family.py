"""How a family of image encoders is cut into pre, context, layers and post.

A family says which Hugging Face class is the tower, what runs before its layers, what every stage
computes from the image grids alone (`context`), how a layer is called and what the last one
returns. Rejected: running the towers' own forwards, in which Qwen's window permutation and
SigLIP2's padding are inline, so that a stage could not start in the middle.

Shape legend: N images, P patches of all images, S positions of one image (class token included),
D features, C channels.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import EncoderInputs, SoundChunks
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.tiling import Tiling
from torchmm.models.layered import LinearSizes
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.connectors import fold_neighbours


def side(size: Any) -> int:
    """Side of a square that a config gives as a number or as two equal ones.

    Raises:
        ConfigError: the two differ.
    """
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise ConfigError(f"[model] size {size} is not a square; only square sizes are supported")
    return int(sides.pop())


def patches_per_row(config: Any) -> int:
    """Patches per row of an image of a fixed size."""
    return side(config.image_size) // side(config.patch_size)


class EncoderFamily:
    """CLIP-like towers on images of a fixed size; base of all families."""

    modality: Literal["image", "audio"] = "image"
    inputs: Literal["fixed", "patches"] = "fixed"
    processor_class = "CLIPImageProcessor"
    layers = "encoder.layers"
    pre: tuple[str, ...] = ("embeddings", "pre_layrnorm")
    patch_embedding = "embeddings.patch_embedding"
    final_norm: str = "post_layernorm"
    """Norm after the last layer, if any, which only some composites' features pass."""
    unused: tuple[str, ...] = ()
    """Other parts that no features pass."""
    has_class_token = True
    listed = True
    """Whether it is in the table; otherwise the extension `auto_models` proved what is
    claimed of it, which tensor parallelism is not part of."""
    in_composites = True
    """Whether Hugging Face's LLaVA and its like can have the tower: they build it with `AutoModel`
    and take all but a class token for patches."""
    same_as_clip = False
    """Whether the tower is CLIP's under another name, so that exports can call it that."""
    replaced_processor: str = ""
    """Class in its files that `processor_class` stands for, if Hugging Face has it with torchvision
    alone."""
    crops = True
    """Whether the image processor crops images to a square; otherwise it resizes them to one."""
    tiling: Tiling | None = None
    """How image processors in its files cut pictures, if that is what it was made for."""
    renames: tuple[tuple[str, str], ...] = ()
    """How files of whole models name the tower, if unusual; see `WeightFiles`."""
    old_names: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    optional: tuple[str, ...] = ()
    """How files differ from the tower, see `WeightFiles`."""
    fixed_merge = False
    """Whether the tower itself merges patches, which fixes its last layer and connectors."""
    merger_styles: ClassVar[dict[str, str]] = {"mlp.0": "colwise", "mlp.2": "rowwise"}
    """Style of each linear of what `take_merger` returns."""
    merger_norms: tuple[str, ...] = ()
    """Parts of it that apply a norm before their linears."""
    splits_clips = False
    """Where patches span several frames: whether each group of frames is an image of its own."""
    pooled = 1
    """Consecutive positions of a sound that `finish` averages into one."""
    merger: tuple[str, ...] = ()
    """Its parts with parameters that do so, if any."""
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
    """Style of each linear and norm of a layer."""

    def variant(self, config: Any) -> EncoderFamily:
        """The family for `config`: models of one type may be cut in different ways.

        Raises:
            ConfigError: the family has no part for it.
        """
        return self

    def styles(self, config: Any) -> dict[str, str]:
        """Tensor-parallel style of the parts of a layer, by name."""
        return self.tensor_parallel

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The tower, whole."""
        return AutoModel.from_config(
            config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
        )

    def taps(self, config: Any) -> tuple[int, ...]:
        """Layers whose outputs the LLM gets too (deepstack), rising."""
        return ()

    def take_merger(self, tower: Any) -> nn.Module:
        """The part of the tower that merges patches for the LLM, which then is no part of it."""
        merger = tower.merger
        tower.merger = None
        return merger

    def linears_before(self, tower: Any) -> LinearSizes:
        """(inputs, outputs) of the matrix products per patch before the layers."""
        weight = tower.get_submodule(self.patch_embedding).weight
        return ((weight.numel() // len(weight), len(weight)),)

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Any:
        """What layers need besides hidden states, from the grids alone."""
        return None

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        """Return the hidden states before the first layer: (N, S, D)."""
        hidden_NSD = tower.embeddings(inputs.pixels)
        return tower.pre_layrnorm(hidden_NSD) if "pre_layrnorm" in self.pre else hidden_NSD

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        """One layer."""
        return layer(hidden, context)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        """(P, D) outputs, image after image, in the order of their placeholders."""
        return (hidden[:, 1:] if drop_class_token else hidden).flatten(0, 1)

    def fold(self, x_PD: Tensor, grids_thw: list[tuple[int, int, int]], shuffle: int) -> Tensor:
        """(P / shuffle**2, D shuffle**2): neighbours that become one token."""
        return fold_neighbours(x_PD, grids_thw, shuffle)

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        """Shape of the hidden states between layers, from the number of patches of each image."""
        if self.inputs == "patches":
            return 1, sum(patches), self.width(config)
        return len(patches), patches[0] + self.tokens_before(config), self.width(config)

    def tokens_before(self, config: Any) -> int:
        """Positions in the layers before those of an image's patches."""
        return int(self.has_class_token)

    def output_size(self, config: Any) -> int:
        """D of what `finish` returns."""
        return self.width(config)

    def merge(self, config: Any) -> int:
        """Patches per row and column that `finish` merges into one."""
        return 1

    def processor(self, config: Any) -> dict[str, Any]:
        """Return the settings of the image processor that follow from the config."""
        size = side(config.image_size)
        square = {"height": size, "width": size}
        if self.crops:
            return {"size": {"shortest_edge": size}, "crop_size": square}
        return {"size": square}

    def known_processor(self, name: str) -> str:
        """The image processor that stands for one that files name."""
        replaced = name.removesuffix("Fast") == self.replaced_processor
        return self.processor_class if replaced else name

    def patch_size(self, config: Any) -> int:
        """Side of a patch in pixels; for sounds, its samples."""
        return side(config.patch_size)

    def max_patches(self, config: Any) -> int:
        """Most patches of a sound; 0: any number. 0 for images."""
        return 0

    def sound_chunks(self, config: Any) -> SoundChunks | None:
        """How sounds are cut; None: they are read whole."""
        return None

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Shape of the pixels and (frames, rows, columns) of the smallest valid image."""
        size = side(config.image_size)
        patches = patches_per_row(config)
        return (1, config.num_channels, size, size), (1, patches, patches)

    def smallest_folded(
        self, config: Any, shuffle: int
    ) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """The same for the smallest image that `fold` can fold."""
        return self.smallest_image(config)

    def width(self, config: Any) -> int:
        """D in the layers."""
        return config.hidden_size

    def ffn_size(self, config: Any) -> int:
        """Hidden size of the feed-forward part."""
        return config.intermediate_size

    def layer_count(self, config: Any) -> int:
        """Layers of the whole tower."""
        return config.num_hidden_layers

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        """Sizes of a layer."""
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
    """Starts of segments of one image each, and the end of the last."""
    return starts_of([prod(grid) for grid in grids_thw])


def frame_starts(grids_thw: list[tuple[int, int, int]]) -> list[int]:
    """The same for frames."""
    return starts_of([rows * columns for frames, rows, columns in grids_thw for _ in range(frames)])


def starts_of(lengths: list[int]) -> list[int]:
    """The same for segments of given lengths."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
