"""Who starts a run's producers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torchmm.common.errors import ConfigError
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig


@contextmanager
def started_producers(
    data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
) -> Iterator[None]:
    """Those of the recipe's engine, until the run ends; for one process of the run.

    Args:
        specs: what samples are opened with besides (`open_samples`).

    Raises:
        ConfigError: the engine is not installed, or cannot be reached.
    """
    if data.producers.engine != "ray":
        yield
        return
    try:
        from torchmm.data.producers.ray_actors import RayProducers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError('data.producers.engine = "ray": pip install "torchmm[ray]"') from error
    with closing(RayProducers(data, training, specs)):
        yield
