"""How Wav2Vec2 is cut into pre, context, layers and post.

It hears the waveform itself. Convolutions without padding make one position of every 320 samples,
but look at 400: behind each sound stand the 80 zeros that its last position would lack, so that a
sound of n patches has n positions, those of Hugging Face's model for the sound with its zeros.

Each sound passes what stands before the layers by itself. Rejected: all of them in one call, which
leaks from sound to sound in two places, the edges of the convolutions and the "group" norm over
time, whose statistics are those of everything in the call, padding included.

Left out: masked spans (SpecAugment), which Hugging Face's model draws in training, and the adapter
that some checkpoints have behind the layers.

Shape legend: P positions of all sounds, S samples of one, C channels, D features.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.models.families.audio import SoundFamily
from torchmm.models.families.encoder_family import EncoderFamily
from torchmm.models.layered import LinearSizes


class Wav2Vec2Family(SoundFamily):
    """Wav2Vec2 with norms behind attention and feed-forward, as the base model has them."""

    processor_class = "Wav2Vec2FeatureExtractor"
    pre: tuple[str, ...] = (
        "feature_extractor",
        "feature_projection",
        "encoder.pos_conv_embed",
        "encoder.layer_norm",
    )
    final_norm: str = ""
    unused = ("masked_spec_embed", "adapter")
    renames = ((r"wav2vec2\.", "tower."), (r"(?=feature_projection\.)", "tower."))
    old_names = (
        (r"conv\.weight_g$", "conv.parametrizations.weight.original0"),
        (r"conv\.weight_v$", "conv.parametrizations.weight.original1"),
    )
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attention.q_proj": "colwise",
        "attention.k_proj": "colwise",
        "attention.v_proj": "colwise",
        "attention.out_proj": "rowwise",
        "feed_forward.intermediate_dense": "colwise",
        "feed_forward.output_dense": "rowwise",
        "layer_norm": "sequence",
        "final_layer_norm": "sequence",
    }

    def variant(self, config: Any) -> EncoderFamily:
        if config.adapter_attn_dim is not None:
            raise ConfigError(
                f"adapter_attn_dim = {config.adapter_attn_dim}: adapters of Wav2Vec2's layers are "
                "not implemented; take a checkpoint without them"
            )
        return Wav2Vec2StableFamily() if config.do_stable_layer_norm else self

    def linears_before(self, tower: Any) -> LinearSizes:
        """Of convolutions: what one output reads, and the outputs per patch."""
        config = tower.config
        inputs, positions, sizes = 1, self.patch_size(config), []
        layers = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
        for channels, kernel, stride in layers:
            positions //= stride
            sizes.append((kernel * inputs, positions * channels))
            inputs = channels
        hidden, groups = config.hidden_size, config.num_conv_pos_embedding_groups
        sizes.append((inputs, hidden))
        return *sizes, (config.num_conv_pos_embeddings * hidden // groups, hidden)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        """(1, P, D)."""
        patches = [prod(grid) for grid in inputs.grids_thw]
        weight = tower.feature_projection.projection.weight
        lacking = receptive_field(tower.config) - self.patch_size(tower.config)
        embedded = []
        for sound_PS in inputs.pixels.to(weight.dtype).split(patches):
            hidden = functional.pad(sound_PS.reshape(1, 1, -1), (0, max(lacking, 0)))
            # Not the extractor's own forward, which asks for gradients of the waveform.
            for layer in tower.feature_extractor.conv_layers:
                hidden = layer(hidden)
            hidden_1PD, _ = tower.feature_projection(hidden[:, :, : len(sound_PS)].mT)
            embedded.append(hidden_1PD + tower.encoder.pos_conv_embed(hidden_1PD))
        return self.norm_before(tower, torch.cat(embedded, dim=1))

    def norm_before(self, tower: Any, hidden: Tensor) -> Tensor:
        """What stands between positions and layers."""
        return tower.encoder.layer_norm(hidden)

    def patch_size(self, config: Any) -> int:
        return prod(config.conv_stride)

    def processor(self, config: Any) -> dict[str, Any]:
        return {"feature_size": 1}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, self.patch_size(config)), (1, 1, 1)


class Wav2Vec2StableFamily(Wav2Vec2Family):
    """With norms before attention and feed-forward, and one behind all layers: the large ones."""

    pre = ("feature_extractor", "feature_projection", "encoder.pos_conv_embed")
    final_norm = "encoder.layer_norm"

    def norm_before(self, tower: Any, hidden: Tensor) -> Tensor:
        return hidden


def receptive_field(config: Any) -> int:
    """Samples that one position depends on."""
    field, step = 1, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        field += (kernel - 1) * step
        step *= stride
    return field
