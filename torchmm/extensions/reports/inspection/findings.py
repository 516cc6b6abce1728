"""Contents of the sources of a recipe, as the model receives them, without training.

Every record is read with the code of a run (`SampleReader`), so that the counts apply to training.
At most `limit` records of a source are read, evenly spaced over the source, because files are often
sorted. For a stream, the first records are read. Only the samples that are shown are decoded.

A sample that `training.sequence_length` truncates is measured again without a limit, to count the
dropped tokens. The length index of a run is not sufficient, because it has neither record formats
nor the tokens in the loss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import microbatch_flops
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError, record_errors_at
from torchmm.data.files.remote_files import open_file_system
from torchmm.data.media.text import EncodedSample
from torchmm.data.record_formats.detect import detect_format_name
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.index.length_index import no_usable_samples_error
from torchmm.data.sources.map_sources import open_map_source, resolve_files
from torchmm.data.sources.reader import MeasuredSample, SampleReader, count_placeholders
from torchmm.data.sources.streams import open_stream
from torchmm.data.steps.balanced_packing import BalancedPacker
from torchmm.data.steps.packing import group_by_sequence, pack_all
from torchmm.data.target_images import make_target_preprocessor
from torchmm.data.tokenizer import load_tokenizer
from torchmm.extensions.reports.inspection.encoder_images import displayed_images
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.data_section import SourceConfig, unique_names
from torchmm.recipe.recipe import Recipe

UNLIMITED_TOKENS = 1 << 24
"""Limit above the length of any sample, so that the dropped tokens are counted exactly."""
MAX_DISPLAYED_SEQUENCES = 12


@dataclass(frozen=True)
class RejectedRecord:
    """Record that cannot be used."""

    name: str
    """Name of the record, "source[index]"."""
    location: str
    """File and line or row, if the source has them."""
    reason: str


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one kind."""

    text: str
    tokens: int
    loss: bool
    image: int | None = None
    """Index of the image whose placeholders these tokens are, from 0."""


@dataclass(frozen=True)
class SampleImage:
    """File of a sample."""

    label: str
    original: Image.Image | None
    prepared: Image.Image | None
    """Input of the encoder as an image, or None for other media."""


@dataclass(frozen=True)
class DisplayedSample:
    """Sample as the model receives it."""

    name: str
    location: str
    record_format: str
    spans: list[TokenSpan]
    sample_images: list[SampleImage]


@dataclass(frozen=True)
class SampleSizes:
    """Sizes of a usable sample."""

    untruncated_tokens: int
    """Number of tokens before truncation to the sequence length."""
    tokens: int
    loss_tokens: int
    images: int
    image_tokens: int
    flops: dict[str, int]
    """FLOPs of forward and backward passes, by module."""
    meta: SampleMeta


@dataclass
class SourceFindings:
    """Findings about one source."""

    name: str
    section: str
    """Section of the recipe: "data.sources" or "data.validation"."""
    config: SourceConfig
    kind: str
    """Format of its records."""
    records: int | None
    """Total number of records. None for a stream."""
    format_counts: Counter[str] = field(default_factory=Counter)
    samples: list[SampleSizes] = field(default_factory=list)
    rejected: list[RejectedRecord] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    """Number of valid samples that are not used, by exceeded limit or `filter`."""
    first_filtered: dict[str, RejectedRecord] = field(default_factory=dict)
    """The first sample beyond each limit."""
    dropped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number of samples, and of items, by content that is dropped from samples in use."""
    displayed: list[DisplayedSample] = field(default_factory=list)
    packs: list[list[SampleMeta]] = field(default_factory=list)
    """First packed sequences of its samples, if the source is packed separately."""

    @property
    def read(self) -> int:
        """Number of records that were read."""
        return len(self.samples) + len(self.rejected) + self.filtered.total()

    def reasons(self) -> list[tuple[int, RejectedRecord]]:
        """Return the number of records per reason of rejection, with the first record, sorted.

        Reasons are the same if they differ only in numbers, paths and quoted values.
        """
        groups: dict[str, list[RejectedRecord]] = {}
        for rejection in self.rejected:
            groups.setdefault(re.sub(r"'[^']*'|\S*/\S*|\d+", "#", rejection.reason), []).append(
                rejection
            )
        counted = [(len(group), group[0]) for group in groups.values()]
        return sorted(counted, key=lambda pair: -pair[0])

    def column(self, name: str) -> np.ndarray:
        """Return a field of `SampleSizes` for all usable samples, int64."""
        return np.asarray([getattr(sample, name) for sample in self.samples], np.int64)


class Inspector:
    """Reader of sources for one model.

    Args:
        recipe: Recipe with the sources.
        model: Model on the meta device, without weights.
        tokenizer: Tokenizer of the LLM.
        limit: Maximum number of records to read per source.
        displayed: Number of samples to show per source.
        decode: Whether to decode the images, videos and audio files of all samples.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: MultimodalModel,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        displayed: int,
        decode: bool,
    ) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._limit, self._num_displayed = limit, displayed
        self._decode = decode
        self._modules: Sequence[ModuleDescription] = [
            m.describe() for m in model.modality_modules()
        ]
        self._length = recipe.training.sequence_length
        drawings = make_target_preprocessor(
            model.generator_spec(), recipe.training.seed, recipe.data.max_image_pixels
        )
        spec = model.text_spec(tokenizer)
        self._reader, self._unlimited_reader = (
            SampleReader(
                recipe.data,
                length,
                spec,
                model.image_specs(),
                tokenizer,
                drawings,
                reads_pairs=recipe.training.loss == "preference",
            )
            for length in (self._length, UNLIMITED_TOKENS)
        )

    def inspect(self, name: str, section: str, config: SourceConfig) -> SourceFindings:
        """Return the findings about one source.

        Raises:
            DataError: The source cannot be read, or none of its records is usable.
        """
        kind, _ = resolve_files(config, open_file_system(config.path, self._recipe.data))
        count, records = self._records(name, config)
        findings = SourceFindings(name, section, config, kind, count)
        for index, record in records:
            self._inspect_record(findings, index, record)
        if not findings.samples:
            counts = f"none of its {findings.read} records that were read is usable"
            skipped = [*findings.first_filtered.values(), *findings.rejected]
            raise no_usable_samples_error(
                name,
                counts,
                [
                    r.reason
                    if r.location and r.reason.startswith(r.location)
                    else f"{r.name}: {r.reason}"
                    for r in skipped
                ],
            )
        findings.packs = self._pack(findings)
        return findings

    def _records(
        self, name: str, config: SourceConfig
    ) -> tuple[int | None, Iterator[tuple[int, Record | CorruptSampleError]]]:
        """Return the number of records, and the records to read with their indices."""
        storage = open_file_system(config.path, self._recipe.data)
        if config.streaming:
            stream = open_stream(name, config, self._recipe.data.index_cache_dir, storage)
            return None, enumerate(islice(iter(stream.next, None), self._limit))
        source = open_map_source(config, self._recipe.data.index_cache_dir, storage)
        chosen = np.unique(
            np.linspace(0, len(source) - 1, min(self._limit, len(source))).astype(int)
        )

        def read(index: int) -> Record | CorruptSampleError:
            try:
                return source.read(index)
            except CorruptSampleError as error:
                return error

        return len(source), ((int(i), read(int(i))) for i in chosen)

    def _inspect_record(
        self, findings: SourceFindings, index: int, record: Record | CorruptSampleError
    ) -> None:
        """Count a record as used, filtered or corrupt."""
        name = f"{findings.name}[{index}]"
        location = record.location if isinstance(record, Record) else ""
        try:
            if isinstance(record, CorruptSampleError):
                raise record
            is_pair = self._reader.reads_pairs
            record_format = "preference pair" if is_pair else detect_format_name(record)
            sample = self._reader.read(record)
            untruncated = self._unlimited_reader.read(record) if sample.text.truncated else sample
            if self._decode:
                with record_errors_at(record.location):
                    for file, image in zip(sample.files, sample.images, strict=True):
                        self._reader.pixels(file, image)
            if not findings.config.filter.keeps(len(sample.text.ids)):
                findings.filtered["outside of the `filter` of the source"] += 1
                return
            if len(findings.displayed) < self._num_displayed:
                findings.displayed.append(self._make_displayed(name, record_format, record, sample))
        except BeyondLimitError as error:
            findings.filtered[error.limit] += 1
            findings.first_filtered.setdefault(
                error.limit, RejectedRecord(name, location, str(error))
            )
            return
        except CorruptSampleError as error:
            findings.rejected.append(RejectedRecord(name, location, str(error)))
            return
        for content, items in sample.dropped.items():
            before = findings.dropped.get(content, (0, 0))
            findings.dropped[content] = before[0] + 1, before[1] + items
        findings.format_counts[record_format] += 1
        meta = self._reader.meta(findings.name, index, sample)
        findings.samples.append(self._sizes(meta, sample, untruncated))

    def _sizes(
        self, meta: SampleMeta, sample: MeasuredSample, untruncated: MeasuredSample
    ) -> SampleSizes:
        loss_tokens = sum(sample.text.loss[1:])
        single = MicrobatchMeta((meta,), meta.tokens)
        flops = microbatch_flops(self._modules, single, loss_tokens)
        return SampleSizes(
            untruncated_tokens=len(untruncated.text.ids),
            tokens=meta.tokens,
            loss_tokens=loss_tokens,
            images=len(meta.images),
            image_tokens=sum(image.tokens for image in meta.images),
            flops={module: f.forward + f.backward for module, f in flops.items()},
            meta=meta,
        )

    def _make_displayed(
        self, name: str, record_format: str, record: Record, sample: MeasuredSample
    ) -> DisplayedSample:
        sample_images = []
        for number, (file, image) in enumerate(zip(sample.files, sample.images, strict=True), 1):
            size = f"{image.width_px}x{image.height_px} px, " if image.width_px else ""
            time = f"{image.duration_ms / 1000:g} s, " if image.duration_ms else ""
            sizes = f"{size}{time}{image.patches} patches, {image.tokens} tokens"
            label = f"{number}: {sizes}" + (f" ({image.encoder})" if image.encoder else "")
            sample_images.append(SampleImage(label, *displayed_images(self._reader, file, image)))
        tokens = count_placeholders(sample.files, sample.images)
        spans = split_token_spans(sample.text, tokens, self._tokenizer)
        return DisplayedSample(name, record.location, record_format, spans, sample_images)

    def _pack(self, findings: SourceFindings) -> list[list[SampleMeta]]:
        data = self._recipe.data
        metas = [sample.meta for sample in findings.samples]
        tokens = [meta.tokens for meta in metas]
        tiles = [meta.tiles for meta in metas]
        if data.packing == "balanced":
            packer = BalancedPacker(self._length, data.max_tiles_per_sequence)
            sizes = np.array([tokens, tiles, [meta.patches for meta in metas]], np.int64)
            packs_N = packer.finish(*sizes)
            chosen, starts = group_by_sequence(packs_N, np.array(packer.closed, np.int64))
            packs = [chosen[a:b].tolist() for a, b in pairwise(starts)]
        else:
            packs = pack_all(
                tokens, self._length, data.packing_buffer_size, tiles, data.max_tiles_per_sequence
            )
        return [[metas[i] for i in pack] for pack in packs[:MAX_DISPLAYED_SEQUENCES]]


def split_token_spans(
    text: EncodedSample, image_tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[TokenSpan]:
    """Return the tokens of a sample as text, split at changes of the loss mask and at images.

    Args:
        text: Encoded sample.
        image_tokens: Number of placeholders of each image in the sample.
        tokenizer: Tokenizer of the LLM.
    """
    length = len(text.ids)
    images = np.full(length, -1)
    for number, (start, count) in enumerate(zip(text.image_starts, image_tokens, strict=False)):
        images[start + text.token_offsets.get(number, np.arange(count))] = number
    types = list(zip(images.tolist(), text.loss, strict=True))
    boundaries = [i for i in range(1, length) if types[i] != types[i - 1]]
    spans = []
    for start, stop in zip([0, *boundaries], [*boundaries, length], strict=True):
        if start == stop:
            continue
        image, loss = types[start]
        span_text = "" if image >= 0 else str(tokenizer.decode(text.ids[start:stop]))
        spans.append(TokenSpan(span_text, stop - start, loss, image if image >= 0 else None))
    return spans


def inspect_recipe(
    recipe: Recipe, limit: int, displayed: int, *, decode: bool = False
) -> Iterator[SourceFindings]:
    """Yield the findings about every source of a recipe, validation sources last.

    Args:
        recipe: Recipe with the sources.
        limit: Maximum number of records to read per source.
        displayed: Number of samples to show per source.
        decode: Whether to decode the images, videos and audio files of all samples. Otherwise only
            their headers are read.

    Raises:
        ConfigError: The model or tokenizer cannot be built.
        DataError: A source cannot be read, or none of its records is usable.
    """
    model = recipe_model(recipe)
    inspector = Inspector(recipe, model, load_tokenizer(recipe.model), limit, displayed, decode)
    for section, configs in (
        ("data.sources", recipe.data.sources),
        ("data.validation", recipe.data.validation),
    ):
        for name, config in zip(unique_names(configs), configs, strict=True):
            yield inspector.inspect(name, section, config)
