"""Measures one shard of a source: reads its records as training would, and writes their sizes.

A file of a shard is complete or is not there, and is the same whoever writes it. So shards may be
measured by several processes at a time, on several machines, again after a crash, even twice.
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
from torchmm.data.sources.configured import MapSource
from torchmm.data.sources.index.length_index import Shard, ShardSizes, shard_file
from torchmm.data.sources.reader import MeasuredSample, SampleReader

FEW_SAMPLES = 8192
MANY_SAMPLES = 65536
"""Most samples of a shard: in sources of up to 2^24 samples, so that several processes have work
and a crash loses little of it, and in larger ones, so that a manifest stays small."""
LARGE_SOURCE = 1 << 24


class Range(NamedTuple):
    """Records of a shard."""

    first: int
    samples: int


def cut(total: int) -> list[Range]:
    """The shards of a source of `total` records."""
    size = FEW_SAMPLES if total <= LARGE_SOURCE else MANY_SAMPLES
    return [Range(first, min(size, total - first)) for first in range(0, total, size)]


@dataclass
class _Rows:
    """Rows of several samples; each distinct row is kept once."""

    width: int
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def add(self, rows: Sequence[tuple[int, ...]]) -> None:
        """The rows of the next sample."""
        self.numbers += [self.known.setdefault(row, len(self.known)) for row in rows]
        self.starts.append(len(self.numbers))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts, numbers and distinct rows."""
        small = np.uint16 if len(self.known) <= 1 << 16 else np.uint32
        rows = np.array(list(self.known), "<i4").reshape(-1, self.width)
        return np.array(self.starts, "<u4"), np.array(self.numbers, small), rows


def measure_shard(
    source: MapSource,
    reader: SampleReader,
    records: Range,
    directory: Path,
    number: int,
    tell: Callable[[int], None] = lambda measured: None,
) -> None:
    """Writes the two files of a shard.

    Args:
        source: its records.
        reader: measures records.
        records: which of them are in the shard.
        directory: of the index.
        number: of the shard.
        tell: is called after each record with how many are measured.
    """
    tokens: list[int] = []
    images = _Rows(8)
    drawn = _Rows(4)
    reasons: dict[int, str] = {}
    filtered: dict[str, tuple[int, int, str]] = {}
    dropped: dict[str, tuple[int, int]] = {}
    digest = SamplesDigest()
    for place in range(records.samples):
        sample: MeasuredSample | None = None
        try:
            sample = reader.read(source.read(records.first + place))
            for content, items in sample.dropped.items():
                before = dropped.get(content, (0, 0))
                dropped[content] = before[0] + 1, before[1] + items
        except BeyondLimitError as error:
            first = filtered.get(error.limit, (0, records.first + place, str(error)))
            filtered[error.limit] = first[0] + 1, *first[1:]
        except CorruptSampleError as error:
            reasons[place] = str(error)
        digest.add(sample)
        tokens.append(len(sample.text.ids) if sample else 0)
        images.add([_row(image, reader.encoders) for image in sample.images] if sample else [])
        drawn.add([(*g.grid_thw, g.context) for g in sample.generated] if sample else [])
        tell(place + 1)
    sizes = ShardSizes(np.array(tokens, "<u4"), *images.arrays(), *drawn.arrays())
    data, arrays = packed(sizes)
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
    told = {"shard": dataclasses.asdict(shard), "reasons": reasons}
    replace_atomically(shard_file(directory, number, "sizes"), data)
    text = json.dumps(told, sort_keys=True)
    replace_atomically(shard_file(directory, number, "json"), text.encode())


def read_shard(directory: Path, number: int, records: Range) -> Shard | None:
    """A shard that was measured before; None where its files are missing, damaged, or not of these
    records."""
    try:
        told = json.loads(shard_file(directory, number, "json").read_bytes())
        shard = Shard(**told["shard"])
        data = shard_file(directory, number, "sizes").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = hashlib.sha256(data).hexdigest() == shard.sha256
    return shard if whole and (shard.first, shard.samples) == records else None


def packed(sizes: ShardSizes) -> tuple[bytes, dict[str, tuple[str, list[int], int]]]:
    """All arrays in one piece, and where each is."""
    data = bytearray()
    arrays: dict[str, tuple[str, list[int], int]] = {}
    for name, array in sizes._asdict().items():
        data += bytes(-len(data) % 8)
        arrays[name] = (array.dtype.str, list(array.shape), len(data))
        data += array.tobytes()
    return bytes(data), arrays


def _row(image: ImageMeta, encoders: Sequence[str]) -> tuple[int, ...]:
    encoder = 0 if image.encoder is None else encoders.index(image.encoder)
    sizes = (image.width_px, image.height_px, image.patches, image.tokens, image.frames)
    return (*sizes, encoder, image.duration_ms, image.frame_pixels)
