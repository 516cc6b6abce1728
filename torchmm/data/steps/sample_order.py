"""Sample order of a run: the sizes and sampling weights that are required to plan steps.

The order has no access to records. It is picklable, so that a background process can plan the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchmm.data.steps.feeds import Feed, Mixture, MixtureStage
from torchmm.data.steps.image_balance import ImageBalancedSteps
from torchmm.data.steps.plan_steps import StepIterator, StepPlanner, StepPosition
from torchmm.recipe.data_section import DataConfig, SourceConfig, StageConfig
from torchmm.recipe.training_section import TrainingConfig


class OrderedSource(NamedTuple):
    """Name, settings and feed of a source."""

    name: str
    config: SourceConfig
    make_feed: Callable[[], Feed]


@dataclass(frozen=True)
class SampleOrder:
    """Sample order of all sources.

    Attributes:
        sources: All sources in the order of the recipe.
        identity: See `torchmm.data.identity`.
        stages: Mixture schedule. If empty, the weights of the sources apply in all steps.
    """

    sources: Sequence[OrderedSource]
    identity: Mapping[str, Any]
    stages: Sequence[StageConfig]

    def mixture(self) -> Mixture:
        """Return the mixture of all sources at its start."""
        feeds = [source.make_feed() for source in self.sources]
        stages = [
            MixtureStage(
                [stage.weights.get(source.name, 0.0) for source in self.sources], stage.until_step
            )
            for stage in self.stages
        ]
        weights = [_weight(s.config, f.size) for s, f in zip(self.sources, feeds, strict=True)]
        return Mixture(feeds, stages or [MixtureStage(weights)])

    def sequence(
        self, data: DataConfig, training: TrainingConfig, position: StepPosition
    ) -> StepIterator:
        """Return the optimizer steps of these sources.

        Args:
            data: Packing settings and limits.
            training: Batch sizes, sequence length and seed.
            position: Position of the first step.

        Raises:
            CheckpointError: The position belongs to different data.
        """
        steps: StepIterator = StepPlanner(
            self.mixture(),
            training,
            packing=data.packing,
            packing_buffer_size=data.packing_buffer_size,
            max_tiles=data.max_tiles_per_sequence,
            packing_max_wait_steps=data.packing_max_wait_steps,
            data_parallel_size=position.data_parallel_size,
            max_skipped=data.max_corrupt_samples,
            state=position.state,
            arrange=position.arrange,
            content=self.identity,
            resume_changed=position.resume_changed,
        )
        if position.balance is None:
            return steps
        return ImageBalancedSteps(steps, position.balance)


def _weight(config: SourceConfig, size: int | None) -> float:
    """Return the sampling weight of a source.

    With `epochs`, it is the number of samples in these epochs. So all sources with `epochs` finish
    at the same step.
    """
    if config.epochs is None:
        return config.weight
    assert size is not None, "streams have no epochs; the recipe checks should have rejected this"
    return config.epochs * size
