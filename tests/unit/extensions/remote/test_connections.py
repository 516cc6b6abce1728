"""Limits of servers: sizes of requests without a token, and clients that do not read."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from data_cases import planned_shares, take
from pyarrow import flight
from test_producers import site

from torchmm.extensions.remote.producers import connection_limits
from torchmm.extensions.remote.producers.rpc import FlightServer, connect_client
from torchmm.extensions.remote.producers.server import Producer
from torchmm.extensions.remote.producers.wire_format import (
    SampleRequest,
    TensorMessage,
    encode_request,
    sample_keys,
)

__all__ = ["site"]
LARGE = 300 * 10**6


def peak_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def _serve(pipe) -> None:
    server = FlightServer("127.0.0.1:0", token="secret")
    pipe.send(server.port)
    pipe.recv()
    server.shutdown()


@pytest.mark.parametrize("kind", ["ticket", "action"])
def test_large_request_without_token_is_not_stored(kind):
    """Send two requests at the same time. Storing them would use 1.8 GB."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    address = f"127.0.0.1:{ours.recv()}"
    before_mb = peak_mb(process.pid)
    client = flight.FlightClient(f"grpc+tcp://{address}")
    body = b"x" * LARGE
    with pytest.raises(flight.FlightError):
        if kind == "ticket":
            client.do_get(flight.Ticket(body)).read_all()
        else:
            list(client.do_action(flight.Action("report", body)))
    used_mb = peak_mb(process.pid) - before_mb
    with pytest.raises(flight.FlightUnauthenticatedError):  # it still responds
        list(flight.FlightClient(f"grpc+tcp://{address}").do_action(flight.Action("list", b"")))
    ours.send("stop")
    process.join(30)
    assert used_mb < 300, used_mb


def test_valid_requests_preserve_their_connection(site):
    """Check that the limit applies to requests, not to connections."""
    client = connect_client(site.producer(), None, 10**6)
    producer = site.opened[0]
    values = json.loads(encode_request(SampleRequest("other", []))) | {"x": "x" * 7_900_000}
    for _ in range(6):
        with pytest.raises(flight.FlightServerError, match="uses different data"):
            client.do_get(flight.Ticket(json.dumps(values).encode())).read_all()
        time.sleep(2 * connection_limits.POLL_S)
    assert producer.watch.closed == 0


class Large(Producer):
    """Producer whose responses end with large messages if `extra` is set."""

    extra = 0

    def _wait(self, job, context):
        pixels = torch.zeros(64 * 10**6, dtype=torch.uint8)
        return (
            super()._wait(job, context)
            + [TensorMessage({"part": "x"}, {"pixels": pixels})] * self.extra
        )


@pytest.fixture
def large(site, monkeypatch):
    """Return a producer with large responses, and the bytes of a request for its first step."""
    monkeypatch.setattr("test_producers.Producer", Large)
    monkeypatch.setattr(connection_limits, "READ_TIMEOUT_S", 2.0)
    monkeypatch.setattr(connection_limits, "MIN_READ_BYTES_PER_S", 10**9)
    site.producer()
    (producer,) = site.opened
    producer.extra = 2
    packs = next(planned_shares(site.loader()))[:1]
    return producer, encode_request(
        SampleRequest(producer._fingerprint, sample_keys(packs), None, 10**9)
    )


def test_clients_that_do_not_read_lose_their_slots(site, large):
    producer, request = large
    address = f"127.0.0.1:{producer.port}"
    # Options differ, so that each client has a separate connection.
    clients = [connect_client(address, None, 10**9 + number) for number in range(4)]
    streams = [client.do_get(flight.Ticket(request)) for client in clients]
    for stream in streams:
        stream.read_chunk()
    assert not producer._request_slots.acquire(blocking=False)
    producer.extra = 0
    assert take(site.loader(address, retry_timeout_s=20), 2) == take(site.loader(), 2)
    deadline_s = time.monotonic() + 10
    while producer._request_slots._value < 4 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert producer._request_slots._value == 4 and producer.watch.closed == 4
    assert all(job.num_requests == 0 for job in producer.work._jobs.values())
    for stream in streams:
        with pytest.raises(flight.FlightError):
            stream.read_all()


def test_slow_reading_client_keeps_its_slot(large):
    producer, request = large
    producer.extra = 6
    stream = connect_client(f"127.0.0.1:{producer.port}", None, 10**9).do_get(
        flight.Ticket(request)
    )
    sizes = []
    for chunk in stream:
        sizes.append(chunk.data.nbytes)
        time.sleep(0.3)  # longer than the limit in total
    assert sum(size >= 64 * 10**6 for size in sizes) == 6 and len(sizes) > 6
    assert producer.watch.closed == 0
