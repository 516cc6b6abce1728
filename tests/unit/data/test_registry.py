"""Producers that come, go and die while samples are asked for; who is asked first."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from pyarrow import flight
from test_producers import site, take

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.producers.calls import TOKEN_VARIABLE, connect, within
from torchmm.data.producers.choosing import in_turn
from torchmm.data.producers.registry import (
    FORGOTTEN_S,
    Registry,
    Reported,
    Reporter,
    ask_registry,
    own_registry,
)
from torchmm.data.registry import make_parser as registry_parser
from torchmm.data.serve import make_parser as serve_parser
from torchmm.recipe.data_section import ProducersConfig

LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"
__all__ = ["site"]


class Reporting:
    """Producers of a site that report to a registry."""

    def __init__(self, site) -> None:
        self.site = site
        self.registry = Registry("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.registry.port}"
        self.reporters: list[Reporter] = []

    def add(self, **options) -> str:
        address = self.site.producer(**options)
        load = partial(self.site.opened[-1].load, address)
        self.reporters.append(Reporter(self.address, load))
        self.until(lambda known: address in known)
        return address

    def known(self) -> list[str]:
        return [each.address for each in ask_registry(connect(self.address, None, 10**6))]

    def until(self, condition) -> None:
        deadline = time.monotonic() + 3 * FORGOTTEN_S
        while not condition(self.known()):
            assert time.monotonic() < deadline, self.known()
            time.sleep(0.05)

    def remove(self, number: int = 0) -> None:
        """It says that it leaves."""
        self.reporters.pop(number).close()
        self.site.stop(number)

    def kill(self, number: int = 0) -> None:
        """It says nothing."""
        reporter = self.reporters.pop(number)
        reporter._closing.set()
        reporter._send = lambda kind: None
        self.site.stop(number)

    def close(self) -> None:
        for reporter in self.reporters:
            reporter.close()
        self.registry.shutdown()


@pytest.fixture
def reporting(site):
    found = Reporting(site)
    yield found
    found.close()


def test_producers_come_and_go_in_a_run(reporting, site):
    expected = take(site.loader(), 12)
    first = reporting.add()
    batches = iter(site.loader(registry=reporting.address))
    found = take(batches, 3)
    second = reporting.add()
    found += take(batches, 3)
    reporting.remove(0)
    assert reporting.known() == [second]
    found += take(batches, 3)
    third = reporting.add()
    reporting.kill(0)
    found += take(batches, 3)
    assert found == expected and len({first, second, third}) == 3
    reporting.until(lambda known: known == [third])  # who was killed is forgotten


def test_all_producers_have_their_turn(reporting, site):
    for _ in range(2):
        reporting.add()
    take(site.loader(registry=reporting.address), 8)
    assert all(producer.work.decoded >= 4 for producer in site.opened)


def test_a_run_goes_on_without_its_registry(reporting, site):
    reporting.add()
    batches = iter(site.loader(registry=reporting.address))
    found = take(batches, 2)
    port = reporting.registry.port
    reporting.registry.shutdown()
    time.sleep(2.5)  # what is known of it is old by now
    found += take(batches, 2)
    assert found == take(site.loader(), 4)
    reporting.registry = Registry(f"127.0.0.1:{port}")
    reporting.until(lambda known: len(known) == 1)


def test_producers_of_other_data_are_not_asked(reporting, site):
    reporting.add(seed=4)
    with pytest.raises(DataError, match="knows 0 producers of these data and 1 of others"):
        take(site.loader(registry=reporting.address, give_up_s=0.5), 1)
    reporting.add()
    assert take(site.loader(registry=reporting.address), 2) == take(site.loader(), 2)


def test_a_registry_that_is_not_there_is_named(site):
    message = r"no producer.*registry 127.0.0.1:1: Unavailable.*data.producers.registry"
    with pytest.raises(DataError, match=message):
        take(site.loader(registry="127.0.0.1:1", give_up_s=0.5), 1)


def test_registries_want_the_token_and_reports_as_they_are(reporting, monkeypatch):
    client = connect(reporting.address, None, 10**6)
    for kind, body in {
        "report": b"{",
        "leave": b"[]",
        "other": json.dumps(Reported("a:1", "f", 1, 0)._asdict()).encode(),
    }.items():
        with pytest.raises(flight.FlightServerError):
            list(client.do_action(flight.Action(kind, body), within(5)))
    for wrong in ({"workers": 0}, {"unfinished": -1}, {"address": "x"}, {"workers": "2"}):
        said = Reported("a:1", "f", 1, 0)._asdict() | wrong
        with pytest.raises(flight.FlightServerError, match="not a producer's report"):
            body = json.dumps(said).encode()
            list(client.do_action(flight.Action("report", body), within(5)))
    assert reporting.known() == []
    guarded = Registry("127.0.0.1:0", token="secret")
    asked = connect(f"127.0.0.1:{guarded.port}", None, 10**6)
    with pytest.raises(flight.FlightUnauthenticatedError, match="no token"):
        ask_registry(asked)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert ask_registry(asked) == []
    guarded.shutdown()


def test_nothing_is_reported_unencrypted_to_other_machines():
    with pytest.raises(ConnectionError, match="unencrypted"):
        Reporter("192.0.2.1:7", lambda: Reported("a:1", "f", 1, 0))


def test_a_run_has_a_registry_only_on_its_own_machine():
    with own_registry(ProducersConfig()) as none:
        assert none is None
    with own_registry(ProducersConfig(registry="10.0.0.1:7")) as none:
        assert none is None
    with own_registry(ProducersConfig(registry="127.0.0.1:0")) as registry:
        second = own_registry(ProducersConfig(registry=f"127.0.0.1:{registry.port}"))
        with pytest.raises(ConfigError, match="cannot listen on"):
            second.__enter__()


def test_kubernetes_starts_what_there_is():
    documents = yaml.safe_load_all((LAUNCH / "kubernetes_producers.yaml").read_text())
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]
        for d in documents
        if "template" in d["spec"]
    }
    (registry,) = pods["torchmm-registry"]["containers"]
    program, _, module, *given = [*registry["command"], *registry["args"]]
    assert (program, module) == ("python", "torchmm.data.registry")
    assert registry_parser().parse_args(given).bind.endswith(":7410")
    (producer,) = pods["torchmm-producers"]["containers"]
    _, _, _, module, *given = producer["args"][0].split()
    found, overrides = serve_parser().parse_known_args(given)
    assert module == "torchmm.data.serve" and overrides == []
    assert found.registry.endswith(":7410") and found.advertise.endswith(":7411")
    assert found.tls_key and found.tls_certificate and found.ca_certificate


def test_steps_go_to_producers_as_often_as_they_have_workers():
    small, large = Reported("small:1", "f", 1, 0), Reported("large:1", "f", 3, 0)
    firsts = [in_turn([small, large], step)[0] for step in range(8)]
    assert firsts.count("large:1") == 6 and firsts[:4] == firsts[4:]
    assert all(len(in_turn([small, large], step)) == 2 for step in range(8))
    assert in_turn([], 3) == []


def test_busy_and_silent_producers_come_last():
    idle, busy = Reported("idle:1", "f", 1, 1), Reported("busy:1", "f", 1, 2)
    assert all(in_turn([idle, busy], step) == ["idle:1", "busy:1"] for step in range(4))
    last = in_turn([idle, busy], 0, avoided={"idle:1": 0.0})
    assert last == ["busy:1", "idle:1"]
