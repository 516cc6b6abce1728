"""An export: the model's files, and a card that says what it is and how to load it.

The card (`README.md`) has what is known for certain: parts and where they come from, data and
their licences as far as they are recorded, settings that matter, losses that were measured. Its
head is what Hugging Face's hub reads. Rejected: the hub's templates, which ask for much that only
people know, and show it as missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedTokenizerBase

from torchmm.data.media.chat import ChatTemplate
from torchmm.data.prepare.manifest import read as read_prepared
from torchmm.data.storage.addresses import without_secrets
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.experts_apart import Keep, in_memory
from torchmm.models.hf.export import Gather, export_hf, gather_whole
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.model_section import PARTS_FILE, split_place
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.exports.place import whole_directory

CARD = "README.md"


class Trained(NamedTuple):
    """What a card says of the training."""

    name: str
    """Of the run."""
    step: int
    training: TrainingConfig
    sources: Sequence[SourceConfig]
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
    ends = ChatTemplate(tokenizer).end_tokens() if tokenizer.chat_template else ()
    export_hf(model, place, tokenizer, gather, shard_bytes, keep, ends)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (place / CARD).write_text(card(model, place, trained))


def write_adapters(model: MultimodalModel, directory: Path, gather: Gather = gather_whole) -> None:
    """Writes adapters alone, as PEFT's files, likewise; nothing if the model has none.

    Raises:
        ConfigError: as `write_export`.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with whole_directory(directory) if writes else nullcontext(directory) as place:
        save_adapters(model, place, gather)


def card(model: MultimodalModel, directory: Path, trained: Trained) -> str:
    """README.md of an export.

    Args:
        directory: with the model's files.
    """
    lines = [*_head(model, trained), f"# {trained.name}", "", "Trained with torchmm.", ""]
    lines += ["## Parts", ""]
    for module in model.modality_modules():
        with torch.device("meta"):
            count = sum(p.numel() for p in module.rebuild().parameters())
        source = module.weights.source
        begin = f"began as `{source}`" if source else "began with random weights"
        lines.append(f"- `{module.name}`: {count:,} parameters, {begin}")
    lines += ["", "## Data", "", *map(_described, trained.sources), ""]
    lines += ["## Training", "", *_training(trained), ""]
    if trained.recipe:
        lines += ["```toml", trained.recipe.strip(), "```", ""]
    lines += ["## Use", "", *_use(directory), ""]
    lines += [
        f"Written by transformers {transformers.__version__}. Use transformers 5.0 or later. Older "
        "versions are not supported: some model types compute other values there.",
        "",
    ]
    return "\n".join(lines)


def _head(model: MultimodalModel, trained: Trained) -> Iterator[str]:
    """What the hub reads, YAML."""
    modalities = {encoder.family.modality for encoder in model.encoder_modules()}
    tasks = {
        frozenset(): "text-generation",
        frozenset({"image"}): "image-text-to-text",
        frozenset({"audio"}): "audio-text-to-text",
    }
    yield "---"
    yield "tags: [torchmm]"
    if model.generator is None:
        yield f"pipeline_tag: {tasks.get(frozenset(modalities), 'any-to-any')}"
    places = [m.weights.source for m in model.modality_modules() if m.weights.source]
    begun = sorted({split_place(p)[0] for p in places if not Path(split_place(p)[0]).exists()})
    for key, names in (
        ("base_model", begun),
        ("datasets", sorted({s.path for s in trained.sources if s.format == "hub"})),
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


def _use(directory: Path) -> list[str]:
    """How its files are loaded."""
    if (directory / PARTS_FILE).exists():
        return [
            "Hugging Face has no class for this pair. Its parts are in folders of their own, which",
            "`scripts/generate.py` of torchmm reads; the directory trains on there as the `source`",
            f"of a recipe's `[model]` (`{PARTS_FILE}` says what the parts are).",
        ]
    (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
    text = "AutoTokenizer" if kind.endswith("ForCausalLM") else "AutoProcessor"
    return [
        "```python",
        f"from transformers import {text}, {kind}",
        "",
        'here = "."  # the directory of this file',
        f"model = {kind}.from_pretrained(here)",
        f"inputs = {text}.from_pretrained(here)",
        "```",
    ]
