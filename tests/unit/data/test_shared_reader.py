"""A process that reads the streams of a host: equal batches on every rank, one read per record."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_cases import (
    CLIP,
    caption,
    caption_rows,
    content,
    data_config,
    largest_first,
    take,
    training,
    write_jsonl,
    write_parquet,
)
from test_balanced_steps import ALTERNATE, assert_same_work, batches_of

from torchmm.common.errors import ConfigError, DataError
from torchmm.data import shared_reader
from torchmm.data.build import build_loader
from torchmm.data.samples import find_samples
from torchmm.data.shared_reader import SLACK_STEPS, ReaderAddress, ReaderClient, SharedReader
from torchmm.data.sources.streams import JsonLinesStream
from torchmm.data.steps.remote_steps import START_DIGEST, StepRequest, digest_state
from torchmm.recipe.data_section import SourceConfig

SECRET = "of this host"


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    """Yield a stream, an indexed source, and functions that open them."""
    texts = [{"text": caption(i)} for i in range(53)]
    write_jsonl(tmp_path / "stream" / "part.jsonl", texts)
    write_parquet(tmp_path / "images", caption_rows(11))
    specs = {
        "tokenizer": tokenizer,
        "text_spec": text_spec,
        "generator_spec": None,
        "image_specs": {"vision": CLIP},
    }
    started = []

    def data(**more):
        sources = [
            SourceConfig(path=str(tmp_path / "stream"), name="stream", streaming=True),
            SourceConfig(path=str(tmp_path / "images"), name="images"),
        ]
        return data_config(
            tmp_path, *(more.pop("sources", sources)), validation=sources[:1], **more
        )

    def start(**more):
        started.append(SharedReader(data(**more), training(), specs, SECRET))
        return started[-1].address

    def loader(streams, rank=0, **more):
        config = data(**{k: more.pop(k) for k in ("workers", "timeout_s", "sources") if k in more})
        validation = more.get("validation", False)
        samples = find_samples(config, training(), streams=streams, validation=validation, **specs)
        return build_loader(
            config,
            training(),
            data_parallel_rank=rank,
            data_parallel_size=2,
            samples=samples,
            **{"state": None, **specs, **more},
        )

    yield SimpleNamespace(
        data=data, start=start, loader=loader, specs=specs, started=started, path=tmp_path
    )
    for reader in started:
        reader.close()


def test_digest_is_independent_of_key_order():
    state = {"steps": 3, "feeds": {"a": 1, "b": 2}}
    reordered = {"feeds": {"b": 2, "a": 1}, "steps": 3}
    assert digest_state(state) == digest_state(reordered)
    assert digest_state(state) != digest_state(state | {"steps": 4})


@pytest.mark.parametrize(("workers", "arrange"), [(0, None), (2, None), (0, largest_first)])
def test_shared_reader_batches_match_separate_readers(site, workers, arrange):
    address = site.start(workers=workers)
    make = partial(site.loader, workers=workers, arrange=arrange)
    shares = []
    for rank in range(2):
        expected = take(make(None, rank))
        assert take(make(address, rank)) == expected
        shares.append(expected)
    assert shares[0] != shares[1]
    resumed = make(address, 1, state=shares[1][2][2])
    assert take(resumed, 3) == shares[1][3:]


@pytest.mark.parametrize("arrange", [None, largest_first])
def test_streamed_images_are_balanced(site, arrange):
    sources = [
        SourceConfig(path=str(site.path / "images"), name="images", streaming=True),
        SourceConfig(path=str(site.path / "stream"), name="stream", streaming=True),
    ]
    address = site.start(sources=sources)
    make = partial(site.loader, sources=sources, arrange=arrange)
    plain = [batches_of(make(None, rank), 4) for rank in range(2)]
    shared = [batches_of(make(address, rank, balance=ALTERNATE), 4) for rank in range(2)]
    single = [batches_of(make(None, rank, balance=ALTERNATE), 4) for rank in range(2)]
    steps = [zip(*batches, strict=True) for batches in (shared, single, plain)]
    for ours, separate, theirs in zip(*steps, strict=True):
        assert_same_work(ours, theirs)
        for shared_batch, separate_batch, expected in zip(ours, separate, theirs, strict=True):
            assert shared_batch.rank_images == separate_batch.rank_images
            assert shared_batch.state == separate_batch.state == expected.state
    homes = [
        (rank, home)
        for rank, batches in enumerate(shared)
        for batch in batches
        for microbatch in batch.microbatches
        for home in microbatch.image_sources["vision"]
    ]
    assert any(rank != home for rank, home in homes)
    state = shared[1][1].state
    resumed = batches_of(make(address, 1, balance=ALTERNATE, state=state), 2)
    assert [batch.rank_images for batch in resumed] == [
        batch.rank_images for batch in shared[1][2:]
    ]


def test_shared_reader_reads_validation_streams(site):
    address = site.start()
    for _ in range(2):  # every validation starts from the first record
        for rank in range(2):
            expected = take(site.loader(None, rank, validation=True), 99)
            assert take(site.loader(address, rank, validation=True), 99) == expected
            assert len(expected) < 99


def test_late_rank_receives_same_batches(site):
    address = site.start()
    late = iter(site.loader(address, 1))
    first = next(late)
    count = SLACK_STEPS + 6
    ahead = take(site.loader(address, 0), count)
    batches = [first, *islice(late, count - 1)]
    assert [(content(b), b.skipped, b.state) for b in batches] == take(site.loader(None, 1), count)
    assert ahead == take(site.loader(None, 0), count)


def test_shared_reader_reads_each_record_once(site, monkeypatch):
    read = []
    once = JsonLinesStream.next
    monkeypatch.setattr(JsonLinesStream, "next", lambda self: (read.append(1), once(self))[1])
    reader = shared_reader._RequestHandler(site.data(), training(), site.specs)
    reader((False, None), None)
    read.clear()
    counts = []
    for packs in ([0, 1], [2, 3]):
        state, after = None, START_DIGEST
        for _ in range(4):
            part = reader((False, StepRequest(after, state, False, packs, True)), None)
            state, after = part.state, digest_state(part.state)
            assert sorted(part.packs) == packs
        counts.append(len(read))
    assert counts[0] == counts[1] > 0


def test_items_without_records_cannot_be_decoded(site):
    """Check that a rank cannot decode a plan without records."""
    address = site.start()
    actual = find_samples(site.data(), training(), streams=address, **site.specs)
    request = StepRequest(START_DIGEST, None, False, [0, 1], records=False)
    part = actual.request(request)
    assert all(item.record is None for pack in part.packs.values() for item in pack)
    with pytest.raises(AssertionError):
        actual.decoder.decode([list(part.packs.values())])


def test_data_error_is_reported_to_every_rank(site):
    nowhere = [SourceConfig(path=str(site.path / "nothing"), streaming=True)]
    address = site.start(sources=nowhere)
    for rank in range(2):
        with pytest.raises((ConfigError, DataError), match="nothing") as caught:
            site.loader(address, rank, sources=nowhere)
        assert caught.value.exit_code == 3


def test_killed_or_stopped_reader_is_reported(site):
    address = site.start()
    steps = iter(site.loader(address, timeout_s=2.0))
    next(steps)
    os.kill(address.pid, signal.SIGSTOP)
    with pytest.raises(DataError, match=rf"process {address.pid}, stopped|plan of the next step"):
        list(islice(steps, 9))
    os.kill(address.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=rf"process {address.pid}\) exited unexpectedly"):
        site.loader(address)


def test_reader_rejects_wrong_secret(site):
    address = site.start()
    intruder = ReaderClient(ReaderAddress(address.path, "guessed", address.pid), False, 2.0)
    with pytest.raises(DataError, match="exited unexpectedly"):
        intruder.describe()
    assert ReaderClient(address, False, 60.0).describe().names == ["stream", "images"]


def test_closed_reader_process_exits(site):
    address = site.start()
    site.started.pop().close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{address.pid}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(address.path).parent.exists()
