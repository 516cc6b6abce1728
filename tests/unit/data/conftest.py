"""A tiny data set and tokenizer, made on the spot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchmm.batch import ImageSpec, TextSpec
from torchmm.config import DataConfig, SourceConfig, TrainingConfig

WORDS = "a red green blue small large round square picture of one two three dogs cats in the sun"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A noise picture."""
    rng = np.random.default_rng(seed)
    return encode(Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)), "PNG")


def encode(image: Image.Image, fmt: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, fmt, **options)
    return stream.getvalue()


def caption(i: int) -> str:
    words = WORDS.split()
    return " ".join(words[(i * 7 + k) % len(words)] for k in range(3 + i % 9))


def caption_rows(count: int) -> list[dict]:
    return [
        {"image": {"bytes": png(16 + i % 5 * 8, 24, i), "path": None}, "text": caption(i)}
        for i in range(count)
    ]


def write_parquet(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(directory / "part-0.parquet")
    return directory


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True, scope="session")
def quiet_datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep converted tables out of the user's cache."""
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("hf")
    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<image>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def text_spec(tokenizer: PreTrainedTokenizerFast) -> TextSpec:
    return TextSpec(
        vocab_size=len(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


CLIP = ImageSpec(
    encoder="vision",
    layout="fixed",
    processor_class="CLIPImageProcessor",
    processor={
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
    patch_size_px=8,
)
NAFLEX = ImageSpec(
    encoder="vision",
    layout="patches",
    processor_class="Siglip2ImageProcessor",
    processor={"patch_size": 8, "max_num_patches": 12},
    patch_size_px=8,
)
QWEN = ImageSpec(
    encoder="vision",
    layout="patches",
    processor_class="Qwen2VLImageProcessor",
    processor={
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 512},
    },
    patch_size_px=4,
    merge=2,
)


def training(**changes: object) -> TrainingConfig:
    values = {
        "global_batch_size": 4,
        "microbatch_size": 1,
        "sequence_length": 64,
        "seed": 3,
        "device": "cpu",
    }
    return TrainingConfig(**{**values, **changes})


def data_config(tmp_path: Path, *sources: SourceConfig, **changes: object) -> DataConfig:
    values = {"workers": 0, "open_packs": 3, "index_cache": str(tmp_path / "index")}
    return DataConfig(sources=list(sources), **{**values, **changes})
