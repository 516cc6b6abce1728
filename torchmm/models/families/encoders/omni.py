"""The encoders of Qwen Omni models: vision encoders of Qwen-VL, and audio encoders.

Audio is split into chunks. The convolutions process each chunk separately, and position embeddings
restart in each chunk. Attention is restricted to windows. Audio is trimmed to full positions, so
that the padding that the Hugging Face model adds has no influence.

| model        | chunk | window         | token               |
|--------------|-------|----------------|---------------------|
| Qwen2.5-Omni | 2 s   | one chunk      | mean of 2 positions |
| Qwen3-Omni   | 1 s   | several chunks | 1 position          |

In Qwen2.5-Omni, up to 20 ms of audio may follow the last token. Layers of the Hugging Face model
read this remainder, but torchmm drops it. In Qwen3-Omni, the last position of a chunk has fewer
frames.

Shape legend: P positions of all audio inputs, K tokens, N chunks of one length, F mel frames, M mel
bins, C channels, T positions of a chunk, V values of a position (its mel frames), D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from math import ceil, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniVisionEncoder,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from torchmm.common.batch import AudioChunks, EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.audio import AudioEncoderFamily, window_lengths
from torchmm.models.families.encoders.family import EncoderFamily, segment_starts
from torchmm.models.families.encoders.qwen import Qwen2_5VisionFamily
from torchmm.models.families.encoders.qwen3 import Qwen3VisionFamily
from torchmm.models.layered import LinearSizes
from torchmm.models.layers.attention import PACKED, PACKED_FLASH, Segments
from torchmm.models.layers.connectors import NormAudioProjection, OmniAudioProjection
from torchmm.models.layers.deepstack import DeepstackConnector

_FRAMES_2_5 = 2
"""Mel frames per position of Qwen2.5-Omni, which has one convolution with a stride of 2."""
_FRAMES = 8
"""Mel frames per position of Qwen3-Omni, which has three convolutions with a stride of 2."""
_CHUNK = 100
"""Mel frames per chunk of Qwen3-Omni (1 s)."""
_CHUNK_POSITIONS = ceil(_CHUNK / _FRAMES)
_LONGEST_S = 300
"""Maximum audio length in seconds, as in the published feature extractors."""
_RATE = 16_000
"""Sample rate in Hz."""
_HOP = 160
"""Samples per mel frame (10 ms)."""


class OmniAudioFamily(AudioEncoderFamily, ABC):
    """The base class of the audio encoders of Omni models."""

    processor_class = "WhisperFeatureExtractor"
    layers = "layers"
    renames = ((r"(thinker\.)?(model\.)?audio_tower\.", "tower."),)
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
    tower: ClassVar[Any]
    """Hugging Face class."""

    @abstractmethod
    def chunk_positions(self, config: Any) -> int:
        """Return the number of positions of a chunk."""

    @abstractmethod
    def window_positions(self, config: Any) -> int:
        """Return the number of positions of an attention window."""

    @abstractmethod
    def embed_chunks(self, tower: Any, chunks_NTV: Tensor) -> Tensor:
        """Return the outputs of the convolutions with position embeddings, (N, T, D).

        Args:
            tower: Hugging Face encoder.
            chunks_NTV: (N, T, V), mel frames of chunks.
        """

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = self.tower._from_config(config, dtype=dtype, attn_implementation=PACKED)
        tower.config._attn_implementation = PACKED_FLASH
        for layer in tower.layers:
            layer.register_forward_hook(_only_output)
        return tower

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> Segments:
        lengths = window_lengths(inputs.grids_thw, self.window_positions(tower.config))
        return Segments.from_starts(segment_starts(lengths), device)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Segments) -> Tensor:
        """Return the hidden states before the layers, (P, D).

        All full chunks are one call. The remainder of each audio is a separate call.
        """
        chunk = self.chunk_positions(tower.config)
        weight = tower.get_submodule(self.patch_embedding).weight
        audios = inputs.pixels.to(weight.dtype).split([prod(grid) for grid in inputs.grids_thw])
        full_parts = [audio[: len(audio) // chunk * chunk] for audio in audios]
        read_PD = self.embed_chunks(tower, torch.cat(full_parts).unflatten(0, (-1, chunk))).flatten(
            0, 1
        )
        pieces = []
        for full_part, audio in zip(
            read_PD.split([len(w) for w in full_parts]), audios, strict=True
        ):
            remainder = audio[len(full_part) :]
            pieces.append(full_part)
            if len(remainder):
                pieces.append(self.embed_chunks(tower, remainder[None])[0])
        return torch.cat(pieces)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Segments
    ) -> Tensor:
        return layer(hidden, context, max_seqlen=0)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        return sum(patches), self.width(config)

    def processor(self, config: Any) -> dict[str, Any]:
        return {"feature_size": config.num_mel_bins, "chunk_length": _LONGEST_S}

    def width(self, config: Any) -> int:
        return config.d_model

    def layer_count(self, config: Any) -> int:
        return config.encoder_layers

    def ffn_size(self, config: Any) -> int:
        return config.encoder_ffn_dim

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
            window=self.window_positions(config),
        )


def _only_output(layer: nn.Module, _: Any, outputs: tuple[Tensor]) -> Tensor:
    """Return the output of a layer that wraps its output in a tuple, unlike other encoders."""
    return outputs[0]


class Qwen2_5OmniVisionFamily(Qwen2_5VisionFamily):  # noqa: N801 - as Hugging Face writes it
    """The encoder of Qwen2.5-VL with separate linear layers for queries, keys and values."""

    renames = ((r"(thinker\.)?(model\.)?visual\.", "tower."),)
    tensor_parallel: ClassVar[dict[str, str]] = {
        **Qwen2_5VisionFamily.tensor_parallel,
        "attn": "local_heads",
        **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "colwise"),
    }
    tower: ClassVar[Any] = Qwen2_5OmniVisionEncoder

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        return replace(super().describe_layer(config, index), packed_qkv=False)


class Qwen2_5OmniAudioFamily(OmniAudioFamily):  # noqa: N801 - as Hugging Face writes it
    """The audio encoder of Qwen2.5-Omni."""

    pre: tuple[str, ...] = ("conv1", "conv2", "positional_embedding")
    patch_embedding = "conv1"
    final_norm = ""  # the norm follows the means, so it is in `merger`
    fixed_merge = True
    pooled = 2
    merger = ("ln_post",)
    merger_styles: ClassVar[dict[str, str]] = {}
    unused = ("proj", "audio_bos_eos_token")  # "proj" is part of the connector of Omni models
    tower: ClassVar[Any] = Qwen2_5OmniAudioEncoder

    def variant(self, config: Any) -> EncoderFamily:
        if config.n_window > config.max_source_positions:
            raise ConfigError(
                f"n_window = {config.n_window} is above max_source_positions = "
                f"{config.max_source_positions} of the encoder; lower it"
            )
        return self

    def detach_merger(self, tower: Any) -> nn.Module:
        projection = NormAudioProjection(tower.ln_post, tower.proj)
        tower.ln_post = None
        tower.proj = None
        return projection

    def chunk_positions(self, config: Any) -> int:
        return config.n_window

    def window_positions(self, config: Any) -> int:
        return config.n_window

    def embed_chunks(self, tower: Any, chunks_NTV: Tensor) -> Tensor:
        frames_NFM = chunks_NTV.unflatten(2, (_FRAMES_2_5, -1)).flatten(1, 2)
        hidden = functional.gelu(tower.conv1(frames_NFM.mT))
        hidden_NTD = functional.gelu(tower.conv2(hidden)).mT
        positions_TD = tower.positional_embedding(hidden_NTD.shape[1])
        return hidden_NTD + positions_TD.to(hidden_NTD.dtype)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        """Return the means of two positions each, (K, D)."""
        pooled_KD = hidden.unflatten(0, (-1, self.pooled)).mean(1)
        return pooled_KD if tower.ln_post is None else tower.ln_post(pooled_KD)

    def linears_before(self, tower: Any) -> LinearSizes:
        mels = tower.conv1.in_channels
        hidden = tower.conv1.out_channels
        return (_FRAMES_2_5 * 3 * mels, hidden), (3 * hidden, hidden)

    def patch_size(self, config: Any) -> int:
        return _FRAMES_2_5 * _HOP

    def max_patches(self, config: Any) -> int:
        return _LONGEST_S * _RATE // self.patch_size(config)

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (self.pooled, _FRAMES_2_5 * config.num_mel_bins), (1, 1, self.pooled)


class Qwen3OmniVisionFamily(Qwen3VisionFamily):
    """The encoder of Qwen3-VL with other names. A video is one image with time positions."""

    unused = ("merger_list",)
    renames = ((r"(thinker\.)?(model\.)?visual\.", "tower."),)
    splits_clips = False
    merger_styles: ClassVar[dict[str, str]] = {
        f"{merger}.mlp.{part}": style
        for merger in ("merger", "deepstack_merger_list.*")
        for part, style in ((0, "colwise"), (2, "rowwise"))
    }
    tower: ClassVar[Any] = Qwen3OmniMoeVisionEncoder

    def detach_merger(self, tower: Any) -> nn.Module:
        connector = DeepstackConnector(tower.merger, tower.merger_list)
        tower.merger = None
        tower.merger_list = None
        return connector


class Qwen3OmniAudioFamily(OmniAudioFamily):
    """The audio encoder of Qwen3-Omni."""

    pre: tuple[str, ...] = ("conv2d1", "conv2d2", "conv2d3", "conv_out", "positional_embedding")
    patch_embedding = "conv2d1"
    final_norm = "ln_post"
    unused = ("proj1", "proj2")  # part of the connector of Omni models
    merger_styles: ClassVar[dict[str, str]] = {"proj1": "colwise", "proj2": "rowwise"}
    tower: ClassVar[Any] = Qwen3OmniMoeAudioEncoder

    def variant(self, config: Any) -> EncoderFamily:
        if config.n_window != _CHUNK // 2:
            raise ConfigError(
                f"n_window = {config.n_window}: the Hugging Face model assumes 13 positions "
                f"per chunk, which requires chunks of {_CHUNK} mel frames; set it to "
                f"{_CHUNK // 2}"
            )
        return self

    def detach_merger(self, tower: Any) -> nn.Module:
        projection = OmniAudioProjection(tower.proj1, tower.act, tower.proj2)
        tower.proj1 = None
        tower.proj2 = None
        return projection

    def chunk_positions(self, config: Any) -> int:
        return _CHUNK_POSITIONS

    def window_positions(self, config: Any) -> int:
        return config.n_window_infer // _CHUNK * _CHUNK_POSITIONS

    def embed_chunks(self, tower: Any, chunks_NTV: Tensor) -> Tensor:
        frames_NFM = chunks_NTV.unflatten(2, (_FRAMES, -1)).flatten(1, 2)
        # The last position of a chunk has fewer frames and is padded with zeros, which are dropped.
        hidden = frames_NFM[:, :_CHUNK].mT[:, None]
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            hidden = functional.gelu(convolution(hidden))
        hidden_NTD = tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        positions_TD = tower.positional_embedding.positional_embedding[: hidden_NTD.shape[1]]
        return hidden_NTD + positions_TD.to(hidden_NTD.dtype)

    def linears_before(self, tower: Any) -> LinearSizes:
        """Return the linear layers per position, averaged over the positions of a chunk."""
        config = tower.config
        frames = _CHUNK
        bins = config.num_mel_bins
        channels = config.downsample_hidden_size
        sizes, inputs = [], 1
        for _ in range(3):
            frames, bins = ceil(frames / 2), ceil(bins / 2)
            outputs = round(channels * bins * frames / _CHUNK_POSITIONS)
            sizes.append((9 * inputs, outputs))
            inputs = channels
        return *sizes, (channels * bins, config.d_model)

    def patch_size(self, config: Any) -> int:
        return _FRAMES * _HOP

    def max_patches(self, config: Any) -> int:
        return _LONGEST_S * _CHUNK_POSITIONS

    def sound_chunks(self, config: Any) -> AudioChunks | None:
        return AudioChunks(_CHUNK * _HOP, _CHUNK_POSITIONS, "patch")

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, _FRAMES * config.num_mel_bins), (1, 1, 1)
