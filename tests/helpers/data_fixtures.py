"""Fixtures of tests that read samples: a tiny tokenizer and a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
from data_cases import CLIP, WORDS
from layout_cases import FILES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchmm.common.batch import TextSpec
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.reader import MeasuredSample, SampleReader
from torchmm.recipe.data_section import DataConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a source with the files of `layout_cases`."""
    directory = tmp_path_factory.mktemp("set")
    for name, content in FILES.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return str(directory)


@pytest.fixture(scope="session")
def reader(tokenizer: PreTrainedTokenizerFast, text_spec: TextSpec) -> SampleReader:
    """Return a reader of records for a model with one encoder."""
    return SampleReader(DataConfig(), 2048, text_spec, {"vision": CLIP}, tokenizer)


@pytest.fixture
def read(reader: SampleReader, root: str) -> Callable[[dict[str, Any]], MeasuredSample]:
    """Return a function that reads a sample from the columns of a record."""
    return lambda columns: reader.read(Record(columns, root))
