"""Invalid producer responses: each field is validated, and the error names the field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from data_cases import CLIP, QWEN, planned_shares, take
from test_producers import BadProducer, Site, site

from torchmm.common.errors import DataError
from torchmm.extensions.remote.producers.response_validation import unpack_step
from torchmm.extensions.remote.producers.server import Producer
from torchmm.extensions.remote.producers.wire_format import (
    MAX_VALUES_BYTES,
    TEXT_PART,
    TensorMessage,
    decode_message,
    encode_message,
    step_messages,
)

__all__ = ["site"]

WRONG_VALUES = [None, "x", True, -1, 1.5, float("nan"), 10**30, [], [1], [[1, 2]], {}, {"x": "y"}]
WRONG_TENSORS = {
    "float": lambda t: t.float() if t.dtype != torch.float32 else t.long(),
    "bytes": lambda t: t.to(torch.uint8) if t.dtype != torch.uint8 else t.long(),
    "one dimension more": lambda t: t[None],
    "flat": lambda t: t.flatten() if t.ndim > 1 else t[:0],
    "one row less": lambda t: t[..., :-1] if t.ndim == 1 else t[:-1],
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "one channel": lambda t: t[:, :1] if t.ndim > 1 else t[:1],
}


class Requested:
    """A requested microbatch and the messages that a correct producer sends for it."""

    def __init__(self, decoder, packs, images) -> None:
        self.decoder = decoder
        self.packs = packs
        step = decoder.decode_one(packs, images)
        self.corrupt = step.corrupt
        self.sent = {m.values["part"]: m for m in step_messages(step)}

    def unpack(self, messages):
        chunks = (
            SimpleNamespace(data=data, app_metadata=pa.py_buffer(values))
            for data, values in messages
        )
        return unpack_step(map(decode_message, chunks), [self.packs], self.decoder)

    def messages(self, part=None, values=None, tensors=None, without=()):
        """Return all messages as sent, one of them with changes."""
        results = []
        for name, message in self.sent.items():
            new_values, new_tensors = dict(message.values), dict(message.tensors)
            if name == part:
                new_values |= values or {}
                new_tensors |= tensors or {}
                for key in without:
                    new_values.pop(key, None)
                    new_tensors.pop(key, None)
            results.append(encode_message(TensorMessage(new_values, new_tensors), 0))
        return results

    def rejection(self, *args, **changes) -> str:
        with pytest.raises(ValueError) as caught:
            self.unpack(self.messages(*args, **changes))
        return str(caught.value)


def requests(site, spec):
    """Return microbatches with each kind of part, one of them with a corrupt sample."""
    read, drawn = site.sources
    site.sources = [read, drawn.model_copy(update={"weight": 0.2})]  # some sequences have none
    loader = site.loader(spec=spec)
    decoder = loader._decoder
    results = {}
    for planned in planned_shares(loader):
        for packs, images in zip(planned, decoder.images_to_decode(planned), strict=True):
            each = Requested(decoder, packs, images)
            kind = (*each.sent, "corrupt") if each.corrupt else tuple(each.sent)
            results.setdefault(kind, each)
        if any("corrupt" in kind for kind in results) and len(results) > 2:
            return list(results.values())
    raise AssertionError(results.keys())


@pytest.fixture(scope="module", params=["clip", "qwen", "fractional"])
def requested(request, tmp_path_factory, tokenizer, text_spec):
    """Return microbatches for one encoder and type of position ids."""
    spec = CLIP if request.param == "clip" else QWEN
    if request.param != "clip":
        times = "sides" if request.param == "qwen" else "fractional"
        text_spec = replace(text_spec, positions="mrope", clip_times=times)
    return requests(Site(tmp_path_factory.mktemp("site"), tokenizer, text_spec), spec)


def test_valid_response_is_accepted(requested):
    for each in requested:
        step = each.unpack(each.messages())
        (actual,) = step.microbatches
        assert step.corrupt == each.corrupt
        assert {m.values["part"] for m in step_messages(step)} == set(each.sent)
        for message in step_messages(step):
            sent = each.sent[message.values["part"]]
            assert json.dumps(message.values) == json.dumps(sent.values)
            assert all(torch.equal(t, sent.tensors[n]) for n, t in message.tensors.items())
        assert actual.meta.tokens == len(actual.input_ids_T)


def test_invalid_value_is_rejected_with_name(requested):
    """Check each value of each part with wrong types, missing, and with an unknown key."""
    case_count = 0
    for each in requested:
        for part, message in each.sent.items():
            for key, valid in message.values.items():
                for wrong in WRONG_VALUES:
                    if json.dumps(wrong) == json.dumps(valid) or (key, wrong) == ("corrupt", {}):
                        continue
                    assert key in each.rejection(part, {key: wrong}), (part, key, wrong)
                    case_count += 1
                assert key in each.rejection(part, without=[key]) or key == "part"
            assert "unknown" in each.rejection(part, {"unknown": 1})
    assert case_count > 300


def test_invalid_tensor_is_rejected_with_name(requested):
    """Check each tensor of each part with wrong dtype or shape, missing, and unknown."""
    case_count = 0
    for each in requested:
        for part, message in each.sent.items():
            for name, tensor in message.tensors.items():
                for kind, change in WRONG_TENSORS.items():
                    wrong = change(tensor)
                    if wrong.dtype == tensor.dtype and wrong.shape == tensor.shape:
                        continue
                    assert name in each.rejection(part, tensors={name: wrong}), (part, name, kind)
                    case_count += 1
                assert name in each.rejection(part, without=[name])
            if len(message.tensors) < 3:
                extra = torch.zeros(3, dtype=torch.int64)
                assert "extra" in each.rejection(part, tensors={"extra": extra})
    assert case_count > 50


def wrong_numbers(each: Requested):
    """Yield (part, field, changes) with correct types and shapes, but wrong values."""
    text = each.sent[TEXT_PART]
    ids, targets, positions = (
        text.tensors[key] for key in ("input_ids_T", "targets_T", "position_ids")
    )
    size = each.decoder.reader.text_spec.vocab_size
    for value in (-1, size, 2**62):
        yield TEXT_PART, "input_ids_T", {"tensors": {"input_ids_T": put(ids, 1, value)}}
    for value in (-1, size, int(ids[2]) ^ 1):
        yield TEXT_PART, "targets_T", {"tensors": {"targets_T": put(targets, 1, value)}}
    yield TEXT_PART, "position_ids", {"tensors": {"position_ids": put(positions, 3, 10**6)}}
    yield TEXT_PART, "position_ids", {"tensors": {"position_ids": positions + 1}}
    yield (
        TEXT_PART,
        "cu_seqlens",
        {"values": {"cu_seqlens": [0, 5, *text.values["cu_seqlens"][1:]]}},
    )
    yield (
        TEXT_PART,
        "cu_seqlens",
        {"values": {"cu_seqlens": list(map(float, text.values["cu_seqlens"]))}},
    )
    yield TEXT_PART, "corrupt", {"values": {"corrupt": {"other[99]": "damaged"}}}
    yield (
        TEXT_PART,
        "corrupt",
        {"values": {"corrupt": dict.fromkeys(each.corrupt, 3) or {"x[1]": ""}}},
    )
    yield TEXT_PART, "decoded_media", {"values": {"decoded_media": 10**6}}
    if not each.corrupt:  # otherwise, blank samples are expected
        name = f"{each.packs[0][0].meta.source}[{each.packs[0][0].meta.index}]"
        yield TEXT_PART, "", {"values": {"corrupt": {name: "damaged"}}}
    for part, message in each.sent.items():
        if part == TEXT_PART:
            continue
        places = message.tensors["places"]
        for value in (-1, len(ids), 2**62):
            yield part, "places|position", {"tensors": {"places": put(places, 0, value)}}
        yield part, "places|position", {"tensors": {"places": put(places, 0, int(places[1]))}}
        grids = message.values["grids_thw"]
        yield part, "grids_thw", {"values": {"grids_thw": [[t, w * h, 1] for t, h, w in grids]}}
        yield part, "grids_thw", {"values": {"grids_thw": grids[:-1]}}
        yield part, "held", {"values": {"held": list(range(len(grids)))}}
        if "blank" in message.values:
            yield part, "blank", {"values": {"blank": [*message.values["blank"], 99]}}
            yield part, "places|position", {"tensors": {"places": places.flip(0) - 1}}
            yield part, "patches_per_token", {"values": {"patches_per_token": 0}}
        else:
            times, contexts = message.values["times"], message.values["contexts"]
            yield part, "times", {"values": {"times": [1 - time for time in times]}}
            yield part, "contexts", {"values": {"contexts": [each + 1 for each in contexts]}}
            counted = [not each for each in message.values["counted"]]
            yield part, "counted", {"values": {"counted": counted}}
            yield part, "places|position", {"tensors": {"places": places.flip(0)}}


def put(tensor, index, value):
    changed = tensor.clone()
    changed[..., index] = value
    return changed


def test_out_of_range_value_is_rejected_with_name(requested):
    case_count = 0
    for each in requested:
        for part, field, changes in wrong_numbers(each):
            assert re.search(field, each.rejection(part, **changes)), (part, field, changes)
            case_count += 1
    assert case_count > 50


def test_duplicate_missing_and_unknown_parts_are_rejected(requested):
    each = next(each for each in requested if len(each.sent) > 1)
    sent = each.messages()
    other = TensorMessage(
        dict(each.sent[TEXT_PART].values) | {"part": "other"}, each.sent[TEXT_PART].tensors
    )
    for messages, why in {
        "twice": ([sent[0], *sent], "sent twice"),
        "less": (sent[:-1], "parts"),
        "nothing": ([], "parts"),
        "unknown": ([*sent, encode_message(other, 0)], "part = 'other'"),
        "other microbatch": ([(sent[0][0], sent[0][1].replace(b'batch": 0', b'batch": 1'))], "= 1"),
        "bool": ([(sent[0][0], sent[0][1].replace(b'batch": 0', b'batch": false'))], "False"),
    }.values():
        with pytest.raises(ValueError, match=why):
            each.unpack(messages)


def test_endless_response_is_rejected_early(requested):
    """Check that the reader stops after the first message that was not requested."""
    each = next(each for each in requested if len(each.sent) > 1)
    read = 0

    def endless():
        nonlocal read
        for number in count():
            read += 1
            values = dict(each.sent[TEXT_PART].values) | {
                "part": f"part {number}" if number else TEXT_PART
            }
            yield encode_message(TensorMessage(values, each.sent[TEXT_PART].tensors), 0)

    with pytest.raises(ValueError, match="part 1"):
        each.unpack(endless())
    assert read == 2
    large = encode_message(
        TensorMessage(dict(each.sent[TEXT_PART].values) | {"x": "x" * MAX_VALUES_BYTES}, {}), 0
    )
    with pytest.raises(ValueError, match="bytes of JSON"):
        each.unpack([large])


class WrongIds(Producer):
    """Producer that returns token ids above the vocabulary size."""

    request_count = 0

    def do_get(self, context, ticket):
        self.request_count += 1
        return super().do_get(context, ticket)

    def _wait(self, job, context):
        text, *others = super()._wait(job, context)
        tensors = text.tensors | {"input_ids_T": text.tensors["input_ids_T"] + 10**6}
        return [TensorMessage(text.values, tensors), *others]


def test_malformed_producer_is_logged_and_excluded(site, monkeypatch, caplog):
    expected = take(site.loader(), 6)
    monkeypatch.setattr("test_producers.Producer", WrongIds)
    wrong = site.producer()
    monkeypatch.undo()
    right = site.producer()
    assert take(site.loader(wrong, right), 6) == expected
    (record,) = [r for r in caplog.records if "wrong response" in r.message]
    assert wrong in record.message and "input_ids_T" in record.message
    assert site.opened[0].request_count == 1  # one request of one data worker in the run
    with pytest.raises(DataError, match=f"no producer.*{wrong}: malformed response.*input_ids_T"):
        take(site.loader(wrong, retry_timeout_s=60), 1)  # without a retry


def test_endless_producer_is_excluded(site):
    loader = site.loader()
    decoder = loader._decoder
    planned = next(planned_shares(loader))
    step = decoder.decode_one(planned[0], decoder.images_to_decode(planned)[0])
    (text, *_) = step_messages(step)
    endless = (
        encode_message(TensorMessage(text.values | {"part": f"p{n}"}, text.tensors), 0)
        for n in count()
    )
    with BadProducer(*[]) as bad_server:
        bad_server.parts = endless
        right = site.producer()
        address = f"127.0.0.1:{bad_server.port}"
        assert take(site.loader(address, right), 2) == take(site.loader(), 2)
        assert next(endless) is not None
