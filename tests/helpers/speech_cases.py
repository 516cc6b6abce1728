"""Samples with audio for speech LLMs, in the formats of our model and of Hugging Face.

Windows are two seconds long: 200 mel frames, 100 positions. Shape legend: N windows, F mel frames,
M mel bins, P positions.
"""

from itertools import accumulate
from math import ceil
from typing import Any

import torch
from model_cases import AUDIO_TOKEN_ID
from torch import Tensor
from torch.nn import functional

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta

MELS, FRAMES = 8, 200
AUDIO_FRAMES = {
    # Mel frames of each audio input by sample. The second sample has only text.
    "voxtral": [[200, 400], [], [200]],
    "qwen2_audio": [[13, 200], [], [67]],
    "audioflamingo3": [[13, 426], [], [200]],
}
PER_TOKEN = {"voxtral": 4, "qwen2_audio": 2, "audioflamingo3": 2}
"""Positions per token."""
MASKS = {"qwen2_audio": "feature_attention_mask", "audioflamingo3": "input_features_mask"}
"""Name of the mask in models of Hugging Face."""


def windows_of(frames: int) -> list[int]:
    """Return the frames of an audio input in each of its windows."""
    complete, rest = divmod(frames, FRAMES)
    return [FRAMES] * complete + [rest] * (rest > 0)


def positions_of(frames: int) -> int:
    return sum(ceil(window / 2) for window in windows_of(frames))


def patches_of(name: str, mels_NFM: Tensor, frames: list[int]) -> Tensor:
    """Return patches as data loading prepares them.

    A position has two frames; if silence is masked, also the next frame.
    """
    patches = []
    for window_FM, length in zip(mels_NFM, frames, strict=True):
        padded_FM = functional.pad(window_FM, (0, 0, 0, 1))
        width = 2 if name == "voxtral" else 3
        positions = [padded_FM[2 * p : 2 * p + width].flatten() for p in range(ceil(length / 2))]
        patches.append(torch.stack(positions))
    return torch.cat(patches)


def three_samples(name: str) -> tuple[Microbatch, list[dict[str, Any]]]:
    """Return a packed microbatch, and the arguments of the model of Hugging Face by sample.

    Frames after the end of an audio input are random too, so only a mask hides them.
    """
    generator = torch.Generator().manual_seed(5)
    ids, targets, samples, patches, grids = [], [], [], [], []
    for of_sample in AUDIO_FRAMES[name]:
        words = torch.randint(3, 50, (12,), generator=generator)
        parts, mels, windows = [words[:3]], [], []
        for number, frames in enumerate(of_sample):
            positions = positions_of(frames)
            own = windows_of(frames)
            mels_NFM = torch.randn(len(own), FRAMES, MELS, generator=generator)
            parts.append(torch.full((positions // PER_TOKEN[name],), AUDIO_TOKEN_ID))
            parts.append(words[3 + number : 4 + number])
            mels.append(mels_NFM)
            windows += own
            patches.append(patches_of(name, mels_NFM, own))
            grids.append((1, 1, positions))
        sample_ids = torch.cat([*parts, words[6:]])
        sample_targets = sample_ids.roll(-1)
        sample_targets[(sample_targets == AUDIO_TOKEN_ID) | (sample_ids == AUDIO_TOKEN_ID)] = (
            IGNORE_TARGET
        )
        sample_targets[-1] = IGNORE_TARGET
        ids.append(sample_ids)
        targets.append(sample_targets)
        sample: dict[str, Any] = {"input_ids": sample_ids[None], "use_cache": False}
        if mels:
            sample["input_features"] = torch.cat(mels).mT
            mask = (torch.arange(FRAMES) < torch.tensor(windows)[:, None]).long()
            if name in MASKS:
                sample[MASKS[name]] = mask
        samples.append(sample)
    ids_T = torch.cat(ids)
    starts = list(accumulate((len(own) for own in ids), initial=0))
    placeholders = (ids_T == AUDIO_TOKEN_ID).nonzero()[:, 0]
    inputs = EncoderInputs(torch.cat(patches), grids, placeholders, None, PER_TOKEN[name])
    positions_T = torch.cat([torch.arange(len(own)) for own in ids])
    meta = MicrobatchMeta((), len(ids_T))
    batch = Microbatch(ids_T, torch.cat(targets), positions_T, starts, {"audio": inputs}, meta)
    return batch, samples
