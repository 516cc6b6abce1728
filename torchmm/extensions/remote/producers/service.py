"""Producers as the sample service of a run, see `SampleService`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchmm.common.sequence_slices import DecodeAssignment
from torchmm.data.decode import StepDecoder
from torchmm.data.identity import identity, run_settings
from torchmm.data.samples import RemoteSamples
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.sample_set import SampleSet
from torchmm.extensions.remote.producers.client import ProducerClient, RemoteDecoder
from torchmm.extensions.remote.producers.engine import run_producers
from torchmm.extensions.remote.producers.registry import run_local_registry
from torchmm.extensions.remote.producers.step_plans import PlanClient, ProducerDataInfo
from torchmm.recipe.changes import changes, with_current_names
from torchmm.recipe.data_section import DataConfig, unique_names
from torchmm.recipe.training_section import TrainingConfig


class ProducerService:
    """Sample service with producer processes, started manually or by the engine of the recipe."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data

    @contextmanager
    def start(self, training: TrainingConfig, specs: Mapping[str, Any]) -> Iterator[None]:
        """Run the local registry and the producers of the engine.

        Raises:
            ConfigError: The address of the registry is not available, or the engine is not
                installed or does not respond.
        """
        with run_local_registry(self._data.producers), run_producers(self._data, training, specs):
            yield

    def find_samples(
        self,
        training: TrainingConfig,
        reader: SampleReader,
        tokenizer: PreTrainedTokenizerBase,
        validation: bool,
    ) -> SampleSet:
        """Return the samples that producers plan.

        Raises:
            ConfigError: A certificate cannot be read.
            DataError: No producer responds, or no producer has these samples.
        """
        data = self._data
        differences = partial(_find_differences, data, training, reader, tokenizer, validation)
        length = training.sequence_length
        plans = PlanClient(data.producers, validation, differences, reader, length)
        described = plans.described
        decoder = StepDecoder(reader, [None for _ in described.names], length)
        return RemoteSamples(
            described.names, decoder, described.digest, described.fingerprint, plans.part, plans,
            described.listed,
        )  # fmt: skip

    def make_decoder(
        self, samples: SampleSet, rank: int, reads: DecodeAssignment | None, validation: bool
    ) -> RemoteDecoder | None:
        """Return a dataset that requests decoded steps from producers.

        Return None for validation samples of this process, which ranks decode.
        """
        producer_fingerprint = (
            samples.producer_fingerprint if isinstance(samples, RemoteSamples) else None
        )
        if producer_fingerprint is None and validation:
            return None
        fingerprint = samples.fingerprint()
        # A separate object, because workers receive it before its first request.
        client = ProducerClient(self._data.producers, producer_fingerprint or fingerprint)
        return RemoteDecoder(client, fingerprint, rank, reads, samples.decoder)


def _find_differences(
    data: DataConfig,
    training: TrainingConfig,
    reader: SampleReader,
    tokenizer: PreTrainedTokenizerBase,
    validation: bool,
    producer_info: ProducerDataInfo,
) -> list[str]:
    """Return the settings of a producer that differ from this run, without reading data."""
    configs = data.validation if validation else data.sources
    contents = {source["name"]: source["content"] for source in producer_info.identity["sources"]}
    named = zip(unique_names(configs), configs, strict=True)
    sources = [(name, config, contents.get(name, "missing")) for name, config in named]
    settings = run_settings(data, training.sequence_length, reader, tokenizer)
    ours = identity(data, training, reader, settings, sources)
    batch = "training.global_batch_size"
    return changes(
        _key_by_name(producer_info.identity) | {batch: producer_info.global_batch_size},
        _key_by_name(ours) | {batch: training.global_batch_size},
    )


def _key_by_name(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as it is sent, with sources by name."""
    sent = json.loads(json.dumps(content))
    named = {source["name"]: source for source in sent.pop("sources")}
    order = with_current_names(sent.pop("order"))
    return {**order, **sent.pop("settings"), **sent, "data.sources": named}
