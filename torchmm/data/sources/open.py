"""Open the sources of a recipe: their order, for planning, and a decoder, for pixels and tokens.

Loaders plan and decode. Producers (`torchmm.data.serve`) only decode. Both open samples here, and
`Samples.fingerprint` shows whether two processes prepare the same tensors.
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
from torchmm.data.files.remote import open_file_system
from torchmm.data.generated import make_drawing_preprocessor
from torchmm.data.identity import identity, settings_of, stream_content
from torchmm.data.layouts.recognise import is_chat
from torchmm.data.layouts.sample import Record
from torchmm.data.sources.configured import LOOKED_AT, warn_of_trained_rows
from torchmm.data.sources.index.building import Building
from torchmm.data.sources.index.length_index import (
    LengthIndex,
    cache_key,
    check_usable,
    describe_lengths,
)
from torchmm.data.sources.local_and_hub import (
    MapSource,
    open_map_source,
    resolve_files,
)
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.streams import StreamFeed, check_stream, open_stream
from torchmm.data.steps.elsewhere import SharedSteps
from torchmm.data.steps.order import Feed, FeedOptions, IndexFeed
from torchmm.data.steps.sample_order import OrderedSource, SampleOrder
from torchmm.data.steps.step_packs import Position, Steps
from torchmm.recipe.data_section import DataConfig, SourceConfig, StageConfig, unique_names
from torchmm.recipe.training_section import TrainingConfig

VALIDATION_SEED = 0


@dataclass(frozen=True)
class OpenSource:
    """One source."""

    name: str
    config: SourceConfig
    records: MapSource | None
    """Random access for workers; None for streams."""
    make_feed: Callable[[], Feed]
    key: str
    """Names all that the sizes of its samples depend on; empty for streams."""
    content: str
    """Identifies its samples, wherever they are; for streams, as far as they are known."""
    index: LengthIndex | None = None
    """Sizes of its samples; None for streams."""


@dataclass(frozen=True)
class Samples:
    """All sources of a run, or those held out."""

    sources: list[OpenSource]
    decoder: StepDecoder
    seed: int
    identity: dict[str, Any] = field(default_factory=dict)
    """See `torchmm.data.identity`."""
    stages: Sequence[StageConfig] = ()
    """Weights in the place of the sources' own; none: there is one stage."""

    @property
    def order(self) -> SampleOrder:
        """Which samples come next."""
        sources = [OrderedSource(s.name, s.config, s.make_feed) for s in self.sources]
        return SampleOrder(sources, self.identity, self.stages)

    @property
    def streamed(self) -> bool:
        """Whether a source is a stream."""
        return any(source.index is None for source in self.sources)

    @property
    def count(self) -> int:
        """Number of samples of all sources, with corrupt ones; 0 if one is a stream."""
        if self.streamed:
            return 0
        return sum(len(source.index) for source in self.sources if source.index is not None)

    def sequence(self, data: DataConfig, training: TrainingConfig, position: Position) -> Steps:
        """The steps they form.

        Raises:
            CheckpointError: the position belongs to other data.
        """
        return self.order.sequence(data, training, position)

    def shared(
        self, data: DataConfig, training: TrainingConfig, *, kept: int = 64, sequences: int = 4
    ) -> SharedSteps:
        """The same for many ranks, which place the packs themselves; `kept` and `sequences` as of
        `SharedSteps`."""
        alone = training.model_copy(update={"microbatch_size": 1})

        def begin(state: dict[str, Any] | None, resume_changed: bool) -> Steps:
            position = Position(state=state, resume_changed=resume_changed)
            return self.sequence(data, alone, position)

        return SharedSteps(begin, kept, sequences)

    def pictures(self, feed: int, index: int) -> list[Image.Image]:
        """Images and frames of a sample, to be shown; none for streams."""
        return self.decoder.images(feed, index)

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """All that people have written for a sample; see `references_of`."""
        return self.decoder.references(feed, index)

    def feeds(self) -> dict[str, int]:
        """Number of each source by its name."""
        return {source.name: number for number, source in enumerate(self.sources)}

    def digest(self) -> tuple[str, str]:
        """What there is to train on, for people: how many samples, and how large they are."""
        indexed = [(s, s.index) for s in self.sources if s.index is not None]
        counts = [f"{s.name} {index.usable(s.config.filter).sum():,}" for s, index in indexed]
        counts += [f"{s.name} (a stream)" for s in self.sources if s.index is None]
        refused = sum(index.corrupt_count for _, index in indexed)
        filtered = sum(index.filtered.total() for _, index in indexed)
        samples = f"samples: {', '.join(counts)}; {refused:,} corrupt"
        if filtered:
            samples += f", {filtered:,} beyond a limit"
        if not indexed:
            return samples, "sizes: determined while streams are read"
        described = [index.described(source.config.filter) for source, index in indexed]
        tokens = np.concatenate([tokens for tokens, _ in described])
        images = np.concatenate([images for _, images in described])
        lengths = ", ".join(describe_lengths(tokens))
        each = f"{images.mean():.2f} images, tiles, frames or audio clips per sample"
        return samples, f"tokens: {lengths}; {each}"

    def fingerprint(self) -> str:
        """Equal for those that prepare the same tensors.

        Raises:
            ConfigError: a source is a stream, which only the process that reads it can decode.
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
        text_spec: How the LLM reads text.
        image_specs: How encoders read images, by name.
        tokenizer: Tokenizer of the LLM (a fast one).
        validation: Whether to open the validation sources.
        generator_spec: How the generator reads images. None if the model has no generator.

    Raises:
        ConfigError: There is no source, or specs do not fit.
        DataError: A source cannot be read or has no usable sample.
    """
    reader = make_reader(
        data, training, text_spec, image_specs, tokenizer, generator_spec, validation
    )
    settings = settings_of(data, training.sequence_length, reader, tokenizer)
    section = "data.validation" if validation else "data.sources"
    buildings = open_buildings(data, training, reader, tokenizer, validation)
    if not buildings:
        raise ConfigError(f"{section}: no source; add a [[{section}]] table")
    seed = seed_of(training, validation)
    opened = []
    for number, (name, config, building) in enumerate(buildings):
        options = FeedOptions(
            number,
            name,
            seed,
            # Validation samples have the same order in every run, and a shuffled one: files are
            # often sorted by topic, and the first samples should represent all of them.
            shuffle=validation or data.shuffle,
            one_epoch=validation,
            filter=config.filter,
            counts_tiles=data.max_tiles_per_sequence is not None,
            counts_patches=data.packing == "balanced",
        )
        make_feed: Callable[[], Feed]
        if building is None:
            storage = open_file_system(config.path, data)
            stream = open_stream(name, config, data.index_cache_dir, storage)
            check_stream(name, config, stream, reader, data.max_corrupt_samples)
            make_feed = partial(StreamFeed, options, stream, reader, data.shuffle_window)
            content = stream_content(config, resolve_files(config, storage)[1], settings)
            opened.append(OpenSource(name, config, None, make_feed, "", content))
            continue
        if validation:
            warn_of_trained_rows(config, building.source, data.sources)
        index = building.load()
        check_usable(name, config, index)
        make_feed = partial(IndexFeed, options, index, reader.encoders)
        key = building.directory.name
        source = OpenSource(name, config, building.source, make_feed, key, index.content, index)
        opened.append(source)
    contents = [(source.name, source.config, source.content) for source in opened]
    whole = identity(data, training, reader, settings, contents)
    decoder = StepDecoder(reader, [s.records for s in opened], training.sequence_length)
    return Samples(opened, decoder, seed, whole, () if validation else data.mixture_schedule)


def open_buildings(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
    validation: bool,
) -> list[tuple[str, SourceConfig, Building | None]]:
    """Return name, settings and index of each source. The index is None for streams.

    Sources are opened, but not measured.

    Raises:
        DataError: A source cannot be read.
    """
    configs = data.validation if validation else data.sources
    found: list[tuple[str, SourceConfig, Building | None]] = []
    for name, config in zip(unique_names(configs), configs, strict=True):
        building = None
        if not config.streaming:
            storage = open_file_system(config.path, data)
            records = open_map_source(config, data.index_cache_dir, storage)
            key = cache_key(records, config, data, training.sequence_length, reader, tokenizer)
            directory = Path(data.index_cache_dir) / key
            building = Building(name, records, reader, directory, data.workers)
        found.append((name, config, building))
    return found


def has_chats(config: SourceConfig, data: DataConfig) -> bool | None:
    """Return whether a source consists of chats, by its first readable record.

    Returns None if the source cannot be read here.
    """
    try:
        storage = open_file_system(config.path, data)
        if config.streaming:
            stream = open_stream(config.path, config, data.index_cache_dir, storage)
            records: Iterator[Record | CorruptSampleError | None] = iter(stream.next, None)
        else:
            source = open_map_source(config, data.index_cache_dir, storage)
            records = map(source.read, range(len(source)))
        for _ in range(LOOKED_AT):
            with suppress(CorruptSampleError):
                record = next(records, None)
                if record is None:
                    return None
                if isinstance(record, Record):
                    return is_chat(record)
    except (DataError, ConfigError, OSError):
        pass
    return None


def seed_of(training: TrainingConfig, validation: bool) -> int:
    """Return the seed of the sample order, which is the same in every run for validation."""
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
    """Return the object that measures and decodes records; arguments as of `open_samples`."""
    seed = seed_of(training, validation)
    drawings = make_drawing_preprocessor(generator_spec, seed, data.max_image_pixels)
    length = training.sequence_length
    return SampleReader(data, length, text_spec, image_specs, tokenizer, drawings)
