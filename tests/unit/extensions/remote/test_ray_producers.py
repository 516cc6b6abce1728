"""Producers that Ray starts and restarts: killed, added and removed, with equal batches."""

from __future__ import annotations

import os
import signal
import time

import pytest
from data_cases import CLIP, take, training
from test_producers import site

from torchmm.extensions.remote.producers.registry import Registry, list_producers
from torchmm.extensions.remote.producers.rpc import connect_client

ray = pytest.importorskip("ray")
from torchmm.extensions.remote.producers.ray_actors import RayProducers  # noqa: E402

__all__ = ["site"]
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
TIMEOUT_S = 200


@pytest.fixture
def registry():
    results = Registry("127.0.0.1:0")
    yield results
    results.shutdown()


def addresses(registry, count: int, without: str = "") -> set[str]:
    """Return the addresses of all producers once `count` are listed and `without` is not."""
    client = connect_client(f"127.0.0.1:{registry.port}", None, 10**6)
    deadline = time.monotonic() + TIMEOUT_S
    while (
        len(listed := {each.address for each in list_producers(client)}) != count
        or without in listed
    ):
        assert time.monotonic() < deadline, listed
        time.sleep(0.1)
    return listed


def test_ray_restarts_killed_producer(site, registry):
    expected = take(site.loader(), 12)
    address = f"127.0.0.1:{registry.port}"
    settings = {
        "registry": address,
        "engine": "ray",
        "count": 3,
        "timeout_s": 100,
        "retry_timeout_s": 300,
    }
    specs = {**site.common, "image_specs": {"vision": CLIP}}
    producers = RayProducers(site.data(**settings), training(), specs)
    before = signal.getsignal(signal.SIGTERM)
    try:
        batches = iter(site.loader(workers=1, **settings))
        actual = take(batches, 3)
        first = addresses(registry, 3)
        killed, process = ray.get(producers.actors[0].describe.remote())
        os.kill(process, signal.SIGKILL)
        actual += take(batches, 3)
        second = addresses(registry, 3, without=killed)
        assert first - second == {killed}  # Ray started a replacement
        added = producers.add()
        third = addresses(registry, 4)
        assert ray.get(added.describe.remote())[0] in third - second
        actual += take(batches, 3)
        producers.remove(producers.actors[1])
        assert addresses(registry, 3) < third
        actual += take(batches, 3)
        assert actual == expected
    finally:
        producers.close()
    assert not ray.is_initialized() and signal.getsignal(signal.SIGTERM) is before
