"""Prompts: samples of training data up to the first token of the text to generate.

A request (files and text, or a chat) becomes a JSON record with a placeholder for the text to
generate. The data pipeline of training reads it, so that placeholder tokens, templates, pixels and
positions are the same. The prompt has all tokens before the first target of the loss.

Hugging Face processors are not used, because some models have none.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import IGNORE_TARGET, Microbatch, SampleMeta
from torchmm.common.errors import ConfigError, DataError
from torchmm.data.build import build_loader
from torchmm.data.loader import StepBatch
from torchmm.data.record_formats.columns import AUDIO_COLUMNS, VIDEO_COLUMNS
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

RESPONSE_PLACEHOLDER = "?"
"""Placeholder for the text to generate."""
_FILE_KEYS = {
    f"{name}{plural}" for name in ("image", "video", "audio") for plural in ("", "s", "_url")
} | {"path", "url"}
"""Columns of records and keys of content parts with file names."""


class Prompt(NamedTuple):
    """Tokens and images before the text to generate."""

    row: Microbatch
    """Packed sequence of one sample."""
    truth_ids: Tensor
    """Reference text of the sample. For a chat, the first message of the assistant."""
    sample: SampleMeta

    def sample_end_tokens(self, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the special token that follows the text in training, if any."""
        return {int(self.truth_ids[-1])} & set(tokenizer.all_special_ids)


def split_prompts(microbatch: Microbatch) -> Iterator[Prompt]:
    """Yield prompts of the samples that have targets, but no image after the first target."""
    read = dict.fromkeys(microbatch.encoders, 0)  # number of images of previous samples
    segments = zip(microbatch.cu_seqlens, microbatch.cu_seqlens[1:], strict=False)
    for sample, (start, stop) in zip(microbatch.meta.samples, segments, strict=False):
        before = dict(read)
        read = {name: count + len(sample.images_of_encoder(name)) for name, count in before.items()}
        shown = {n: range(before[n], read[n]) for n in before if before[n] < read[n]}
        targets = microbatch.targets_T[start:stop]
        counted = (targets != IGNORE_TARGET).nonzero()
        if not len(counted):
            continue
        prompt_end = start + int(counted[0]) + 1
        encoders = {
            name: microbatch.encoders[name].select(image_indices)
            for name, image_indices in shown.items()
        }
        for inputs in encoders.values():
            inputs.positions_K = inputs.positions_K - start
        if any(int(inputs.positions_K.max()) >= prompt_end - start for inputs in encoders.values()):
            continue
        row = Microbatch(
            input_ids_T=microbatch.input_ids_T[start:prompt_end],
            targets_T=torch.full((prompt_end - start,), IGNORE_TARGET),
            position_ids=microbatch.position_ids[..., start:prompt_end],
            cu_seqlens=[0, prompt_end - start],
            encoders=encoders,
            meta=replace(microbatch.meta, samples=(sample,), tokens=prompt_end - start),
        )
        answer = targets[int(counted[0]) :]
        after_response = (answer == IGNORE_TARGET).nonzero()
        yield Prompt(
            row, answer[: int(after_response[0])] if len(after_response) else answer, sample
        )


def batch_prompts(
    prompts: Iterable[Prompt], max_prompts: int, tokens: int
) -> Iterator[list[Prompt]]:
    """Yield batches of consecutive prompts.

    Args:
        prompts: Prompts in order.
        max_prompts: Maximum number of prompts in a batch.
        tokens: Maximum number of tokens in a batch. Caches store all prompts with the length of the
            longest prompt. A prompt with more tokens is a batch by itself.
    """
    group: list[Prompt] = []
    longest = 0
    for prompt in prompts:
        length = len(prompt.row.input_ids_T)
        longest = max(longest, length)
        if group and (len(group) == max_prompts or (len(group) + 1) * longest > tokens):
            yield group
            group = []
            longest = length
        group.append(prompt)
    if group:
        yield group


@dataclass(frozen=True)
class Request:
    """A request to generate text."""

    label: str
    """Name of the request in outputs."""
    record: dict[str, Any]
    """Record of training data with `RESPONSE_PLACEHOLDER` as the text to generate."""
    root: Path
    """Directory of relative file names in the record."""


def make_request(files: Sequence[Path], prompt_text: str, *, as_chat: bool = False) -> Request:
    """Return a request with files, followed by text.

    Args:
        files: Images, audio and videos.
        prompt_text: Text after the files.
        as_chat: Whether the request is a user message in the chat template.

    Raises:
        ConfigError: Neither a file nor text is specified.
        DataError: A file does not exist.
    """
    label = " ".join([*map(str, files), *([prompt_text] if prompt_text else [])])
    if not label:
        raise ConfigError("no prompt; pass a file or text (--prompt)")
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"no such file: {', '.join(missing)}")
    if as_chat:
        return chat_request(
            label, [{"role": "user", "content": content_parts(files, prompt_text)}], Path()
        )
    named: dict[str, Any] = {}
    for file in files:
        named.setdefault(f"{media_type_of(file)}s", []).append(str(file))
    text = (
        {"prompt": prompt_text, "completion": RESPONSE_PLACEHOLDER}
        if prompt_text
        else {"text": RESPONSE_PLACEHOLDER}
    )
    return Request(label, named | text, Path())


def content_parts(files: Sequence[Path], text: str) -> list[dict[str, str]]:
    """Return the content of a user message."""
    shown = [{"type": media_type_of(file), media_type_of(file): str(file)} for file in files]
    return [*shown, {"type": "text", "text": text}] if text else shown


def media_type_of(file: Path) -> str:
    """Return the type of a file by its suffix: "image", "video" or "audio"."""
    suffix = file.suffix.removeprefix(".").lower()
    if suffix in VIDEO_COLUMNS:
        return "video"
    return "audio" if suffix in AUDIO_COLUMNS else "image"


def chat_request(
    label: str, messages: Sequence[dict], root: Path, columns: dict[str, Any] | None = None
) -> Request:
    """Return a request for the next message of the assistant.

    Args:
        label: Name in outputs.
        messages: Messages of the chat. The last one is not from the assistant.
        root: Directory of relative file names.
        columns: Other columns of the record: files, tools.
    """
    answer = [{"role": "assistant", "content": RESPONSE_PLACEHOLDER}]
    return Request(label, {**(columns or {}), "prompt": [*messages], "completion": answer}, root)


def read_chats(file: Path) -> list[Request]:
    """Return the chats of a JSON file (one chat or a list) or a JSON lines file.

    If the last message is from the assistant, it is dropped and generated again.

    Raises:
        DataError: The file cannot be read.
        ConfigError: A record has no messages.
    """
    try:
        text = file.read_text()
        if file.suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            content = json.loads(text)
            # A list of messages is one chat, any other list is a list of chats.
            is_chat = isinstance(content, dict) or (content and "role" in content[0])
            records = [content] if is_chat else content
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{file}: {error}") from error
    requests = []
    for number, record in enumerate(records):
        label = f"{file.name}[{number}]"
        columns = {"messages": record} if isinstance(record, list) else dict(record)
        messages = columns.pop("messages", None)
        if messages is None:
            turns = columns.pop("conversations", None) or ()
            roles = {"human": "user", "gpt": "assistant"}
            messages = [
                {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
                for turn in turns
            ]
        if messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ConfigError(f'{label}: no messages; use "messages" with "role" and "content"')
        requests.append(chat_request(label, messages, file.parent, columns))
    return requests


def read_prompts(
    requests: Sequence[Request],
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> list[Prompt]:
    """Return the prompts of requests in the same order.

    Args:
        requests: Requests to read.
        model: Model that processes the files.
        tokenizer: Tokenizer of the model.
        max_tokens: Maximum length of a prompt.

    Raises:
        ConfigError, DataError: A request cannot be read.
    """
    prompts: dict[int, Prompt] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for batch in read_steps(requests, model, tokenizer, max_tokens, Path(scratch)):
                problems += batch.skipped
                for prompt in (p for row in batch.microbatches for p in split_prompts(row)):
                    prompts[prompt.sample.index] = prompt
                if len(prompts) == len(requests):
                    break
        except DataError as error:  # no request can be read
            problems.append(str(error).partition("\nCorrect the source")[0])
    if lost := [r.label for number, r in enumerate(requests) if number not in prompts]:
        labels = ", ".join(f"{label!r:.80}" for label in lost)
        why = "; ".join(problems) or f"longer than {max_tokens} tokens"
        raise DataError(f"{labels} cannot be read: {why}")
    return [prompts[number] for number in range(len(requests))]


def read_steps(
    requests: Sequence[Request],
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    folder: Path,
    *,
    generate: str | None = None,
    seed: int = 0,
) -> Iterator[StepBatch]:
    """Yield the requests as batches of held-out samples, whose indices are request numbers.

    Args:
        requests: Requests to read.
        model: Model that processes the files.
        tokenizer: Tokenizer of the model.
        max_tokens: Maximum length of a sample.
        folder: Directory for copies of the files.
        generate: Column of the images to generate, whose files are in `folder`.
        seed: Seed of the noise.
    """
    lines = [json.dumps(_copy_files(r.record, r.root, folder)) + "\n" for r in requests]
    # The noise of held-out samples depends on the name of the source, not on the training seed.
    name = f"requests {seed}"
    source = folder / "requests.jsonl"
    source.write_text("".join(lines))
    loader = build_loader(
        DataConfig(
            validation=[SourceConfig(path=str(source), name=name, target_image_column=generate)],
            workers=0,
            index_cache_dir=str(folder / "index"),
        ),
        TrainingConfig(global_batch_size=1, sequence_length=max_tokens),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        validation=True,
        **model.sample_specs(tokenizer),
    )
    yield from islice(loader, len(requests))


def _copy_files(value: Any, root: Path, folder: Path, key: str = "") -> Any:
    """Return the record with its files copied to `folder`. Sources read only one directory."""
    if isinstance(value, dict):
        return {name: _copy_files(item, root, folder, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy_files(item, root, folder, key) for item in value]
    if key not in _FILE_KEYS or not isinstance(value, str):
        return value
    file = root / value
    try:
        if not file.is_file():
            return value
    except OSError:  # base64 data, too long for a file name
        return value
    copy = folder / f"{len([*folder.iterdir()])}{file.suffix}"
    shutil.copy(file, copy)
    return copy.name
