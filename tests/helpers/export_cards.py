"""Exports of every class with their cards, and the text that torchmm generates from them.

The weights are random. The tokenizer is real and has the special tokens of all classes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from clients.client_cases import PAIRS, make_tokenizer, model_section
from model_cases import COMPOSITES, ENCODERS, build
from PIL import Image
from transformers import PreTrainedTokenizerFast

from torchmm.extensions.evaluation.text.load_model import load_text_generator
from torchmm.extensions.evaluation.text.prompts import make_request
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.recipe.model_section import EncoderConfig, ModelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.model_files import TrainingSummary, write_export

QUESTION = "What is this?"
PROMPT = "The"
HEARING_PAIR = "audioflamingo3_encoder + llama"
PARTS_PAIR = "siglip2 + llama"
CLASSES = ("llama", *PAIRS, HEARING_PAIR, PARTS_PAIR, *COMPOSITES)
"""Every composite class, every class of separate sources, an LLM, and a pair without a class."""
NOT_RUN = {PARTS_PAIR: "has no class for this pair", "voxtral": "VoxtralProcessor does not"}
"""Classes whose card says that plain transformers does not generate with it."""
_SOUND_TEXTS = {
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
    "qwen2_audio": "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\\n",
    "audioflamingo3": "<sound>",
}
_OMNI = {
    "qwen2_5_omni": "<|vision_bos|><|image_pad|><|vision_eos|>",
    "qwen3_omni": "<|vision_start|><|image_pad|><|vision_end|>",
}
_TOKENS = {
    "voxtral": {"audio_token_id": "[AUDIO]"},
    "qwen2_audio": {"audio_token_index": "<|AUDIO|>"},
    "audioflamingo3": {"audio_token_id": "<sound>"},
    "qwen3_omni": {
        "image_token_id": "<|image_pad|>",
        "audio_token_id": "<|audio_pad|>",
        "audio_start_token_id": "<|audio_start|>",
        "audio_end_token_id": "<|audio_end|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "qwen2_5_omni": {
        "image_token_id": "<|image_pad|>",
        "audio_token_id": "<|audio_pad|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    },
}
"""Special tokens of configs by their keys."""
_ADDED = (
    *("[BEGIN_AUDIO]", "[AUDIO]", "<|AUDIO|>", "<sound>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<|vision_bos|>", "<|vision_eos|>"),
)


@dataclass(frozen=True)
class CardCase:
    """An export with its card and the file that the example reads."""

    directory: Path
    file: Path | None
    use: str
    """Section of the card."""
    text: str
    """Text that torchmm generates."""

    def job(self) -> dict[str, str]:
        """Return the example for a program of another environment."""
        return {"family": self.directory.parent.name, "code": self.code()}

    def code(self) -> str:
        """Return the example of the card with the paths of this case."""
        code = self.use.split("```python\n")[1].split("```")[0]
        code = code.replace('"."', repr(str(self.directory)))
        for name in ("image.jpg", "audio.wav"):
            code = code.replace(f'"{name}"', repr(str(self.file)))
        return code


def make_card_case(name: str, *, chats: bool, data: Path, root: Path) -> CardCase:
    """Export a tiny model that was trained on captions or on chats.

    Args:
        name: One of `CLASSES`.
        chats: Whether the data are chats.
        data: Directory with the prepared data.
        root: Empty directory.
    """
    tokenizer = _tokenizer(name, data)
    model = build(_section(name, tokenizer))
    modality = next((e.family.modality for e in model.encoder_modules()), None)
    file = _save_file(root, modality)
    source = _save_record(root, file, modality, chats)
    prompt = "" if chats else PROMPT
    recipe = Recipe.model_validate({"data": {"sources": [{"path": str(source), "prompt": prompt}]}})
    trained = TrainingSummary(recipe, 1, Path("none"))
    directory = root / "hf"
    write_export(model, directory, tokenizer, trained)
    use = (directory / "README.md").read_text().split("## Use\n")[1]
    request = make_request([file] if file else [], QUESTION if chats else PROMPT, as_chat=chats)
    writer = load_text_generator(directory)
    try:
        (text,) = writer.write([request], Sampling(max_new_tokens=40))
    finally:
        torch.distributed.destroy_process_group()
    return CardCase(directory, file, use, text)


def _tokenizer(name: str, data: Path) -> PreTrainedTokenizerFast:
    pair = name in (HEARING_PAIR, PARTS_PAIR)
    tokenizer = make_tokenizer(data, next(iter(PAIRS)) if pair else name)
    special = {"additional_special_tokens": list(_ADDED)}
    tokenizer.add_special_tokens(special, replace_extra_special_tokens=False)
    if name in (*_SOUND_TEXTS, *_OMNI):
        text = {**_SOUND_TEXTS, **_OMNI}[name]
        tokenizer.chat_template = tokenizer.chat_template.replace("<image>", text)
    return tokenizer


def _section(name: str, tokenizer: PreTrainedTokenizerFast) -> ModelConfig:
    if name == HEARING_PAIR:
        encoders = {"audio": EncoderConfig(config=ENCODERS["audioflamingo3"], modality="audio")}
    elif name == PARTS_PAIR:
        encoders = {"vision": EncoderConfig(config=ENCODERS["siglip2"])}
    else:
        section = model_section(name, tokenizer)
        ids = {k: tokenizer.convert_tokens_to_ids(t) for k, t in _TOKENS.get(name, {}).items()}
        config = {**(section.config or {}), **ids} or None
        return section.model_copy(update={"config": config})
    return ModelConfig(llm=model_section("llama", tokenizer).llm, encoders=encoders)


def _save_file(root: Path, modality: str | None) -> Path | None:
    if modality is None:
        return None
    if modality == "image":
        Image.new("RGB", (48, 40), (200, 30, 10)).save(root / "image.jpg")
        return root / "image.jpg"
    noise = np.random.default_rng(0).standard_normal(10_000).astype("float32") / 10
    soundfile.write(root / "audio.wav", noise, 16_000)
    return root / "audio.wav"


def _save_record(root: Path, file: Path | None, modality: str | None, chats: bool) -> Path:
    record: dict[str, Any] = {"prompt": PROMPT, "completion": "x"}
    if chats:
        question: Any = QUESTION
        if modality is not None:
            question = [{"type": modality}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": "Red."}
        record = {"messages": [{"role": "user", "content": question}, answer]}
    if file is not None and modality is not None:
        record[modality] = file.name
    source = root / "data.json"
    source.write_text(json.dumps([record]))
    return source


def packages_of(case: CardCase) -> list[str]:
    """Return the packages that the card requires, as modules to import."""
    packages = case.use.split("```python")[0].partition("pip install ")[2].partition("`")[0]
    return packages.replace("'transformers[audio]'", "soundfile soxr").split()
