"""Open the sources of a recipe, with a sample order for planning and a decoder.

Ranks and producers (`torchmm.data.serve`) open samples with the same function. If
`Samples.fingerprint` is equal in two processes, they prepare the same tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.common.errors import ConfigError, DataError
from torchmm.common.generated import GeneratorSpec
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.decode import StepDecoder
from torchmm.data.files.remote_files import open_file_system
from torchmm.data.identity import identity, run_settings, stream_digest
from torchmm.data.record_formats.detect import is_chat
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.index.index_builder import IndexBuilder
from torchmm.data.sources.index.length_index import (
    LengthIndex,
    cache_key,
    check_usable_samples,
    describe_lengths,
)
from torchmm.data.sources.map_sources import (
    MapSource,
    open_map_source,
    resolve_files,
)
from torchmm.data.sources.preference_pairs import has_pair, split_pair
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.source_options import MAX_CHECKED_RECORDS, warn_about_training_rows
from torchmm.data.sources.streams import StreamFeed, check_stream, open_stream
from torchmm.data.steps.feeds import Feed, FeedOptions, IndexFeed
from torchmm.data.steps.plan_steps import StepIterator, StepPosition
from torchmm.data.steps.remote_steps import StepPlanServer
from torchmm.data.steps.sample_order import OrderedSource, SampleOrder
from torchmm.data.target_images import make_target_preprocessor
from torchmm.recipe.data_section import DataConfig, SourceConfig, StageConfig, unique_names
from torchmm.recipe.training_section import TrainingConfig

VALIDATION_SEED = 0


@dataclass(frozen=True)
class OpenSource:
    """Open source with its index or stream."""

    name: str
    config: SourceConfig
    records: MapSource | None
    """Random access for workers. None for streams."""
    make_feed: Callable[[], Feed]
    key: str
    """Hash of all inputs of the sample sizes (`cache_key`). Empty for streams."""
    content: str
    """Digest of the samples, independent of their location (`torchmm.data.identity`)."""
    index: LengthIndex | None = None
    """Sizes of the samples. None for streams."""


@dataclass(frozen=True)
class Samples:
    """Open training sources or validation sources of a run."""

    sources: list[OpenSource]
    decoder: StepDecoder
    seed: int
    identity: dict[str, Any] = field(default_factory=dict)
    """See `torchmm.data.identity`."""
    stages: Sequence[StageConfig] = ()
    """Mixture schedule. If empty, the weights of the sources apply in all steps."""

    @property
    def order(self) -> SampleOrder:
        """Sample order of all sources."""
        sources = [OrderedSource(s.name, s.config, s.make_feed) for s in self.sources]
        return SampleOrder(sources, self.identity, self.stages)

    @property
    def streamed(self) -> bool:
        """True if any source is a stream."""
        return any(source.index is None for source in self.sources)

    @property
    def count(self) -> int:
        """Number of samples of all sources, including corrupt samples. 0 if any is a stream."""
        if self.streamed:
            return 0
        return sum(len(source.index) for source in self.sources if source.index is not None)

    def sequence(
        self, data: DataConfig, training: TrainingConfig, position: StepPosition
    ) -> StepIterator:
        """Return the steps from a position.

        Raises:
            CheckpointError: The position belongs to different data.
        """
        return self.order.sequence(data, training, position)

    def make_plan_server(
        self,
        data: DataConfig,
        training: TrainingConfig,
        *,
        max_steps: int = 64,
        max_iterators: int = 4,
    ) -> StepPlanServer:
        """Return a planner for several ranks, which assign the sequences to microbatches.

        Args:
            data: Packing settings and limits.
            training: Batch sizes and sequence length.
            max_steps: See `StepPlanServer`.
            max_iterators: See `StepPlanServer`.
        """
        alone = training.model_copy(update={"microbatch_size": 1})

        def begin(state: dict[str, Any] | None, resume_changed: bool) -> StepIterator:
            position = StepPosition(state=state, resume_changed=resume_changed)
            return self.sequence(data, alone, position)

        return StepPlanServer(begin, max_steps, max_iterators)

    def sample_images(self, feed: int, index: int) -> list[Image.Image]:
        """Return images and frames of a sample, to be displayed. Empty for streams."""
        return self.decoder.images(feed, index)

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Return all reference texts of a sample, see `read_references`."""
        return self.decoder.references(feed, index)

    def feeds(self) -> dict[str, int]:
        """Return the index of each source by name."""
        return {source.name: number for number, source in enumerate(self.sources)}

    def digest(self) -> tuple[str, str]:
        """Return two lines of text: the number of samples, and a summary of their sizes."""
        indexed = [(s, s.index) for s in self.sources if s.index is not None]
        counts = [f"{s.name} {index.count_usable(s.config.filter).sum():,}" for s, index in indexed]
        counts += [f"{s.name} (a stream)" for s in self.sources if s.index is None]
        corrupt = sum(index.corrupt_count for _, index in indexed)
        filtered = sum(index.filtered.total() for _, index in indexed)
        samples = f"samples: {', '.join(counts)}; {corrupt:,} corrupt"
        if filtered:
            samples += f", {filtered:,} beyond a limit"
        if not indexed:
            return samples, "sizes: determined while streams are read"
        described = [index.sample_lengths(source.config.filter) for source, index in indexed]
        tokens = np.concatenate([tokens for tokens, _ in described])
        images = np.concatenate([images for _, images in described])
        lengths = ", ".join(describe_lengths(tokens))
        each = f"{images.mean():.2f} images, tiles, frames or audio clips per sample"
        return samples, f"tokens: {lengths}; {each}"

    def fingerprint(self) -> str:
        """Return a key that is equal for processes that prepare the same tensors.

        Raises:
            ConfigError: A source is a stream, which other processes cannot decode.
        """
        streams = [source.name for source in self.sources if not source.key]
        if streams:
            raise ConfigError(
                f"data.producers: source {streams[0]!r} is streamed, but producers require "
                "random access; set streaming = false, or remove data.producers"
            )
        keys = [[source.name, source.key] for source in self.sources]
        return hashlib.sha256(json.dumps([self.seed, keys]).encode()).hexdigest()


def open_samples(
    data: DataConfig,
    training: TrainingConfig,
    *,
    text_spec: TextSpec,
    image_specs: Mapping[str, ImageSpec],
    tokenizer: PreTrainedTokenizerBase,
    validation: bool = False,
    generator_spec: GeneratorSpec | None = None,
) -> Samples:
    """Open the training sources of a recipe, or its validation sources.

    Args:
        data: Sources and limits.
        training: Sequence length and seed.
        text_spec: Format of the text for the LLM.
        image_specs: Format of the images, videos and audio for each encoder, by name.
        tokenizer: Fast tokenizer of the LLM.
        validation: Whether to open the validation sources.
        generator_spec: Format of the images for the generator. None without a generator.

    Raises:
        ConfigError: There is no source, or specs do not match.
        DataError: A source cannot be read or has no usable sample.
    """
    reader = make_reader(
        data, training, text_spec, image_specs, tokenizer, generator_spec, validation
    )
    settings = run_settings(data, training.sequence_length, reader, tokenizer)
    section = "data.validation" if validation else "data.sources"
    buildings = open_index_builders(data, training, reader, tokenizer, validation)
    if not buildings:
        raise ConfigError(f"{section}: no source; add a [[{section}]] table")
    seed = order_seed(training, validation)
    opened = []
    for number, (name, config, building) in enumerate(buildings):
        options = FeedOptions(
            number,
            name,
            seed,
            # Validation samples have the same shuffled order in every run. Files are often sorted
            # by topic, and the first samples should be representative.
            shuffle=validation or data.shuffle,
            one_epoch=validation,
            filter=config.filter,
            needs_tiles=data.max_tiles_per_sequence is not None,
            needs_patches=data.packing == "balanced",
        )
        make_feed: Callable[[], Feed]
        if building is None:
            storage = open_file_system(config.path, data)
            stream = open_stream(name, config, data.index_cache_dir, storage)
            check_stream(name, config, stream, reader, data.max_corrupt_samples)
            make_feed = partial(StreamFeed, options, stream, reader, data.shuffle_window)
            content = stream_digest(config, resolve_files(config, storage)[1], settings)
            opened.append(OpenSource(name, config, None, make_feed, "", content))
            continue
        if validation:
            warn_about_training_rows(config, building.source, data.sources)
        index = building.load()
        check_usable_samples(name, config, index)
        make_feed = partial(IndexFeed, options, index, reader.encoders)
        key = building.directory.name
        source = OpenSource(name, config, building.source, make_feed, key, index.content, index)
        opened.append(source)
    contents = [(source.name, source.config, source.content) for source in opened]
    run_identity = identity(data, training, reader, settings, contents)
    decoder = StepDecoder(reader, [s.records for s in opened], training.sequence_length)
    return Samples(opened, decoder, seed, run_identity, () if validation else data.mixture_schedule)


def open_index_builders(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
    validation: bool,
) -> list[tuple[str, SourceConfig, IndexBuilder | None]]:
    """Open each source, and return its name, settings and index without building the index.

    The index is None for streams. Arguments are those of `open_samples`.

    Raises:
        DataError: A source cannot be read.
    """
    configs = data.validation if validation else data.sources
    buildings: list[tuple[str, SourceConfig, IndexBuilder | None]] = []
    for name, config in zip(unique_names(configs), configs, strict=True):
        building = None
        if not config.streaming:
            storage = open_file_system(config.path, data)
            records = open_map_source(config, data.index_cache_dir, storage)
            key = cache_key(records, config, data, training.sequence_length, reader, tokenizer)
            directory = Path(data.index_cache_dir) / key
            building = IndexBuilder(name, records, reader, directory, data.workers)
        buildings.append((name, config, building))
    return buildings


def contains_chats(config: SourceConfig, data: DataConfig) -> bool | None:
    """Return True if the first readable record of a source is a chat.

    Returns None if this process cannot read the source.
    """
    try:
        storage = open_file_system(config.path, data)
        if config.streaming:
            stream = open_stream(config.path, config, data.index_cache_dir, storage)
            records: Iterator[Record | CorruptSampleError | None] = iter(stream.next, None)
        else:
            source = open_map_source(config, data.index_cache_dir, storage)
            records = map(source.read, range(len(source)))
        for _ in range(MAX_CHECKED_RECORDS):
            with suppress(CorruptSampleError):
                record = next(records, None)
                if record is None:
                    return None
                if isinstance(record, Record):
                    return is_chat(split_pair(record)[0] if has_pair(record) else record)
    except (DataError, ConfigError, OSError):
        pass
    return None


def order_seed(training: TrainingConfig, validation: bool) -> int:
    """Return the seed of the sample order. Validation has the same seed in every run."""
    return VALIDATION_SEED if validation else training.seed


def make_reader(
    data: DataConfig,
    training: TrainingConfig,
    text_spec: TextSpec,
    image_specs: Mapping[str, ImageSpec],
    tokenizer: PreTrainedTokenizerBase,
    generator_spec: GeneratorSpec | None = None,
    validation: bool = False,
) -> SampleReader:
    """Return the reader of records. Arguments are those of `open_samples`."""
    seed = order_seed(training, validation)
    target_preprocessor = make_target_preprocessor(generator_spec, seed, data.max_image_pixels)
    return SampleReader(
        data,
        training.sequence_length,
        text_spec,
        image_specs,
        tokenizer,
        target_preprocessor,
        reads_pairs=training.loss == "preference",
    )
