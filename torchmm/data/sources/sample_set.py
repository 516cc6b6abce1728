"""Interface of the training or validation samples of a run."""

from __future__ import annotations

from typing import Protocol

from PIL import Image

from torchmm.data.decode import StepDecoder
from torchmm.data.steps.plan_steps import StepIterator, StepPosition
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


class SampleSet(Protocol):
    """Samples of the training sources of a run, or of the validation sources."""

    @property
    def decoder(self) -> StepDecoder:
        """Decoder of these samples. It can also mask samples that other processes decoded."""
        ...

    @property
    def count(self) -> int:
        """Number of samples of all sources, including corrupt samples. 0 if unknown."""
        ...

    def sequence(
        self, data: DataConfig, training: TrainingConfig, position: StepPosition
    ) -> StepIterator:
        """Return the steps. Raise CheckpointError if the position belongs to different data."""
        ...

    def feeds(self) -> dict[str, int]:
        """Return the index of each source by name."""
        ...

    def digest(self) -> tuple[str, str]:
        """Return two lines of text: the number of samples, and a summary of their sizes."""
        ...

    def fingerprint(self) -> str:
        """Return a key that is equal for processes that prepare the same tensors.

        Raises:
            ConfigError: A source is a stream.
        """
        ...

    def sample_images(self, feed: int, index: int) -> list[Image.Image]:
        """Return images and frames of a sample, to be displayed. Empty for streams."""
        ...

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Return all reference texts of a sample, see `read_references`."""
        ...
