"""Identity of the samples and their order, saved in checkpoints to detect a resume on other data.

A source with random access is identified by a digest of its samples as the model receives them:
token ids, loss mask and file bytes. The digest is computed while the source is indexed. It is
independent of paths, modification times and library versions.

A stream is not read completely before training. It is identified by the sizes and ends of its files
and by the settings that its samples depend on.
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

from torchmm.data.files.remote_files import AnyFile
from torchmm.data.files.sample_files import open_regular
from torchmm.data.media.tiles import Tile
from torchmm.data.media.video import VideoFrames
from torchmm.data.sources.reader import MeasuredSample, SampleReader, require_bytes
from torchmm.recipe.changes import changes, short, with_current_names, with_former_names
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

DIGEST_VERSION = 3
"""Version of the digests. Digests of different versions are not compared."""
HASHED_BYTES = 1 << 16
"""Number of bytes that are hashed at each end of a file."""
MAX_HASHED_FILES = 16
"""Maximum number of files of a stream whose ends are hashed."""
_ORDER_KEYS = ("weight", "epochs", "filter", "streaming")
"""Keys of a source that affect which samples are used, and how often."""
SAMPLE_KEYS = (
    "prompt",
    "target_image_column",
    "split",
    "config",
    "revision",
    "columns",
    "max_samples",
    "train_on",
    "train_template_prefix",
    "box_format",
)
"""Keys of a source that may change its samples, and therefore their digest."""
_DEFAULTS = SourceConfig(path="").model_dump(mode="json")
"""Values of keys that checkpoints of earlier versions do not have."""
_KEY_PREFIX = "data.sources."


class SamplesDigest:
    """Digest of consecutive samples, such as those of a shard of the index."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, sample: MeasuredSample | None) -> None:
        """Add the next sample. None is a corrupt sample."""
        if sample is None:
            self._hash.update(b"corrupt")
            return
        ids = np.asarray(sample.text.ids, "<i4")
        self._hash.update(len(ids).to_bytes(8, "little") + ids.tobytes() + bytes(sample.text.loss))
        if sample.chosen_tokens:
            self._hash.update(f"pair {sample.chosen_tokens}".encode())
        video = None
        for file in [*sample.files, *sample.generated_files]:
            if isinstance(file, Tile):
                if file.number == 0:
                    self._hash.update(file.parent.data)
                continue
            if not isinstance(file, VideoFrames):
                self._hash.update(require_bytes(file))
                continue
            if file.video is not video:  # hash a video once for all frames
                video = file.video
                self._hash.update(video.data)
            self._hash.update(str(file.frame_indices).encode())
        rows = [image.rows for image in sample.images]
        if any(rows):
            self._hash.update(str(rows).encode())

    def hexdigest(self) -> str:
        """Return the digest of all added samples."""
        return self._hash.hexdigest()[:32]


def stream_digest(
    config: SourceConfig, files: Sequence[AnyFile], settings: Mapping[str, Any]
) -> str:
    """Return a digest of a stream that does not require reading all of it.

    Args:
        config: The source.
        files: Files of the source in order. Empty for a Hub dataset.
        settings: Result of `run_settings`.
    """
    values = _sample_settings(config)
    first = [values.pop(key) for key in ("prompt", "target_image_column", "split")]
    # Only values that differ from the default, so that new keys do not change existing digests.
    later = {key: value for key, value in values.items() if value != _DEFAULTS[key]}
    parts: list[Any] = [first, settings, *([later] if later else [])]
    parts += [file.stat().st_size for file in files] or [config.path]
    some = {int(i) for i in np.linspace(0, len(files) - 1, min(len(files), MAX_HASHED_FILES))}
    for number in sorted(some):
        with open_regular(files[number]) as stream:
            head = stream.read(HASHED_BYTES)
            stream.seek(max(len(head), files[number].stat().st_size - HASHED_BYTES))
            parts.append(hashlib.sha256(head + stream.read(HASHED_BYTES)).hexdigest())
    return _digest(parts)


def sample_settings(config: SourceConfig) -> dict[str, Any]:
    """Return the settings of a source that affect its samples, as JSON with former keys.

    Former keys make checkpoints and indexes of earlier versions compare equal.
    """
    return with_former_names(_sample_settings(config), _KEY_PREFIX)


def _sample_settings(config: SourceConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    return {key: values[key] for key in SAMPLE_KEYS}


def run_settings(
    data: DataConfig, length: int, reader: SampleReader, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the settings that may change samples, and therefore their digest."""
    text = dataclasses.asdict(reader.text_spec)
    if reader.text_spec.boxes is None or not reader.text_spec.boxes.tokens:
        del text["boxes"]  # changes only records that earlier versions rejected
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
        "special tokens": _digest(text),
        "transformers": transformers.__version__,
        # Omitted otherwise, so that checkpoints of earlier versions compare equal.
        **({"training.loss": "preference"} if reader.reads_pairs else {}),
    }


def identity(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    settings: Mapping[str, Any],
    sources: Sequence[tuple[str, SourceConfig, str]],
) -> dict[str, Any]:
    """Return the identity of samples and their order, as JSON with former keys.

    Args:
        data: Sources and limits.
        training: Seed and sequence length.
        reader: Settings of encoders and generator.
        settings: Result of `run_settings`.
        sources: Name, settings and content digest of each source.
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
    if reader.target_preprocessor is not None:
        spec = dataclasses.asdict(reader.target_preprocessor.spec)
        # Without unused latent settings, checkpoints of earlier versions compare equal.
        spec = {key: value for key, value in spec.items() if value or "latent" not in key}
        pixels["images to be drawn"] = _digest(spec)
    described = [
        {
            "name": name,
            "content": content,
            **{key: config.model_dump(mode="json")[key] for key in _ORDER_KEYS},
            **sample_settings(config),
        }
        for name, config, content in sources
    ]
    return {
        "version": DIGEST_VERSION,
        "order": with_former_names(order),
        "pixels": pixels,
        "settings": dict(settings),
        "sources": described,
    }


def is_comparable(saved: Any) -> bool:
    """Return True if the identity in a checkpoint has the current version."""
    return isinstance(saved, dict) and saved.get("version") == DIGEST_VERSION


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a description of each change of the samples and their order."""
    descriptions = changes(with_current_names(saved["order"]), with_current_names(now["order"]))
    kinds = dict.fromkeys([*saved["pixels"], *now["pixels"]])
    descriptions += [kind for kind in kinds if saved["pixels"].get(kind) != now["pixels"].get(kind)]
    old, new = ({s["name"]: s for s in side["sources"]} for side in (saved, now))
    if list(old) != list(new):
        descriptions.append(f"data.sources {', '.join(old)} -> {', '.join(new)} (in this order)")
    for name in (name for name in new if name in old):
        descriptions += _source_changes(name, old[name], new[name], _ORDER_KEYS)
        if old[name]["content"] != new[name]["content"]:
            causes = _source_changes(name, old[name], new[name], SAMPLE_KEYS)
            causes += _without_digests(changes(saved["settings"], now["settings"]))
            descriptions += causes or [f"samples of source {name!r}"]
    return list(dict.fromkeys(descriptions))


def is_same_stream(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Return True if a saved position in this stream is still valid."""
    old, new = ({s["name"]: s for s in side["sources"]}.get(name) for side in (saved, now))
    keys = ("training.seed", "data.shuffle", "data.shuffle_window")
    return (
        old is not None
        and new is not None
        and old["streaming"]
        and old["content"] == new["content"]
        and all(saved["order"].get(key) == now["order"].get(key) for key in keys)
    )


def _source_changes(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]
) -> list[str]:
    was = {**_DEFAULTS, **with_current_names(old, _KEY_PREFIX)}
    now = with_current_names(new, _KEY_PREFIX)
    return [
        f"{key} of source {name!r} {short(was[key])} -> {short(now[key])}"
        for key in keys
        if was[key] != now[key]
    ]


def _without_digests(lines: Sequence[str]) -> list[str]:
    hashed = ("tokenizer ", "chat template ", "special tokens ")
    return [line.partition(' "')[0] if line.startswith(hashed) else line for line in lines]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
