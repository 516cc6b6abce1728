"""Training data of random recipes: random words with images, videos and audio of noise.

Everything is a function of fixed seeds and needs no download. Samples have 0 to 4 images, so some
microbatches have none. A third of the samples has only text.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from torchmm.data.media.video_writer import encode_video

WORDS = 80
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
SPECIAL_TOKENS = [
    *("<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
    *("[IMG_BREAK]", "[IMG_END]", "<sound>", "<video>"),
    *("[BEGIN_AUDIO]", "<|audio_bos|>", "<|audio_eos|>"),
]
"""Special tokens around images and audio of multimodal models, and other placeholders."""
TOKEN_IDS = {
    token: number
    for number, token in enumerate([*SPECIAL, *(f"w{n}" for n in range(WORDS)), *SPECIAL_TOKENS])
}
SAMPLES = 48
IMAGES = 12
SOUNDS = 8
VIDEOS, VIDEO_FPS = 4, 2
SAMPLING_RATE = 16000
SOURCES = (
    "text",
    "images",
    "sounds",
    "both",
    "drawn",
    "drawn_images",
    "drawn_sounds",
    "drawn_both",
    "videos",
)
"""File names: the media of the samples. "videos" also has images."""


def make_data(directory: Path) -> None:
    """Write the tokenizer, the media and a JSON Lines file for each of `SOURCES`."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory / "tokenizer")
    rng = np.random.default_rng(1)
    for number in range(IMAGES):
        height, width = rng.integers(12, 40, 2)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / f"image-{number}.png")
    for number in range(SOUNDS):
        samples = rng.integers(-20000, 20000, int(rng.integers(700, 3500)), dtype=np.int16)
        with wave.open(str(directory / f"sound-{number}.wav"), "wb") as file:
            file.setparams((1, 2, SAMPLING_RATE, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
    rng = np.random.default_rng(3)
    for number in range(VIDEOS):
        width, height = 2 * rng.integers(8, 14, 2)  # the codec requires even heights and widths
        frames = 2 * int(rng.integers(2, 5))  # two or more pairs of frames, one pair per second
        pixels = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
        video = encode_video([Image.fromarray(frame) for frame in pixels], fps=VIDEO_FPS)
        (directory / f"video-{number}.mp4").write_bytes(video)
    for name in SOURCES:
        rng = np.random.default_rng([2, SOURCES.index(name)])
        lines = [json.dumps(_sample(name, rng)) for _ in range(SAMPLES)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_tokenizer(directory: Path) -> None:
    words = Tokenizer(WordLevel(TOKEN_IDS, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    tokenizer.save_pretrained(directory)


def _sample(source: str, rng: np.random.Generator) -> dict:
    """Return an interleaved record. "videos" are captions, whose media come first."""
    if source == "videos":
        count = int(rng.integers(0, 3))
        return {
            "images": [f"image-{rng.integers(IMAGES)}.png" for _ in range(int(rng.integers(0, 3)))],
            "videos": [f"video-{rng.integers(VIDEOS)}.mp4"] if count else [],
            "text": _text(rng, 14),
        }
    images = audios = 0
    if not rng.random() < 1 / 3:
        images = int(rng.integers(0, 5)) if "image" in source or "both" in source else 0
        audios = int(rng.integers(0, 3)) if "sound" in source or "both" in source else 0
    files = [f"image-{rng.integers(IMAGES)}.png" for _ in range(images)]
    files += [f"sound-{rng.integers(SOUNDS)}.wav" for _ in range(audios)]
    rng.shuffle(files)
    elements: list[str] = []
    for file in files:
        elements += [file, *([_text(rng, 5)] if rng.random() < 0.6 else [])]
    elements.append(_text(rng, 14))
    record: dict = {
        "texts": [None if "." in e else e for e in elements],
        "images": [e if e.endswith(".png") else None for e in elements],
        "audios": [e if e.endswith(".wav") else None for e in elements],
    }
    if source.startswith("drawn"):
        has_target = rng.random() < 0.7
        record["draw"] = f"image-{rng.integers(IMAGES)}.png" if has_target else None
    return record


def _text(rng: np.random.Generator, max_words: int) -> str:
    return " ".join(f"w{word}" for word in rng.integers(WORDS, size=rng.integers(2, max_words + 1)))
