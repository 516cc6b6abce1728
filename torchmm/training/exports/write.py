"""An export: the model's files, and a card that says what it is and how to load it.

The card (`README.md`) has what is known for certain: parts and where they come from, data and
their licences as far as they are recorded, settings that matter, losses that were measured. Its
head is what Hugging Face's hub reads. Rejected: the hub's templates, which ask for much that only
people know, and show it as missing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import TEMPLATE_ERRORS
from torchmm.common.files import read_prepared
from torchmm.common.module_names import GENERATOR
from torchmm.data.files.addresses import without_secrets
from torchmm.data.media.chat import FALLBACK_TEMPLATE, ChatTemplate
from torchmm.data.sources.open import has_chats
from torchmm.models.families.encoders.family import patches_per_row
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.experts_apart import Keep, in_memory
from torchmm.models.hf.export import Gather, export_hf, gather_whole
from torchmm.models.hf.processor_classes import Written
from torchmm.models.hf.processors import choose_processor, name_tokens
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import PARTS_FILE, split_place
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.exports.place import whole_directory

CARD = "README.md"
CHAT_TAG = "conversational"
"""Tag of the Hub for models that answer chats."""
_FILES = {"image": 'Image.open("image.jpg")', "audio": '"audio.wav"'}
"""Files in the examples of cards, as the processors read them."""
_QUESTION = "What is this?"
_AS_TENSORS = 'tokenize=True, return_dict=True, return_tensors="pt"'


class Trained(NamedTuple):
    """What a card says of the training."""

    name: str
    """Of the run."""
    step: int
    training: TrainingConfig
    data: DataConfig
    metrics: Path
    """metrics.jsonl; may be missing."""
    recipe: str = ""
    """TOML; see `torchmm.recipe.read.what_was_trained`."""


def write_export(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: Trained,
    gather: Gather = gather_whole,
    shard_bytes: int | None = None,
    keep: Keep = in_memory,
) -> None:
    """Writes the model with its card; collective, rank 0 writes.

    Files are written beside the directory's place, which gets its name, or takes that of the export
    before, when all are there.

    Args:
        directory: of the export.
        gather: where weights come from, see `export_hf`.
        shard_bytes: of the largest file with weights; None: Hugging Face's default.
        keep: see `export_hf`.

    Raises:
        ConfigError: another process writes it.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with whole_directory(directory) if writes else nullcontext(directory) as place:
        write_files(model, place, tokenizer, trained, gather, shard_bytes, keep)


def write_files(
    model: MultimodalModel,
    place: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: Trained,
    gather: Gather = gather_whole,
    shard_bytes: int | None = None,
    keep: Keep = in_memory,
) -> None:
    """Write an export into an existing directory. Collective; rank 0 writes."""
    writes = not dist.is_initialized() or dist.get_rank() == 0
    chats = {has_chats(source, trained.data) for source in trained.data.sources if writes}
    tokenizer = _as_in_training(tokenizer, chats)
    ends = ChatTemplate(tokenizer).end_tokens() if tokenizer.chat_template else ()
    export_hf(model, place, tokenizer, gather, shard_bytes, keep, ends)
    if writes:
        (place / CARD).write_text(card(model, place, tokenizer, trained, True in chats))


def is_chat_model(directory: Path) -> bool:
    """Return whether the model of an export was trained on chats, by the tags of its card."""
    try:
        tags = ModelCard.load(directory / CARD).data.tags or []
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return CHAT_TAG in tags


def _as_in_training(
    tokenizer: PreTrainedTokenizerBase, chats: Collection[bool | None]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that prepares text as training did.

    Training begins each text without a chat template with the BOS token. It renders chats with a
    simple template if the tokenizer has none.

    Args:
        tokenizer: Tokenizer of the LLM.
        chats: For each source, whether it has chats; None if that is unknown.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if True in chats and not tokenizer.chat_template:
        tokenizer.chat_template = FALLBACK_TEMPLATE
    bos = tokenizer.bos_token_id
    lacks_bos = bos is not None and tokenizer("a").input_ids[:1] != [bos]
    # Programs that tokenize rendered chats would get BOS twice if the template writes it, too.
    if lacks_bos and False in chats and not (True in chats and _writes_bos(tokenizer)):
        tokenizer.add_bos_token = True
    return tokenizer


def _writes_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TEMPLATE_ERRORS:
        return False
    return str(text).startswith(str(tokenizer.bos_token))


def write_adapters(model: MultimodalModel, directory: Path, gather: Gather = gather_whole) -> None:
    """Writes adapters alone, as PEFT's files, likewise; nothing if the model has none.

    Raises:
        ConfigError: as `write_export`.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with whole_directory(directory) if writes else nullcontext(directory) as place:
        save_adapters(model, place, gather)


def card(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: Trained,
    chats: bool,
) -> str:
    """Return the README.md of an export.

    Args:
        model: Model that is exported.
        directory: Directory with the files of the model.
        tokenizer: Tokenizer that is exported.
        trained: Facts about the training.
        chats: Whether the data have chats.
    """
    lines = [*_head(model, trained, chats), f"# {trained.name}", "", "Trained with torchmm.", ""]
    lines += ["## Parts", ""]
    for module in model.modality_modules():
        with torch.device("meta"):
            count = sum(p.numel() for p in module.rebuild().parameters())
        source = module.weights.source
        begin = f"began as `{source}`" if source else "began with random weights"
        lines.append(f"- `{module.name}`: {count:,} parameters, {begin}")
    lines += ["", "## Data", "", *map(_described, trained.data.sources), ""]
    lines += ["## Training", "", *_training(trained), ""]
    if trained.recipe:
        lines += ["```toml", trained.recipe.strip(), "```", ""]
    lines += ["## Use", "", *_use(model, directory, tokenizer, trained, chats), ""]
    lines += [
        f"Written by transformers {transformers.__version__}. Use transformers 5.0 or later. Older "
        "versions are not supported: some model types compute other values there.",
        "",
    ]
    return "\n".join(lines)


def _head(model: MultimodalModel, trained: Trained, chats: bool) -> Iterator[str]:
    """Yield the YAML metadata that the Hub reads."""
    modalities = {encoder.family.modality for encoder in model.encoder_modules()}
    tasks = {
        frozenset(): "text-generation",
        frozenset({"image"}): "image-text-to-text",
        frozenset({"audio"}): "audio-text-to-text",
    }
    yield "---"
    yield f"tags: [torchmm, {CHAT_TAG}]" if chats else "tags: [torchmm]"
    if model.generator is None:
        yield f"pipeline_tag: {tasks.get(frozenset(modalities), 'any-to-any')}"
    places = [m.weights.source for m in model.modality_modules() if m.weights.source]
    begun = sorted({split_place(p)[0] for p in places if not Path(split_place(p)[0]).exists()})
    for key, names in (
        ("base_model", begun),
        ("datasets", sorted({s.path for s in trained.data.sources if s.format == "hub"})),
    ):
        if names:
            yield f"{key}: {json.dumps(names)}"
    yield "---"
    yield ""


def _described(source: SourceConfig) -> str:
    """A source, with its licence if `scripts/prepare_data.py` has recorded it."""
    path = Path(source.path)
    licence = "not recorded"
    for directory in () if "://" in source.path else (path, path.parent):  # or that of a split
        prepared: dict[str, Any] = read_prepared(directory.parent)
        licence = prepared.get(directory.name, {}).get("licence", licence)
    revision = f" at {source.revision}" if source.revision else ""
    place = f"`{without_secrets(source.path)}`{revision}"
    return f"- {place}, weight {source.weight:g}; licence: {licence}"


def _training(trained: Trained) -> Iterator[str]:
    training = trained.training
    yield (
        f"- step {trained.step:,} of {training.steps:,}, {training.global_batch_size} sequences of "
        f"up to {training.sequence_length:,} tokens a step, {training.dtype}"
    )
    for key, name in (("loss", "loss"), ("validation_loss", "held-out loss")):
        if (found := _last(trained, key)) is not None:
            yield f"- {name} {found[1]:.4f} nats a token at step {found[0]:,}"


def _last(trained: Trained, key: str) -> tuple[int, float] | None:
    """Step and value of the newest figure up to the exported step."""
    found = None
    if trained.metrics.exists():
        for line in trained.metrics.read_text().splitlines():
            record = json.loads(line)
            if record["step"] <= trained.step and record.get(key) is not None:
                found = record["step"], record[key]
    return found


def _use(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: Trained,
    chats: bool,
) -> list[str]:
    """Return the section that shows how to generate text with the files."""
    if (directory / PARTS_FILE).exists():
        return [
            "Hugging Face has no class for this pair. Its parts are in separate folders, which",
            "`torchmm generate` reads. To continue training, set `source` in the",
            f"`[model]` section of a recipe to this directory (`{PARTS_FILE}` lists the parts).",
        ]
    (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
    prompt = next((source.prompt for source in trained.data.sources if source.prompt), "")
    decoder = "tokenizer"
    packages: tuple[str, ...] = ()
    if not model.encoders:
        lines = _llm_example(kind, prompt, chats)
    else:
        processor = choose_processor(model)
        packages = processor.packages
        if not processor.takes_text:
            return [
                f"`{kind}.from_pretrained` loads this directory. {processor.processor} does not:",
                "it requires a tokenizer of mistral-common, and this one is in the format of",
                "Hugging Face. Use `scripts/generate.py` of torchmm to generate text.",
            ]
        if processor.adds_bos:
            decoder = "processor"
            lines = _processor_example(model, kind, tokenizer, processor, prompt, chats)
        else:
            lines = _tokenizer_and_images_example(model, kind, tokenizer, prompt, chats)
    lines = [
        "```python",
        *lines,
        "tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]",
        'answer = tokens[inputs["input_ids"].shape[1] :]',
        f"print({decoder}.decode(answer, skip_special_tokens=True))",
        "```",
    ]
    if packages:
        names = " ".join(f"'{name}'" if "[" in name else name for name in packages)
        lines = [f"The example requires `pip install {names}`.", "", *lines]
    if model.generator is not None:
        lines += ["", f"`scripts/generate.py --draw` of torchmm draws with `{GENERATOR}/`."]
    return lines


def _llm_example(kind: str, prompt: str, chats: bool) -> list[str]:
    """Return code that loads an LLM and prepares a chat or a text."""
    lines = [
        f"from transformers import AutoTokenizer, {kind}",
        *_model_lines(kind),
        "tokenizer = AutoTokenizer.from_pretrained(path)",
    ]
    if chats:
        return [
            *lines,
            f'messages = [{{"role": "user", "content": "{_QUESTION}"}}]',
            *_chat_lines("inputs", "tokenizer", _AS_TENSORS),
        ]
    return [*lines, f'inputs = tokenizer({_literal(prompt or "The")}, return_tensors="pt")']


def _processor_example(
    model: MultimodalModel,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    processor: Written,
    prompt: str,
    chats: bool,
) -> list[str]:
    """Return code that loads a model with its processor and prepares a chat or a file."""
    modality = model.encoder_modules()[0].family.modality
    lines = [
        *(["from PIL import Image"] if modality == "image" else []),
        f"from transformers import AutoProcessor, {kind}",
        *_model_lines(kind),
        "processor = AutoProcessor.from_pretrained(path)",
    ]
    if chats:
        return [*lines, *_message_lines(modality), *_chat_lines("inputs", "processor", _AS_TENSORS)]
    text = _literal(_file_text(model, tokenizer, processor, modality) + prompt)
    argument = "images" if modality == "image" else "audio"
    return [
        *lines,
        f'inputs = processor(text={text}, {argument}={_FILES[modality]}, return_tensors="pt")',
    ]


def _tokenizer_and_images_example(
    model: MultimodalModel, kind: str, tokenizer: PreTrainedTokenizerBase, prompt: str, chats: bool
) -> list[str]:
    """Return code for a class whose processor writes other tokens than training.

    The processor of PaliGemma writes the BOS token after the image, and a newline after the text.
    Token types of 0 mark the prompt, which the model reads in both directions.
    """
    (encoder,) = model.encoder_modules()
    placeholder = model.image_token_id(tokenizer)
    assert placeholder is not None
    mark = _literal(str(tokenizer.convert_ids_to_tokens(placeholder)))
    count = patches_per_row(encoder.spec.config) ** 2
    lines = [
        "from PIL import Image",
        f"from transformers import AutoImageProcessor, AutoTokenizer, {kind}",
        *_model_lines(kind),
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        "image_processor = AutoImageProcessor.from_pretrained(path)",
        f'images = image_processor({_FILES["image"]}, return_tensors="pt")',
        "# The processor of this class writes the BOS token after the image; training wrote it "
        "first.",
    ]
    if chats:
        lines += [
            *_message_lines("image"),
            *_chat_lines("text", "tokenizer", "tokenize=False"),
            f"text = text.replace({mark}, {mark} * {count})",
            "encoded = tokenizer(",
            '    text, add_special_tokens=False, return_token_type_ids=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines += [
            f"text = {mark} * {count} + {_literal(prompt)}",
            'encoded = tokenizer(text, return_token_type_ids=True, return_tensors="pt")',
        ]
    return [*lines, "inputs = {**encoded, **images}"]


def _model_lines(kind: str) -> list[str]:
    return [
        "",
        'path = "."  # the directory of this file',
        f"model = {kind}.from_pretrained(path)",
    ]


def _message_lines(modality: str) -> list[str]:
    key = "image" if modality == "image" else "path"
    return [
        f'file = {{"type": "{modality}", "{key}": {_FILES[modality]}}}',
        f'question = {{"type": "text", "text": "{_QUESTION}"}}',
        'messages = [{"role": "user", "content": [file, question]}]',
    ]


def _chat_lines(result: str, templates: str, settings: str) -> list[str]:
    return [
        f"{result} = {templates}.apply_chat_template(",
        f"    messages, add_generation_prompt=True, {settings}",
        ")",
    ]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _file_text(
    model: MultimodalModel, tokenizer: PreTrainedTokenizerBase, processor: Written, modality: str
) -> str:
    """Return the text that stands for an image or a sound in prompts of the processor."""
    text = model.text
    placeholder = model.image_token_id(tokenizer)
    before = text.prefix
    after = text.suffix
    if modality == "audio" and text.sound_token_id is not None:
        placeholder = text.sound_token_id
        before = text.sound_prefix
        after = text.sound_suffix
    assert placeholder is not None
    if processor.in_text:
        return name_tokens(processor, model.composite, placeholder, tokenizer)[processor.in_text]
    marks = (placeholder,) if processor.adds_marks else (*before, placeholder, *after)
    written = ""
    for mark in marks:
        if isinstance(mark, int):
            written += str(tokenizer.convert_ids_to_tokens(mark) or "")
        else:
            written += mark if isinstance(mark, str) else mark.text
    return written
