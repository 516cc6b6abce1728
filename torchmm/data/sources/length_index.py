"""The length index of a source with random access: tokens and image sizes of every sample.

Measured once and cached as an .npz file, it makes sample order, packing and planning independent
of any data access. The cache file is named by a hash of everything that lengths depend on; racing
ranks write the same bytes to separate files and rename them, so no lock is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase, __version__

from torchmm.common.batch import ImageMeta, SampleMeta
from torchmm.common.errors import DataError
from torchmm.common.files import check_writable, replace_atomically
from torchmm.common.generated import GeneratedMeta
from torchmm.data.corrupt import CorruptSampleError, first_of
from torchmm.data.identity import SamplesDigest, causes_of
from torchmm.data.sources.local_and_hub import MapSource
from torchmm.data.sources.packed import naming_the_cache
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig, LengthFilter, SourceConfig

FORMAT_VERSION = 8
"""Increased when parsing, tokenising or measuring changes, so that old caches are not used."""
PROGRESS_INTERVAL_S = 10.0
SHARD_SAMPLES = 8192
DURATION = 6
"""Column of `images_M8`."""

logger = logging.getLogger(__name__)


class ShardSizes(NamedTuple):
    """Sizes of the samples of a shard."""

    tokens_N: np.ndarray
    offsets: np.ndarray
    images_M8: np.ndarray

    def tiles_N(self) -> np.ndarray:
        """Pictures and tiles of each sample: neither sounds nor clips nor their frames."""
        before = np.concatenate([[0], np.cumsum(self.images_M8[:, DURATION] == 0)])
        return np.diff(before[self.offsets])

    def kept_by(self, wanted: LengthFilter) -> np.ndarray:
        """Places of the usable samples that a filter leaves in, ascending."""
        return _kept_by(self.tokens_N, wanted)


def _kept_by(tokens_N: np.ndarray, wanted: LengthFilter) -> np.ndarray:
    kept = tokens_N >= wanted.min_tokens  # at least 1, so without the corrupt ones
    if wanted.max_tokens is not None:
        kept &= tokens_N <= wanted.max_tokens
    return np.flatnonzero(kept)


@dataclass(frozen=True)
class LengthIndex:
    """Sizes of N samples with M images and sounds, and G more images to be drawn.

    `tokens_N` is 0 for corrupt samples, whose reasons are in `corrupt`; `content` identifies all
    samples, wherever their files are. The rows of `images_M8` are (width_px, height_px, patches,
    tokens, frames, encoder, duration_ms, frame_pixels), the encoder as its position in the model;
    sample n has rows `offsets[n]:offsets[n + 1]`. Those of `generated_G4` are (frames, rows,
    columns, context), from `generated_offsets`.
    """

    tokens_N: np.ndarray
    offsets: np.ndarray
    images_M8: np.ndarray
    generated_offsets: np.ndarray
    generated_G4: np.ndarray
    corrupt: dict[int, str]
    content: str = ""

    @property
    def firsts_S(self) -> np.ndarray:
        """First sample of every shard."""
        return np.arange(0, len(self.tokens_N), SHARD_SAMPLES)

    @property
    def samples_S(self) -> np.ndarray:
        """Samples of every shard."""
        return np.diff([*self.firsts_S, len(self.tokens_N)])

    def usable(self, wanted: LengthFilter) -> np.ndarray:
        """Samples of every shard that are not corrupt and that a filter leaves in."""
        shards = range(len(self.firsts_S))
        return np.array([len(self.sizes(n).kept_by(wanted)) for n in shards], np.int64)

    def sizes(self, shard: int) -> ShardSizes:
        """Sizes of a shard's samples."""
        start, stop = shard * SHARD_SAMPLES, (shard + 1) * SHARD_SAMPLES
        starts = self.offsets[start : stop + 1]
        return ShardSizes(self.tokens_N[start:stop], starts, self.images_M8)

    def has(self, index: int) -> bool:
        """Whether there is such a sample, and a usable one."""
        return index < len(self.tokens_N) and bool(self.tokens_N[index])

    def kept_by(self, wanted: LengthFilter) -> np.ndarray:
        """Indices of the usable samples that a filter leaves in, ascending."""
        return _kept_by(self.tokens_N, wanted)

    def meta(self, source: str, index: int, encoders: Sequence[str]) -> SampleMeta:
        """Metadata of sample `index` for a model with these encoders."""
        rows = self.images_M8[self.offsets[index] : self.offsets[index + 1]].tolist()
        several = len(encoders) > 1
        images = tuple(
            ImageMeta(w, h, patches, tokens, frames, encoders[e] if several else None, *of_clip)
            for w, h, patches, tokens, frames, e, *of_clip in rows
        )
        first, end = self.generated_offsets[index : index + 2]
        drawn = self.generated_G4[first:end].tolist()
        generated = tuple(GeneratedMeta((f, r, c), context) for f, r, c, context in drawn)
        tokens = int(self.tokens_N[index])
        encoder = encoders[0] if images and not several else None
        return SampleMeta(source, index, tokens, images, encoder, generated)


def cache_key(
    source: MapSource,
    config: SourceConfig,
    data: DataConfig,
    sequence_length: int,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Hash of everything that the lengths of a source's samples depend on."""
    parts = {
        "format": FORMAT_VERSION,
        "transformers": __version__,
        "source": source.fingerprint,
        "config": causes_of(config),
        "generated": dataclasses.asdict(reader.drawings.spec) if reader.drawings else None,
        "limits": [data.max_images_per_sample, data.max_image_pixels, sequence_length],
        "file": data.max_file_mb,
        "tiles": [data.max_tiles_per_sample, data.max_tiles_per_sequence],
        "video": data.video.model_dump(),
        "text": dataclasses.asdict(reader.text_spec),
        "encoders": [dataclasses.asdict(medium.spec) for medium in reader.media.values()],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load_or_build(name: str, source: MapSource, reader: SampleReader, path: Path) -> LengthIndex:
    """The cached index, or a new one that is then cached.

    Args:
        name: the source's name, for messages.
        source: its records.
        reader: measures records.
        path: cache file.

    Raises:
        ConfigError: there is none, and none can be written.
    """
    index = _load(path)
    if index is None:
        with naming_the_cache(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path.parent)  # measuring may take hours, in vain
        index = _build(name, source, reader)
        with naming_the_cache(path.parent):
            _save(index, path)
    return index


def describe_lengths(tokens_N: np.ndarray) -> list[str]:
    """Lengths of samples in words: half of them, nearly all, the longest."""
    middle, high = np.percentile(tokens_N, [50, 95])
    return [f"median {middle:.0f}", f"95 % <= {high:.0f}", f"most {tokens_N.max():,}"]


def check_usable(name: str, config: SourceConfig, index: LengthIndex) -> None:
    """Tells how many samples of a source take part.

    Raises:
        DataError: none does.
    """
    kept = len(index.kept_by(config.filter))
    total = len(index.tokens_N)
    corrupt = len(index.corrupt)
    counts = f"{corrupt} are corrupt, {total - corrupt - kept} are outside of its `filter`"
    if not kept:
        lengths = index.tokens_N[index.tokens_N > 0]
        found = (
            f" (the others have {lengths.min()} to {lengths.max()} tokens)"
            if corrupt < total
            else ""
        )
        messages = [f"{name}[{i}]: {reason}" for i, reason in index.corrupt.items()]
        raise nothing_usable(name, f"none of its {total} samples: {counts}{found}", messages)
    if kept < total:
        logger.info("source %r gives %d of its %d samples: %s", name, kept, total, counts)


def nothing_usable(name: str, found: str, messages: Sequence[str]) -> DataError:
    """The error of a source that gives nothing."""
    return DataError(
        f"source {name!r} gives {found}{first_of(messages)}\nCorrect the source in the recipe "
        "(`columns` maps names of columns, `filter` limits lengths), repair its samples, or leave "
        "it out"
    )


def _build(name: str, source: MapSource, reader: SampleReader) -> LengthIndex:
    tokens: list[int] = []
    offsets = [0]
    images: list[tuple[int, ...]] = []
    generated_offsets = [0]
    generated: list[tuple[int, ...]] = []
    corrupt: dict[int, str] = {}
    digest = SamplesDigest()
    last = time.monotonic()
    for i in range(len(source)):
        try:
            sample = reader.read(source.read(i))
        except CorruptSampleError as error:
            tokens.append(0)
            corrupt[i] = str(error)
            digest.add(None)
        else:
            tokens.append(len(sample.text.ids))
            digest.add(sample)
            images.extend(_row(image, reader.encoders) for image in sample.images)
            generated.extend((*g.grid_thw, g.context) for g in sample.generated)
        offsets.append(len(images))
        generated_offsets.append(len(generated))
        if time.monotonic() - last > PROGRESS_INTERVAL_S:
            last = time.monotonic()
            logger.info("measuring source %s: %d of %d samples", name, i + 1, len(source))
    return LengthIndex(
        np.asarray(tokens, np.int32),
        np.asarray(offsets, np.int64),
        np.asarray(images, np.int32).reshape(-1, 8),
        np.asarray(generated_offsets, np.int64),
        np.asarray(generated, np.int32).reshape(-1, 4),
        corrupt,
        digest.hexdigest(),
    )


def _row(image: ImageMeta, encoders: Sequence[str]) -> tuple[int, ...]:
    encoder = 0 if image.encoder is None else encoders.index(image.encoder)
    sizes = (image.width_px, image.height_px, image.patches, image.tokens, image.frames)
    return (*sizes, encoder, image.duration_ms, image.frame_pixels)


def _save(index: LengthIndex, path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        tokens_N=index.tokens_N,
        offsets=index.offsets,
        images_M8=index.images_M8,
        generated_offsets=index.generated_offsets,
        generated_G4=index.generated_G4,
        corrupt=np.asarray(json.dumps(index.corrupt)),
        content=np.asarray(index.content),
    )
    replace_atomically(path, buffer.getvalue())


def _load(path: Path) -> LengthIndex | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            corrupt = {int(k): v for k, v in json.loads(str(arrays["corrupt"])).items()}
            tokens, offsets = arrays["tokens_N"], arrays["offsets"]
            generated = arrays["generated_offsets"], arrays["generated_G4"]
            content = str(arrays["content"])
            return LengthIndex(tokens, offsets, arrays["images_M8"], *generated, corrupt, content)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("index cache %s is unreadable (%s) and is built again", path, error)
        return None
