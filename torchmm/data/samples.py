"""The samples of a run, wherever they are opened.

    own         every rank opens the sources, plans and decodes (`sources.open`): the default
    planned     other processes open them; a rank asks for its packs, and for what is in them
                (`SampleService`, an entry of the table "sample_services")
    read for    one process of a machine opens them and plans, as a stream is read once; ranks
                decode (`shared_reader`)

`Loader` needs to know nothing of this: all of them say what comes next, and have a decoder.
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
from torchmm.common.row_slices import Reads
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.shared_reader import ReaderAddress, ReaderClient
from torchmm.data.sources.configured import MapSource
from torchmm.data.sources.open import make_reader, open_buildings, open_samples
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.elsewhere import Ask, StepsElsewhere
from torchmm.data.steps.step_packs import Position, Steps
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


class SampleService(Protocol):
    """Other processes that prepare samples.

    An extension adds a service with an entry of the table "sample_services". The name of the entry
    is "producers" (for `data.producers`), and its target a class with the argument `DataConfig`.
    """

    def start(
        self, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Run the processes that this run starts. Rank 0 enters it before ranks communicate.

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
        self, samples: SampleSet, rank: int, reads: Reads | None, validation: bool
    ) -> Dataset[DecodedStep] | None:
        """Return a dataset that requests decoded steps. None if ranks decode these samples.

        Args:
            samples: Samples of the run.
            rank: Data-parallel rank.
            reads: Images that this rank decodes. None for all.
            validation: Whether the samples are held out.
        """
        ...


def sample_service(data: DataConfig) -> SampleService | None:
    """Return the service of `data.producers`. None if the recipe does not use producers."""
    if not data.producers.is_used:
        return None
    service: SampleService = load_entry("sample_services", "producers")(data)
    return service


class Look(Protocol):
    """Returns images and texts of samples, see `StepDecoder`."""

    def images(self, feed: int, index: int) -> list[Image.Image]: ...
    def references(self, feed: int, index: int) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class SamplesElsewhere:
    """Samples whose sizes another process knows.

    Args:
        names: of the sources.
        decoder: without sources where others decode too.
        told: `digest` of who opened them.
        prepared: `fingerprint` of these.
        ask: who plans.
        look: returns images and references of samples.
        listed: fingerprint by which the producers that decode are known; None: ranks do.
    """

    names: Sequence[str]
    decoder: StepDecoder
    told: tuple[str, str]
    prepared: str
    ask: Ask
    look: Look
    listed: str | None = None
    count: int = 0
    """0: unknown."""

    def sequence(self, data: DataConfig, training: TrainingConfig, position: Position) -> Steps:
        """Asks for it, step by step."""
        return StepsElsewhere(self.ask, training, position, streamed=self.listed is None)

    def feeds(self) -> dict[str, int]:
        """Number of each source by its name."""
        return {name: number for number, name in enumerate(self.names)}

    def digest(self) -> tuple[str, str]:
        """What there is to train on."""
        return self.told

    def fingerprint(self) -> str:
        """Equal for those that prepare the same tensors."""
        return self.prepared

    def pictures(self, feed: int, index: int) -> list[Image.Image]:
        """Images and frames of a sample, to be shown."""
        return self.look.images(feed, index)

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """All that people have written for a sample."""
        return self.look.references(feed, index)


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
    """The samples of a recipe: opened here, or those of its producers, if they plan, or of the
    process that reads this machine's streams.

    Other arguments and errors as of `open_samples`; DataError also if nobody has them.

    Args:
        streams: this process; None: streams are read here.
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
        # Before it is asked: what has to be measured is measured here, where progress is shown.
        records: list[MapSource | None] = []
        for _, _, building in open_buildings(data, training, reader, tokenizer, validation):
            if building is not None:
                building.load()
            records.append(None if building is None else building.source)
        client = ReaderClient(streams, validation, data.timeout_s)
        names, told = client.describe()
        decoder = StepDecoder(reader, records, training.sequence_length)
        return SamplesElsewhere(names, decoder, told, "", client.part, decoder)
    service = sample_service(data)
    assert service is not None, (
        "data.producers.plan requires producers; the recipe checks should have rejected this"
    )
    return service.find_samples(training, reader, tokenizer, validation)


def shares_reader(data: DataConfig) -> bool:
    """Whether ranks of one machine have a stream read for all of them."""
    return not data.producers.is_used and any(
        s.streaming for s in (*data.sources, *data.validation)
    )
