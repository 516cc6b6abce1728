"""Samples with several sounds for models that hear and write, ours and Hugging Face's, by hand.

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
FRAMES_OF = {
    # By sample: mel frames of each of its sounds. The second reads a text.
    "voxtral": [[200, 400], [], [200]],
    "qwen2_audio": [[13, 200], [], [67]],
    "audioflamingo3": [[13, 426], [], [200]],
}
PER_TOKEN = {"voxtral": 4, "qwen2_audio": 2, "audioflamingo3": 2}
"""Positions."""
MASKS = {"qwen2_audio": "feature_attention_mask", "audioflamingo3": "input_features_mask"}
"""What Hugging Face's models call theirs."""


def windows_of(frames: int) -> list[int]:
    """Frames of a sound in each of its windows."""
    whole, rest = divmod(frames, FRAMES)
    return [FRAMES] * whole + [rest] * (rest > 0)


def positions_of(frames: int) -> int:
    return sum(ceil(own / 2) for own in windows_of(frames))


def patches_of(name: str, mels_NFM: Tensor, frames: list[int]) -> Tensor:
    """As data prepare windows: two frames to a position; where silence is masked, the next too."""
    pieces = []
    for window_FM, own in zip(mels_NFM, frames, strict=True):
        padded_FM = functional.pad(window_FM, (0, 0, 0, 1))
        reach = 2 if name == "voxtral" else 3
        cut = [padded_FM[2 * p : 2 * p + reach].flatten() for p in range(ceil(own / 2))]
        pieces.append(torch.stack(cut))
    return torch.cat(pieces)


def three_samples(name: str) -> tuple[Microbatch, list[dict[str, Any]]]:
    """A packed microbatch, and what Hugging Face's model takes for each sample on its own.

    What is behind the end of a sound is as random as the sound: only a mask hides it.
    """
    generator = torch.Generator().manual_seed(5)
    ids, targets, samples, sounds, grids = [], [], [], [], []
    for of_sample in FRAMES_OF[name]:
        words = torch.randint(3, 50, (12,), generator=generator)
        parts, heard, windows = [words[:3]], [], []
        for number, frames in enumerate(of_sample):
            positions = positions_of(frames)
            own = windows_of(frames)
            mels_NFM = torch.randn(len(own), FRAMES, MELS, generator=generator)
            parts.append(torch.full((positions // PER_TOKEN[name],), AUDIO_TOKEN_ID))
            parts.append(words[3 + number : 4 + number])
            heard.append(mels_NFM)
            windows += own
            sounds.append(patches_of(name, mels_NFM, own))
            grids.append((1, 1, positions))
        own_ids = torch.cat([*parts, words[6:]])
        own_targets = own_ids.roll(-1)
        own_targets[(own_targets == AUDIO_TOKEN_ID) | (own_ids == AUDIO_TOKEN_ID)] = IGNORE_TARGET
        own_targets[-1] = IGNORE_TARGET
        ids.append(own_ids)
        targets.append(own_targets)
        sample: dict[str, Any] = {"input_ids": own_ids[None], "use_cache": False}
        if heard:
            sample["input_features"] = torch.cat(heard).mT
            mask = (torch.arange(FRAMES) < torch.tensor(windows)[:, None]).long()
            if name in MASKS:
                sample[MASKS[name]] = mask
        samples.append(sample)
    ids_T = torch.cat(ids)
    starts = list(accumulate((len(own) for own in ids), initial=0))
    places = (ids_T == AUDIO_TOKEN_ID).nonzero()[:, 0]
    inputs = EncoderInputs(torch.cat(sounds), grids, places, None, PER_TOKEN[name])
    positions_T = torch.cat([torch.arange(len(own)) for own in ids])
    meta = MicrobatchMeta((), len(ids_T))
    batch = Microbatch(ids_T, torch.cat(targets), positions_T, starts, {"audio": inputs}, meta)
    return batch, samples
