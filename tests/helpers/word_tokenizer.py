"""A fixture: the tokenizer whose words the tiny models embed."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = {**{f"w{i}": i for i in range(63)}, "<image>": 63}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        additional_special_tokens=["<image>"],
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
    )
