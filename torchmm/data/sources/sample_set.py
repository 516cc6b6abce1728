"""The interface of the samples that a run trains on or validates with."""

from __future__ import annotations

from typing import Protocol

from PIL import Image

from torchmm.data.decode import StepDecoder
from torchmm.data.steps.step_packs import Position, Steps
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


class SampleSet(Protocol):
    """Samples of the training sources of a run, or of the validation sources."""

    @property
    def decoder(self) -> StepDecoder:
        """Decoder of these samples, also of samples that other processes have decoded."""
        ...

    @property
    def count(self) -> int:
        """Number of samples of all sources, with corrupt ones; 0 if it is unknown."""
        ...

    def sequence(self, data: DataConfig, training: TrainingConfig, position: Position) -> Steps:
        """Return the steps. Raise CheckpointError if the position belongs to other data."""
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
