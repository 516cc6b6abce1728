"""Whisper encoders on 30 s chunks: the encoders of Voxtral, Qwen2-Audio and Audio Flamingo 3.

Hugging Face encoders have windows of one length (30 s in published models), padded with silence.

- Voxtral attends to the silence and has tokens for it. Data preprocessing therefore adds it.
- Qwen2-Audio and Audio Flamingo 3 mask the silence. Tokens depend on it only through one frame
  after the last position, which a convolution reads. Data preprocessing omits the silence and adds
  this frame (`AudioChunks.overlap`).

All three therefore have the same form in torchmm: windows that attend to themselves, where the last
window of an audio may be shorter, in one packed sequence. Padded windows with a mask, as in Hugging
Face, would make one spoken word as expensive as 30 s.

Shape legend: N windows of one length, P positions (of a window or of all audio inputs), V values of
a position, F mel frames, M mel bins, D features.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import AudioChunks, EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.audio import (
    SAMPLES_PER_POSITION,
    WhisperFamily,
    window_lengths,
)
from torchmm.models.families.encoders.family import EncoderFamily, segment_starts
from torchmm.models.hf.float32 import convert_to_buffer, keep_in_float32
from torchmm.models.layers.attention import Segments

_FRAMES = 2
"""Mel frames per position."""
_RATE = 16_000
"""Sample rate in Hz."""


class AudioWindows(NamedTuple):
    """The windows of all audio inputs of a microbatch."""

    segments: Segments
    lengths: list[int]
    """Number of positions of each window."""


class VoxtralAudioFamily(WhisperFamily):
    """The Voxtral encoder, with windows padded with silence."""

    renames = ((r"(model\.)?audio_tower\.", "tower."),)
    padding: Literal["silent", "heard"] = "heard"
    overlap = 0
    float32_positions = True
    """Whether position embeddings remain in float32 (`torchmm.models.hf.float32`)."""
    max_windows = 0
    """Maximum number of windows of an audio, which is truncated. 0 means no limit."""

    def variant(self, config: Any) -> EncoderFamily:
        per_second = _RATE // SAMPLES_PER_POSITION
        if config.max_source_positions % per_second:
            raise ConfigError(
                f"max_source_positions = {config.max_source_positions}: the feature extractor "
                f"of {config.model_type} requires chunks of full seconds; use a multiple of "
                f"{per_second}"
            )
        return self

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = EncoderFamily.build(self, config, dtype)
        if self.float32_positions:
            keep_in_float32(tower, ("embed_positions",))
            convert_to_buffer(tower.get_submodule("embed_positions"), "weight")
        return tower

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> AudioWindows:
        lengths = window_lengths(inputs.grids_thw, tower.config.max_source_positions)
        return AudioWindows(Segments.from_starts(segment_starts(lengths), device), lengths)

    def embed(self, tower: Any, inputs: EncoderInputs, context: AudioWindows) -> Tensor:
        """Return the hidden states before the layers, (1, P, D).

        Windows of the same length are one call.
        """
        windows = inputs.pixels.to(tower.conv1.weight.dtype).split(context.lengths)
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, length in enumerate(context.lengths):
            by_length[length].append(number)
        embedded = list(windows)
        for numbers in by_length.values():
            read_NPD = self._embed_windows(
                tower, torch.stack([windows[number] for number in numbers])
            )
            for number, read_PD in zip(numbers, read_NPD, strict=True):
                embedded[number] = read_PD
        return torch.cat(embedded)[None]

    def _embed_windows(self, tower: Any, windows_NPV: Tensor) -> Tensor:
        """Return the convolution outputs with positions, (N, P, D), for windows (N, P, V)."""
        patches_NPFM = windows_NPV.unflatten(2, (-1, tower.num_mel_bins))
        positions = patches_NPFM.shape[1]
        inner_NFM = patches_NPFM[:, :, :_FRAMES].flatten(1, 2)
        overlap_NFM = patches_NPFM[:, -1, _FRAMES:]
        frames_NMF = torch.cat([inner_NFM, overlap_NFM], dim=1).mT
        hidden = functional.gelu(tower.conv1(frames_NMF))[..., : _FRAMES * positions]
        hidden = functional.gelu(tower.conv2(hidden)).mT
        return (hidden + tower.embed_positions.weight[:positions]).to(hidden.dtype)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: AudioWindows
    ) -> Tensor:
        return layer(hidden, context.segments)

    def fold(self, x_PD: Tensor, grids_thw: list[tuple[int, int, int]], shuffle: int) -> Tensor:
        """Concatenate the features of consecutive outputs. Incomplete groups are dropped."""
        group = shuffle**2
        audios = x_PD.split([prod(grid) // self.pooled for grid in grids_thw])
        full_groups = torch.cat([audio[: len(audio) // group * group] for audio in audios])
        return super().fold(full_groups, grids_thw, shuffle)

    def processor(self, config: Any) -> dict[str, Any]:
        seconds = config.max_source_positions * SAMPLES_PER_POSITION // _RATE
        return {**super().processor(config), "chunk_length": seconds}

    def max_patches(self, config: Any) -> int:
        return self.max_windows * config.max_source_positions

    def sound_chunks(self, config: Any) -> AudioChunks | None:
        positions = config.max_source_positions
        samples = SAMPLES_PER_POSITION * positions
        return AudioChunks(samples, positions, self.padding, self.overlap)

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        values = (_FRAMES + self.overlap) * config.num_mel_bins
        return (self.pooled, values), (1, 1, self.pooled)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        layer = super().describe_layer(config, index)
        return replace(layer, window=config.max_source_positions)


class Qwen2AudioFamily(VoxtralAudioFamily):
    """The Qwen2-Audio encoder: one window without silence, means of two positions, a norm."""

    padding = "silent"
    float32_positions = False
    overlap = 1
    max_windows = 1
    pooled = 2
    final_norm = ""
    merger = ("layer_norm",)
    fixed_merge = True

    def finish(
        self, tower: Any, hidden: Tensor, context: AudioWindows, drop_class_token: bool
    ) -> Tensor:
        """Return the normalized means of two positions, (K, D).

        The last position of an odd number is dropped.
        """
        x_PD = hidden[0]
        if any(length % self.pooled for length in context.lengths):
            starts = pairwise(segment_starts(context.lengths))
            pieces = [x_PD[start : stop - (stop - start) % self.pooled] for start, stop in starts]
            x_PD = torch.cat(pieces)
        return tower.layer_norm(x_PD.unflatten(0, (-1, self.pooled)).mean(1))


class AudioFlamingoFamily(Qwen2AudioFamily):
    """The Audio Flamingo 3 encoder: up to 20 windows, each with a separate spectrogram."""

    max_windows = 20
