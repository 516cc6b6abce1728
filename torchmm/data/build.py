"""Build the loader of one data-parallel rank from the keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratorSpec
from torchmm.common.processes import raise_open_file_limit
from torchmm.common.sequence_slices import DecodeAssignment
from torchmm.data.loader import Loader
from torchmm.data.nodes import State
from torchmm.data.samples import find_samples, sample_service
from torchmm.data.sources.open import Samples
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.background_steps import BackgroundSteps
from torchmm.data.steps.plan_steps import (
    ArrangeSequences,
    AssignImages,
    StepIterator,
    StepPosition,
)
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


def build_loader(  # noqa: PLR0913 - the inputs of a run
    data: DataConfig,
    training: TrainingConfig,
    *,
    text_spec: TextSpec,
    image_specs: Mapping[str, ImageSpec],
    tokenizer: PreTrainedTokenizerBase,
    data_parallel_rank: int,
    data_parallel_size: int,
    state: dict[str, Any] | None,
    validation: bool = False,
    generator_spec: GeneratorSpec | None = None,
    arrange: ArrangeSequences | None = None,
    balance: AssignImages | None = None,
    resume_changed: bool = False,
    samples: SampleSet | None = None,
    reads: DecodeAssignment | None = None,
) -> Loader:
    """Build the loader of one data-parallel rank.

    Args:
        data: Sources and limits.
        training: Batch sizes, sequence length, seed and device.
        text_spec: Format of the text for the LLM.
        image_specs: Format of the images, videos and audio for each encoder, by name.
        tokenizer: Fast tokenizer of the LLM.
        data_parallel_rank: Rank whose part of each global batch is loaded.
        data_parallel_size: Number of data-parallel ranks.
        state: `StepBatch.state` of the batch to continue after. None to start at the beginning.
        validation: Whether to load `data.validation` once, in an order that is the same for every
            run.
        generator_spec: Format of the images for the generator. None without a generator.
        arrange: Assigns the sequences of a global batch to ranks and microbatches. None for their
            packing order.
        balance: Assigns the images of a microbatch to ranks. If None, each rank encodes the images
            of its microbatch.
        resume_changed: Whether to continue after `state` even if data or sample order changed.
        samples: Samples of these sources, if they are already open.
        reads: Images that this rank decodes. None for all images of its data-parallel rank.

    Raises:
        ConfigError: Sizes or specs do not match.
        DataError: A source cannot be read, or has no usable sample.
        CheckpointError: The state belongs to different data.
    """
    _prepare(training, data_parallel_rank, data_parallel_size)
    samples = samples or find_samples(
        data,
        training,
        text_spec=text_spec,
        image_specs=image_specs,
        tokenizer=tokenizer,
        validation=validation,
        generator_spec=generator_spec,
    )
    service = sample_service(data)
    rank = data_parallel_rank
    position = StepPosition(rank, data_parallel_size, state, arrange, resume_changed, balance)
    return Loader(
        partial(_plan_steps, samples, data, training, position),
        samples.decoder.for_rank(reads),
        samples,
        data,
        training.sequence_length,
        rank,
        pin_memory=training.device != "cpu" and torch.cuda.is_available(),
        remote=service.make_decoder(samples, rank, reads, validation) if service else None,
    )


def _plan_steps(
    samples: SampleSet,
    data: DataConfig,
    training: TrainingConfig,
    position: StepPosition,
    state: State | None,
) -> StepIterator:
    """Return the steps after a loader state. A state of None is the position of the run.

    Steps that are reordered or balanced are planned in a background process if that is faster.
    """
    if state is not None:
        position = position._replace(state=state, resume_changed=False)
    is_natural = position.arrange is None and position.balance is None
    # Only one process can read a stream.
    if is_natural or not data.workers or not isinstance(samples, Samples) or samples.streamed:
        return samples.sequence(data, training, position)
    return BackgroundSteps(partial(samples.order.sequence, data, training), position)


def _prepare(training: TrainingConfig, rank: int, data_parallel_size: int) -> None:
    _check_sizes(training, data_parallel_size)
    raise_open_file_limit()
    if rank > 0:
        datasets.disable_progress_bars()  # all ranks convert the same files


def _check_sizes(training: TrainingConfig, data_parallel_size: int) -> None:
    per_microbatch = data_parallel_size * training.microbatch_size
    if training.global_batch_size % per_microbatch:
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of "
            f"training.microbatch_size = {training.microbatch_size} times {data_parallel_size} "
            "data-parallel ranks"
        )
