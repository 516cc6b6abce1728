"""Producers as Ray actors, which Ray starts on available cores and restarts after failures.

They report to the registry of the run and respond to requests like all producers. Ray transfers no
samples, because its tasks and data sets have no order that can be resumed exactly.

An actor receives the arguments with which `train.py` opens samples, so that its host requires no
recipe. The sources must exist on its host. Any host that reaches Ray can run code on it: keep Ray
in a private network.
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
from torchmm.extensions.remote.producers.registry import StatusReporter
from torchmm.extensions.remote.producers.rpc import (
    TOKEN_VARIABLE,
    check_exposure,
    read_certificate,
    read_key_pair,
)
from torchmm.extensions.remote.producers.server import open_producer
from torchmm.recipe.data_section import DataConfig, is_local
from torchmm.recipe.training_section import TrainingConfig

OBJECT_STORE_BYTES = 10**8
"""Size of the object store of a local cluster, which stores no samples."""

logger = logging.getLogger(__name__)


class ProducerActor:
    """Producer that is started by its construction, with the arguments of `RayProducers`."""

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        config = data.producers
        assert config.registry is not None
        host = "127.0.0.1" if is_local(config.registry) else ray.util.get_node_ip_address()
        token = os.environ.get(TOKEN_VARIABLE)
        certificate = read_key_pair(config.tls_certificate, config.tls_key)
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
        registry_certificate = read_certificate(
            "data.producers.ca_certificate", config.ca_certificate
        )
        load = partial(self._producer.load, self._address)
        self._reporter = StatusReporter(config.registry, load, registry_certificate)

    def describe(self) -> tuple[str, int]:
        """Return the address and the process id of the producer."""
        return self._address, os.getpid()


class RayProducers:
    """Producers that Ray restarts until they are closed.

    Args:
        data: Section [data] of the recipe, with the number of producers and the registry.
        training: Section [training] of the recipe.
        specs: Further arguments of `open_samples`.

    Raises:
        ConfigError: Ray cannot be reached or started.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        count = data.producers.count
        workers = data.producers.workers
        starts_cluster = not os.environ.get("RAY_ADDRESS")
        self._owns_cluster = _connect(starts_cluster)
        # Stored once, for all actors and all of their restarts.
        self._arguments = [ray.put(each) for each in (data, training, dict(specs))]
        actor_class = ray.remote(ProducerActor)
        # A local cluster does not share its cores with other programs.
        self._actor_class = actor_class.options(
            num_cpus=0 if starts_cluster else workers, max_restarts=-1
        )
        self.actors: list[Any] = []
        for _ in range(count):
            self.add()
        logger.info("Ray starts %d producers with %d workers", count, workers)

    def add(self) -> Any:
        """Start one more producer as soon as the cluster has cores for it."""
        self.actors.append(self._actor_class.remote(*self._arguments))
        return self.actors[-1]

    def remove(self, actor: Any) -> None:
        """Stop a producer permanently."""
        self.actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        """Stop all producers, and Ray if this process has started it."""
        for actor in list(self.actors):
            self.remove(actor)
        if self._owns_cluster:
            ray.shutdown()


def _make_directory() -> str:
    """Return a temporary directory of a cluster, which is removed when this process exits."""
    # Ray also uses /tmp instead of TMPDIR: it appends 63 bytes for sockets, whose paths are limited
    # to 107 bytes.
    directory = tempfile.mkdtemp(prefix="torchmm-ray-", dir="/tmp")
    command = [sys.executable, str(Path(ray_cleanup.__file__)), directory]
    # Only this process has the write end of the pipe, which is closed whenever the process exits.
    subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    return directory


def _connect(starts_cluster: bool) -> bool:
    """Connect to the cluster at RAY_ADDRESS, or start a cluster that is limited to this host.

    Args:
        starts_cluster: Whether to start a cluster.

    Returns:
        Whether this process has to disconnect.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disables usage reports
    local: dict[str, Any] = {
        "address": "local",
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_system_config": {"worker_niceness": 0},  # same priority as other processes
    }
    stopped_by = signal.getsignal(signal.SIGTERM)
    try:
        init_options = {**local, "_temp_dir": _make_directory()} if starts_cluster else {}
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **init_options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f'data.producers.engine = "ray": {error}') from error
    finally:
        signal.signal(
            signal.SIGTERM, stopped_by
        )  # the handler of Ray would stop the run immediately
    return True
