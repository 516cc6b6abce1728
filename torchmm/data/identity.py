"""What samples and their order depend on: kept in checkpoints, to notice a resume on different
data.

A source with random access is identified by its samples as they reach the model (token ids, what
counts in the loss, bytes of files): a digest made while its index is built, when all of it is read
anyway. So it does not matter where files are, how old they are, or which version of a library cuts
texts into the same tokens. A stream is never read as a whole: it is identified by sizes and ends of
its files and the settings its samples depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transformers
from transformers import PreTrainedTokenizerBase

from torchmm.data.files.remote import AnyFile
from torchmm.data.files.sample_files import open_regular
from torchmm.data.media.tiles import Tile
from torchmm.data.media.video import ClipFrames
from torchmm.data.sources.reader import MeasuredSample, SampleReader, data_of
from torchmm.recipe.changes import changes, short, with_current_names, with_former_names
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

VERSION = 3
"""Increased when digests are made differently; those of other versions are not compared."""
ENDS_BYTES = 1 << 16
ENDS_FILES = 16
"""Number of a stream's files of which both ends are read."""
_OF_ORDER = ("weight", "epochs", "filter", "streaming")
"""Keys of a source that decide how often, or whether, its samples come."""
CAUSES = (
    "prompt",
    "target_image_column",
    "split",
    "config",
    "revision",
    "columns",
    "max_samples",
    "train_on",
)
"""Keys of a source that may change its samples; if they do, their digest shows it."""
_DEFAULTS = SourceConfig(path="").model_dump(mode="json")
"""What keys mean to checkpoints that were saved before there were these keys."""
_SOURCE = "data.sources."


class SamplesDigest:
    """Digest of some samples, in order: those of a shard of the index."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, sample: MeasuredSample | None) -> None:
        """The next sample; None: it is corrupt."""
        if sample is None:
            self._hash.update(b"corrupt")
            return
        ids = np.asarray(sample.text.ids, "<i4")
        self._hash.update(len(ids).to_bytes(8, "little") + ids.tobytes() + bytes(sample.text.loss))
        clip = None
        for file in [*sample.files, *sample.generated_files]:
            if isinstance(file, Tile):
                if file.number == 0:
                    self._hash.update(file.of.data)
                continue
            if not isinstance(file, ClipFrames):
                self._hash.update(data_of(file))
                continue
            if file.clip is not clip:  # once for all its frames
                clip = file.clip
                self._hash.update(clip.data)
            self._hash.update(str(file.numbers).encode())

    def hexdigest(self) -> str:
        """Digest of all samples so far."""
        return self._hash.hexdigest()[:32]


def stream_content(
    config: SourceConfig, files: Sequence[AnyFile], settings: Mapping[str, Any]
) -> str:
    """What can be known of a stream's content without reading it.

    Args:
        config: the source.
        files: its files in order; none: a hub data set.
        settings: the identity's "settings".
    """
    said = _causes_of(config)
    first = [said.pop(key) for key in ("prompt", "target_image_column", "split")]
    # Only what differs: streams of recipes without newer keys stay what they were.
    later = {key: value for key, value in said.items() if value != _DEFAULTS[key]}
    parts: list[Any] = [first, settings, *([later] if later else [])]
    parts += [file.stat().st_size for file in files] or [config.path]
    some = {int(i) for i in np.linspace(0, len(files) - 1, min(len(files), ENDS_FILES))}
    for number in sorted(some):
        with open_regular(files[number]) as stream:
            head = stream.read(ENDS_BYTES)
            stream.seek(max(len(head), files[number].stat().st_size - ENDS_BYTES))
            parts.append(hashlib.sha256(head + stream.read(ENDS_BYTES)).hexdigest())
    return _digest(parts)


def causes_of(config: SourceConfig) -> dict[str, Any]:
    """What a recipe says of a source that its samples depend on, as JSON with former keys, so that
    checkpoints and indexes of earlier versions compare equal."""
    return with_former_names(_causes_of(config), _SOURCE)


def _causes_of(config: SourceConfig) -> dict[str, Any]:
    said = config.model_dump(mode="json")
    return {key: said[key] for key in CAUSES}


def settings_of(
    data: DataConfig, length: int, reader: SampleReader, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Settings that may change what a sample becomes; if they do, its digest shows it."""
    return {
        "training.sequence_length": length,
        "data.max_images_per_sample": data.max_images_per_sample,
        "data.max_image_pixels": data.max_image_pixels,
        "data.max_file_mb": data.max_file_mb,
        "data.max_tiles_per_sample": data.max_tiles_per_sample,
        "data.max_tiles_per_sequence": data.max_tiles_per_sequence,
        **{f"data.video.{key}": value for key, value in data.video.model_dump().items()},
        "tokenizer": _digest(tokenizer.backend_tokenizer.to_str()),
        "chat template": _digest(tokenizer.chat_template),
        "special tokens": _digest(dataclasses.asdict(reader.text_spec)),
        "transformers": transformers.__version__,
    }


def identity(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    settings: Mapping[str, Any],
    sources: Sequence[tuple[str, SourceConfig, str]],
) -> dict[str, Any]:
    """All that decides order and content of samples, as JSON with former keys.

    Args:
        sources: name, settings and content of each.
    """
    order: dict[str, Any] = {
        "training.seed": training.seed,
        "training.sequence_length": training.sequence_length,
        "data.shuffle": data.shuffle,
        "data.packing_buffer_size": data.packing_buffer_size,
        "data.packing_max_wait_steps": data.packing_max_wait_steps,
    }
    if data.max_tiles_per_sequence is not None:
        order["data.max_tiles_per_sequence"] = data.max_tiles_per_sequence
    if data.packing != "best_fit":
        order["data.packing"] = data.packing
    if data.mixture_schedule:
        order["data.mixture_schedule"] = [
            stage.model_dump(mode="json") for stage in data.mixture_schedule
        ]
    if any(config.streaming for _, config, _ in sources):
        order["data.shuffle_window"] = data.shuffle_window
    pixels = {
        f"image processing of {name}": _digest(dataclasses.asdict(medium.spec))
        for name, medium in reader.media.items()
    }
    if reader.drawings is not None:
        spec = dataclasses.asdict(reader.drawings.spec)
        # Runs from before there were latents are resumed.
        spec = {key: value for key, value in spec.items() if value or "latent" not in key}
        pixels["images to be drawn"] = _digest(spec)
    described = [
        {
            "name": name,
            "content": content,
            **{key: config.model_dump(mode="json")[key] for key in _OF_ORDER},
            **causes_of(config),
        }
        for name, config, content in sources
    ]
    return {
        "version": VERSION,
        "order": with_former_names(order),
        "pixels": pixels,
        "settings": dict(settings),
        "sources": described,
    }


def comparable(saved: Any) -> bool:
    """Whether a checkpoint's identity is of this version."""
    return isinstance(saved, dict) and saved.get("version") == VERSION


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs in the samples and their order, one description each."""
    found = changes(with_current_names(saved["order"]), with_current_names(now["order"]))
    kinds = dict.fromkeys([*saved["pixels"], *now["pixels"]])
    found += [kind for kind in kinds if saved["pixels"].get(kind) != now["pixels"].get(kind)]
    old, new = ({s["name"]: s for s in side["sources"]} for side in (saved, now))
    if list(old) != list(new):
        found.append(f"data.sources {', '.join(old)} -> {', '.join(new)} (in this order)")
    for name in (name for name in new if name in old):
        found += _of_source(name, old[name], new[name], _OF_ORDER)
        if old[name]["content"] != new[name]["content"]:
            causes = _of_source(name, old[name], new[name], CAUSES)
            causes += _hiding_digests(changes(saved["settings"], now["settings"]))
            found += causes or [f"samples of source {name!r}"]
    return list(dict.fromkeys(found))


def same_stream(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Whether a position in the stream of this name is still one."""
    old, new = ({s["name"]: s for s in side["sources"]}.get(name) for side in (saved, now))
    keys = ("training.seed", "data.shuffle", "data.shuffle_window")
    return (
        old is not None
        and new is not None
        and old["streaming"]
        and old["content"] == new["content"]
        and all(saved["order"].get(key) == now["order"].get(key) for key in keys)
    )


def _of_source(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]
) -> list[str]:
    was = {**_DEFAULTS, **with_current_names(old, _SOURCE)}
    now = with_current_names(new, _SOURCE)
    return [
        f"{key} of source {name!r} {short(was[key])} -> {short(now[key])}"
        for key in keys
        if was[key] != now[key]
    ]


def _hiding_digests(lines: Sequence[str]) -> list[str]:
    hashed = ("tokenizer ", "chat template ", "special tokens ")
    return [line.partition(' "')[0] if line.startswith(hashed) else line for line in lines]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
