"""Who prepares samples at the moment, and how busy they are.

Producers report every second; who has not for `FORGOTTEN_S` is forgotten, so that they may come, go
and die while runs go on. Trainers ask now and then. A registry decides nothing and keeps nothing:
started again, it knows all producers a second later, and meanwhile trainers go on with those that
they knew.

Rejected: etcd or the rendezvous's store, which a run on one machine does not have, or loses with
the ranks; Kubernetes's or Ray's own lists of services, which only know what they have started.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from pyarrow import flight

from torchmm.data.producers.calls import (
    IN_VAIN,
    TOKEN_VARIABLE,
    Certificate,
    Server,
    connect,
    describe,
    within,
)
from torchmm.recipe.data_section import ProducersConfig, is_local

REPORT_S = 1.0
FORGOTTEN_S = 5.0
ANSWER_S = 5.0
"""How long a registry may take to answer."""
MOST_REPORT_BYTES = 10_000
MOST_PRODUCERS = 10_000
MOST_LIST_BYTES = MOST_PRODUCERS * 1000

logger = logging.getLogger(__name__)


class Reported(NamedTuple):
    """What a producer says of itself.

    Attributes:
        address: HOST:PORT where it can be asked.
        fingerprint: of its data and how they are prepared.
        workers: processes that decode.
        unfinished: microbatches that are being decoded or wait for it.
    """

    address: str
    fingerprint: str
    workers: int
    unfinished: int

    @classmethod
    def of(cls, values: Any) -> Reported:
        """From JSON.

        Raises:
            ValueError: this is no report.
        """
        try:
            found = cls(**values)
            whole = type(found.workers) is type(found.unfinished) is int
            if whole and found.workers >= 1 and found.unfinished >= 0 and ":" in found.address:
                return found
        except TypeError:
            pass
        raise ValueError(f"not a producer's report: {str(values)[:200]}")


class Registry(Server):
    """Knows the producers; arguments as `Server`."""

    def __init__(
        self, bind: str, token: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, Reported]] = {}
        super().__init__(bind, token, certificate)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[Any]:
        """`report` and `leave` of a producer, `list` for a trainer."""
        if action.type == "list":
            return iter([json.dumps([each._asdict() for each in self.listed()]).encode()])
        try:
            if action.body.size > MOST_REPORT_BYTES:
                raise ValueError(f"a report of {action.body.size} bytes")
            self._hear(action.type, Reported.of(json.loads(action.body.to_pybytes())))
        except ValueError as error:
            raise flight.FlightServerError(str(error)) from error
        return iter([])

    def listed(self) -> list[Reported]:
        """Producers that are there, in the order of their addresses."""
        now = time.monotonic()
        with self._lock:
            self._last = {
                address: (at, each)
                for address, (at, each) in sorted(self._last.items())
                if now - at < FORGOTTEN_S
            }
            return [each for _, each in self._last.values()]

    def _hear(self, kind: str, said: Reported) -> None:
        with self._lock:
            if kind == "leave":
                self._last.pop(said.address, None)
            elif kind == "report" and len(self._last) < MOST_PRODUCERS:
                if said.address not in self._last:
                    logger.info("producer %s with %d workers", said.address, said.workers)
                self._last[said.address] = time.monotonic(), said
            else:
                raise ValueError(f"cannot {kind[:20]!r}")


@contextmanager
def own_registry(config: ProducersConfig) -> Iterator[Registry | None]:
    """Listens as a run's registry, if that is on this machine; for one process of the run.

    Raises:
        ConfigError: the address is not available.
    """
    if config.registry is None or not is_local(config.registry):
        yield None
        return
    registry = Registry(config.registry, os.environ.get(TOKEN_VARIABLE))
    try:
        yield registry
    finally:
        registry.shutdown()


class Reporter:
    """Tells a registry of a producer, from when it is made until it is closed.

    Args:
        registry: HOST:PORT.
        load: what there is to tell.
        certificate: PEM, of who signed the registry's; None: nothing is encrypted.

    Raises:
        ConfigError, ConnectionError: it may not be told so.
    """

    def __init__(
        self, registry: str, load: Callable[[], Reported], certificate: bytes | None = None
    ) -> None:
        self._registry = registry
        self._load = load
        self._client = connect(registry, certificate, MOST_REPORT_BYTES)
        self._closing = threading.Event()
        self._silent = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says that the producer leaves."""
        self._closing.set()
        self._thread.join(2 * ANSWER_S)
        with suppress(*IN_VAIN):
            self._send("leave")

    def _run(self) -> None:
        while True:
            try:
                self._send("report")
                self._silent = False
            except IN_VAIN as error:
                if not self._silent:  # once, however long it lasts
                    logger.warning("registry %s: %s; goes on", self._registry, describe(error))
                self._silent = True
            if self._closing.wait(REPORT_S):
                return

    def _send(self, kind: str) -> None:
        body = json.dumps(self._load()._asdict()).encode()
        list(self._client.do_action(flight.Action(kind, body), within(ANSWER_S)))


def ask_registry(client: flight.FlightClient, timeout_s: float = ANSWER_S) -> list[Reported]:
    """Producers that a registry knows.

    Raises:
        errors in `IN_VAIN`: it does not answer, or something else.
    """
    answers: Sequence[flight.Result] = list(
        client.do_action(flight.Action("list", b""), within(timeout_s))
    )
    if len(answers) != 1:
        raise ValueError(f"{len(answers)} answers of a registry")
    listed = json.loads(answers[0].body.to_pybytes())
    if not isinstance(listed, list):
        raise ValueError("a registry's answer is no list")
    return [Reported.of(each) for each in listed]
