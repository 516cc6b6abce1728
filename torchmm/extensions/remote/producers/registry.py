"""Registry of the available producers and their load.

Producers report every second. A producer that has not reported for `FORGOTTEN_S` is removed, so
that producers may start, stop and fail during a run. Trainers request the list periodically. A
registry makes no decisions and stores no state: after a restart, it has all producers within a
second. In the meantime, trainers continue with the producers of their last list.

etcd and the store of the rendezvous are not used, because a run on one host does not have etcd and
loses the store together with its ranks. Service lists of Kubernetes or Ray have only the services
that they have started.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from pyarrow import flight

from torchmm.data.corrupt import escape_text
from torchmm.extensions.remote.producers.calls import (
    IN_VAIN,
    TOKEN_VARIABLE,
    Certificate,
    Server,
    connect,
    describe,
    single_response,
    within,
)
from torchmm.recipe.data_section import (
    MAX_PRODUCER_WORKERS,
    ProducersConfig,
    is_host_port,
    is_local,
)

REPORT_S = 1.0
FORGOTTEN_S = 5.0
ANSWER_S = 5.0
"""Time limit of the response of a registry in seconds."""
MOST_REPORT_BYTES = 10_000
MOST_PRODUCERS = 10_000
MAX_PRODUCERS_PER_HOST = 256
"""Limit on the addresses that one host reports, so that it cannot use all of `MOST_PRODUCERS`."""
MOST_LIST_BYTES = MOST_PRODUCERS * 1000
MAX_UNFINISHED = 10**9
MAX_FINGERPRINT_CHARACTERS = 128

logger = logging.getLogger(__name__)


class Reported(NamedTuple):
    """Report of a producer.

    Attributes:
        address: HOST:PORT of the producer.
        fingerprint: Fingerprint of its data and preprocessing settings.
        workers: Number of decoding processes.
        unfinished: Number of microbatches that are queued or being decoded.
    """

    address: str
    fingerprint: str
    workers: int
    unfinished: int

    @classmethod
    def of(cls, values: Any) -> Reported:
        """Return the report in a JSON object.

        Raises:
            ValueError: A value is missing, unknown, of a wrong type or out of range.
        """
        try:
            found = cls(**values)
            found._check()
        except (TypeError, ValueError) as error:
            why = escape_text(str(error), 200)
            raise ValueError(
                f"invalid report of a producer: {escape_text(repr(values), 200)}: {why}"
            ) from error
        return found

    def _check(self) -> None:
        for key, most in (("workers", MAX_PRODUCER_WORKERS), ("unfinished", MAX_UNFINISHED)):
            value = getattr(self, key)
            if type(value) is not int or not (key == "workers") <= value <= most:
                raise ValueError(f"{key} is not an integer of at most {most}")
        if not isinstance(self.address, str) or not is_host_port(self.address):
            raise ValueError("address is not HOST:PORT")
        name = self.fingerprint
        if not isinstance(name, str) or not name.isascii() or not name.isprintable():
            raise ValueError("fingerprint is not printable text")
        if len(name) > MAX_FINGERPRINT_CHARACTERS:
            raise ValueError(f"fingerprint has more than {MAX_FINGERPRINT_CHARACTERS} characters")


class _Known(NamedTuple):
    """Report and its origin.

    Attributes:
        at_s: Time of the report.
        host: Host that sent it.
        report: The report.
    """

    at_s: float
    host: str
    report: Reported

    def is_expired(self, now_s: float) -> bool:
        """Return True if the producer has not reported for `FORGOTTEN_S`."""
        return now_s - self.at_s >= FORGOTTEN_S


class Registry(Server):
    """Server that stores the reports of producers, with the arguments of `Server`."""

    def __init__(
        self, bind: str, token: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, _Known] = {}
        """Reports by address."""
        super().__init__(bind, token, certificate)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[Any]:
        """Handle `report` and `leave` of a producer, and `list` of a trainer."""
        self.watch.accept(context.peer())
        if action.type == "list":
            body = json.dumps([each._asdict() for each in self.listed()]).encode()
            return self.respond(context, body)
        try:
            if action.body.size > MOST_REPORT_BYTES:
                raise ValueError(f"a report of {action.body.size} bytes")
            said = Reported.of(json.loads(action.body.to_pybytes()))
            self._hear(action.type, said, context.peer().rpartition(":")[0])
        except (ValueError, RecursionError) as error:
            raise flight.FlightServerError(str(error)) from error
        return iter([])

    def listed(self) -> list[Reported]:
        """Return the available producers, sorted by address."""
        with self._lock:
            self._forget(time.monotonic())
            return [known.report for _, known in sorted(self._last.items())]

    def _forget(self, now_s: float) -> None:
        """Remove producers that have not reported for `FORGOTTEN_S`."""
        self._last = {a: each for a, each in self._last.items() if not each.is_expired(now_s)}

    def _hear(self, kind: str, said: Reported, host: str) -> None:
        if kind not in ("report", "leave"):
            raise ValueError(f"cannot {kind[:20]!r}")
        now_s = time.monotonic()
        with self._lock:
            known = self._last.get(said.address)
            if known is not None and known.host != host and not known.is_expired(now_s):
                raise ValueError(f"{said.address} is reported by {known.host}")
            if kind == "leave":
                self._last.pop(said.address, None)
                return
            if known is None:
                self._forget(now_s)
                own = sum(each.host == host for each in self._last.values())
                if own >= MAX_PRODUCERS_PER_HOST:
                    text = f"{host} has {own} producers, but the limit is {MAX_PRODUCERS_PER_HOST}"
                    raise ValueError(text)
                if len(self._last) >= MOST_PRODUCERS:
                    text = f"{len(self._last)} producers are registered, the maximum"
                    raise ValueError(text)
                logger.info("producer %s with %d workers", said.address, said.workers)
            self._last[said.address] = _Known(now_s, host, said)


@contextmanager
def own_registry(config: ProducersConfig) -> Iterator[Registry | None]:
    """Run the registry of a run if its address is on this host. For one process of the run.

    Raises:
        ConfigError: The address is not available.
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
    """Thread that reports the load of a producer to a registry until it is closed.

    Args:
        registry: HOST:PORT.
        load: Function that returns the report.
        certificate: PEM certificate of the signer of the registry certificate. If None, the
            connection is not encrypted.

    Raises:
        ConfigError, ConnectionError: The connection to the registry is not permitted.
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
        """Report that the producer stops."""
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
                if not self._silent:  # logged once per outage
                    logger.warning(
                        "registry %s: %s; reporting continues", self._registry, describe(error)
                    )
                self._silent = True
            if self._closing.wait(REPORT_S):
                return

    def _send(self, kind: str) -> None:
        body = json.dumps(self._load()._asdict()).encode()
        for _ in self._client.do_action(flight.Action(kind, body), within(ANSWER_S)):
            raise ValueError("a response to a report")


def ask_registry(client: flight.FlightClient, timeout_s: float = ANSWER_S) -> list[Reported]:
    """Return the producers in a registry.

    Raises:
        errors in `IN_VAIN`: The registry does not respond, or the response is invalid.
    """
    results = client.do_action(flight.Action("list", b""), within(timeout_s))
    listed = json.loads(single_response(results, MOST_LIST_BYTES))
    if not isinstance(listed, list) or len(listed) > MOST_PRODUCERS:
        raise ValueError(
            f"the registry response is not a list of at most {MOST_PRODUCERS} producers"
        )
    return [Reported.of(each) for each in listed]
