"""A small byte-level BPE tokenizer trained on captions, for models trained from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchmm.common.errors import DataError
from torchmm.common.files import read_prepared_manifest
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set

VOCAB_SIZE = 1024
"""Vocabulary size, small enough to split rare nouns: a token that occurs once is not learned."""
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<image>"]
BYTE_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
"""Size of a vocabulary with one token per letter."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}"
    "{% endfor %}{% endif %}"
    "{{ eos_token if message.role == 'assistant' }}\n"
    "{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
)


def prepare(
    output: Path,
    packages: Path,
    options: dict[str, Any],
    *,
    texts: str = "tuxpaint_stamps",
    name: str = "tokenizer",
) -> None:
    """Make `output`/`name` from the training text of a set.

    Args:
        output: Directory of all sets.
        packages: Not used.
        options: `source` has the hashes of the files of the set, and `vocabulary` is the size.
        texts: Name of the set.
        name: Name of the tokenizer directory.

    Raises:
        DataError: The set is missing.
    """
    files = sorted((output / texts / "train").glob("*.parquet"))
    if not files:
        raise DataError(f"{output}/{texts} is missing; prepare {texts} first")
    captions: list[str] = []
    for file in files:
        captions.extend(pq.read_table(file, columns=["text"])["text"].to_pylist())
    tokenizer = train_tokenizer(captions, options["vocabulary"])
    with new_directory(output / name) as directory:
        tokenizer.save_pretrained(directory)
    counts = {"vocabulary": len(tokenizer), "captions": len(captions)}
    license = read_prepared_manifest(output)[texts]["license"]
    record_data_set(output, name, [], license, {"options": options, "counts": counts})


def train_tokenizer(texts: list[str], vocabulary: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a tokenizer on text. It encodes any other text, if necessary byte by byte."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
