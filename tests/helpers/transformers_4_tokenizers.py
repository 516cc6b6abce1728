"""Tokenizers of several classes with one byte-level vocabulary."""

import json
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<|im_start|>", "<|im_end|>"]
CLASSES = ("Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def transformers_4_tokenizer(name: str, adds_bos: bool) -> PreTrainedTokenizerBase:
    """Return a tokenizer of a class of transformers, or a `PreTrainedTokenizerFast`."""
    trained = _trained()
    settings: dict[str, Any] = {
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
        "extra_special_tokens": SPECIAL[4:],
        "chat_template": TEMPLATE,
    }
    if name not in CLASSES:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, **settings)
        tokenizer.add_bos_token = adds_bos
        return tokenizer
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    kind = getattr(transformers, name)
    return kind(vocab=model["vocab"], merges=merges, add_bos_token=adds_bos, **settings)


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a cat and a dog on the mat"] * 4, trainer)
    return tokenizer
