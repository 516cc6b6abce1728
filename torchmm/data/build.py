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
from torchmm.common.processes import allow_open_files
from torchmm.common.row_slices import Reads
from torchmm.data.loader import Loader
from torchmm.data.nodes import State
from torchmm.data.samples import find_samples, sample_service
from torchmm.data.sources.open import Samples
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.beside import StepsBeside
from torchmm.data.steps.step_packs import Arrange, Balance, Position, Steps
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


def build_loader(  # noqa: PLR0913 - what a run consists of
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
    arrange: Arrange | None = None,
    balance: Balance | None = None,
    resume_changed: bool = False,
    samples: SampleSet | None = None,
    reads: Reads | None = None,
) -> Loader:
    """The loader of one data-parallel rank.

    Args:
        data, training: sources and limits; batch sizes, sequence length, seed, device.
        text_spec, image_specs: how the LLM wants its text, and encoders, by name, their images.
        tokenizer: the LLM's tokenizer (a fast one).
        data_parallel_rank: which of `data_parallel_size` shares of the global batches to load.
        state: `StepBatch.state` of the batch to continue after, or None.
        validation: load `data.validation` once, in an order that is the same for every run.
        generator_spec: how the generator wants its images; None: nothing is drawn.
        arrange: which packs of a global batch go where; None: in natural order.
        balance: Assigns the images of a microbatch to ranks; None: each rank encodes its own.
        resume_changed: continue after `state` even if data or order have changed.
        samples: of these sources, if they were opened before.
        reads: which images this rank decodes; None: all of its data-parallel rank's.

    Raises:
        ConfigError, DataError: sizes or specs do not fit; a source cannot be read, or is of no use.
        CheckpointError: the state belongs to other data.
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
    position = Position(rank, data_parallel_size, state, arrange, resume_changed, balance)
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
    position: Position,
    state: State | None,
) -> Steps:
    """Return the steps after a data state. None for the position of the run.

    Steps that are reordered or balanced are planned in another process if that is faster.
    """
    if state is not None:
        position = position._replace(state=state, resume_changed=False)
    is_natural = position.arrange is None and position.balance is None
    # Streams can be read by one process only.
    if is_natural or not data.workers or not isinstance(samples, Samples) or samples.streamed:
        return samples.sequence(data, training, position)
    return StepsBeside(partial(samples.order.sequence, data, training), position)


def _prepare(training: TrainingConfig, rank: int, data_parallel_size: int) -> None:
    _check_sizes(training, data_parallel_size)
    allow_open_files()
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
