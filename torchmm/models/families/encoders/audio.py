"""Families of the audio encoders Whisper and Wav2Vec2.

Audio inputs of any length are concatenated to one packed sequence, and each attends only to itself.

Whisper. The Hugging Face forward pads each audio to 30 s and attends to the silence. Results are
equal to those of a Hugging Face model whose `max_source_positions` is the length of the audio.

Wav2Vec2 reads the waveform. Convolutions without padding compute one position per 320 samples from
400 samples. Each audio is padded with 80 zeros, so that n patches have n positions. They are equal
to those of the Hugging Face model for the padded audio.

Each audio passes the part before the layers in a separate call. In a joint call, the edges of the
convolutions and the "group" norm over time would depend on the other inputs and on padding.

Masked spans (SpecAugment), which the Hugging Face model samples in training, are omitted. So is the
adapter that some checkpoints have after the layers.

Shape legend: P positions of all audio inputs, F mel frames of one input (two per position), M mel
bins, S samples of a position, C channels, D features.
"""

from __future__ import annotations

import copy
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily, image_starts
from torchmm.models.layered import LinearSizes
from torchmm.models.layers.attention import PACKED, Segments

SAMPLES_PER_POSITION = 320
"""Samples per position: two mel frames of 10 ms each, at 16 kHz."""


class AudioEncoderFamily(EncoderFamily):
    """The base class of audio encoders, whose inputs are concatenated."""

    modality: Literal["image", "audio"] = "audio"
    inputs = "patches"
    has_class_token = False

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Any:
        return Segments.from_starts(image_starts(inputs.grids_thw), device)

    def smallest_folded(
        self, config: Any, shuffle: int
    ) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        (patches, values), _ = self.smallest_image(config)
        patches *= shuffle**2
        return (patches, values), (1, 1, patches)

    def fold(self, x_PD: Tensor, grids_thw: list[tuple[int, int, int]], shuffle: int) -> Tensor:
        """Concatenate the features of consecutive positions. Lengths must be full groups.

        Returns:
            (P / shuffle**2, D shuffle**2).
        """
        return x_PD.reshape(-1, shuffle**2 * x_PD.shape[-1])


class WhisperFamily(AudioEncoderFamily):
    """The Whisper encoder: two convolutions over mel frames, fixed positions, layers, a norm."""

    processor_class = "WhisperFeatureExtractor"
    layers = "layers"
    pre = ("conv1", "conv2", "embed_positions")
    patch_embedding = "conv1"
    final_norm = "layer_norm"
    renames = ((r"(model\.)?encoder\.", "tower."),)
    tensor_parallel: ClassVar[dict[str, str]] = {
        "self_attn": "local_heads",
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "fc1": "colwise",
        "fc2": "rowwise",
        "self_attn_layer_norm": "sequence",
        "final_layer_norm": "sequence",
    }

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = WhisperEncoder._from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=PACKED
        )
        return tower

    def linears_before(self, tower: Any) -> LinearSizes:
        mels, hidden = tower.conv1.in_channels, tower.conv1.out_channels
        return (2 * 3 * mels, hidden), (3 * hidden, hidden)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        """Return the hidden states before the layers, (1, P, D).

        Each audio is a separate call, so that convolutions are padded with zeros at its edges.
        """
        positions = [prod(grid) for grid in inputs.grids_thw]
        weight = tower.conv1.weight
        mels = tower.conv1.in_channels
        embedded = []
        for audio_PD in inputs.pixels.to(weight.dtype).split(positions):
            mels_MF = audio_PD.reshape(-1, mels).T
            hidden = functional.gelu(tower.conv1(mels_MF[None]))
            hidden_PD = functional.gelu(tower.conv2(hidden))[0].T
            embedded.append(hidden_PD + tower.embed_positions.weight[: len(hidden_PD)])
        return torch.cat(embedded)[None]

    def processor(self, config: Any) -> dict[str, Any]:
        return {"feature_size": config.num_mel_bins}

    def patch_size(self, config: Any) -> int:
        return SAMPLES_PER_POSITION

    def max_patches(self, config: Any) -> int:
        return config.max_source_positions

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, 2 * config.num_mel_bins), (1, 1, 1)

    def layer_count(self, config: Any) -> int:
        return config.encoder_layers

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        heads = config.encoder_attention_heads
        return LayerDescription(
            hidden_size=config.d_model,
            heads=heads,
            kv_heads=heads,
            head_dim=config.d_model // heads,
            ffn_size=config.encoder_ffn_dim,
            gated_ffn=False,
            causal=False,
            norm="layer",
            activation=config.activation_function,
            rotary=False,
        )


class Wav2Vec2Family(AudioEncoderFamily):
    """Wav2Vec2 with norms after attention and MLP, as in the base model."""

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
    legacy_names = (
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
                f"adapter_attn_dim = {config.adapter_attn_dim}: adapter layers of Wav2Vec2 "
                "are not supported; use a checkpoint without them"
            )
        return Wav2Vec2StableFamily() if config.do_stable_layer_norm else self

    def linears_before(self, tower: Any) -> LinearSizes:
        """Return (values read per output, outputs per patch) of the convolutions."""
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
        """Return the hidden states before the layers, (1, P, D)."""
        patches = [prod(grid) for grid in inputs.grids_thw]
        weight = tower.feature_projection.projection.weight
        padding = receptive_field(tower.config) - self.patch_size(tower.config)
        embedded = []
        for audio_PS in inputs.pixels.to(weight.dtype).split(patches):
            hidden = functional.pad(audio_PS.reshape(1, 1, -1), (0, max(padding, 0)))
            # The forward of the extractor would enable gradients of the waveform.
            for layer in tower.feature_extractor.conv_layers:
                hidden = layer(hidden)
            hidden_1PD, _ = tower.feature_projection(hidden[:, :, : len(audio_PS)].mT)
            embedded.append(hidden_1PD + tower.encoder.pos_conv_embed(hidden_1PD))
        return self.pre_layer_norm(tower, torch.cat(embedded, dim=1))

    def pre_layer_norm(self, tower: Any, hidden: Tensor) -> Tensor:
        """Return the output of the norm between position embeddings and layers, (1, P, D)."""
        return tower.encoder.layer_norm(hidden)

    def patch_size(self, config: Any) -> int:
        return prod(config.conv_stride)

    def processor(self, config: Any) -> dict[str, Any]:
        return {"feature_size": 1}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, self.patch_size(config)), (1, 1, 1)


class Wav2Vec2StableFamily(Wav2Vec2Family):
    """Wav2Vec2 with norms before attention and MLP and after all layers (large models)."""

    pre = ("feature_extractor", "feature_projection", "encoder.pos_conv_embed")
    final_norm = "encoder.layer_norm"

    def pre_layer_norm(self, tower: Any, hidden: Tensor) -> Tensor:
        return hidden


def window_lengths(grids_thw: list[tuple[int, int, int]], window: int) -> list[int]:
    """Return the number of positions of each window of all audio inputs.

    The last window of an input may be shorter.

    Args:
        grids_thw: Grids, whose product is the number of positions of an input.
        window: Number of positions of a full window.
    """
    lengths = []
    for grid in grids_thw:
        num_full, remainder = divmod(prod(grid), window)
        lengths += [window] * num_full + [remainder] * (remainder > 0)
    return lengths


def receptive_field(config: Any) -> int:
    """Return the number of samples that one position depends on."""
    field, step = 1, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        field += (kernel - 1) * step
        step *= stride
    return field
