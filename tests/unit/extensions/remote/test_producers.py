"""Disaggregated preprocessing: equal batches from any producer, even if one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from data_cases import (
    CLIP,
    QWEN,
    caption,
    caption_rows,
    data_config,
    planned_shares,
    png,
    take,
    training,
    write_jsonl,
    write_parquet,
)
from ports import free_port
from pyarrow import flight
from test_video import make_video

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.generated import GeneratorSpec
from torchmm.common.sequence_slices import DecodeAssignment, RankShare
from torchmm.data.build import build_loader
from torchmm.data.sources.open import open_samples
from torchmm.extensions.remote.producers.rpc import (
    TOKEN_VARIABLE,
    check_exposure,
    read_certificate,
    read_key_pair,
)
from torchmm.extensions.remote.producers.server import Producer
from torchmm.extensions.remote.producers.wire_format import (
    PROTOCOL_VERSION,
    SCHEMA,
    SampleRequest,
    TensorMessage,
    decode_request,
    encode_message,
    encode_request,
    step_messages,
)
from torchmm.recipe.data_section import ProducersConfig, SourceConfig

GENERATOR = GeneratorSpec(size_px=16, patch_size_px=4, context_tokens=6)


class Site:
    """Data and producers."""

    def __init__(self, directory: Path, tokenizer, text_spec) -> None:
        rows = caption_rows(23)
        rows[5]["image"]["bytes"] = png(40, 24, 5)[:-800]  # truncated after its header
        write_parquet(directory / "captions", rows)
        path = str(directory / "captions")
        self.sources = [
            SourceConfig(path=path, name="read"),
            SourceConfig(path=path, name="drawn", target_image_column="image"),
        ]
        self.directory = directory
        self.sizes: dict[str, int] = {}
        self.common = {"tokenizer": tokenizer, "text_spec": text_spec, "generator_spec": GENERATOR}
        self.opened: list[Producer] = []

    def data(self, workers=0, **producers):
        addresses = ProducersConfig(**{"retry_timeout_s": 20, "timeout_s": 10, **producers})
        return data_config(self.directory, *self.sources, workers=workers, producers=addresses)

    def loader(
        self, *addresses, spec=CLIP, rank=0, ranks=1, state=None, workers=0, reads=None, **producers
    ):
        return build_loader(
            self.data(workers, addresses=list(addresses), **producers),
            training(**self.sizes),
            image_specs={"vision": spec},
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            state=state,
            reads=reads,
            **self.common,
        )

    def producer(self, spec=CLIP, workers=0, token=None, certificate=None, **sizes):
        """Start a producer and return its address."""
        sizes = training(**self.sizes, **sizes)
        opened = open_samples(self.data(), sizes, image_specs={"vision": spec}, **self.common)
        producer = Producer(
            opened, sizes, "127.0.0.1:0", workers=workers, token=token, certificate=certificate
        )
        self.opened.append(producer)
        return f"127.0.0.1:{producer.port}"

    def stop(self, number=-1):
        self.opened.pop(number).close()


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    results = Site(tmp_path, tokenizer, text_spec)
    yield results
    while results.opened:
        results.stop()


@pytest.mark.parametrize("spec", [CLIP, QWEN], ids=lambda s: s.processor_class)
def test_producer_batches_match_local_workers(site, spec):
    addresses = [site.producer(spec), site.producer(spec)]
    for rank in range(2):
        expected = take(site.loader(spec=spec, rank=rank, ranks=2), 7)
        assert take(site.loader(*addresses, spec=spec, rank=rank, ranks=2), 7) == expected
    assert any(skipped for _, skipped, _ in expected)


@pytest.mark.parametrize("spec", [CLIP, QWEN], ids=lambda s: s.processor_class)
def test_producer_videos_match_local_workers(site, spec):
    """Check videos and frames, images and text, and one video that is damaged after planning."""
    rows = [{"video": f"{i}.mp4", "text": caption(i)} for i in range(4)]
    rows += [{"image": "image.png", "text": caption(4)}, {"text": caption(5)}]
    (site.directory / "image.png").write_bytes(png(16, 24))
    for i in range(4):
        (site.directory / f"{i}.mp4").write_bytes(
            make_video(5 + 4 * i, fps=10 - 2 * i, width=24, height=16)
        )
    path = write_jsonl(site.directory / "videos.jsonl", rows)
    site.sources = [SourceConfig(path=str(path), name="videos")]
    site.common["text_spec"] = replace(site.common["text_spec"], video_token_id=4)
    site.sizes = {"sequence_length": 256}
    local, remote = site.loader(spec=spec), site.loader(site.producer(spec), spec=spec)
    (site.directory / "2.mp4").write_bytes(b"damaged later")
    expected = take(local, 3)
    assert take(remote, 3) == expected
    metas = [meta for batch, _, _ in expected for *_, meta in batch]
    frames = {i.frames for meta in metas for i in meta.images_of_encoder("vision") if i.duration_ms}
    assert frames == ({2, 4} if spec is QWEN else {1})
    assert any("videos[2]" in message for _, skipped, _ in expected for message in skipped)


def test_noise_is_generated_by_trainer(site):
    producer = site.loader(site.producer())
    planned = next(planned_shares(producer))
    sent = producer._decoder.decode(planned)
    assert any(m.generator and len(m.generator.patches_PV) for m in sent.microbatches)
    assert all(not len(m.generator.noise_PV) for m in sent.microbatches if m.generator)
    [batch] = islice(producer, 1)
    for m in batch.microbatches:
        assert m.generator is None or m.generator.noise_PV.shape == m.generator.patches_PV.shape


def test_killed_worker_and_producer_lose_no_batches(site):
    expected = take(site.loader(), 12)
    addresses = [site.producer(workers=1), site.producer()]
    batches = iter(site.loader(*addresses, workers=1))
    actual = []
    for number in range(12):
        actual += take(batches, 1)
        if number == 2:
            pool = site.opened[0].work._pool
            os.kill(next(iter(pool._processes)), signal.SIGKILL)
        if number == 6:
            site.stop(0)
    assert actual == expected


def test_resume_with_different_producers_is_exact(site):
    expected = take(site.loader(), 6)
    first = take(site.loader(site.producer()), 3)
    site.stop()
    actual = first + take(site.loader(site.producer(), state=first[-1][2]), 3)
    assert [(c, state) for c, _, state in actual] == [(c, state) for c, _, state in expected]


def test_busy_producer_is_retried(site):
    address = site.producer()
    room = site.opened[0]._request_slots
    for _ in range(4):
        room.acquire()
    message = r"no producer.*retry_timeout_s = 0.5.*Unavailable: its queue of requests is full"
    with pytest.raises(DataError, match=message):
        take(site.loader(address, retry_timeout_s=0.5), 1)
    room.release()
    assert take(site.loader(address), 2) == take(site.loader(), 2)


def test_unreachable_producer_is_reported(site):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DataError, match=f"no producer.*{address}: Unavailable.*torchmm.data.serve"):
        take(site.loader(address, retry_timeout_s=0.5), 1)
    assert take(site.loader(address, site.producer()), 2) == take(site.loader(), 2)


def test_producer_of_different_data_is_rejected(site):
    with pytest.raises(DataError, match="uses different data"):
        take(site.loader(site.producer(seed=4)), 1)


def test_wrong_token_is_rejected(site, monkeypatch):
    address = site.producer(token="secret")
    for sent, why in ((None, "no token"), ("guess", "wrong token")):
        if sent:
            monkeypatch.setenv(TOKEN_VARIABLE, sent)
        with pytest.raises(DataError, match=f"{why}.*{TOKEN_VARIABLE}"):
            take(site.loader(address), 1)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert take(site.loader(address), 2) == take(site.loader(), 2)


def test_too_large_message_names_limit(site):
    with pytest.raises(DataError, match=r"too large for one message.*max_message_mb = 0.001"):
        take(site.loader(site.producer(), max_message_mb=0.001), 1)


def test_unknown_certificate_is_rejected(site, tmp_path):
    keys = {}
    for name in ("ours", "theirs"):
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
        names = [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out"]
        result = subprocess.run([*names, certificate], capture_output=True, check=False)
        if result.returncode:
            pytest.skip("openssl is not installed")
        keys[name] = (certificate.read_bytes(), key.read_bytes())
    address = site.producer(certificate=keys["ours"])
    trusted = site.loader(address, ca_certificate=str(tmp_path / "ours.pem"))
    assert take(trusted, 2) == take(site.loader(), 2)
    other = site.loader(address, ca_certificate=str(tmp_path / "theirs.pem"), retry_timeout_s=1)
    with pytest.raises(DataError, match="Unavailable"):
        take(other, 1)


def test_key_pair_needs_both_files(tmp_path):
    certificate, key = tmp_path / "a.pem", tmp_path / "a.key"
    certificate.write_bytes(b"certificate")
    key.write_bytes(b"key")
    assert read_key_pair(None, None) is None
    assert read_key_pair(str(certificate), str(key)) == (b"certificate", b"key")
    for half in ((str(certificate), None), (None, str(key))):
        with pytest.raises(
            ConfigError, match="--tls-certificate and --tls-key must be used together"
        ):
            read_key_pair(*half)
    with pytest.raises(ConfigError, match=r"absent\.key: No such file"):
        read_key_pair(str(certificate), str(tmp_path / "absent.key"))


def test_absent_ca_certificate_names_its_key(tmp_path):
    assert read_certificate("some.key", None) is None
    with pytest.raises(ConfigError, match=r"some\.key = .*absent\.pem': No such file"):
        read_certificate("some.key", str(tmp_path / "absent.pem"))


def test_streamed_source_rejects_producers(site):
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
def test_remote_producers_require_certificate_and_token(bind, encrypted, token, allowed):
    if allowed:
        check_exposure(bind, encrypted, token)
    else:
        with pytest.raises(ConfigError, match="--tls-certificate"):
            check_exposure(bind, encrypted, token)


@pytest.mark.parametrize("data", [b"{}", b"\xff", b"[]", b'{"version": 0}'])
def test_malformed_request_is_rejected(data):
    with pytest.raises(ValueError, match=r"invalid request|protocol version is 0, but 7|column"):
        decode_request(data)
    reads = DecodeAssignment({"vision": RankShare(1, 2)}, RankShare(0, 4))
    for request in (SampleRequest("a", [[[]]]), SampleRequest("a", [[[]]], reads)):
        assert decode_request(encode_request(request)) == request
    assert PROTOCOL_VERSION == 7


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([[[[0, 0, -1]]]], "invalid request for samples"),
        ([[[[0, 0, 10**30]]]], "invalid request for samples"),
        ([[[[0, 0, 99]]]], "source 0 has no sample 99"),
        ([[[[7, 0, 0]]]], "source 7 has no sample 0"),
        ([[[[0, 0, 0]] * 50]], "a sequence of .* tokens, but training.sequence_length = 64"),
        ([[[]] * 99], "99 sequences, but training.global_batch_size"),
        ([[[[0, 0, 1]] * 200_000] * 4], "a request of .* bytes"),
    ],
    ids=["negative", "beyond", "no sample", "no source", "too long", "too many", "too large"],
)
def test_request_outside_plan_is_rejected(site, samples, why):
    address = site.producer()
    fingerprint = site.opened[0]._fingerprint
    values = {"version": PROTOCOL_VERSION, "fingerprint": fingerprint, "samples": samples}
    ticket = flight.Ticket(json.dumps(values | {"reads": None, "most_bytes": 10**9}).encode())
    with pytest.raises(flight.FlightServerError, match=why) as caught:
        flight.FlightClient(f"grpc+tcp://{address}").do_get(ticket).read_all()
    assert caught.value.extra_info == b"refused"
    assert site.opened[0].work.decoded == 0
    assert take(site.loader(address), 1) == take(site.loader(), 1)


class BadProducer(flight.FlightServerBase):
    """Producer with the same response to every request."""

    def __init__(self, *parts, schema=SCHEMA):
        super().__init__("grpc+tcp://127.0.0.1:0")
        self.parts = parts
        self.schema = schema

    def do_get(self, context, ticket):
        return flight.GeneratorStream(self.schema, iter(self.parts))


def correct_messages(site):
    """Return the messages of the first step."""
    loader = site.loader()
    planned = next(planned_shares(loader))
    expected = loader._decoder.images_to_decode(planned)
    return [
        (number, message)
        for number, each in enumerate(zip(planned, expected, strict=True))
        for message in step_messages(loader._decoder.decode_one(*each))
    ]


def changed_messages(sent, number, part, values=None, tensors=None):
    """Return correct messages, one of them with different values or tensors."""
    results = []
    for of, message in sent:
        values_now, tensors_now = dict(message.values), dict(message.tensors)
        if (of, message.values["part"]) == (number, part):
            values_now |= values or {}
            tensors_now |= tensors or {}
        results.append(encode_message(TensorMessage(values_now, tensors_now), of))
    return results


def malformed_responses(sent):
    """Return malformed producer responses by name."""
    first = {message.values["part"]: message for number, message in sent if number == 0}
    pixels = first["vision"].tensors["pixels"]
    nothing = pa.record_batch([pa.nulls(1, pa.large_binary())] * 3, schema=SCHEMA)
    return {
        "nothing": [],
        "no values": [nothing],
        "no JSON": [(nothing, b"{")],
        "a list": [(nothing, b"[]")],
        "half of it": changed_messages(sent, 0, "")[:1],
        "twice the same": changed_messages(sent, 0, "")[:1] * 2,
        "other tokens": changed_messages(sent, 0, "", tensors={"input_ids_T": pixels}),
        "other segments": changed_messages(sent, 0, "", {"cu_seqlens": [0, 3]}),
        "no segments": changed_messages(sent, 0, "", {"cu_seqlens": None}),
        "fewer pixels": changed_messages(sent, 0, "vision", tensors={"pixels": pixels[1:]}),
        "floats": changed_messages(sent, 0, "vision", tensors={"pixels": pixels.float()}),
        "other sizes": changed_messages(sent, 0, "vision", {"grids_thw": [[1, 2, 3]]}),
        "places outside": changed_messages(
            sent, 0, "vision", tensors={"places": first["vision"].tensors["places"] + 10**6}
        ),
        "unknown blank sample": changed_messages(sent, 0, "vision", {"blank": [99]}),
    }


def test_malformed_response_is_retried_with_other_producer(site):
    sent = correct_messages(site)
    correct, expected = site.producer(), take(site.loader(), 1)
    valid_producer = BadProducer(*changed_messages(sent, 0, ""))
    assert take(site.loader(f"127.0.0.1:{valid_producer.port}"), 1) == expected  # a valid response
    valid_producer.shutdown()
    for name, parts in malformed_responses(sent).items():
        with BadProducer(*parts) as bad_producer:
            address = f"127.0.0.1:{bad_producer.port}"
            with pytest.raises(DataError, match=f"{address}: malformed response"):
                take(site.loader(address, retry_timeout_s=0.1), 1)
            for addresses in ([address, correct], [correct, address]):
                assert take(site.loader(*addresses), 1) == expected, name
    other = pa.schema([("x", pa.int64())])
    with BadProducer(pa.record_batch([[1]], schema=other), schema=other) as bad_producer:
        assert take(site.loader(f"127.0.0.1:{bad_producer.port}", correct), 1) == expected


def test_ranks_with_same_samples_share_decoding(site):
    """Check ranks of a replica that read no pixels, which send equal requests."""
    address = site.producer()
    work = site.opened[0].work
    no_pixels = DecodeAssignment({})
    loaders = [site.loader(address, reads=no_pixels) for _ in range(3)]
    actual = [take(loader, 2) for loader in loaders]
    assert actual[0] == actual[1] == actual[2]
    steps = len(actual[0])
    microbatches = len(actual[0][0][0])
    assert work.decoded == steps * microbatches
    take(site.loader(address), 2)
    assert work.decoded == 2 * steps * microbatches


def test_timed_out_request_is_not_decoded(site):
    address = site.producer()
    work = site.opened[0].work
    release = threading.Event()
    work._pool.submit(release.wait, 30)  # occupy the only worker
    loader = site.loader(address, timeout_s=0.3, retry_timeout_s=0.3)
    with pytest.raises(DataError, match="TimedOut"):
        take(loader, 1)
    deadline = time.monotonic() + 10
    while (work.unfinished or not site.opened[0]._request_slots.acquire(False)) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert work.unfinished == 0 and not work._jobs
    release.set()


def test_remote_producer_requires_encryption(site, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with pytest.raises(DataError, match="requires encryption"):
        take(site.loader("192.0.2.1:7", retry_timeout_s=0.1), 1)
