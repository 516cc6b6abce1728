"""What the sources of a recipe contain, as the model would get it: nothing is trained or decoded.

Every record goes through the code that a run reads it with (`SampleReader`), so what is counted
here is what will be trained on. At most `limit` records of a source are read, evenly spaced over
all of it, because files are often sorted; of a stream the first ones. Only the samples that are
shown are decoded.

A sample that `training.sequence_length` cuts is measured again without a limit, to know how much is
cut off. Rejected: the length index of a run, which keeps sizes, but neither layouts nor what counts
in the loss.
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
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError, naming_place
from torchmm.data.files.remote import open_file_system
from torchmm.data.generated import make_drawing_preprocessor
from torchmm.data.layouts.recognise import layout_of
from torchmm.data.layouts.sample import Record
from torchmm.data.media.text import EncodedSample
from torchmm.data.sources.index.length_index import nothing_usable
from torchmm.data.sources.local_and_hub import open_map_source, resolve_files
from torchmm.data.sources.reader import MeasuredSample, SampleReader, placeholders
from torchmm.data.sources.streams import open_stream
from torchmm.data.steps.balanced_packing import BalancedPacker
from torchmm.data.steps.packing import members, pack_all
from torchmm.data.tokenizer import load_tokenizer
from torchmm.extensions.reports.inspection.pictures import file_pictures
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.data_section import SourceConfig, unique_names
from torchmm.recipe.recipe import Recipe

UNLIMITED_TOKENS = 1 << 24
"""Longer than any sample is; what is cut off is counted, not guessed."""
PACKS_SHOWN = 12


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be used."""

    name: str
    """source[index]."""
    where: str
    """File and line or row, where the source knows it."""
    reason: str


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one kind."""

    text: str
    tokens: int
    loss: bool
    image: int | None = None
    """Number of the image whose placeholders these are, from 0."""


@dataclass(frozen=True)
class Picture:
    """One file of a sample."""

    label: str
    original: Image.Image | None
    prepared: Image.Image | None
    """What the encoder gets, as a picture; None where it is no picture, or cannot be drawn."""


@dataclass(frozen=True)
class ShownSample:
    """One sample as the model sees it."""

    name: str
    where: str
    layout: str
    runs: list[Run]
    pictures: list[Picture]


@dataclass(frozen=True)
class SampleSizes:
    """Sizes of one usable sample."""

    whole_tokens: int
    """Before it is cut at the sequence length."""
    tokens: int
    loss_tokens: int
    images: int
    image_tokens: int
    flops: dict[str, int]
    """Of a forward and backward, by module."""
    meta: SampleMeta


@dataclass
class SourceFindings:
    """What was found in one source."""

    name: str
    section: str
    """data.sources or data.validation."""
    config: SourceConfig
    kind: str
    """How its files are read."""
    records: int | None
    """In all of it; None for a stream."""
    layouts: Counter[str] = field(default_factory=Counter)
    samples: list[SampleSizes] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    """Number of valid samples that are not used, by exceeded limit or `filter`."""
    first_filtered: dict[str, Refusal] = field(default_factory=dict)
    """The first sample beyond each limit."""
    dropped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number of samples, and of items, by content that is dropped from samples in use."""
    shown: list[ShownSample] = field(default_factory=list)
    packs: list[list[SampleMeta]] = field(default_factory=list)
    """The first sequences that its samples would be packed into on their own."""

    @property
    def read(self) -> int:
        """Records that were looked at."""
        return len(self.samples) + len(self.refused) + self.filtered.total()

    def reasons(self) -> list[tuple[int, Refusal]]:
        """How many records were refused for the same reason, with the first of them, most first.

        Reasons are the same if they differ in numbers, paths and quoted values alone.
        """
        groups: dict[str, list[Refusal]] = {}
        for refusal in self.refused:
            groups.setdefault(re.sub(r"'[^']*'|\S*/\S*|\d+", "#", refusal.reason), []).append(
                refusal
            )
        counted = [(len(group), group[0]) for group in groups.values()]
        return sorted(counted, key=lambda pair: -pair[0])

    def column(self, name: str) -> np.ndarray:
        """One of the numbers of `SampleSizes` over all usable samples: int64."""
        return np.asarray([getattr(sample, name) for sample in self.samples], np.int64)


class Inspector:
    """Reads sources for one model.

    Args:
        recipe: its data section names the sources.
        model: on the meta device; no weights are needed.
        tokenizer: the LLM's.
        limit: most records read of a source.
        shown: samples shown of each.
        decode: Whether to decode the images, videos and audio files of all samples.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: MultimodalModel,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        shown: int,
        decode: bool,
    ) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._limit, self._shown = limit, shown
        self._decode = decode
        self._modules: Sequence[ModuleDescription] = [
            m.describe() for m in model.modality_modules()
        ]
        self._length = recipe.training.sequence_length
        drawings = make_drawing_preprocessor(
            model.generator_spec(), recipe.training.seed, recipe.data.max_image_pixels
        )
        spec = model.text_spec(tokenizer)
        self._reader, self._whole = (
            SampleReader(recipe.data, length, spec, model.image_specs(), tokenizer, drawings)
            for length in (self._length, UNLIMITED_TOKENS)
        )

    def inspect(self, name: str, section: str, config: SourceConfig) -> SourceFindings:
        """One source.

        Raises:
            DataError: it cannot be read, or none of its records is usable.
        """
        kind, _ = resolve_files(config, open_file_system(config.path, self._recipe.data))
        count, records = self._records(name, config)
        found = SourceFindings(name, section, config, kind, count)
        for index, record in records:
            self._look_at(found, index, record)
        if not found.samples:
            counts = f"none of its {found.read} records that were read is usable"
            skipped = [*found.first_filtered.values(), *found.refused]
            raise nothing_usable(
                name,
                counts,
                [
                    r.reason
                    if r.where and r.reason.startswith(r.where)
                    else f"{r.name}: {r.reason}"
                    for r in skipped
                ],
            )
        found.packs = self._pack(found)
        return found

    def _records(
        self, name: str, config: SourceConfig
    ) -> tuple[int | None, Iterator[tuple[int, Record | CorruptSampleError]]]:
        """How many there are, and those to be looked at with their index."""
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

    def _look_at(
        self, found: SourceFindings, index: int, record: Record | CorruptSampleError
    ) -> None:
        """Count a record as used, filtered or corrupt."""
        name = f"{found.name}[{index}]"
        where = record.where if isinstance(record, Record) else ""
        try:
            if isinstance(record, CorruptSampleError):
                raise record
            layout = layout_of(record)
            sample = self._reader.read(record)
            whole = self._whole.read(record) if sample.text.truncated else sample
            if self._decode:
                with naming_place(record.where):
                    for file, image in zip(sample.files, sample.images, strict=True):
                        self._reader.pixels(file, image)
            if not found.config.filter.keeps(len(sample.text.ids)):
                found.filtered["outside of the `filter` of the source"] += 1
                return
            if len(found.shown) < self._shown:
                found.shown.append(self._show(name, layout, record, sample))
        except BeyondLimitError as error:
            found.filtered[error.limit] += 1
            found.first_filtered.setdefault(error.limit, Refusal(name, where, str(error)))
            return
        except CorruptSampleError as error:
            found.refused.append(Refusal(name, where, str(error)))
            return
        for content, items in sample.dropped.items():
            before = found.dropped.get(content, (0, 0))
            found.dropped[content] = before[0] + 1, before[1] + items
        found.layouts[layout] += 1
        meta = self._reader.meta(found.name, index, sample)
        found.samples.append(self._sizes(meta, sample, whole))

    def _sizes(
        self, meta: SampleMeta, sample: MeasuredSample, whole: MeasuredSample
    ) -> SampleSizes:
        loss_tokens = sum(sample.text.loss[1:])
        alone = MicrobatchMeta((meta,), meta.tokens)
        flops = microbatch_flops(self._modules, alone, loss_tokens)
        return SampleSizes(
            whole_tokens=len(whole.text.ids),
            tokens=meta.tokens,
            loss_tokens=loss_tokens,
            images=len(meta.images),
            image_tokens=sum(image.tokens for image in meta.images),
            flops={module: f.forward + f.backward for module, f in flops.items()},
            meta=meta,
        )

    def _show(self, name: str, layout: str, record: Record, sample: MeasuredSample) -> ShownSample:
        pictures = []
        for number, (file, image) in enumerate(zip(sample.files, sample.images, strict=True), 1):
            size = f"{image.width_px}x{image.height_px} px, " if image.width_px else ""
            time = f"{image.duration_ms / 1000:g} s, " if image.duration_ms else ""
            sizes = f"{size}{time}{image.patches} patches, {image.tokens} tokens"
            label = f"{number}: {sizes}" + (f" ({image.encoder})" if image.encoder else "")
            pictures.append(Picture(label, *file_pictures(self._reader, file, image)))
        tokens = placeholders(sample.files, sample.images)
        runs = text_runs(sample.text, tokens, self._tokenizer)
        return ShownSample(name, record.where, layout, runs, pictures)

    def _pack(self, found: SourceFindings) -> list[list[SampleMeta]]:
        data = self._recipe.data
        metas = [sample.meta for sample in found.samples]
        tokens = [meta.tokens for meta in metas]
        tiles = [meta.tiles for meta in metas]
        if data.packing == "balanced":
            packer = BalancedPacker(self._length, data.max_tiles_per_sequence)
            sizes = np.array([tokens, tiles, [meta.patches for meta in metas]], np.int64)
            packs_N = packer.finish(*sizes)
            chosen, starts = members(packs_N, np.array(packer.closed, np.int64))
            packs = [chosen[a:b].tolist() for a, b in pairwise(starts)]
        else:
            packs = pack_all(
                tokens, self._length, data.packing_buffer_size, tiles, data.max_tiles_per_sequence
            )
        return [[metas[i] for i in pack] for pack in packs[:PACKS_SHOWN]]


def text_runs(
    text: EncodedSample, image_tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[Run]:
    """A sample's tokens as text, cut where the loss begins or ends and around images.

    Args:
        image_tokens: placeholders of each image that was kept.
    """
    length = len(text.ids)
    images = np.full(length, -1)
    for number, (start, count) in enumerate(zip(text.image_starts, image_tokens, strict=False)):
        images[start : start + count] = number
    kinds = list(zip(images.tolist(), text.loss, strict=True))
    cuts = [i for i in range(1, length) if kinds[i] != kinds[i - 1]]
    runs = []
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        if start == stop:
            continue
        image, loss = kinds[start]
        words = "" if image >= 0 else str(tokenizer.decode(text.ids[start:stop]))
        runs.append(Run(words, stop - start, loss, image if image >= 0 else None))
    return runs


def inspect_recipe(
    recipe: Recipe, limit: int, shown: int, *, decode: bool = False
) -> Iterator[SourceFindings]:
    """Every source of a recipe, those that are held out last.

    Args:
        limit: most records read of a source.
        shown: samples shown of each.
        decode: Whether to decode the images, videos and audio files of all samples. Otherwise only
            their headers are read.

    Raises:
        ConfigError: the model or tokenizer cannot be built.
        DataError: a source cannot be read, or none of its records is usable.
    """
    model = recipe_model(recipe)
    inspector = Inspector(recipe, model, load_tokenizer(recipe.model), limit, shown, decode)
    for section, configs in (
        ("data.sources", recipe.data.sources),
        ("data.validation", recipe.data.validation),
    ):
        for name, config in zip(unique_names(configs), configs, strict=True):
            yield inspector.inspect(name, section, config)
