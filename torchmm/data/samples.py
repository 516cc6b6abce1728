"""The samples of a run, wherever they are opened.

    own         every rank opens the sources, plans and decodes (`sources.open`): the default
    planned     producers open them; a rank asks for its packs, and for what is in them
                (`producers.planning`)
    read for    one process of a machine opens them and plans, as a stream is read once; ranks
                decode (`shared_reader`)

`Loader` needs to know nothing of this: all of them say what comes next, and have a decoder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from PIL import Image
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.common.changes import changes
from torchmm.common.generated import GeneratorSpec
from torchmm.common.row_slices import Reads
from torchmm.data.decode import StepDecoder
from torchmm.data.identity import identity, settings_of
from torchmm.data.shared_reader import ReaderAddress, ReaderClient
from torchmm.data.sources.open import make_reader, open_records, open_samples, seed_of
from torchmm.data.sources.reader import SampleReader
from torchmm.data.steps.elsewhere import Ask, StepsElsewhere
from torchmm.data.steps.step_packs import Position, Steps
from torchmm.extensions.remote.producers.ask import Asking, RemoteDecoder
from torchmm.extensions.remote.producers.planning import Described, ProducersPlans
from torchmm.recipe.data_section import DataConfig, unique_names
from torchmm.recipe.training_section import TrainingConfig


class SampleSet(Protocol):
    """All sources of a run, or those held out."""

    @property
    def decoder(self) -> StepDecoder:
        """Of the samples that ranks decode, and of what others have decoded."""
        ...

    @property
    def count(self) -> int:
        """Number of samples of all sources, with corrupt ones; 0 if it is unknown."""
        ...

    def sequence(self, data: DataConfig, training: TrainingConfig, position: Position) -> Steps:
        """The steps they form; raises CheckpointError if the position belongs to other data."""
        ...

    def feeds(self) -> dict[str, int]:
        """Number of each source by its name."""
        ...

    def digest(self) -> tuple[str, str]:
        """What there is to train on, for people: how many samples, and how large they are."""
        ...

    def fingerprint(self) -> str:
        """Equal for those that prepare the same tensors; raises ConfigError for streams."""
        ...

    def pictures(self, feed: int, index: int) -> list[Image.Image]:
        """Images and frames of a sample, to be shown; none for streams."""
        ...

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """All that people have written for a sample; see `references_of`."""
        ...


class Look(Protocol):
    """Gives samples to people; methods as of `SampleSet`."""

    def pictures(self, feed: int, index: int) -> list[Image.Image]: ...
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
        look: gives pictures and references.
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
        return self.look.pictures(feed, index)

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
    seed = seed_of(training, validation)
    reader = make_reader(data, training, text_spec, image_specs, tokenizer, generator_spec, seed)
    if streams is not None:
        # Before it is asked: what has to be measured is measured here, where progress is shown.
        records = open_records(data, training, reader, tokenizer, validation)
        client = ReaderClient(streams, validation, data.timeout_s)
        names, told = client.describe()
        decoder = StepDecoder(reader, records, training.sequence_length)
        return SamplesElsewhere(names, decoder, told, "", client.part, client)
    differences = partial(_differences, data, training, reader, tokenizer, validation)
    length = training.sequence_length
    plans = ProducersPlans(data.producers, validation, differences, reader, length)
    described = plans.described
    decoder = StepDecoder(reader, [None for _ in described.names], length)
    return SamplesElsewhere(
        described.names, decoder, described.digest, described.fingerprint, plans.part, plans,
        described.listed,
    )  # fmt: skip


def remote_decoder(
    samples: SampleSet,
    data: DataConfig,
    rank: int,
    reads: Reads | None,
    validation: bool,
) -> RemoteDecoder | None:
    """Asks producers to decode, if the recipe names any; held-out samples are decoded by ranks that
    have them."""
    listed = samples.listed if isinstance(samples, SamplesElsewhere) else None
    named = data.producers.addresses or data.producers.registry is not None
    if listed is None and (validation or not named):
        return None
    fingerprint = samples.fingerprint()
    # Of its own, as workers take it with them before it has asked anybody.
    asking = Asking(data.producers, listed or fingerprint)
    return RemoteDecoder(asking, fingerprint, rank, reads, samples.decoder)


def shares_reader(data: DataConfig) -> bool:
    """Whether ranks of one machine have a stream read for all of them."""
    elsewhere = data.producers.addresses or data.producers.registry
    return not elsewhere and any(s.streaming for s in (*data.sources, *data.validation))


def _differences(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
    validation: bool,
    theirs: Described,
) -> list[str]:
    """What is other with a producer than this run's recipe says; all that can be known without the
    data."""
    configs = data.validation if validation else data.sources
    contents = {source["name"]: source["content"] for source in theirs.identity["sources"]}
    named = zip(unique_names(configs), configs, strict=True)
    sources = [(name, config, contents.get(name, "missing")) for name, config in named]
    settings = settings_of(data, training.sequence_length, reader, tokenizer)
    ours = identity(data, training, reader, settings, sources)
    batch = "training.global_batch_size"
    return changes(
        _by_name(theirs.identity) | {batch: theirs.global_batch_size},
        _by_name(ours) | {batch: training.global_batch_size},
    )


def _by_name(content: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as it is sent, with names instead of places of sources."""
    sent = json.loads(json.dumps(content))
    named = {source["name"]: source for source in sent.pop("sources")}
    return {**sent.pop("order"), **sent.pop("settings"), **sent, "data.sources": named}
