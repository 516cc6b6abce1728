"""One process reads a machine's streams: the same batches for every rank, each record read once."""

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
from torchmm.data.steps.elsewhere import START, Asked, digest_of
from torchmm.recipe.data_section import SourceConfig

SECRET = "of this machine"


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    """A stream, a source with an index, and what they are opened with."""
    texts = [{"text": caption(i)} for i in range(53)]
    write_jsonl(tmp_path / "stream" / "part.jsonl", texts)
    write_parquet(tmp_path / "pictures", caption_rows(11))
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
            SourceConfig(path=str(tmp_path / "pictures"), name="pictures"),
        ]
        return data_config(
            tmp_path, *(more.pop("sources", sources)), validation=sources[:1], **more
        )

    def start(**more):
        started.append(SharedReader(data(**more), training(), specs, SECRET))
        return started[-1].address

    def loader(streams, rank=0, **more):
        given = data(**{k: more.pop(k) for k in ("workers", "timeout_s", "sources") if k in more})
        validation = more.get("validation", False)
        found = find_samples(given, training(), streams=streams, validation=validation, **specs)
        return build_loader(
            given,
            training(),
            data_parallel_rank=rank,
            data_parallel_size=2,
            samples=found,
            **{"state": None, **specs, **more},
        )

    yield SimpleNamespace(
        data=data, start=start, loader=loader, specs=specs, started=started, path=tmp_path
    )
    for reader in started:
        reader.close()


@pytest.mark.parametrize(("workers", "arrange"), [(0, None), (2, None), (0, largest_first)])
def test_batches_are_those_of_ranks_that_read_for_themselves(site, workers, arrange):
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
        SourceConfig(path=str(site.path / "pictures"), name="pictures", streaming=True),
        SourceConfig(path=str(site.path / "stream"), name="stream", streaming=True),
    ]
    address = site.start(sources=sources)
    make = partial(site.loader, sources=sources, arrange=arrange)
    plain = [batches_of(make(None, rank), 4) for rank in range(2)]
    shared = [batches_of(make(address, rank, balance=ALTERNATE), 4) for rank in range(2)]
    alone = [batches_of(make(None, rank, balance=ALTERNATE), 4) for rank in range(2)]
    steps = [zip(*batches, strict=True) for batches in (shared, alone, plain)]
    for ours, others, theirs in zip(*steps, strict=True):
        assert_same_work(ours, theirs)
        for own, other, expected in zip(ours, others, theirs, strict=True):
            assert own.encoded == other.encoded
            assert own.state == other.state == expected.state
    homes = [
        (rank, home)
        for rank, batches in enumerate(shared)
        for batch in batches
        for microbatch in batch.microbatches
        for home in microbatch.read_for["vision"]
    ]
    assert any(rank != home for rank, home in homes)
    state = shared[1][1].state
    resumed = batches_of(make(address, 1, balance=ALTERNATE, state=state), 2)
    assert [batch.encoded for batch in resumed] == [batch.encoded for batch in shared[1][2:]]


def test_held_out_streams_are_read_there_too(site):
    address = site.start()
    for _ in range(2):  # every validation begins anew
        for rank in range(2):
            own = take(site.loader(None, rank, validation=True), 99)
            assert take(site.loader(address, rank, validation=True), 99) == own
            assert len(own) < 99


def test_a_rank_that_is_late_gets_the_same(site):
    address = site.start()
    late = iter(site.loader(address, 1))
    first = next(late)
    count = SLACK_STEPS + 6
    ahead = take(site.loader(address, 0), count)
    rest = [first, *islice(late, count - 1)]
    assert [(content(b), b.skipped, b.state) for b in rest] == take(site.loader(None, 1), count)
    assert ahead == take(site.loader(None, 0), count)


def test_each_record_is_read_once(site, monkeypatch):
    read = []
    once = JsonLinesStream.next
    monkeypatch.setattr(JsonLinesStream, "next", lambda self: (read.append(1), once(self))[1])
    reader = shared_reader._Reader(site.data(), training(), site.specs)
    reader((False, None), None)
    read.clear()
    counts = []
    for packs in ([0, 1], [2, 3]):
        state, after = None, START
        for _ in range(4):
            part = reader((False, Asked(after, state, False, packs, True)), None)
            state, after = part.state, digest_of(part.state)
            assert sorted(part.packs) == packs
        counts.append(len(read))
    assert counts[0] == counts[1] > 0


def test_samples_without_their_records_are_not_decoded(site):
    """What the ranks would get if records did not travel."""
    address = site.start()
    found = find_samples(site.data(), training(), streams=address, **site.specs)
    asked = Asked(START, None, False, [0, 1], records=False)
    part = found.ask(asked)
    assert all(item.record is None for pack in part.packs.values() for item in pack)
    with pytest.raises(AssertionError):
        found.decoder.decode([list(part.packs.values())])


def test_mistakes_in_the_data_are_told_to_every_rank(site):
    nowhere = [SourceConfig(path=str(site.path / "nothing"), streaming=True)]
    address = site.start(sources=nowhere)
    for rank in range(2):
        with pytest.raises((ConfigError, DataError), match="nothing") as caught:
            site.loader(address, rank, sources=nowhere)
        assert caught.value.exit_code == 3


def test_a_reader_that_was_killed_or_stopped_is_named(site):
    address = site.start()
    steps = iter(site.loader(address, timeout_s=2.0))
    next(steps)
    os.kill(address.pid, signal.SIGSTOP)
    with pytest.raises(DataError, match=rf"process {address.pid}, stopped|plan of the next step"):
        list(islice(steps, 9))
    os.kill(address.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=rf"process {address.pid}\) exited unexpectedly"):
        site.loader(address)


def test_only_who_knows_the_secret_is_answered(site):
    address = site.start()
    liar = ReaderClient(ReaderAddress(address.path, "guessed", address.pid), False, 2.0)
    with pytest.raises(DataError, match="exited unexpectedly"):
        liar.describe()
    assert ReaderClient(address, False, 60.0).describe().names == ["stream", "pictures"]


def test_it_ends_when_it_is_closed(site):
    address = site.start()
    site.started.pop().close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{address.pid}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(address.path).parent.exists()
