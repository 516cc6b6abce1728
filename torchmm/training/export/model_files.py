"""Write an export: the files of a model, and a model card about its training and usage.

The card (`README.md`) has facts that the run recorded: modules and their sources, data and their
licenses, important settings and measured losses. The Hub reads its metadata. The templates of the
Hub are not used, because they require facts that the run does not record, and show them as missing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
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
from torchmm.common.files import read_prepared_manifest
from torchmm.common.module_names import GENERATOR
from torchmm.data.files.urls import redact_urls
from torchmm.data.media.chat import FALLBACK_TEMPLATE, ChatTemplate
from torchmm.data.sources.open import contains_chats
from torchmm.models.families.encoders.family import patches_per_row
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.export import TRAINED_WEIGHTS, WeightSource, export_hf
from torchmm.models.hf.legacy_keys import OLDEST_VERSION, describe_versions
from torchmm.models.hf.processor_classes import ProcessorFiles
from torchmm.models.hf.processors import choose_processor, processor_tokens
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import COMPONENTS_FILE, split_revision
from torchmm.recipe.read import training_recipe_toml
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.atomic_directory import write_directory_atomically

CARD_FILE = "README.md"
CHAT_TAG = "conversational"
"""Hub tag of models that are trained on chats."""
_TASKS = {"image": "image-text-to-text", "audio": "audio-text-to-text"}
_EXAMPLE_FILES = {"image": 'Image.open("image.jpg")', "audio": '"audio.wav"'}
"""Files in the examples of cards, in the form that the processors accept."""
_QUESTION = "What is this?"


class TrainingSummary(NamedTuple):
    """Facts about the training, for the card."""

    recipe: Recipe
    step: int
    """Step of the weights."""
    metrics: Path
    """File metrics.jsonl of the run. It may be missing."""


def write_export(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: TrainingSummary,
    shard_bytes: int | None = None,
) -> None:
    """Write the model of a run with its card. Collective. Rank 0 writes the files.

    The directory appears, or replaces an earlier export, when all files are complete.

    Args:
        model: Model to export.
        directory: Directory of the export.
        tokenizer: Tokenizer of the run.
        trained: Facts about the training.
        shard_bytes: Maximum size of a weight file. If None, use the default of Hugging Face.

    Raises:
        ConfigError: Another process writes the directory.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with write_directory_atomically(directory) if writes else nullcontext(directory) as output:
        write_files(model, output, tokenizer, trained, TRAINED_WEIGHTS, shard_bytes)


def write_files(
    model: MultimodalModel,
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: TrainingSummary,
    weights: WeightSource,
    shard_bytes: int | None,
) -> None:
    """Write an export into an existing directory. Collective. Rank 0 writes the files."""
    writes = not dist.is_initialized() or dist.get_rank() == 0
    data = trained.recipe.data
    chats = {contains_chats(source, data) for source in data.sources if writes}
    tokenizer = _with_training_template(tokenizer, chats)
    end_tokens = ChatTemplate(tokenizer).end_token_ids() if tokenizer.chat_template else ()
    export_hf(model, output, tokenizer, weights, shard_bytes, end_tokens)
    if writes:
        (output / CARD_FILE).write_text(
            model_card(model, output, tokenizer, trained, True in chats)
        )


def write_adapters(model: MultimodalModel, directory: Path) -> None:
    """Write the adapters of a run in PEFT format, if the model has adapters.

    Collective. Rank 0 writes the files.

    Raises:
        ConfigError: Another process writes the directory.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with write_directory_atomically(directory) if writes else nullcontext(directory) as output:
        save_adapters(model, output)


def is_chat_model(directory: Path) -> bool:
    """Return True if the model of an export was trained on chats, by the tags of its card."""
    try:
        tags = ModelCard.load(directory / CARD_FILE).data.tags or []
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return CHAT_TAG in tags


def _with_training_template(
    tokenizer: PreTrainedTokenizerBase, chats: Collection[bool | None]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that prepares text as in training.

    In training, text without a chat template starts with the BOS token. Chats use a simple template
    if the tokenizer has none.

    Args:
        tokenizer: Tokenizer of the LLM.
        chats: Whether each source has chats, or None if that is unknown.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if True in chats and not tokenizer.chat_template:
        tokenizer.chat_template = FALLBACK_TEMPLATE
    bos = tokenizer.bos_token_id
    if False in chats and bos is not None and tokenizer("a").input_ids[:1] != [bos]:
        rendered = ""
        if True in chats:
            message = {"role": "user", "content": "a"}
            try:
                rendered = str(tokenizer.apply_chat_template([message], tokenize=False))
            except TEMPLATE_ERRORS:
                rendered = ""
        # Programs that tokenize rendered chats would add BOS twice if the template also adds it.
        if not rendered.startswith(str(tokenizer.bos_token)):
            tokenizer.add_bos_token = True
    return tokenizer


def model_card(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trained: TrainingSummary,
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
    recipe, step, metrics = trained
    modules = model.modality_modules()
    sources = recipe.data.sources

    # Metadata for the Hub.
    lines = ["---", f"tags: [torchmm, {CHAT_TAG}]" if chats else "tags: [torchmm]"]
    if model.generator is None:
        modalities = sorted({encoder.family.modality for encoder in model.encoder_modules()})
        task = "any-to-any" if modalities else "text-generation"
        if len(modalities) == 1:
            task = _TASKS.get(modalities[0], task)
        lines.append(f"pipeline_tag: {task}")
    sources_of_weights = {split_revision(m.weights.source)[0] for m in modules if m.weights.source}
    bases = sorted(name for name in sources_of_weights if not Path(name).exists())
    datasets = sorted({source.path for source in sources if source.format == "hub"})
    lines += [f"base_model: {json.dumps(bases)}"] if bases else []
    lines += [f"datasets: {json.dumps(datasets)}"] if datasets else []

    lines += ["---", "", f"# {recipe.name}", "", "Trained with torchmm.", "", "## Parts", ""]
    for module in modules:
        with torch.device("meta"):
            count = sum(p.numel() for p in module.rebuild().parameters())
        source = module.weights.source
        begin = f"initialized from `{source}`" if source else "initialized randomly"
        lines.append(f"- `{module.name}`: {count:,} parameters, {begin}")

    lines += ["", "## Data", ""]
    for data in sources:
        # `scripts/prepare_data.py` records licenses of data sets, whose splits may be folders.
        path = Path(data.path)
        license = "not recorded"
        for folder in () if "://" in data.path else (path, path.parent):
            prepared: dict[str, Any] = read_prepared_manifest(folder.parent)
            license = prepared.get(folder.name, {}).get("license", license)
        revision = f" at {data.revision}" if data.revision else ""
        name = f"`{redact_urls(data.path)}`{revision}"
        lines.append(f"- {name}, weight {data.weight:g}; license: {license}")

    training = recipe.training
    lines += ["", "## Training", ""]
    lines.append(
        f"- step {step:,} of {training.steps:,}, {training.global_batch_size} sequences of up "
        f"to {training.sequence_length:,} tokens per step, {training.dtype}"
    )
    text = metrics.read_text() if metrics.exists() else ""
    records = [record for record in map(json.loads, text.splitlines()) if record["step"] <= step]
    for key, name in (("loss", "loss"), ("validation_loss", "validation loss")):
        measured = [record for record in records if record.get(key) is not None]
        if measured:
            last = measured[-1]
            lines.append(f"- {name} {last[key]:.4f} nats per token at step {last['step']:,}")

    settings = training_recipe_toml(recipe).strip()
    lines += ["", "```toml", settings, "```"] if settings else []
    lines += ["", "## Use", ""]
    prompt = next((source.prompt for source in sources if source.prompt), "")
    lines += _usage_section(model, directory, tokenizer, prompt, chats)
    versions = f"Use transformers {OLDEST_VERSION} or later."
    if not (directory / COMPONENTS_FILE).exists():
        versions = describe_versions(directory)
    lines += [
        "",
        f"Written with transformers {transformers.__version__}. {versions}",
        "",
    ]
    return "\n".join(lines)


def _usage_section(
    model: MultimodalModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chats: bool,
) -> list[str]:
    """Return the section that shows how to generate text with the files."""
    if (directory / COMPONENTS_FILE).exists():
        return [
            "Hugging Face has no class for this pair. Its components are in separate folders,",
            "which `torchmm generate` reads. To continue training, set `source` in the `[model]`",
            f"section of a recipe to this directory (`{COMPONENTS_FILE}` lists the components).",
        ]
    (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
    processor = choose_processor(model) if model.encoders else None
    if processor is not None and not processor.accepts_tokenizer:
        return [
            f"`{kind}.from_pretrained` loads this directory. {processor.processor} does not:",
            "it requires a tokenizer of mistral-common, and this one is in the format of",
            "Hugging Face. Use `torchmm generate` to generate text.",
        ]
    lines = ["```python", *_code_example(model, kind, tokenizer, processor, prompt, chats), "```"]
    if processor is not None and processor.packages:
        names = " ".join(f"'{name}'" if "[" in name else name for name in processor.packages)
        lines = [f"The example requires `pip install {names}`.", "", *lines]
    if model.generator is not None:
        lines += [
            "",
            f"`torchmm generate --generate-images` generates images with `{GENERATOR}/`.",
        ]
    return lines


def _code_example(
    model: MultimodalModel,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorFiles | None,
    prompt: str,
    chats: bool,
) -> list[str]:
    """Return code that loads a model, prepares a chat or a file with text, and generates text.

    Args:
        model: Model that is exported.
        kind: Class of the model.
        tokenizer: Tokenizer that is exported.
        processor: Processor of the export. None for LLMs.
        prompt: Text for models that were not trained on chats.
        chats: Whether the model was trained on chats.
    """
    modality = None if processor is None else model.encoder_modules()[0].family.modality
    if processor is None:
        classes = {"tokenizer": "AutoTokenizer"}
    elif processor.adds_bos:
        classes = {"processor": "AutoProcessor"}
    else:
        classes = {"tokenizer": "AutoTokenizer", "image_processor": "AutoImageProcessor"}
    reader = next(iter(classes))
    lines = ["from PIL import Image"] if modality == "image" else []
    lines += [
        f"from transformers import {', '.join(sorted(classes.values()))}, {kind}",
        "",
        'path = "."  # the directory of this file',
        f"model = {kind}.from_pretrained(path)",
    ]
    lines += [f"{name} = {loader}.from_pretrained(path)" for name, loader in classes.items()]

    question: list[str] = []
    if chats:
        content = f'"{_QUESTION}"'
        if modality is not None:
            key = "image" if modality == "image" else "path"
            question.append(f'file = {{"type": "{modality}", "{key}": {_EXAMPLE_FILES[modality]}}}')
            question.append(f'question = {{"type": "text", "text": {content}}}')
            content = "[file, question]"
        question.append(f'messages = [{{"role": "user", "content": {content}}}]')

    if "image_processor" in classes:
        lines += _separate_inputs(model, tokenizer, prompt, question)
    elif chats:
        settings = 'tokenize=True, return_dict=True, return_tensors="pt"'
        lines += [*question, *_rendered_chat("inputs", reader, settings)]
    elif processor is None or modality is None:
        lines.append(f'inputs = tokenizer({_literal(prompt or "The")}, return_tensors="pt")')
    else:
        text = _literal(_file_text(model, tokenizer, processor, modality) + prompt)
        files = f"{'images' if modality == 'image' else 'audio'}={_EXAMPLE_FILES[modality]}"
        lines.append(f'inputs = processor(text={text}, {files}, return_tensors="pt")')
    return [
        *lines,
        "tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]",
        'answer = tokens[inputs["input_ids"].shape[1] :]',
        f"print({reader}.decode(answer, skip_special_tokens=True))",
    ]


def _separate_inputs(
    model: MultimodalModel, tokenizer: PreTrainedTokenizerBase, prompt: str, question: list[str]
) -> list[str]:
    """Return code that prepares inputs with the tokenizer and the image processor.

    The processor of PaliGemma writes the BOS token after the image, and a newline after the text.
    Token type 0 selects the prompt, to which the model applies bidirectional attention.

    Args:
        model: Model that is exported.
        tokenizer: Tokenizer that is exported.
        prompt: Text, used without a question.
        question: Code that sets `messages`. Empty for models that were not trained on chats.
    """
    (encoder,) = model.encoder_modules()
    placeholder = model.image_token_id(tokenizer)
    assert placeholder is not None
    token = _literal(str(tokenizer.convert_ids_to_tokens(placeholder)))
    tokens = f"{token} * {patches_per_row(encoder.spec.config) ** 2}"
    lines = [
        f'images = image_processor({_EXAMPLE_FILES["image"]}, return_tensors="pt")',
        "# The processor of this class writes the BOS token after the image; training wrote it "
        "first.",
    ]
    if question:
        lines += [
            *question,
            *_rendered_chat("text", "tokenizer", "tokenize=False"),
            f"text = text.replace({token}, {tokens})",
            "encoded = tokenizer(",
            '    text, add_special_tokens=False, return_token_type_ids=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines += [
            f"text = {tokens} + {_literal(prompt)}",
            'encoded = tokenizer(text, return_token_type_ids=True, return_tensors="pt")',
        ]
    return [*lines, "inputs = {**encoded, **images}"]


def _rendered_chat(result: str, reader: str, settings: str) -> list[str]:
    return [
        f"{result} = {reader}.apply_chat_template(",
        f"    messages, add_generation_prompt=True, {settings}",
        ")",
    ]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _file_text(
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorFiles,
    modality: str,
) -> str:
    """Return the placeholder text of an image or an audio file in prompts of the processor."""
    text = model.text
    placeholder = model.image_token_id(tokenizer)
    before = text.prefix
    after = text.suffix
    if modality == "audio" and text.sound_token_id is not None:
        placeholder = text.sound_token_id
        before = text.sound_prefix
        after = text.sound_suffix
    assert placeholder is not None
    if processor.prompt_token_name:
        return processor_tokens(processor, model.composite, placeholder, tokenizer)[
            processor.prompt_token_name
        ]
    written = ""
    for token in (placeholder,) if processor.adds_markers else (*before, placeholder, *after):
        if isinstance(token, int):
            written += str(tokenizer.convert_ids_to_tokens(token) or "")
        else:
            written += token if isinstance(token, str) else token.text
    return written
