"""A tiny Qwen2.5-VL, saved by its Hugging Face class, to test continued training.

The weights are random. The smallest published checkpoint has 3 B parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from torchmm.common.errors import DataError
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set

NAME = "tiny_qwen2_5_vl"
MAX_PIXELS = 112 * 112
"""Maximum number of pixels of an image: 16 tokens of 28 x 28 pixels."""
SEED = 0
_EXTRA_TOKEN_KEYS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/tiny_qwen2_5_vl: weights, the tokenizer of the stamps, image processor.

    Args:
        output: Directory of all sets.
        packages: Not used.
        options: Options that are recorded in the manifest.

    Raises:
        DataError: OUTPUT/tokenizer is missing.
    """
    source = output / "tokenizer"
    if not source.is_dir():
        raise DataError(f"{source} is missing; prepare tuxpaint_stamps first")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen2_5_VLForConditionalGeneration(_config(tokenizer))
    size = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    with new_directory(output / NAME) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        Qwen2VLImageProcessorPil(size=size).save_pretrained(directory)
    counts = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    record_data_set(
        output, NAME, [], "none (random weights)", {"options": options, "counts": counts}
    )


def _config(tokenizer: Any) -> Qwen2_5_VLConfig:
    sizes = {"hidden_size": 192, "intermediate_size": 512}
    text = {
        **sizes,
        "vocab_size": len(tokenizer) + 64,  # markers around images have no text
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        **sizes,
        "depth": 4,
        "num_heads": 6,
        "out_hidden_size": 192,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
    }
    marks = {name: len(tokenizer) + i for i, name in enumerate(_EXTRA_TOKEN_KEYS)}
    image = tokenizer.convert_tokens_to_ids("<image>")
    settings: dict[str, Any] = {"text_config": text, "vision_config": vision, **marks}
    return Qwen2_5_VLConfig(image_token_id=image, **settings)
