"""Tiles and audio in the messages of producers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from model_cases import SPEECH
from speech_cases import PER_TOKEN
from test_speech_files import open_documents
from test_tile_model import SHRUNK, TILED, fail_to_decode, open_run

from torchmm.common.batch import Microbatch
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.items import Item
from torchmm.data.microbatch_builder import sample_name
from torchmm.extensions.remote.producers.response_validation import unpack_step
from torchmm.extensions.remote.producers.wire_format import (
    decode_message,
    encode_message,
    step_messages,
)

__all__ = ["open_run"]


def through_messages(
    microbatch: Microbatch, decoder: StepDecoder, corrupt: Iterable[str] = ()
) -> Microbatch:
    """Return a microbatch of one pack as the trainer receives it from a producer."""
    step = DecodedStep([microbatch], dict.fromkeys(corrupt, "damaged"))
    sent = [encode_message(message, 0) for message in step_messages(step)]
    chunks = [SimpleNamespace(data=batch, app_metadata=pa.py_buffer(v)) for batch, v in sent]
    packs = [[Item(0, 0, meta) for meta in microbatch.meta.samples]]
    arrived = map(decode_message, chunks)  # type: ignore[arg-type]
    return unpack_step(arrived, [packs], decoder).microbatches[0]


@pytest.mark.parametrize("is_corrupt", [False, True])
@pytest.mark.parametrize(("family", "changes"), TILED)
def test_producer_response_has_same_tiles(
    family, changes, is_corrupt, open_run, monkeypatch
) -> None:
    if is_corrupt:
        monkeypatch.setattr("torchmm.data.media.tiles.decode_rgb", fail_to_decode)
    _, microbatches, _, _ = open_run(family, corrupt=is_corrupt, **changes)
    for microbatch in microbatches:
        corrupt = [sample_name(s) for s in microbatch.meta.samples if is_corrupt]
        received = through_messages(microbatch, open_run.decoder, corrupt)
        ours, theirs = microbatch.encoders["vision"], received.encoders["vision"]
        assert theirs.tile_regions == ours.tile_regions and theirs.undecodable == ours.undecodable
        assert torch.equal(theirs.positions_K, ours.positions_K)
        assert torch.equal(theirs.pixels, ours.pixels)
        assert torch.equal(received.position_ids, microbatch.position_ids)


@pytest.mark.parametrize("changes", [{}, SHRUNK])
def test_invalid_kept_tiles_are_rejected(changes, open_run) -> None:
    _, (microbatch, *_), _, _ = open_run("llava_onevision", **changes)
    inputs = microbatch.encoders["vision"]
    assert inputs.tile_regions is not None
    valid = [list(retained) for retained in inputs.tile_regions]
    wrong = [None, valid[:-1], [None, *valid[1:]], [[0] * 6, *valid[1:]]]
    for image, retained in enumerate(valid):
        for position in range(6):
            for value in (-1, 10**6, 1.0, True, "x", None, [[9, 9]] * 6):
                if json.dumps(value) != json.dumps(retained[position]):
                    other = [*retained[:position], value, *retained[position + 1 :]]
                    wrong.append([*valid[:image], other, *valid[image + 1 :]])
        shrunk = retained[5]
        for position in range(6 if shrunk else 0):
            for value in (-1, 10**6, [0, 10**6], [3, 1], [0, 1, 2], 0.5):
                other = [*retained[:5], [*shrunk[:position], value, *shrunk[position + 1 :]]]
                wrong.append([*valid[:image], other, *valid[image + 1 :]])
    for values in wrong:
        inputs.tile_regions = values
        with pytest.raises(ValueError, match="kept"):
            through_messages(microbatch, open_run.decoder)


@pytest.mark.parametrize("name", SPEECH)
def test_producer_response_has_patches_per_token(name, tmp_path) -> None:
    _, _, loader = open_documents(name, tmp_path)
    (batch,) = islice(loader, 1)
    received = through_messages(batch.microbatches[0], loader._decoder)
    assert received.encoders["audio"].patches_per_token == PER_TOKEN[name]
