"""Measure one shard of a source: read its records as in training, and write their sizes.

Shard files are written atomically, and each process writes the same content. Therefore several
processes on several nodes may measure shards concurrently, repeatedly, or again after a crash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchmm.common.batch import ImageMeta
from torchmm.common.files import replace_atomically
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.identity import SamplesDigest
from torchmm.data.sources.index.length_index import Shard, ShardSizes, shard_file
from torchmm.data.sources.reader import MeasuredSample, SampleReader
from torchmm.data.sources.source_options import MapSource

SMALL_SHARD_SAMPLES = 8192
LARGE_SHARD_SAMPLES = 65536
"""Maximum samples of a shard in sources of up to 2^24 samples and in larger sources. Small shards
give work to several processes, and lose little in a crash. Large shards keep the manifest small."""
MAX_SMALL_SOURCE_SAMPLES = 1 << 24
"""Maximum number of samples of a source with small shards."""


class ShardRange(NamedTuple):
    """Range of the records of a shard."""

    first: int
    samples: int


def split_into_shards(total: int) -> list[ShardRange]:
    """Split `total` records into shards."""
    size = SMALL_SHARD_SAMPLES if total <= MAX_SMALL_SOURCE_SAMPLES else LARGE_SHARD_SAMPLES
    return [ShardRange(first, min(size, total - first)) for first in range(0, total, size)]


@dataclass
class _DistinctRows:
    """Rows of several samples, deduplicated."""

    width: int
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def add(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Add the rows of the next sample."""
        self.numbers += [self.known.setdefault(row, len(self.known)) for row in rows]
        self.starts.append(len(self.numbers))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return starts by sample, row numbers, and distinct rows."""
        small = np.uint16 if len(self.known) <= 1 << 16 else np.uint32
        rows = np.array(list(self.known), "<i4").reshape(-1, self.width)
        return np.array(self.starts, "<u4"), np.array(self.numbers, small), rows


def measure_shard(
    source: MapSource,
    reader: SampleReader,
    records: ShardRange,
    directory: Path,
    number: int,
    on_progress: Callable[[int], None] = lambda measured: None,
) -> None:
    """Measure the samples of a shard, and write its two files.

    Args:
        source: Records of the source.
        reader: Reader that measures records.
        records: Range of records of the shard.
        directory: Directory of the index.
        number: Number of the shard.
        on_progress: Called after each record with the number of measured records.
    """
    tokens: list[int] = []
    chosen: list[int] = []
    images = _DistinctRows(9)
    target_images = _DistinctRows(4)
    reasons: dict[int, str] = {}
    filtered: dict[str, tuple[int, int, str]] = {}
    dropped: dict[str, tuple[int, int]] = {}
    digest = SamplesDigest()
    for offset in range(records.samples):
        sample: MeasuredSample | None = None
        try:
            sample = reader.read(source.read(records.first + offset))
            for content, items in sample.dropped.items():
                before = dropped.get(content, (0, 0))
                dropped[content] = before[0] + 1, before[1] + items
        except BeyondLimitError as error:
            first = filtered.get(error.limit, (0, records.first + offset, str(error)))
            filtered[error.limit] = first[0] + 1, *first[1:]
        except CorruptSampleError as error:
            reasons[offset] = str(error)
        digest.add(sample)
        tokens.append(len(sample.text.ids) if sample else 0)
        chosen.append(sample.chosen_tokens if sample else 0)
        images.add(
            [_image_row(image, reader.encoders) for image in sample.images] if sample else []
        )
        target_images.add([(*g.grid_thw, g.context) for g in sample.generated] if sample else [])
        on_progress(offset + 1)
    sizes = ShardSizes(
        np.array(tokens, "<u4"),
        *images.arrays(),
        *target_images.arrays(),
        np.array(chosen if reader.reads_pairs else [], "<u4"),
    )
    data, arrays = serialize_sizes(sizes)
    usable = [count for count in tokens if count]
    shard = Shard(
        records.first,
        records.samples,
        len(reasons),
        min(usable, default=0),
        max(usable, default=0),
        digest.hexdigest(),
        hashlib.sha256(data).hexdigest(),
        len(data),
        arrays,
        filtered,
        dropped,
    )
    content_of_file = {"shard": dataclasses.asdict(shard), "reasons": reasons}
    replace_atomically(shard_file(directory, number, "sizes"), data)
    text = json.dumps(content_of_file, sort_keys=True)
    replace_atomically(shard_file(directory, number, "json"), text.encode())


def read_shard(directory: Path, number: int, records: ShardRange) -> Shard | None:
    """Return an existing shard, or None if its files are missing, damaged or of other records."""
    try:
        content_of_file = json.loads(shard_file(directory, number, "json").read_bytes())
        shard = Shard(**content_of_file["shard"])
        data = shard_file(directory, number, "sizes").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    intact = hashlib.sha256(data).hexdigest() == shard.sha256
    return shard if intact and (shard.first, shard.samples) == records else None


def serialize_sizes(sizes: ShardSizes) -> tuple[bytes, dict[str, tuple[str, list[int], int]]]:
    """Return the bytes of all arrays, and the dtype, shape and offset of each."""
    data = bytearray()
    arrays: dict[str, tuple[str, list[int], int]] = {}
    for name, array in sizes._asdict().items():
        data += bytes(-len(data) % 8)
        arrays[name] = (array.dtype.str, list(array.shape), len(data))
        data += array.tobytes()
    return bytes(data), arrays


def _image_row(image: ImageMeta, encoders: Sequence[str]) -> tuple[int, ...]:
    encoder = 0 if image.encoder is None else encoders.index(image.encoder)
    sizes = (image.width_px, image.height_px, image.patches, image.tokens, image.frames)
    return (*sizes, encoder, image.duration_ms, image.frame_pixels, image.rows)
