"""Registry of the available producers and their load.

Producers report every second. A producer that has not reported for `EXPIRY_S` is removed, so
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
from torchmm.extensions.remote.producers.rpc import (
    CALL_ERRORS,
    TOKEN_VARIABLE,
    Certificate,
    FlightServer,
    call_options,
    connect_client,
    describe_error,
    read_single_response,
)
from torchmm.recipe.data_section import (
    MAX_PRODUCER_WORKERS,
    ProducersConfig,
    is_host_port,
    is_local,
)

REPORT_S = 1.0
EXPIRY_S = 5.0
RESPONSE_TIMEOUT_S = 5.0
"""Time limit of the response of a registry in seconds."""
MAX_REPORT_BYTES = 10_000
MAX_PRODUCERS = 10_000
MAX_PRODUCERS_PER_HOST = 256
"""Limit on the addresses that one host reports, so that it cannot use all of `MAX_PRODUCERS`."""
MAX_LIST_BYTES = MAX_PRODUCERS * 1000
MAX_UNFINISHED = 10**9
MAX_FINGERPRINT_CHARACTERS = 128

logger = logging.getLogger(__name__)


class ProducerStatus(NamedTuple):
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
    def of(cls, values: Any) -> ProducerStatus:
        """Return the report in a JSON object.

        Raises:
            ValueError: A value is missing, unknown, of a wrong type or out of range.
        """
        try:
            status = cls(**values)
            status._check()
        except (TypeError, ValueError) as error:
            reason = escape_text(str(error), 200)
            raise ValueError(
                f"invalid report of a producer: {escape_text(repr(values), 200)}: {reason}"
            ) from error
        return status

    def _check(self) -> None:
        for key, maximum in (("workers", MAX_PRODUCER_WORKERS), ("unfinished", MAX_UNFINISHED)):
            value = getattr(self, key)
            if type(value) is not int or not (key == "workers") <= value <= maximum:
                raise ValueError(f"{key} is not an integer of at most {maximum}")
        if not isinstance(self.address, str) or not is_host_port(self.address):
            raise ValueError("address is not HOST:PORT")
        name = self.fingerprint
        if not isinstance(name, str) or not name.isascii() or not name.isprintable():
            raise ValueError("fingerprint is not printable text")
        if len(name) > MAX_FINGERPRINT_CHARACTERS:
            raise ValueError(f"fingerprint has more than {MAX_FINGERPRINT_CHARACTERS} characters")


class _RegistryEntry(NamedTuple):
    """Report and its origin.

    Attributes:
        at_s: Time of the report.
        host: Host that sent it.
        report: The report.
    """

    at_s: float
    host: str
    report: ProducerStatus

    def is_expired(self, now_s: float) -> bool:
        """Return True if the producer has not reported for `EXPIRY_S`."""
        return now_s - self.at_s >= EXPIRY_S


class Registry(FlightServer):
    """Server that stores the reports of producers, with the arguments of `FlightServer`."""

    def __init__(
        self, bind: str, token: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _RegistryEntry] = {}
        """Reports by address."""
        super().__init__(bind, token, certificate)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[Any]:
        """Handle `report` and `leave` of a producer, and `list` of a trainer."""
        self.watch.accept(context.peer())
        if action.type == "list":
            body = json.dumps([each._asdict() for each in self.list_active()]).encode()
            return self.respond(context, body)
        try:
            if action.body.size > MAX_REPORT_BYTES:
                raise ValueError(f"a report of {action.body.size} bytes")
            status = ProducerStatus.of(json.loads(action.body.to_pybytes()))
            self._update(action.type, status, context.peer().rpartition(":")[0])
        except (ValueError, RecursionError) as error:
            raise flight.FlightServerError(str(error)) from error
        return iter([])

    def list_active(self) -> list[ProducerStatus]:
        """Return the available producers, sorted by address."""
        with self._lock:
            self._remove_expired(time.monotonic())
            return [known.report for _, known in sorted(self._entries.items())]

    def _remove_expired(self, now_s: float) -> None:
        """Remove producers that have not reported for `EXPIRY_S`."""
        self._entries = {a: each for a, each in self._entries.items() if not each.is_expired(now_s)}

    def _update(self, kind: str, status: ProducerStatus, host: str) -> None:
        if kind not in ("report", "leave"):
            raise ValueError(f"cannot {kind[:20]!r}")
        now_s = time.monotonic()
        with self._lock:
            known = self._entries.get(status.address)
            if known is not None and known.host != host and not known.is_expired(now_s):
                raise ValueError(f"{status.address} is reported by {known.host}")
            if kind == "leave":
                self._entries.pop(status.address, None)
                return
            if known is None:
                self._remove_expired(now_s)
                num_on_host = sum(each.host == host for each in self._entries.values())
                if num_on_host >= MAX_PRODUCERS_PER_HOST:
                    text = (
                        f"{host} has {num_on_host} producers, but the limit is "
                        f"{MAX_PRODUCERS_PER_HOST}"
                    )
                    raise ValueError(text)
                if len(self._entries) >= MAX_PRODUCERS:
                    text = f"{len(self._entries)} producers are registered, the maximum"
                    raise ValueError(text)
                logger.info("producer %s with %d workers", status.address, status.workers)
            self._entries[status.address] = _RegistryEntry(now_s, host, status)


@contextmanager
def run_local_registry(config: ProducersConfig) -> Iterator[Registry | None]:
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


class StatusReporter:
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
        self, registry: str, load: Callable[[], ProducerStatus], certificate: bytes | None = None
    ) -> None:
        self._registry = registry
        self._load = load
        self._client = connect_client(registry, certificate, MAX_REPORT_BYTES)
        self._closing = threading.Event()
        self._is_disconnected = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report that the producer stops."""
        self._closing.set()
        self._thread.join(2 * RESPONSE_TIMEOUT_S)
        with suppress(*CALL_ERRORS):
            self._send("leave")

    def _run(self) -> None:
        while True:
            try:
                self._send("report")
                self._is_disconnected = False
            except CALL_ERRORS as error:
                if not self._is_disconnected:  # logged once per outage
                    logger.warning(
                        "registry %s: %s; reporting continues",
                        self._registry,
                        describe_error(error),
                    )
                self._is_disconnected = True
            if self._closing.wait(REPORT_S):
                return

    def _send(self, kind: str) -> None:
        body = json.dumps(self._load()._asdict()).encode()
        for _ in self._client.do_action(
            flight.Action(kind, body), call_options(RESPONSE_TIMEOUT_S)
        ):
            raise ValueError("a response to a report")


def list_producers(
    client: flight.FlightClient, timeout_s: float = RESPONSE_TIMEOUT_S
) -> list[ProducerStatus]:
    """Return the producers in a registry.

    Raises:
        errors in `CALL_ERRORS`: The registry does not respond, or the response is invalid.
    """
    results = client.do_action(flight.Action("list", b""), call_options(timeout_s))
    listed = json.loads(read_single_response(results, MAX_LIST_BYTES))
    if not isinstance(listed, list) or len(listed) > MAX_PRODUCERS:
        raise ValueError(
            f"the registry response is not a list of at most {MAX_PRODUCERS} producers"
        )
    return [ProducerStatus.of(each) for each in listed]
