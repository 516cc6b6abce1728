"""Open the samples of a run on the ranks, in producers or in a shared reader.

    process         opens sources   plans steps   decodes        used for
    rank            yes             yes           yes            default (`sources.open`)
    producer        yes             yes           yes            `data.producers` (`SampleService`)
    shared reader   yes             yes           no, ranks do   streams (`shared_reader`)

`Loader` is independent of the choice, because all of them implement `SampleSet`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.common.extensions import load_entry
from torchmm.common.generated import GeneratorSpec
from torchmm.common.sequence_slices import DecodeAssignment
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.shared_reader import ReaderAddress, ReaderClient
from torchmm.data.sources.open import make_reader, open_index_builders, open_samples
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.sources.source_options import MapSource
from torchmm.data.steps.plan_steps import StepIterator, StepPosition
from torchmm.data.steps.remote_steps import RemoteSteps, RequestStep
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


class SampleService(Protocol):
    """Processes outside of the ranks that prepare samples.

    An extension adds a service with an entry of the table "sample_services". The name of the entry
    is "producers" (for `data.producers`), and its target a class with the argument `DataConfig`.
    """

    def start(
        self, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a context in which the processes run that this run starts.

        Rank 0 enters it before ranks communicate.

        Args:
            training: Batch sizes and sequence length.
            specs: Further arguments of `open_samples`.

        Raises:
            ConfigError: The processes cannot be started.
        """
        ...

    def find_samples(
        self,
        training: TrainingConfig,
        reader: SampleReader,
        tokenizer: PreTrainedTokenizerBase,
        validation: bool,
    ) -> SampleSet:
        """Return the samples that the service plans (`data.producers.plan`).

        Raises:
            ConfigError: A key of the recipe cannot be used.
            DataError: No process responds, or none has these samples.
        """
        ...

    def make_decoder(
        self, samples: SampleSet, rank: int, reads: DecodeAssignment | None, validation: bool
    ) -> Dataset[DecodedStep] | None:
        """Return a dataset that requests decoded steps, or None if ranks decode these samples.

        Args:
            samples: Samples of the run.
            rank: Data-parallel rank.
            reads: Images that this rank decodes. None for all.
            validation: Whether these are validation samples.
        """
        ...


def sample_service(data: DataConfig) -> SampleService | None:
    """Return the service of `data.producers`, or None if the recipe does not use producers."""
    if not data.producers.is_used:
        return None
    service: SampleService = load_entry("sample_services", "producers")(data)
    return service


class SamplePreview(Protocol):
    """Access to images and reference texts of samples, see `StepDecoder`."""

    def images(self, feed: int, index: int) -> list[Image.Image]: ...
    def references(self, feed: int, index: int) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class RemoteSamples:
    """Samples that another process opens and plans.

    Attributes:
        names: Names of the sources.
        decoder: Decoder of the samples. Without sources if producers decode.
        digests: Result of `digest` in the process that opened the samples.
        samples_key: Result of `fingerprint`.
        request: Requests a part of a step.
        preview: Returns images and reference texts of samples.
        producer_fingerprint: Fingerprint of the producers that decode. None if ranks decode.
        count: Number of samples. 0 if unknown.
    """

    names: Sequence[str]
    decoder: StepDecoder
    digests: tuple[str, str]
    samples_key: str
    request: RequestStep
    preview: SamplePreview
    producer_fingerprint: str | None = None
    count: int = 0

    def sequence(
        self, data: DataConfig, training: TrainingConfig, position: StepPosition
    ) -> StepIterator:
        """Return an iterator that requests steps."""
        return RemoteSteps(
            self.request, training, position, streamed=self.producer_fingerprint is None
        )

    def feeds(self) -> dict[str, int]:
        """Return the index of each source by name."""
        return {name: number for number, name in enumerate(self.names)}

    def digest(self) -> tuple[str, str]:
        """Return a summary of the samples, see `SampleSet.digest`."""
        return self.digests

    def fingerprint(self) -> str:
        """Return a key that is equal for processes that prepare the same tensors."""
        return self.samples_key

    def sample_images(self, feed: int, index: int) -> list[Image.Image]:
        """Return images and frames of a sample, to be displayed."""
        return self.preview.images(feed, index)

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Return all reference texts of a sample."""
        return self.preview.references(feed, index)


def find_samples(
    data: DataConfig,
    training: TrainingConfig,
    *,
    text_spec: TextSpec,
    image_specs: Mapping[str, ImageSpec],
    tokenizer: PreTrainedTokenizerBase,
    validation: bool = False,
    generator_spec: GeneratorSpec | None = None,
    streams: ReaderAddress | None = None,
) -> SampleSet:
    """Return the samples of a recipe.

    Producers plan them with `data.producers.plan`, and the shared reader with `streams`. Otherwise
    this process opens them. The remaining arguments and errors are those of `open_samples`.

    Args:
        streams: Address of the shared reader. None if this process reads streams.

    Raises:
        DataError: No process has the samples.
    """
    if streams is None and not data.producers.plan:
        return open_samples(
            data,
            training,
            text_spec=text_spec,
            image_specs=image_specs,
            tokenizer=tokenizer,
            validation=validation,
            generator_spec=generator_spec,
        )
    reader = make_reader(
        data, training, text_spec, image_specs, tokenizer, generator_spec, validation
    )
    if streams is not None:
        # Before the first request, so that ranks index the sources and log the progress.
        records: list[MapSource | None] = []
        for _, _, building in open_index_builders(data, training, reader, tokenizer, validation):
            if building is not None:
                building.load()
            records.append(None if building is None else building.source)
        client = ReaderClient(streams, validation, data.timeout_s)
        names, digests = client.describe()
        decoder = StepDecoder(reader, records, training.sequence_length)
        return RemoteSamples(names, decoder, digests, "", client.part, decoder)
    service = sample_service(data)
    assert service is not None, (
        "data.producers.plan requires producers; the recipe checks should have rejected this"
    )
    return service.find_samples(training, reader, tokenizer, validation)


def uses_shared_reader(data: DataConfig) -> bool:
    """Return True if one process per node reads the streams for all ranks of the node."""
    return not data.producers.is_used and any(
        s.streaming for s in (*data.sources, *data.validation)
    )
