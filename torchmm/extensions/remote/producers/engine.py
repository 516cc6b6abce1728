"""Start the producers of a run with the engine of the recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torchmm.common.errors import ConfigError, install_command
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Setting with which a local cluster listens on the loopback interface.

Ray reads it at import. Ray replaces 127.0.0.1 in its address options by another address, except on
Windows and macOS, where this is the default.
"""


@contextmanager
def run_producers(
    data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
) -> Iterator[None]:
    """Run the producers of the engine of the recipe. For one process of the run.

    Args:
        data: Section [data] of the recipe.
        training: Section [training] of the recipe.
        specs: Further arguments of `open_samples`.

    Raises:
        ConfigError: The engine is not installed, or cannot be reached.
    """
    if data.producers.engine != "ray":
        yield
        return
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.update(LOOPBACK_ONLY)
    try:
        from torchmm.extensions.remote.producers.ray_actors import RayProducers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            f'data.producers.engine = "ray": Ray is not installed; {install_command("ray")}'
        ) from error
    with closing(RayProducers(data, training, specs)):
        yield
