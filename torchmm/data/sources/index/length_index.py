"""Length index of a source with random access: tokens and image sizes of all samples.

With the index, sample order, packing and planning require no data access. It is a directory whose
name is a hash of all inputs of the sizes (`cache_key`):

    manifest.json     all shards: samples, corrupt samples, shortest, longest, SHA-256 of the file
    000017.sizes      memory-mapped arrays of one shard: 8 to 16 bytes per sample
    000017.json       entry of the shard in the manifest, and the reasons of corrupt samples

A shard is a range of consecutive records instead of a file of the source. So sample order and
identity do not depend on the distribution of records over files. All processes of a node share the
mapped shards in the page cache. Separate files allow several jobs to write shards concurrently.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase, __version__

from torchmm.common.batch import ImageMeta, ImageSizes, SampleMeta, concatenate_ranges
from torchmm.common.errors import DataError
from torchmm.common.generated import GeneratedMeta
from torchmm.data.corrupt import list_messages
from torchmm.data.identity import sample_settings
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.source_options import MapSource
from torchmm.recipe.data_section import DataConfig, LengthFilter, SourceConfig

FORMAT_VERSION = 11
"""Version of parsing, tokenizing and measuring. An index of a different version is not used."""
MANIFEST = "manifest.json"
PATCHES_COLUMN, DURATION_COLUMN = 2, 6
"""Columns of `sizes_D9`."""
IMAGE_SIZES_COLUMNS = [5, PATCHES_COLUMN, 3, 4]
"""Columns of `sizes_D9` for the columns of `ImageSizes`."""
MAX_MAPPED_SHARDS = 512
"""Maximum number of mapped shards. A block of the sample order has at most 256."""
MAX_SUMMARIZED_SHARDS = 64
"""Maximum number of shards for the logged summary of lengths."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """Entry of a shard in the manifest."""

    first: int
    """Index of the first sample."""
    samples: int
    """Number of samples."""
    corrupt: int
    """Number of corrupt samples."""
    shortest: int
    """Number of tokens of the shortest usable sample. 0 without usable samples."""
    longest: int
    """Number of tokens of the longest usable sample."""
    content: str
    """Digest of the samples (`SamplesDigest`)."""
    sha256: str
    """SHA-256 of the `.sizes` file."""
    size_bytes: int
    """Size of the `.sizes` file."""
    arrays: dict[str, tuple[str, list[int], int]]
    """Dtype, shape and byte offset of each array in the `.sizes` file."""
    filtered: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Maps an exceeded limit (`BeyondLimitError`) to the number of samples, and to the index and
    reason of the first sample."""
    dropped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Maps dropped content (`MeasuredSample.dropped`) to the number of samples and of items."""

    @property
    def usable(self) -> int:
        """Number of samples that are neither corrupt nor beyond a limit."""
        return self.samples - self.corrupt - sum(count for count, *_ in self.filtered.values())

    def is_fully_kept(self, length_filter: LengthFilter) -> bool:
        """Return True if the manifest shows that a filter keeps all usable samples."""
        short = self.shortest >= length_filter.min_tokens
        return short and (
            length_filter.max_tokens is None or self.longest <= length_filter.max_tokens
        )


class ShardSizes(NamedTuple):
    """Sizes of the N samples of a shard.

    `tokens_N` is 0 for corrupt samples and for samples beyond a limit. Sample n has the images,
    videos and audio files `images_M[starts_N1[n] : starts_N1[n + 1]]`. Each is the index of a row
    of `sizes_D9`: (width_px, height_px, patches, tokens, frames, encoder, duration_ms,
    frame_pixels, rows), where the encoder is its index in the model. Target images have the same
    structure, with rows (frames, rows, columns, context). `chosen_N` has the sizes
    `SampleMeta.chosen_tokens` of preference pairs, and is empty otherwise.
    """

    tokens_N: np.ndarray
    starts_N1: np.ndarray
    images_M: np.ndarray
    sizes_D9: np.ndarray
    drawn_starts_N1: np.ndarray
    drawn_M: np.ndarray
    drawn_D4: np.ndarray
    chosen_N: np.ndarray = np.zeros(0, "<u4")

    def tiles_N(self) -> np.ndarray:
        """Return the number of images and tiles of each sample, without audio and video frames."""
        is_tile_M = (self.sizes_D9[:, DURATION_COLUMN] == 0)[self.images_M]
        before = np.concatenate([[0], np.cumsum(is_tile_M)])
        return np.diff(before[self.starts_N1]).astype(np.uint16)

    def patches_N(self) -> np.ndarray:
        """Return the number of patches of each sample, including audio and target images."""
        read_M = self.sizes_D9[:, PATCHES_COLUMN][self.images_M]
        drawn_M = self.drawn_D4[:, :3].prod(1)[self.drawn_M]
        read_before = np.append(0, np.cumsum(read_M, dtype=np.int64))
        drawn_before = np.append(0, np.cumsum(drawn_M, dtype=np.int64))
        read_N = np.diff(read_before[self.starts_N1])
        return read_N + np.diff(drawn_before[self.drawn_starts_N1])

    def image_sizes(self, offsets_N: np.ndarray, generator: int | None = None) -> ImageSizes:
        """Return the sizes of the images of some samples.

        Args:
            offsets_N: Indices of the samples in the shard.
            generator: Index of the generator among the modules. None to omit target images.
        """
        starts_N = self.starts_N1[offsets_N].astype(np.int64)
        counts_N = self.starts_N1[offsets_N + 1] - starts_N
        rows_I = self.images_M[concatenate_ranges(starts_N, counts_N)]
        read = ImageSizes(counts_N, self.sizes_D9[:, IMAGE_SIZES_COLUMNS][rows_I].astype(np.int64))
        if generator is None:
            return read
        starts_N = self.drawn_starts_N1[offsets_N].astype(np.int64)
        counts_N = self.drawn_starts_N1[offsets_N + 1] - starts_N
        rows_I4 = self.drawn_D4[self.drawn_M[concatenate_ranges(starts_N, counts_N)]].astype(
            np.int64
        )
        modules_I = np.full(len(rows_I4), generator)
        sizes = (modules_I, rows_I4[:, :3].prod(1), rows_I4[:, 3], rows_I4[:, 0])
        return read.append_per_sample(ImageSizes(counts_N, np.stack(sizes, axis=1)))

    def select_indices(self, length_filter: LengthFilter) -> np.ndarray:
        """Return the indices of usable samples that a filter keeps, ascending."""
        # The minimum is at least 1, so corrupt samples are excluded.
        kept = self.tokens_N >= length_filter.min_tokens
        if length_filter.max_tokens is not None:
            kept &= self.tokens_N <= length_filter.max_tokens
        return np.flatnonzero(kept)

    def meta(self, source: str, first: int, offset: int, encoders: Sequence[str]) -> SampleMeta:
        """Return the metadata of a sample by its index in the shard."""
        start, stop = self.starts_N1[offset : offset + 2].tolist()
        rows = self.sizes_D9[self.images_M[start:stop]].tolist()
        several = len(encoders) > 1
        images = tuple(
            ImageMeta(w, h, patches, tokens, frames, encoders[e] if several else None, *of_clip)
            for w, h, patches, tokens, frames, e, *of_clip in rows
        )
        start, stop = self.drawn_starts_N1[offset : offset + 2].tolist()
        target_metas = self.drawn_D4[self.drawn_M[start:stop]].tolist()
        generated = tuple(GeneratedMeta((f, r, c), context) for f, r, c, context in target_metas)
        encoder = encoders[0] if images and not several else None
        tokens = int(self.tokens_N[offset])
        chosen = int(self.chosen_N[offset]) if len(self.chosen_N) else 0
        return SampleMeta(source, first + offset, tokens, images, encoder, generated, chosen)


class LengthIndex:
    """Index with the sizes of all samples of a source.

    Args:
        shards: Entries of the manifest in order.
        open_shard: Returns the sizes of a shard by number.
        reasons: Returns the reasons of corrupt samples of a shard, by index in the shard.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        open_shard: Callable[[int], ShardSizes],
        reasons: Callable[[int], Mapping[int, str]],
    ) -> None:
        self.shards = list(shards)
        self.firsts_S = np.array([shard.first for shard in shards], np.int64)
        self.samples_S = np.array([shard.samples for shard in shards], np.int64)
        self.corrupt_count = sum(shard.corrupt for shard in shards)
        self.filtered: Counter[str] = Counter()
        """Number of samples beyond each limit."""
        self.dropped: dict[str, tuple[int, int]] = {}
        """Number of samples, and of items, by dropped content."""
        for shard in shards:
            self.filtered.update({limit: count for limit, (count, *_) in shard.filtered.items()})
            for content, (samples, items) in shard.dropped.items():
                before = self.dropped.get(content, (0, 0))
                self.dropped[content] = before[0] + samples, before[1] + items
        self._open_shard, self._reasons = open_shard, reasons
        self.sizes: Callable[[int], ShardSizes] = lru_cache(MAX_MAPPED_SHARDS)(open_shard)
        """Function that returns the sizes of a shard. Raises DataError for a damaged file."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form without mapped arrays, which each process maps again."""
        return LengthIndex, (self.shards, self._open_shard, self._reasons)

    def __len__(self) -> int:
        return int(self.samples_S.sum())

    @property
    def content(self) -> str:
        """Digest of all samples, independent of file locations."""
        parts = [[shard.samples, shard.content] for shard in self.shards]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def count_usable(self, length_filter: LengthFilter) -> np.ndarray:
        """Return the number of usable samples of each shard that a filter keeps."""
        return np.array(
            [
                shard.usable
                if shard.is_fully_kept(length_filter)
                else len(self.sizes(number).select_indices(length_filter))
                for number, shard in enumerate(self.shards)
            ],
            np.int64,
        )

    def corrupt(self) -> Iterator[tuple[int, str]]:
        """Yield the index and reason of each corrupt sample."""
        for number, shard in enumerate(self.shards):
            if shard.corrupt:
                for offset, reason in sorted(self._reasons(number).items()):
                    yield shard.first + offset, reason

    def beyond_limits(self) -> Iterator[tuple[int, str]]:
        """Yield the first sample beyond each limit, with the reason."""
        first = {
            limit: entry for shard in self.shards[::-1] for limit, entry in shard.filtered.items()
        }
        for _, index, reason in first.values():
            yield index, reason

    def is_usable(self, index: int) -> bool:
        """Return True if a sample exists and is usable."""
        if index >= len(self):
            return False
        number, offset = self._find(index)
        return bool(self.sizes(number).tokens_N[offset])

    def meta(self, source: str, index: int, encoders: Sequence[str]) -> SampleMeta:
        """Return the metadata of sample `index` for a model with these encoders."""
        number, offset = self._find(index)
        return self.sizes(number).meta(source, int(self.firsts_S[number]), offset, encoders)

    def image_sizes(self, indices_N: np.ndarray, generator: int | None = None) -> ImageSizes:
        """Return the sizes of the images of some samples (`ShardSizes.image_sizes`)."""
        shards_N = np.searchsorted(self.firsts_S, indices_N, side="right") - 1
        offsets_N = indices_N - self.firsts_S[shards_N]
        return ImageSizes.from_groups(
            shards_N,
            lambda shard, members: self.sizes(shard).image_sizes(offsets_N[members], generator),
        )

    def sample_lengths(self, length_filter: LengthFilter) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and number of images of usable samples, in large sources of some shards."""
        count = min(len(self.shards), MAX_SUMMARIZED_SHARDS)
        shard_numbers = np.linspace(0, len(self.shards) - 1, count).astype(int)
        tokens, images = [], []
        for sizes in map(self.sizes, shard_numbers.tolist()):
            kept = sizes.select_indices(length_filter)
            tokens.append(sizes.tokens_N[kept])
            images.append(np.diff(sizes.starts_N1)[kept])
        return np.concatenate(tokens), np.concatenate(images)

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.firsts_S, index, side="right")) - 1
        return number, index - int(self.firsts_S[number])


def read_index(directory: Path) -> LengthIndex | None:
    """Return the index in a directory, or None if it is missing or incomplete."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        shards = [Shard(**line) for line in manifest["shards"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is unreadable (%s); indexing again", directory / MANIFEST, error)
        return None
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory)}
    for number, shard in enumerate(shards):
        file = shard_file(directory, number, "sizes")
        if sizes.get(file.name) != shard.size_bytes:
            logger.warning("%s is missing or corrupt; indexing its shard again", file)
            return None

    files = _ShardFiles(directory, shards)
    return LengthIndex(shards, files.sizes, files.reasons)


class _ShardFiles:
    """Reader of the shard files of an index."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._directory, self._shards = directory, shards
        self._checked: set[int] = set()

    def reasons(self, number: int) -> Mapping[int, str]:
        content = json.loads(shard_file(self._directory, number, "json").read_bytes())
        return {int(index): reason for index, reason in content["reasons"].items()}

    def sizes(self, number: int) -> ShardSizes:
        shard = self._shards[number]
        file = shard_file(self._directory, number, "sizes")
        try:
            with file.open("rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file} cannot be read ({error}). The next start indexes its shard again"
            ) from error
        if number not in self._checked and hashlib.sha256(data).hexdigest() != shard.sha256:
            raise DataError(
                f"{file} is corrupt: its SHA-256 differs from the manifest. Remove this file; "
                "the next start indexes its shard again"
            )
        self._checked.add(number)
        return ShardSizes(
            **{
                name: np.frombuffer(data, kind, int(np.prod(shape)), offset).reshape(shape)
                for name, (kind, shape, offset) in shard.arrays.items()
            }
        )


def shard_file(directory: Path, number: int, kind: str) -> Path:
    """Return the path of a file of a shard."""
    return directory / f"{number:06d}.{kind}"


def cache_key(
    source: MapSource,
    config: SourceConfig,
    data: DataConfig,
    sequence_length: int,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return a hash of all inputs that determine the sizes of samples."""
    parts = {
        "format": FORMAT_VERSION,
        "transformers": __version__,
        "source": source.fingerprint,
        "config": sample_settings(config),
        "generated": dataclasses.asdict(reader.target_preprocessor.spec)
        if reader.target_preprocessor
        else None,
        "limits": [data.max_images_per_sample, data.max_image_pixels, sequence_length],
        "tiles": [data.max_tiles_per_sample, data.max_tiles_per_sequence],
        "video": data.video.model_dump(),
        "text": dataclasses.asdict(reader.text_spec),
        "encoders": [dataclasses.asdict(medium.spec) for medium in reader.media.values()],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "chat_template": tokenizer.chat_template,
    }
    if config.files is not None:
        parts["files"] = config.files
    if reader.reads_pairs:
        parts["pairs"] = True
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def describe_lengths(tokens_N: np.ndarray) -> list[str]:
    """Return descriptions of the median, the 95th percentile and the maximum length."""
    middle, high = np.percentile(tokens_N, [50, 95])
    return [f"median {middle:.0f}", f"95 % <= {high:.0f}", f"most {tokens_N.max():,}"]


def check_usable_samples(name: str, config: SourceConfig, index: LengthIndex) -> None:
    """Log the number of used, filtered and truncated samples of a source.

    Raises:
        DataError: No sample is usable.
    """
    kept = int(index.count_usable(config.filter).sum())
    total = len(index)
    usable_count = sum(shard.usable for shard in index.shards)
    parts = [
        f"{index.corrupt_count} are corrupt",
        f"{usable_count - kept} are removed by its `filter`",
    ]
    counts = ", ".join([*parts, *describe_filtered(index.filtered, total)])
    if not kept:
        usable = [shard for shard in index.shards if shard.shortest]
        token_range = (
            f" (the remaining samples have {min(s.shortest for s in usable)} to "
            f"{max(s.longest for s in usable)} tokens)"
            if usable
            else ""
        )
        skipped = [*index.beyond_limits(), *index.corrupt()]
        messages = [f"{name}[{i}]: {reason}" for i, reason in skipped]
        raise no_usable_samples_error(
            name, f"none of its {total} samples are usable: {counts}{token_range}", messages
        )
    if kept < total:
        # A warning would be logged by each rank.
        logger.info("source %r: %d of %d samples are used: %s", name, kept, total, counts)
    if index.dropped:
        logger.info(
            "source %r: truncated samples: %s",
            name,
            ", ".join(describe_dropped(index.dropped, usable_count)),
        )


def describe_filtered(filtered: Mapping[str, int], total: int) -> list[str]:
    """Return descriptions of the samples beyond each limit, most frequent first.

    Args:
        filtered: Number of samples by limit.
        total: Number of all samples of the source.
    """
    counted = sorted(filtered.items(), key=lambda pair: -pair[1])
    return [f"{n:,} ({n / total:.1%}): {limit}" for limit, n in counted]


def describe_dropped(dropped: Mapping[str, tuple[int, int]], samples: int) -> list[str]:
    """Return descriptions of the content that is dropped from samples in use.

    Args:
        dropped: Number of samples, and of items, by content.
        samples: Number of usable samples.
    """
    descriptions = []
    for content, (count, items) in dropped.items():
        fraction = f"{count / max(1, samples):.1%}"
        of_samples = fraction if items == count else f"in {count:,} samples, {fraction}"
        descriptions.append(f"{items:,} {content} ({of_samples})")
    return descriptions


def no_usable_samples_error(name: str, text: str, messages: Sequence[str]) -> DataError:
    """Return the error for a source without usable samples."""
    return DataError(
        f"source {name!r}: {text}{list_messages(messages)}\nCorrect the source in the recipe "
        "(`columns` maps column names, `filter` limits lengths), repair its samples, or "
        "remove the source"
    )
