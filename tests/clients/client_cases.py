"""Tiny exports for other programs, each with a sample and the expected results of torchmm.

The weights are random; tokenizer and image are real. A case is an export directory with expected
values: ids and targets of a chat with an image, their loss, and the greedy text after its question.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from likeliest_text import written
from model_cases import COMPOSITES, ENCODERS, LLMS, build
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.data.build import build_loader
from torchmm.models.build import build_model
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.layers.lora import is_adapter_parameter
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import (
    AdapterConfig,
    EncoderConfig,
    FreezeConfig,
    LlmConfig,
    ModelConfig,
)
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.export.model_files import TrainingSummary, write_export

QUESTION = "What is this?"
VOCABULARY = 1088
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of LLMs, which are the smallest that the attention of vLLM supports."""
_VIT = {
    "model_type": "vit",
    **{k: v for k, v in ENCODERS["clip"].items() if k != "model_type"},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GLM = ("glm4v", "glm4v_moe", "glm46v")
_IMAGE_TOKENS = {
    "internvl": "<IMG_CONTEXT>",
    **dict.fromkeys(_QWEN, "<|image_pad|>"),
    **dict.fromkeys(_GLM, "<|image|>"),
    **dict.fromkeys(("mistral3", "pixtral_llava"), "[IMG]"),
    "gemma4": "<|image|>",
    "gemma3": "<image_soft_token>",
}
_IMAGE_TEXTS = {
    **dict.fromkeys(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    **dict.fromkeys(_GLM, "<|begin_of_image|><|image|><|end_of_image|>"),
    "gemma3": "<start_of_image>",
}
"""Text of an image in a chat template, if it is not the placeholder alone."""
_SPECIAL = (
    *("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endgeneration %}{% else %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else 'IMAGE' }}{% endfor %}"
    "{% endif %}{% endif %}\n"
    "{% endfor %}{{ 'assistant:\n' if add_generation_prompt }}"
)
"""Chat template with tags around the text of the assistant, as TRL requires."""
TEXT_ONLY = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{{ 'assistant:\n' if add_generation_prompt }}"
)
"""The same template of an LLM without images."""


@dataclass
class Case:
    """An export with its expected results."""

    family: str
    directory: Path
    expected: dict[str, Any]
    """prompt_ids, ids, targets, loss (mean over targets), tokens, unwritten (a token)."""

    def job(self) -> dict[str, Any]:
        """Return the values that a program of another environment receives."""
        known = ("targets", "prompt_ids", "unwritten", "picture", "question", "answer", "count")
        known += ("adapter", "model_impl")
        return {
            "family": self.family,
            "directory": str(self.directory),
            **{key: self.expected[key] for key in known if key in self.expected},
        }


def make_tokenizer(data: Path, family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with real merges and the special tokens of all families."""
    backend = Tokenizer.from_file(str(data / "tokenizer/tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    backend.add_tokens([AddedToken(token, normalized=False) for token in rows])
    image = _IMAGE_TEXTS.get(family, _IMAGE_TOKENS.get(family, "<image>"))
    template = TEXT_ONLY if family in PAIRS else TEMPLATE.replace("IMAGE", image)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def model_section(family: str, tokenizer: PreTrainedTokenizerFast) -> ModelConfig:
    """Return the model section of a recipe."""
    llm = LlmConfig(config={**LLMS["llama"], **_SIZES})
    if family in PAIRS:
        return ModelConfig(llm=llm, encoders={"vision": PAIRS[family]})
    if family not in COMPOSITES:
        return ModelConfig(llm=LlmConfig(config={**LLMS[family], **_SIZES}))
    config = copy.deepcopy(COMPOSITES[family])
    text = config["text_config"]
    text["vocab_size"] = VOCABULARY
    if family in VLLM:
        text |= {key: size for key, size in _SIZES.items() if key in text or key == "head_dim"}
    if family == "qwen2_5_vl":  # the tower has the output size of the LLM
        text["rope_parameters"]["mrope_section"] = [4, 6, 6]
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    ids = tokenizer.convert_tokens_to_ids
    config |= {key: ids(token) for key, token in _config_tokens(family, config)}
    return ModelConfig(config=config, processor=PROCESSORS.get(family))


def _config_tokens(family: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    named = {
        "image_token_id": _IMAGE_TOKENS.get(family, "<image>"),
        "image_token_index": _IMAGE_TOKENS.get(family, "<image>"),
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    if family == "gemma4":
        named |= {"boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"}
    if family in _GLM:
        named["video_token_id"] = "<|video|>"
    yield from ((key, token) for key, token in named.items() if key in config)


PAIRS = {
    "clip + llama": EncoderConfig(config=ENCODERS["clip"], feature_layer=-2),
    "vit + llama": EncoderConfig(config=_VIT, feature_layer=-2),
    "internvl_vision + llama": EncoderConfig(
        config=ENCODERS["internvl_norms"], connector="pixel_shuffle_norm_mlp"
    ),
}
"""Towers of pairs, which are exported as LLaVA and InternVL."""
PROCESSORS = {
    name: {"size": {"shortest_edge": 64, "longest_edge": 64 * 64}} for name in (*_QWEN, *_GLM)
}
"""Settings of image processors that keep images small."""
VLLM = (
    *("llama", "clip + llama", "internvl_vision + llama"),
    *("qwen2_5_vl", "internvl", "smolvlm"),
)
"""Families that vLLM opens. The others have the same parts, and vLLM starts slowly."""
IMPLEMENTATIONS = {"internvl_vision + llama": "transformers"}
"""Implementation in vLLM, whose own InternVL adds tokens that were not part of the training."""
ADAPTED = ("llama", "clip + llama")
"""Families with an adapter."""
SEEING = (
    *PAIRS,
    *("llava_next", "internvl", "smolvlm", "idefics3", "gemma3", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("llava_onevision", "pixtral_llava", "gemma4", "glm4v", "glm4v_moe", "glm46v"),
)
"""Families with images.

PaliGemma is missing: its processor puts the begin token after the image, torchmm before.
"""
CASES = ("llama", "qwen3", *SEEING)


def make_case(family: str, directory: Path, data: Path) -> Case:
    """Export a tiny model of a family like a training run, and run it on a chat."""
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer(data, family)
    model = build(model_section(family, tokenizer))
    recipe = Recipe(model=ModelConfig())
    trained = TrainingSummary(recipe, 1, Path("none"))
    write_export(model, directory / "hf", tokenizer, trained)
    image, answer = image_of(data, directory, family in SEEING)
    batch = microbatch_of(model, tokenizer, directory, image, answer)
    unwritten = model.text_spec(tokenizer).image_token_id
    first = int((batch.targets_T != IGNORE_TARGET).nonzero()[0])
    with torch.no_grad():
        loss = model(batch) / (batch.targets_T != IGNORE_TARGET).sum()
    expected = {
        "ids": batch.input_ids_T.tolist(),
        "targets": batch.targets_T.tolist(),
        "loss": loss.item(),
        "prompt_ids": batch.input_ids_T[: first + 1].tolist(),
        "tokens": written(
            model, prompt_of(batch, first + 1), -1 if unwritten is None else unwritten
        ),
        "unwritten": unwritten,
        "question": QUESTION,
        "answer": answer,
        "picture": None if image is None else str(image),
    }
    expected["count"] = len(expected["tokens"])
    if family in IMPLEMENTATIONS:
        expected["model_impl"] = IMPLEMENTATIONS[family]
    if family in ADAPTED:
        expected |= adapted(family, directory, batch)
    return Case(family, directory / "hf", expected)


def adapted(family: str, directory: Path, batch: Microbatch) -> dict[str, Any]:
    """Save an adapter on the export, and return its directory and the loss with it."""
    source = str(directory / "hf")
    section = ModelConfig(source=source) if family in SEEING else None
    section = section or ModelConfig(llm=LlmConfig(source=source))
    adapters = {"mine": AdapterConfig(modules=["llm"], rank=2)}
    model = build_model(section, FreezeConfig(), adapters=adapters)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_parameter(name):
                parameter.normal_(std=0.3, generator=generator)
        loss = model(batch) / (batch.targets_T != IGNORE_TARGET).sum()
    save_adapters(model, directory / "adapters")
    return {"adapter": str(directory / "adapters/mine"), "adapter_loss": loss.item()}


def image_of(data: Path, directory: Path, has_image: bool) -> tuple[Path | None, str]:
    """Save a small version of a real image and return the file and its caption."""
    files = sorted(str(f) for f in (data / "tuxpaint_stamps/validation").glob("*.parquet"))
    row = (
        datasets.load_dataset("parquet", data_files=files, split="train")
        .with_format("arrow")[:1]
        .to_pylist()[0]
    )
    if not has_image:
        return None, row["text"]
    picture = directory / "picture.png"
    image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
    image.resize((48, 40)).save(picture)
    return picture, row["text"]


def microbatch_of(
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    image: Path | None,
    answer: str,
) -> Microbatch:
    """Return the chat as a training run reads it."""
    question: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    record: dict[str, Any] = {"images": []}
    if image is not None:
        question.insert(0, {"type": "image"})
        record["images"] = [image.name]
    record["messages"] = [
        {"role": "user", "content": question if image is not None else QUESTION},
        {"role": "assistant", "content": answer},
    ]
    source = directory / "chat.jsonl"
    source.write_text(json.dumps(record) + "\n")
    loader = build_loader(
        DataConfig(
            validation=[SourceConfig(path=str(source))],
            workers=0,
            index_cache_dir=str(directory / "index"),
        ),
        TrainingConfig(global_batch_size=1, sequence_length=1024),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        validation=True,
        **model.sample_specs(tokenizer),
    )
    (batch,) = islice(loader, 1)
    (microbatch,) = batch.microbatches
    length = microbatch.cu_seqlens[1]  # the rest is padding
    return _first(microbatch, length, microbatch.targets_T[:length])


def _first(batch: Microbatch, length: int, targets_T: torch.Tensor) -> Microbatch:
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[:length],
        targets_T=targets_T,
        target_positions_L=None,
        position_ids=batch.position_ids[..., :length],
        cu_seqlens=[0, length],
    )


def prompt_of(batch: Microbatch, length: int) -> Microbatch:
    """Return the tokens before the answer."""
    return _first(batch, length, torch.full((length,), IGNORE_TARGET))


def opened_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of an export."""
    return AutoTokenizer.from_pretrained(directory)
