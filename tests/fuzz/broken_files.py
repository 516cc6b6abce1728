"""Damaged files of a model directory, each of which must give a model or an error with its name.

Draw `index` of a seed is a pure function of both numbers, see `fuzz.broken_configs`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from model_cases import COMPOSITES
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    CLIPImageProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from fuzz.broken_configs import limits, wrong_values
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.media.preprocessors import open_media
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.build import build_model
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import materialize
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
FILES = (*JSON_FILES, "chat_template.jinja", "model-00001-of-00012.safetensors")
DAMAGES = (
    "cut",
    "flip",
    "garbage",
    "deep",
    "directory",
    "fifo",
    "value",
    "value",
    "value",
    "value",
    "drop",
    "root",
)
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class BrokenFile:
    """A damaged file of a model directory."""

    name: str
    file: str
    keys: tuple[str, ...]
    """Key whose value is wrong, if the file is valid JSON."""


def save_model(directory: Path) -> None:
    """Write a tiny LLaVA with tokenizer, processor and an index of weight files."""
    words = {**{f"w{i}": i for i in range(63)}, "<image>": 63}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<image>"],
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    model = LlavaForConditionalGeneration(AutoConfig.for_model(**COMPOSITES["llava"]))
    model.save_pretrained(directory, max_shard_size="20KB")
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(directory)
    GenerationConfig(eos_token_id=2, max_new_tokens=8).save_pretrained(directory)


def damage_file(seed: int, index: int, model: Path, target: Path) -> BrokenFile:
    """Copy `model` to `target` and damage one file of the copy."""
    rng = Random(f"{seed}-{index}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    name = rng.choice(FILES)
    kind = rng.choice(DAMAGES)
    file = target / name
    content = file.read_bytes()
    if name not in JSON_FILES and kind in ("value", "drop", "root"):
        kind = "flip"
    if kind == "cut":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "flip":
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 1, 5))):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        file.write_bytes(bytes(flipped))
    elif kind == "garbage":
        start = rng.randrange(len(content))
        file.write_bytes(content[:start] + rng.randbytes(20) + content[start:])
    elif kind == "deep":
        file.write_bytes(rng.choice((b"[", b'{"a":')) * 100_000)
    elif kind in ("directory", "fifo"):
        file.unlink()
        file.mkdir() if kind == "directory" else os.mkfifo(file)
    keys: tuple[str, ...] = ()
    if kind in ("value", "drop", "root"):
        values = json.loads(content)
        if kind == "root":
            values = rng.choice(([], [values], 3, None, "x", {}, True))
        else:
            keys = _change_value(rng, values, kind == "drop")
        file.write_text(json.dumps(values))
    return BrokenFile(f"{seed}-{index} {name}: {kind} {'.'.join(keys)}", name, keys)


def _change_value(rng: Random, values: Any, drop: bool) -> tuple[str, ...]:
    """Change or drop a random value in place and return its path."""
    path: list[str] = []
    while True:
        key: Any = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
        path.append(str(key))
        inner = values[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
            values = inner
            continue
        if drop:
            del values[key]
        else:
            values[key] = rng.choice(wrong_values(rng, inner))
        return tuple(path)


def judge_file(damage: BrokenFile, directory: Path) -> str:
    """Return "built", "rejected" or "unnamed"; raise all other errors of loading."""
    try:
        with limits():
            section = ModelConfig.model_validate({"source": str(directory)})
            model = build_model(section, FreezeConfig())
            tokenizer = load_tokenizer(section)
            for spec in model.sample_specs(tokenizer)["image_specs"].values():
                open_media(spec, 10**6)
            parameters = sum(p.numel() for p in model.parameters())
            if parameters > 10**7:  # a dropped section has default sizes
                return "built"
            materialize(model, "cpu")
            load_weights(model)
    except (ConfigError, CheckpointError, ValidationError) as error:
        names = {damage.file, *(key for key in damage.keys if not key.isdigit())}
        # Valid files with different names or sizes do not match the weights or the processor.
        names |= {"tokenizer", "weights do not match", "image_token", "processor"}
        return "rejected" if any(name in str(error) for name in names) else "unnamed"
    return "built"
