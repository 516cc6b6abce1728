"""The towers of Qwen3-Omni: Qwen3-VL's for images, and one for sounds.

A sound is cut into chunks of a second, which three convolutions read one by one; each chunk has
positions of its own, the last of them with fewer frames than the others. Windows of several chunks
attend to themselves. Sounds end with a whole position, so that what Hugging Face's model reads
beyond their end, the padding to the longest chunk of the call, has no influence.

Shape legend: P positions of all sounds, N chunks of one length, F mel frames, M mel bins, C
channels, T positions of a chunk, D features.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from torchmm.common.batch import EncoderInputs, LayerDescription
from torchmm.common.errors import ConfigError
from torchmm.models.families.encoders.audio import SoundFamily
from torchmm.models.families.encoders.family import EncoderFamily, starts_of
from torchmm.models.families.encoders.qwen3 import Qwen3VisionFamily
from torchmm.models.layered import LinearSizes
from torchmm.models.layers.attention import PACKED, PACKED_UNSPLIT, Segments
from torchmm.models.layers.connectors import SoundProjection
from torchmm.models.layers.deepstack import DeepstackConnector

_FRAMES = 8
"""Mel frames of a position: three convolutions with a stride of 2."""
_CHUNK = 100
"""Mel frames of a chunk, a second."""
_CHUNK_POSITIONS = ceil(_CHUNK / _FRAMES)
_LONGEST_S = 300
"""Longer sounds are cut: what the published extractor keeps. A chunk lasts a second."""
_HOP = 160
"""Samples from a mel frame to the next, 10 ms at 16 kHz."""


class Qwen3OmniVisionFamily(Qwen3VisionFamily):
    """Qwen3-VL's under other names; a clip is one image, with times as positions."""

    unused = ("merger_list",)
    renames = ((r"(thinker\.)?(model\.)?visual\.", "tower."),)
    splits_clips = False
    merger_styles: ClassVar[dict[str, str]] = {
        f"{merger}.mlp.{part}": style
        for merger in ("merger", "deepstack_merger_list.*")
        for part, style in ((0, "colwise"), (2, "rowwise"))
    }
    tower: ClassVar[Any] = Qwen3OmniMoeVisionEncoder

    def take_merger(self, tower: Any) -> nn.Module:
        connector = DeepstackConnector(tower.merger, tower.merger_list)
        tower.merger = None
        tower.merger_list = None
        return connector


class Qwen3OmniSoundFamily(SoundFamily):
    """Qwen3-Omni's tower for sounds."""

    processor_class = "WhisperFeatureExtractor"
    layers = "layers"
    pre: tuple[str, ...] = ("conv2d1", "conv2d2", "conv2d3", "conv_out", "positional_embedding")
    patch_embedding = "conv2d1"
    final_norm = "ln_post"
    unused = ("proj1", "proj2")  # without the LLM that they are made for
    renames = ((r"(thinker\.)?(model\.)?audio_tower\.", "tower."),)
    merger_styles: ClassVar[dict[str, str]] = {"proj1": "colwise", "proj2": "rowwise"}
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

    def variant(self, config: Any) -> EncoderFamily:
        if config.n_window != _CHUNK // 2:
            raise ConfigError(
                f"n_window = {config.n_window}: Hugging Face's model counts 13 positions in every "
                f"chunk, which only those of {_CHUNK} mel frames have; set it to {_CHUNK // 2}"
            )
        return self

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = Qwen3OmniMoeAudioEncoder._from_config(
            config, dtype=dtype, attn_implementation=PACKED
        )
        tower.config._attn_implementation = PACKED_UNSPLIT
        for layer in tower.layers:
            layer.register_forward_hook(_only_output)
        return tower

    def take_merger(self, tower: Any) -> nn.Module:
        projection = SoundProjection(tower.proj1, tower.act, tower.proj2)
        tower.proj1 = None
        tower.proj2 = None
        return projection

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> Segments:
        window = _window(tower.config)
        lengths = []
        for grid in inputs.grids_thw:
            whole, rest = divmod(prod(grid), window)
            lengths += [window] * whole + [rest] * (rest > 0)
        return Segments.from_starts(starts_of(lengths), device)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Segments) -> Tensor:
        """(P, D); all whole chunks in one call, what remains of each sound in another."""
        chunk = _CHUNK_POSITIONS
        mels = tower.config.num_mel_bins
        sounds = inputs.pixels.to(tower.conv_out.weight.dtype).split(
            [prod(grid) for grid in inputs.grids_thw]
        )
        wholes = [sound[: len(sound) // chunk * chunk] for sound in sounds]
        frames_NFM = torch.cat(wholes).reshape(-1, chunk * _FRAMES, mels)
        # The last position of a chunk has fewer frames: the rest is filled with zeros.
        read_ND = self._read(tower, frames_NFM[:, :_CHUNK]).flatten(0, 1)
        pieces = []
        for whole, sound in zip(read_ND.split([len(w) for w in wholes]), sounds, strict=True):
            rest = sound[len(whole) :]
            pieces.append(whole)
            if len(rest):
                pieces.append(self._read(tower, rest.reshape(1, -1, mels))[0])
        return torch.cat(pieces)

    def _read(self, tower: Any, frames_NFM: Tensor) -> Tensor:
        """(N, T, D)."""
        hidden = frames_NFM.mT[:, None]
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            hidden = functional.gelu(convolution(hidden))
        hidden_NTD = tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        positions_TD = tower.positional_embedding.positional_embedding[: hidden_NTD.shape[1]]
        return hidden_NTD + positions_TD.to(hidden_NTD.dtype)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Segments
    ) -> Tensor:
        return layer(hidden, context, max_seqlen=0)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        return sum(patches), self.width(config)

    def linears_before(self, tower: Any) -> LinearSizes:
        """Of a position, on the average of a chunk."""
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

    def processor(self, config: Any) -> dict[str, Any]:
        return {"feature_size": config.num_mel_bins, "chunk_length": _LONGEST_S}

    def patch_size(self, config: Any) -> int:
        return _FRAMES * _HOP

    def max_patches(self, config: Any) -> int:
        return _LONGEST_S * _CHUNK_POSITIONS

    def sound_chunk(self, config: Any) -> tuple[int, int] | None:
        return _CHUNK * _HOP, _CHUNK_POSITIONS

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, _FRAMES * config.num_mel_bins), (1, 1, 1)

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
            window=_window(config),
        )


def _only_output(layer: nn.Module, _: Any, outputs: tuple[Tensor]) -> Tensor:
    """Of a layer that returns a tuple of one, which all others do not."""
    return outputs[0]


def _window(config: Any) -> int:
    """Positions that attend to each other."""
    return config.n_window_infer // _CHUNK * _CHUNK_POSITIONS
