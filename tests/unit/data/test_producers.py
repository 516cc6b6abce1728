"""Disaggregated preprocessing: same batches from any producer, even if one dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from itertools import islice
from pathlib import Path

import grpc
import pytest
from data_cases import (
    CLIP,
    QWEN,
    caption,
    caption_rows,
    data_config,
    png,
    training,
    write_jsonl,
    write_parquet,
)
from ports import free_port
from test_video import clip_of

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.generated import GeneratorSpec
from torchmm.common.row_slices import Reads, Share
from torchmm.data.loader import build_loader
from torchmm.data.producers import TOKEN_VARIABLE
from torchmm.data.serve import Producer, check_exposure, start_server
from torchmm.data.sources.open import open_samples
from torchmm.data.wire import VERSION, Request, pack_request, unpack_request
from torchmm.recipe.data_section import ProducersConfig, SourceConfig

DRAWN = GeneratorSpec(size_px=16, patch_size_px=4, context_tokens=6)


def content(batch):
    """Everything a model sees of a batch, comparable."""

    def plain(value):
        return value.numpy().tobytes() if hasattr(value, "numpy") else value

    return [
        (
            [plain(getattr(m, key)) for key in ("input_ids_T", "targets_T", "position_ids")],
            m.cu_seqlens,
            {name: [plain(v) for v in vars(e).values()] for name, e in m.encoders.items()},
            m.generator and [plain(v) for v in vars(m.generator).values()],
            m.meta,
        )
        for m in batch.microbatches
    ]


class Site:
    """Data, and those that prepare them."""

    def __init__(self, directory: Path, tokenizer, text_spec) -> None:
        rows = caption_rows(23)
        rows[5]["image"]["bytes"] = png(40, 24, 5)[:-800]  # torn after its header
        write_parquet(directory / "captions", rows)
        path = str(directory / "captions")
        self.sources = [
            SourceConfig(path=path, name="read"),
            SourceConfig(path=path, name="drawn", generate="image"),
        ]
        self.directory = directory
        self.sizes: dict[str, int] = {}
        self.common = {"tokenizer": tokenizer, "text_spec": text_spec, "generator_spec": DRAWN}
        self.opened: list[tuple[grpc.Server, Producer]] = []

    def data(self, workers=0, **producers):
        addresses = ProducersConfig(**{"give_up_s": 20, "timeout_s": 10, **producers})
        return data_config(self.directory, *self.sources, workers=workers, producers=addresses)

    def loader(self, *addresses, spec=CLIP, rank=0, ranks=1, state=None, workers=0, **producers):
        return build_loader(
            self.data(workers, addresses=list(addresses), **producers),
            training(**self.sizes),
            image_specs={"vision": spec},
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            state=state,
            **self.common,
        )

    def producer(self, spec=CLIP, workers=0, token=None, credentials=None, **sizes):
        """Starts one; returns its address."""
        sizes = training(**self.sizes, **sizes)
        opened = open_samples(self.data(), sizes, image_specs={"vision": spec}, **self.common)
        producer = Producer(opened.decoder, opened.fingerprint(), workers, token)
        server, port = start_server(producer, "127.0.0.1:0", credentials=credentials)
        self.opened.append((server, producer))
        return f"127.0.0.1:{port}"

    def stop(self, number=-1):
        server, producer = self.opened.pop(number)
        server.stop(0).wait()
        producer.close()


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    found = Site(tmp_path, tokenizer, text_spec)
    yield found
    while found.opened:
        found.stop()


def take(loader, count):
    return [(content(batch), batch.skipped, batch.state) for batch in islice(loader, count)]


@pytest.mark.parametrize("spec", [CLIP, QWEN], ids=lambda s: s.processor_class)
def test_batches_are_those_of_the_own_workers(site, spec):
    addresses = [site.producer(spec), site.producer(spec)]
    for rank in range(2):
        expected = take(site.loader(spec=spec, rank=rank, ranks=2), 7)
        assert take(site.loader(*addresses, spec=spec, rank=rank, ranks=2), 7) == expected
    assert any(skipped for _, skipped, _ in expected)


@pytest.mark.parametrize("spec", [CLIP, QWEN], ids=lambda s: s.processor_class)
def test_clips_come_as_from_the_own_workers(site, spec):
    """Whole or frame by frame, with images and text, and one that is torn after planning."""
    rows = [{"video": f"{i}.mp4", "text": caption(i)} for i in range(4)]
    rows += [{"image": "image.png", "text": caption(4)}, {"text": caption(5)}]
    (site.directory / "image.png").write_bytes(png(16, 24))
    for i in range(4):
        (site.directory / f"{i}.mp4").write_bytes(
            clip_of(5 + 4 * i, fps=10 - 2 * i, width=24, height=16)
        )
    path = write_jsonl(site.directory / "clips.jsonl", rows)
    site.sources = [SourceConfig(path=str(path), name="clips")]
    site.common["text_spec"] = replace(site.common["text_spec"], video_token_id=4)
    site.sizes = {"sequence_length": 256}
    own, served = site.loader(spec=spec), site.loader(site.producer(spec), spec=spec)
    (site.directory / "2.mp4").write_bytes(b"torn later")
    expected = take(own, 3)
    assert take(served, 3) == expected
    metas = [meta for batch, _, _ in expected for *_, meta in batch]
    frames = {i.frames for meta in metas for i in meta.images_read_by("vision") if i.duration_ms}
    assert frames == ({2, 4} if spec is QWEN else {1})
    assert any("clips[2]" in message for _, skipped, _ in expected for message in skipped)


def test_noise_is_not_sent_but_drawn_where_it_is_trained_on(site):
    producer = site.loader(site.producer())
    planned = next(iter(producer._queue))
    sent = producer._decoder.decode(planned)
    assert any(m.generator and len(m.generator.patches_PV) for m in sent.microbatches)
    assert all(not len(m.generator.noise_PV) for m in sent.microbatches if m.generator)
    [batch] = islice(producer, 1)
    for m in batch.microbatches:
        assert m.generator is None or m.generator.noise_PV.shape == m.generator.patches_PV.shape


def test_a_killed_worker_and_a_killed_producer_cost_nothing(site):
    expected = take(site.loader(), 12)
    addresses = [site.producer(workers=1), site.producer()]
    batches = iter(site.loader(*addresses, workers=1))
    found = []
    for number in range(12):
        found += take(batches, 1)
        if number == 2:
            pool = site.opened[0][1]._pool
            os.kill(next(iter(pool._processes)), signal.SIGKILL)
        if number == 6:
            site.stop(0)
    assert found == expected


def test_resuming_with_other_producers_goes_on_exactly(site):
    whole = take(site.loader(), 6)
    first = take(site.loader(site.producer()), 3)
    site.stop()
    found = first + take(site.loader(site.producer(), state=first[-1][2]), 3)
    assert [(c, state) for c, _, state in found] == [(c, state) for c, _, state in whole]


def test_busy_producers_are_asked_again(site):
    address = site.producer()
    room = site.opened[0][1]._room
    for _ in range(4):
        room.acquire()
    message = r"no producer.*give_up_s = 0.5.*RESOURCE_EXHAUSTED: it has no room"
    with pytest.raises(DataError, match=message):
        take(site.loader(address, give_up_s=0.5), 1)
    room.release()
    assert take(site.loader(address), 2) == take(site.loader(), 2)


def test_nobody_answers(site):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DataError, match=f"no producer.*{address}: UNAVAILABLE.*torchmm.data.serve"):
        take(site.loader(address, give_up_s=0.5), 1)
    assert take(site.loader(address, site.producer()), 2) == take(site.loader(), 2)


def test_a_producer_of_other_data_is_refused(site):
    with pytest.raises(DataError, match="prepares other data"):
        take(site.loader(site.producer(seed=4)), 1)


def test_a_wrong_token_is_refused(site, monkeypatch):
    address = site.producer(token="secret")
    for sent, why in ((None, "no token"), ("guess", "wrong token")):
        if sent:
            monkeypatch.setenv(TOKEN_VARIABLE, sent)
        with pytest.raises(DataError, match=f"{why}.*{TOKEN_VARIABLE}"):
            take(site.loader(address), 1)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert take(site.loader(address), 2) == take(site.loader(), 2)


def test_a_step_above_the_limit_names_it(site):
    with pytest.raises(DataError, match=r"too large to be sent.*max_message_mb = 0.001"):
        take(site.loader(site.producer(), max_message_mb=0.001), 1)


def test_an_unknown_certificate_is_not_trusted(site, tmp_path):
    keys = {}
    for name in ("ours", "theirs"):
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
        names = [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out"]
        made = subprocess.run([*names, certificate], capture_output=True, check=False)
        if made.returncode:
            pytest.skip("no openssl to make a certificate with")
        keys[name] = (key.read_bytes(), certificate.read_bytes())
    address = site.producer(credentials=grpc.ssl_server_credentials([keys["ours"]]))
    trusted = site.loader(address, ca_certificate=str(tmp_path / "ours.pem"))
    assert take(trusted, 2) == take(site.loader(), 2)
    other = site.loader(address, ca_certificate=str(tmp_path / "theirs.pem"), give_up_s=1)
    with pytest.raises(DataError, match="UNAVAILABLE"):
        take(other, 1)


def test_streams_stay_where_they_are_read(site):
    site.sources[0] = site.sources[0].model_copy(update={"streaming": True})
    with pytest.raises(ConfigError, match=r"'read' is streamed.*streaming = false"):
        site.loader("127.0.0.1:1")


@pytest.mark.parametrize(
    ("bind", "encrypted", "token", "allowed"),
    [
        ("127.0.0.1:1", False, None, True),
        ("localhost:1", False, None, True),
        ("[::1]:1", False, None, True),
        ("0.0.0.0:1", False, "secret", False),
        ("10.0.0.1:1", True, None, False),
        ("node3:1", True, "secret", True),
    ],
)
def test_other_machines_need_a_certificate_and_a_token(bind, encrypted, token, allowed):
    if allowed:
        check_exposure(bind, encrypted, token)
    else:
        with pytest.raises(ConfigError, match="--tls-certificate"):
            check_exposure(bind, encrypted, token)


@pytest.mark.parametrize("data", [b"{}", b"\xff", b"[]", b'{"version": 0}'])
def test_what_is_no_request_is_said(data):
    with pytest.raises(ValueError, match=r"not a request|version 0 of the protocol, not 5|column"):
        unpack_request(data)
    reads = Reads({"vision": Share(1, 2)}, Share(0, 4))
    for asked in (Request("a", [[[]]]), Request("a", [[[]]], reads)):
        assert unpack_request(pack_request(asked)) == asked
    assert VERSION == 5
