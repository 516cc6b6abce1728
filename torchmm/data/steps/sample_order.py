"""Which samples come next: all of a run's sources that planning its steps needs.

Sizes, weights and what identifies them, without what reads or decodes a record: it can be handed to
another process, which then plans the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchmm.data.steps.balanced import BalancedSteps
from torchmm.data.steps.order import Feed, Mixture, Stage
from torchmm.data.steps.step_packs import Position, Steps, StepSequence
from torchmm.recipe.data_section import DataConfig, SourceConfig, StageConfig
from torchmm.recipe.training_section import TrainingConfig


class OrderedSource(NamedTuple):
    """A source as far as its order goes."""

    name: str
    config: SourceConfig
    make_feed: Callable[[], Feed]


@dataclass(frozen=True)
class SampleOrder:
    """Of all sources.

    Attributes:
        identity: see `torchmm.data.identity`.
        stages: weights in the place of the sources' own; none: there is one stage.
    """

    sources: Sequence[OrderedSource]
    identity: Mapping[str, Any]
    stages: Sequence[StageConfig]

    def mixture(self) -> Mixture:
        """Their global order, from the start."""
        feeds = [source.make_feed() for source in self.sources]
        stages = [
            Stage(
                [stage.weights.get(source.name, 0.0) for source in self.sources], stage.until_step
            )
            for stage in self.stages
        ]
        own = [_weight(s.config, f.size) for s, f in zip(self.sources, feeds, strict=True)]
        return Mixture(feeds, stages or [Stage(own)])

    def sequence(self, data: DataConfig, training: TrainingConfig, position: Position) -> Steps:
        """Return the optimizer steps of these sources.

        Raises:
            CheckpointError: The position belongs to other data.
        """
        steps: Steps = StepSequence(
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
        return BalancedSteps(steps, position.balance)


def _weight(config: SourceConfig, size: int | None) -> float:
    """Its share in the mixture: with `epochs`, so that all sources are seen as often as theirs
    say in the same time."""
    if config.epochs is None:
        return config.weight
    assert size is not None, "streams have no epochs; the recipe checks should have rejected this"
    return config.epochs * size
