"""Producers as Ray actors: Ray starts them wherever its cluster has cores, and starts those again
that die. They report to the run's registry like all others, and answer like all others: Ray carries
no samples, as its tasks and data sets have no order that can be resumed exactly.

An actor is given what `train.py` opens samples with, so no recipe has to be where it runs; sources
have to be. Ray itself lets everybody who reaches it run code: keep it in a network of one's own.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray

from torchmm.common.errors import ConfigError
from torchmm.extensions.remote.producers import ray_cleanup
from torchmm.extensions.remote.producers.calls import (
    TOKEN_VARIABLE,
    check_exposure,
    key_pair,
    read_certificate,
)
from torchmm.extensions.remote.producers.registry import Reporter
from torchmm.extensions.remote.producers.server import open_producer
from torchmm.recipe.data_section import DataConfig, is_local
from torchmm.recipe.training_section import TrainingConfig

OBJECT_STORE_BYTES = 10**8
"""Of a cluster that is started here; nothing is kept in it."""

logger = logging.getLogger(__name__)


class ProducerActor:
    """A producer, from when it is made; arguments as `RayProducers`."""

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        config = data.producers
        assert config.registry is not None
        host = "127.0.0.1" if is_local(config.registry) else ray.util.get_node_ip_address()
        token = os.environ.get(TOKEN_VARIABLE)
        certificate = key_pair(config.tls_certificate, config.tls_key)
        check_exposure(f"{host}:0", certificate is not None, token)
        self._producer = open_producer(
            data,
            training,
            specs,
            f"{host}:0",
            workers=config.workers,
            token=token,
            certificate=certificate,
        )
        self._address = f"{host}:{self._producer.port}"
        trusted = read_certificate("data.producers.ca_certificate", config.ca_certificate)
        load = partial(self._producer.load, self._address)
        self._reporter = Reporter(config.registry, load, trusted)

    def describe(self) -> tuple[str, int]:
        """Where it can be asked, and its process."""
        return self._address, os.getpid()


class RayProducers:
    """Producers that Ray keeps alive until they are closed.

    Args:
        data: sources and limits; how many producers, and where they report.
        training: packs and batches.
        specs: what else samples are opened with (`open_samples`).

    Raises:
        ConfigError: Ray cannot be reached or started.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        count = data.producers.count
        workers = data.producers.workers
        alone = not os.environ.get("RAY_ADDRESS")
        self._ours = _connect(alone)
        # Put there once, for all actors and each of their lives.
        self._given = [ray.put(each) for each in (data, training, dict(specs))]
        kind = ray.remote(ProducerActor)
        # In a cluster of our own there is nobody to share cores with.
        self._kind = kind.options(num_cpus=0 if alone else workers, max_restarts=-1)
        self.actors: list[Any] = []
        for _ in range(count):
            self.add()
        logger.info("Ray starts %d producers with %d workers", count, workers)

    def add(self) -> Any:
        """Starts one more, as soon as the cluster has cores for it."""
        self.actors.append(self._kind.remote(*self._given))
        return self.actors[-1]

    def remove(self, actor: Any) -> None:
        """Ends one for good."""
        self.actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        """Ends all, and Ray where it was started here."""
        for actor in list(self.actors):
            self.remove(actor)
        if self._ours:
            ray.shutdown()


def _make_directory() -> str:
    """Return a temporary directory for a cluster, which ends and is removed with this process."""
    # As Ray itself, not in TMPDIR: Ray appends 63 bytes for sockets, whose paths have at most 107.
    directory = tempfile.mkdtemp(prefix="torchmm-ray-", dir="/tmp")
    command = [sys.executable, str(Path(ray_cleanup.__file__)), directory]
    # This process has the only writing end of the pipe until it exits, however it does.
    subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    return directory


def _connect(alone: bool) -> bool:
    """Connect to the cluster at RAY_ADDRESS, or start one that only this machine reaches.

    Args:
        alone: Whether to start one.

    Returns:
        Whether this process has to disconnect.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # says nothing to anybody
    local: dict[str, Any] = {
        "address": "local",
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_system_config": {"worker_niceness": 0},  # not behind all else that runs here
    }
    stopped_by = signal.getsignal(signal.SIGTERM)
    try:
        given = {**local, "_temp_dir": _make_directory()} if alone else {}
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **given)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f'data.producers.engine = "ray": {error}') from error
    finally:
        signal.signal(signal.SIGTERM, stopped_by)  # Ray's own would end the run at once
    return True
