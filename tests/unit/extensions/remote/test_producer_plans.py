"""Trainers without data and index: any producer plans the same steps."""

from __future__ import annotations

import json
import time
from functools import partial, reduce
from itertools import islice
from operator import getitem
from types import SimpleNamespace

import pytest
from data_cases import (
    CLIP,
    caption_rows,
    content,
    data_config,
    largest_first,
    take,
    training,
    write_parquet,
)
from pyarrow import flight
from test_producers import GENERATOR

from torchmm.common.errors import CheckpointError, DataError
from torchmm.data.build import build_loader
from torchmm.data.samples import RemoteSamples, find_samples
from torchmm.data.steps.remote_steps import LazyPacks, StepPart, StepRequest
from torchmm.extensions.remote.producers.rpc import FlightServer
from torchmm.extensions.remote.producers.server import open_producer
from torchmm.extensions.remote.producers.step_plans import VALUE_ERRORS
from torchmm.recipe.data_section import ProducersConfig, SourceConfig


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    """Yield producers of two sources and a validation source, and recipes with and without data."""
    write_parquet(tmp_path / "captions", caption_rows(23))
    held_out = [row | {"references": ["three", "3"]} for row in caption_rows(7)]
    write_parquet(tmp_path / "held_out", held_out)
    opened = []
    specs = {
        "tokenizer": tokenizer,
        "text_spec": text_spec,
        "generator_spec": GENERATOR,
        "image_specs": {"vision": CLIP},
    }

    def data(place, addresses=(), plan=False, **more):
        sources = [
            SourceConfig(path=f"{place}/captions", name="read"),
            SourceConfig(path=f"{place}/captions", name="drawn", target_image_column="image"),
        ]
        producers = ProducersConfig(
            addresses=list(addresses), plan=plan, retry_timeout_s=more.pop("retry_timeout_s", 20)
        )
        held_out = [SourceConfig(path=f"{place}/held_out", name="held_out")]
        config = data_config(tmp_path, *sources, producers=producers, **more)
        return config.model_copy(update={"validation": held_out})

    def start(plan=True, **sizes):
        served = data(tmp_path, ["127.0.0.1:1"], plan)
        producer = open_producer(
            served, training(**sizes), specs, "127.0.0.1:0", workers=0, token=None, certificate=None
        )
        opened.append(producer)
        return f"127.0.0.1:{producer.port}"

    def loader(*addresses, rank=0, ranks=2, retry_timeout_s=20.0, sizes=None, workers=0, **more):
        remote_config = data(
            "/nowhere", addresses, plan=True, retry_timeout_s=retry_timeout_s, workers=workers
        )
        chosen = remote_config if addresses else data(tmp_path)
        return build_loader(
            chosen,
            training(**(sizes or {})),
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            **{"state": None, **specs, **more},
        )

    yield SimpleNamespace(start=start, loader=loader, data=data, specs=specs, opened=opened)
    for producer in opened:
        producer.close()


def test_missing_sequences_are_requested_together():
    requests = []

    def request(numbers, with_records):
        requests.append((numbers, with_records))
        return StepPart({0: "other", 1: "second", 2: "third"}, [], {}, 0.0)

    packs = LazyPacks({0: "first"}, request)
    assert packs(0) == "first" and not requests
    assert (packs(2), packs(1), packs(0)) == ("third", "second", "first")
    assert requests == [(None, False)]


@pytest.mark.parametrize(("arrange", "workers"), [(None, 2), (largest_first, 0)])
def test_planned_steps_match_ranks_with_data(site, arrange, workers):
    address = site.start()
    shares = []
    for rank in range(2):
        expected = take(site.loader(rank=rank, arrange=arrange))
        assert take(site.loader(address, rank=rank, arrange=arrange, workers=workers)) == expected
        shares.append(expected)
    assert shares[0] != shares[1]  # the comparison depends on the rank
    natural = take(site.loader(address))
    assert (natural == shares[0]) == (arrange is None)


def test_next_metas_match_ranks_with_data(site):
    ours, theirs = site.loader(), site.loader(site.start())
    for _, _ in islice(zip(ours, theirs, strict=True), 3):
        assert list(theirs.next_metas()) == list(ours.next_metas())


def test_producer_failover_preserves_plan(site):
    expected = take(site.loader())
    addresses = [site.start(), site.start()]
    steps = iter(site.loader(*addresses))
    actual = [next(steps)]
    site.opened[0].close()
    actual += islice(steps, 5)
    assert [(content(b), b.skipped, b.state) for b in actual] == expected
    resumed = site.loader(addresses[1], state=actual[2].state)
    assert take(resumed, 3) == expected[3:]


def test_validation_samples_and_images_are_fetched(site):
    address = site.start()
    ours, theirs = site.loader(validation=True), site.loader(address, validation=True)
    expected = take(ours, 99)
    assert take(theirs, 99) == expected and len(expected) < 99
    images = [loader.images("held_out", 3) for loader in (ours, theirs)]
    assert [image.tobytes() for image in images[0]] == [image.tobytes() for image in images[1]]
    assert len(images[0]) == 1
    assert ours.references("held_out", 3) == theirs.references("held_out", 3) == ("three", "3")


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"seed": 5}, "training.seed 3 -> 5"),
        ({"global_batch_size": 8}, "training.global_batch_size 4 -> 8"),
        ({"sequence_length": 48}, "training.sequence_length 64 -> 48"),
    ],
)
def test_different_training_settings_are_rejected(site, sizes, why):
    with pytest.raises(DataError, match=why):
        site.loader(site.start(), sizes=sizes)


def test_missing_plan_and_changed_data_are_reported(site):
    with pytest.raises(DataError, match=r"does not set data\.producers\.plan = true"):
        site.loader(site.start(plan=False), retry_timeout_s=0.2)
    assert take(site.loader(site.start(plan=False), site.start()), 1) == take(site.loader(), 1)
    state = take(site.loader(), 1)[0][2]
    changed = state | {"content": state["content"] | {"order": {"training.seed": 9}}}
    address = site.start()
    with pytest.raises(CheckpointError, match=r"training\.seed 9 -> 3"):
        site.loader(address, state=changed)
    loader = site.loader(address, state=changed, resume_changed=True)
    assert take(loader, 2) == take(site.loader(state=changed, resume_changed=True), 2)


def test_steps_are_planned_once_for_all_ranks(site, monkeypatch):
    address = site.start()
    positions = []
    plans = site.opened[0]._plans._steps[False]
    make = plans._make_steps
    plans._make_steps = lambda *position: (positions.append(position), make(*position))[1]
    for rank in range(2):
        take(site.loader(address, rank=rank))
    assert positions == [(None, False)]


class BadServer(FlightServer):
    """Server with an invalid response to every action."""

    def __init__(self, answers):
        super().__init__("127.0.0.1:0")
        self.answers = answers

    def do_action(self, context, action):
        return iter([flight.Result(self.answers.get(action.type, b"{}"))])


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"\xff", b'{"packs": 1}', b'{"packs": [[0, [[0]]]], "state": {}}', b"[" * 10**5],
)
def test_malformed_plan_is_rejected(site, answer):
    address = site.start()
    description = site.opened[0]._plans.answer("describe", b'{"held_out": false}')
    bad_server = BadServer({"describe": description, "plan": answer})
    try:
        with pytest.raises(DataError, match="malformed response"):
            site.loader(f"127.0.0.1:{bad_server.port}", retry_timeout_s=0.2)
        # Another producer is requested instead.
        assert take(site.loader(f"127.0.0.1:{bad_server.port}", address)) == take(site.loader())
    finally:
        bad_server.shutdown()


JUNK = [None, "x", True, -1, 1.5, 10**30, [], {}]


def path_to(plan, field):
    """Return the path to the first sample whose list `field` is not empty."""
    return next(
        ["packs", n, 1, i]
        for n, (_, pack) in enumerate(plan["packs"])
        for i in range(len(pack))
        if pack[i][field]
    )


def wrong_plans(plan):
    """Yield plans with one wrong value: of each type, out of range, missing, unknown."""
    numbers = [number for number, _ in plan["packs"]]
    read, drawn = path_to(plan, 4), path_to(plan, 6)
    image, to_generate = [*read, 4, 0], [*drawn, 6, 0]
    changes = [
        (["packs", 0, 0], [*JUNK, 99, numbers[1]]),
        (["packs"], [plan["packs"][1:], [*plan["packs"], [99, []]], *JUNK]),
        (["packs", 0, 1], [plan["packs"][0][1] * 50]),
        *(([*read, place], JUNK) for place in range(4)),  # feed, epoch, index, tokens
        ([*read, 0], [2]),
        ([*read, 5], ["other", True, 3, []]),
        (read, [[], [0, 0, 0]]),
        *(
            ([*image, place], [value for value in JUNK if place != 5 or value])
            for place in range(8)
        ),
        ([*image, 2], [10**6]),
        ([*image, 3], [10**6]),
        ([*image, 5], ["other", []]),
        *(([*to_generate, 0, place], [*JUNK, 0, 10**6]) for place in range(3)),
        ([*to_generate, 1], [*JUNK, 0, 10**6]),
        (["epoch"], [value for value in JUNK if value != 1.5]),
    ]
    for path, values in changes:
        for value in values:
            copy = json.loads(json.dumps(plan))
            reduce(getitem, path[:-1], copy)[path[-1]] = value
            yield path, value, copy
    for key in ("packs", "state", "epoch", "skipped", "notice"):
        yield [key], "missing", {name: value for name, value in plan.items() if name != key}


def test_wrong_plan_is_rejected(site):
    site.start()
    plans = site.opened[0]._plans
    request = StepRequest("start", None, False, None, False)
    body = json.dumps(request._asdict() | {"held_out": False}).encode()
    plan = json.loads(plans.answer("plan", body))
    trainer = find_samples(
        site.data("/nowhere", [f"127.0.0.1:{site.opened[0].port}"], plan=True),
        training(),
        **site.specs,
    )
    read = partial(trainer.preview._read_part, request)
    assert set(read(plan).packs) == set(range(4))
    plan_count = 0
    for path, value, wrong in wrong_plans(plan):
        with pytest.raises((ValueError, *VALUE_ERRORS)):
            pytest.fail(f"accepted: {path} = {value!r}: {read(wrong)}")
        plan_count += 1
    assert plan_count > 150


@pytest.mark.parametrize(
    "changes",
    [{"names": ["a", "a"]}, {"names": "ab"}, {"identity": {}}, {"identity": []}, {"digest": ["x"]},
     {"global_batch_size": True}, {"listed": 3}, {"fingerprint": None}, {"other": 1}],
)  # fmt: skip
def test_malformed_description_excludes_producer(site, changes):
    address = site.start()
    description = json.loads(site.opened[0]._plans.answer("describe", b'{"held_out": false}'))
    bad_server = BadServer({"describe": json.dumps(description | changes).encode()})
    try:
        with pytest.raises(DataError, match="malformed response"):
            site.loader(f"127.0.0.1:{bad_server.port}", retry_timeout_s=60)
        both = site.loader(f"127.0.0.1:{bad_server.port}", address)
        assert take(both, 1) == take(site.loader(), 1)
    finally:
        bad_server.shutdown()


class Endless(FlightServer):
    """Responds to each action without end."""

    def do_action(self, context, action):
        while True:
            yield flight.Result(b"{}")


def test_endless_response_to_action_is_rejected(site):
    server = Endless("127.0.0.1:0")
    begin_s = time.monotonic()
    with pytest.raises(DataError, match="more than one response"):
        site.loader(f"127.0.0.1:{server.port}", retry_timeout_s=60)
    assert time.monotonic() - begin_s < 30
    server.shutdown()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"held_out": 3}', b'{"held_out": false, "after": "start"}',
     b'{"held_out": false, "after": "start", "state": null, "resume_changed": false,'
     b' "packs": [99], "records": false}'],
)  # fmt: skip
def test_malformed_plan_request_is_rejected(site, body):
    site.start()
    with pytest.raises(ValueError, match=r"invalid|Expecting|validation|packed"):
        site.opened[0]._plans.answer("plan", body)


def test_trainer_with_remote_plan_opens_no_source(site):
    samples = find_samples(
        site.data("/nowhere", [site.start()], plan=True), training(), **site.specs
    )
    assert isinstance(samples, RemoteSamples)
    assert samples.feeds() == {"read": 0, "drawn": 1}
    assert samples.digest()[0] == "samples: read 23, drawn 23; 0 corrupt"
