"""Producers that are added, removed and killed while samples are requested, and request order."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from data_cases import take
from pyarrow import flight
from test_producers import site

from torchmm.common.errors import ConfigError, DataError
from torchmm.extensions.remote.producers import registry as registry_module
from torchmm.extensions.remote.producers.load_balancing import order_producers
from torchmm.extensions.remote.producers.registry import (
    EXPIRY_S,
    MAX_PRODUCERS_PER_HOST,
    ProducerStatus,
    Registry,
    StatusReporter,
    list_producers,
    run_local_registry,
)
from torchmm.extensions.remote.producers.rpc import (
    TOKEN_VARIABLE,
    call_options,
    clean_message,
    connect_client,
)
from torchmm.extensions.remote.registry import main as registry_program
from torchmm.extensions.remote.registry import make_parser as registry_parser
from torchmm.extensions.remote.serve import make_parser as serve_parser
from torchmm.extensions.remote.serve import serve
from torchmm.recipe.data_section import ProducersConfig

LAUNCH = Path(__file__).parents[4] / "scripts" / "launch"
__all__ = ["site"]


class Reporting:
    """Producers of a site that report to a registry."""

    def __init__(self, site) -> None:
        self.site = site
        self.registry = Registry("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.registry.port}"
        self.reporters: list[StatusReporter] = []

    def add(self, **options) -> str:
        address = self.site.producer(**options)
        load = partial(self.site.opened[-1].load, address)
        self.reporters.append(StatusReporter(self.address, load))
        self.until(lambda listed: address in listed)
        return address

    def listed(self) -> list[str]:
        return [each.address for each in list_producers(connect_client(self.address, None, 10**6))]

    def until(self, condition) -> None:
        deadline = time.monotonic() + 3 * EXPIRY_S
        while not condition(self.listed()):
            assert time.monotonic() < deadline, self.listed()
            time.sleep(0.05)

    def remove(self, number: int = 0) -> None:
        """Remove a producer, which notifies the registry."""
        self.reporters.pop(number).close()
        self.site.stop(number)

    def kill(self, number: int = 0) -> None:
        """Stop a producer without a notification of the registry."""
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
    results = Reporting(site)
    yield results
    results.close()


def test_producers_can_be_added_and_removed(reporting, site):
    expected = take(site.loader(), 12)
    first = reporting.add()
    batches = iter(site.loader(registry=reporting.address))
    actual = take(batches, 3)
    second = reporting.add()
    actual += take(batches, 3)
    reporting.remove(0)
    assert reporting.listed() == [second]
    actual += take(batches, 3)
    third = reporting.add()
    reporting.kill(0)
    actual += take(batches, 3)
    assert actual == expected and len({first, second, third}) == 3
    reporting.until(lambda listed: listed == [third])  # the killed producer expires


def test_all_producers_receive_requests(reporting, site):
    for _ in range(2):
        reporting.add()
    take(site.loader(registry=reporting.address), 8)
    assert all(producer.work.decoded >= 4 for producer in site.opened)


def test_run_continues_without_registry(reporting, site):
    reporting.add()
    batches = iter(site.loader(registry=reporting.address))
    actual = take(batches, 2)
    port = reporting.registry.port
    reporting.registry.shutdown()
    time.sleep(2.5)  # the listed producers are outdated
    actual += take(batches, 2)
    assert actual == take(site.loader(), 4)
    reporting.registry = Registry(f"127.0.0.1:{port}")
    reporting.until(lambda listed: len(listed) == 1)


def test_producers_of_different_data_are_not_requested(reporting, site):
    reporting.add(seed=4)
    with pytest.raises(DataError, match="lists 0 producers of the same data and 1 of other data"):
        take(site.loader(registry=reporting.address, retry_timeout_s=0.5), 1)
    reporting.add()
    assert take(site.loader(registry=reporting.address), 2) == take(site.loader(), 2)


def test_missing_registry_is_reported(site):
    message = r"no producer.*registry 127.0.0.1:1: Unavailable.*data.producers.registry"
    with pytest.raises(DataError, match=message):
        take(site.loader(registry="127.0.0.1:1", retry_timeout_s=0.5), 1)


def test_registry_requires_token_and_valid_reports(reporting, monkeypatch):
    client = connect_client(reporting.address, None, 10**6)
    for kind, body in {
        "report": b"{",
        "leave": b"[]",
        "other": json.dumps(ProducerStatus("a:1", "f", 1, 0)._asdict()).encode(),
    }.items():
        with pytest.raises(flight.FlightServerError):
            list(client.do_action(flight.Action(kind, body), call_options(5)))
    guarded = Registry("127.0.0.1:0", token="secret")
    client_without_token = connect_client(f"127.0.0.1:{guarded.port}", None, 10**6)
    with pytest.raises(flight.FlightUnauthenticatedError, match="no token"):
        list_producers(client_without_token)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert list_producers(client_without_token) == []
    guarded.shutdown()


WRONG_REPORTS = [
    *({"workers": wrong} for wrong in (0, -1, 4097, 10**7, 10**12, 10**400, "2", 2.0, True, None)),
    *({"unfinished": wrong} for wrong in (-1, 10**10, "0", 0.5, False, None)),
    *(
        {"address": wrong}
        for wrong in (
            "x", ":1", "a:", "a:0", "a:65536", "a:-1", "a:1 ", " a:1", "a:1\n", "a\nb:1",
            "a\x1b[2J:1", "a:1:2", "::1:7", "[::1:7", "user@a:1", "a/b:1", "a" * 300 + ":1",
            "\u202ea:1", 7, None, [],
        )
    ),
    *({"fingerprint": wrong} for wrong in ("f" * 129, "f\n", "f\x1b", "\u00e9", 1, None)),
    {"other": 1},
]  # fmt: skip


def report(client, kind="report", **changes):
    body = json.dumps(ProducerStatus("a:1", "f", 1, 0)._asdict() | changes).encode()
    list(client.do_action(flight.Action(kind, body), call_options(5)))


@pytest.mark.parametrize("wrong", WRONG_REPORTS, ids=lambda w: ascii(w)[:40])
def test_registry_rejects_malformed_report(reporting, wrong, caplog):
    caplog.set_level("INFO")
    client = connect_client(reporting.address, None, 10**6)
    with pytest.raises(flight.FlightServerError, match="invalid report of a producer") as caught:
        report(client, **wrong)
    assert clean_message(caught.value).isprintable()
    assert reporting.listed() == [] and not caplog.records
    for right in ("node-3.example_1:7411", "10.0.0.7:65535", "[fd00::7]:7411"):
        report(client, address=right, workers=4096)
    assert len(reporting.listed()) == 3


def test_large_report_does_not_interrupt_run(reporting, site):
    """Check a report of 10^7 workers, which previously stopped the runs that used the registry."""
    reporting.add()
    client = connect_client(reporting.address, None, 10**6)
    fingerprint = site.opened[0].load("a:1").fingerprint
    for workers in (10**7, 10**12):
        with pytest.raises(flight.FlightServerError):
            report(client, fingerprint=fingerprint, workers=workers)
    assert take(site.loader(registry=reporting.address, retry_timeout_s=10), 3) == take(
        site.loader(), 3
    )


def test_unknown_addresses_do_not_displace_producers(reporting, monkeypatch):
    registry = reporting.registry
    now_s = [0.0]
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now_s[0])
    right = ProducerStatus("right:1", "f", 1, 0)
    registry._update("report", right, "ipv4:10.0.0.1")
    for number in range(MAX_PRODUCERS_PER_HOST):
        registry._update("report", ProducerStatus(f"wrong{number}:1", "f", 1, 0), "ipv4:10.0.0.9")
    with pytest.raises(ValueError, match=r"10\.0\.0\.9 has 256 producers, but the limit is 256"):
        registry._update("report", ProducerStatus("wrong:1", "f", 1, 0), "ipv4:10.0.0.9")
    registry._update("report", right, "ipv4:10.0.0.1")
    registry._update("report", ProducerStatus("second:1", "f", 1, 0), "ipv4:10.0.0.2")
    for kind in ("report", "leave"):  # an address belongs to the host that reports it
        with pytest.raises(ValueError, match=r"right:1 is reported by ipv4:10\.0\.0\.1"):
            registry._update(kind, right, "ipv4:10.0.0.9")
    assert right in registry.list_active()
    monkeypatch.setattr(registry_module, "MAX_PRODUCERS", len(registry._entries))
    registry._update("report", right, "ipv4:10.0.0.1")  # listed producers can always report
    with pytest.raises(ValueError, match="258 producers are registered"):
        registry._update("report", ProducerStatus("third:1", "f", 1, 0), "ipv4:10.0.0.3")
    now_s[0] += EXPIRY_S  # the made-up addresses expire, though no trainer lists producers
    registry._update("report", ProducerStatus("third:1", "f", 1, 0), "ipv4:10.0.0.3")
    assert registry.list_active() == [ProducerStatus("third:1", "f", 1, 0)]


def test_request_order_limits_many_workers():
    many = [ProducerStatus(f"n{number}:1", "f", 4096, 0) for number in range(2000)]
    begin_s = time.monotonic()
    assert len(order_producers(many, 7)) == 2000
    assert time.monotonic() - begin_s < 5
    firsts = [
        order_producers([*many[:9], ProducerStatus("small:1", "f", 1, 0)], n)[0]
        for n in range(0, 20000, 50)
    ]
    assert {each.address for each in many[:9]} <= set(firsts)
    assert firsts.count("small:1") <= 1


@pytest.mark.parametrize(
    "wrong",
    [["--workers", "-1"], ["--workers", "4097"], ["--bind", "nowhere"], ["--bind", "a:1\x1b[2J"],
     ["--registry", "a:0"], ["--advertise", "http://a:1"]],
)  # fmt: skip
def test_serve_rejects_invalid_arguments(wrong):
    arguments, overrides = serve_parser().parse_known_args(["--config", "none.toml", *wrong])
    with pytest.raises(ConfigError, match=wrong[0]) as caught:
        serve(arguments, overrides)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("option", ["--tls-certificate", "--tls-key"])
def test_programs_with_half_tls_pair_are_rejected(option, monkeypatch, capsys):
    half = [option, "file.pem"]
    arguments, overrides = serve_parser().parse_known_args(["--config", "none.toml", *half])
    with pytest.raises(ConfigError, match="must be used together"):
        serve(arguments, overrides)
    monkeypatch.setattr("sys.argv", ["registry", "--bind", "127.0.0.1:0", *half])
    with pytest.raises(SystemExit) as stopped:
        registry_program()
    assert stopped.value.code == ConfigError.exit_code
    assert "--tls-certificate and --tls-key must be used together" in capsys.readouterr().err


def test_reports_to_remote_registry_require_encryption():
    with pytest.raises(ConnectionError, match="requires encryption"):
        StatusReporter("192.0.2.1:7", lambda: ProducerStatus("a:1", "f", 1, 0))


def test_run_starts_registry_on_its_host_only():
    with run_local_registry(ProducersConfig()) as none:
        assert none is None
    with run_local_registry(ProducersConfig(registry="10.0.0.1:7")) as none:
        assert none is None
    with run_local_registry(ProducersConfig(registry="127.0.0.1:0")) as registry:
        second = run_local_registry(ProducersConfig(registry=f"127.0.0.1:{registry.port}"))
        with pytest.raises(ConfigError, match="cannot listen on"):
            second.__enter__()


def test_kubernetes_manifest_uses_valid_arguments():
    documents = yaml.safe_load_all((LAUNCH / "kubernetes_producers.yaml").read_text())
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]
        for d in documents
        if "template" in d["spec"]
    }
    (registry,) = pods["torchmm-registry"]["containers"]
    program, _, module, *arguments = [*registry["command"], *registry["args"]]
    assert (program, module) == ("python", "torchmm.data.registry")
    assert registry_parser().parse_args(arguments).bind.endswith(":7410")
    (producer,) = pods["torchmm-producers"]["containers"]
    _, _, _, module, *arguments = producer["args"][0].split()
    actual, overrides = serve_parser().parse_known_args(arguments)
    assert module == "torchmm.data.serve" and overrides == []
    assert actual.registry.endswith(":7410") and actual.advertise.endswith(":7411")
    assert actual.tls_key and actual.tls_certificate and actual.ca_certificate


def test_requests_are_proportional_to_workers():
    small, large = ProducerStatus("small:1", "f", 1, 0), ProducerStatus("large:1", "f", 3, 0)
    firsts = [order_producers([small, large], step)[0] for step in range(8)]
    assert firsts.count("large:1") == 6 and firsts[:4] == firsts[4:]
    assert all(len(order_producers([small, large], step)) == 2 for step in range(8))
    assert order_producers([], 3) == []


def test_busy_and_unresponsive_producers_are_last():
    idle, busy = ProducerStatus("idle:1", "f", 1, 1), ProducerStatus("busy:1", "f", 1, 2)
    assert all(order_producers([idle, busy], step) == ["idle:1", "busy:1"] for step in range(4))
    last = order_producers([idle, busy], 0, deprioritized={"idle:1": 0.0})
    assert last == ["busy:1", "idle:1"]
