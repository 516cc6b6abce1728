"""What trainers and producers send each other: JSON for requests, Arrow record batches for tensors.

A request names samples (source, epoch, index) and which of their images the rank decodes, so that
producers need no state. It has no sizes: those are in the producer's own index, which is the
trainer's, as fingerprints are compared. So nothing that is sent makes a producer allocate anything.

The answer is a stream of small messages: for every microbatch its text, then what each module reads
of it. Pixels are bytes (`torchmm.common.dtypes`), noise is not sent at all. A message is one
row of bytes, a column for each tensor, so that none is copied; all else is JSON beside it.

Rejected: asking only by (step, rank), as DistTrain (§4.2) describes, because producers would then
also have to plan, in the trainer's order and from its state; and pickle, which runs code of any
peer that answers.

Shape legend as in `torchmm.common.batch`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import flight
from torch import Tensor

from torchmm.common.module_names import GENERATOR
from torchmm.common.row_slices import Reads, Share
from torchmm.data.decode import DecodedStep
from torchmm.data.items import PackItems

VERSION = 6
BUSY = b"busy"
"""Comes with errors of who has no room at the moment."""
REFUSED = b"refused"
TOO_LARGE = b"too large"
"""Come with errors that another try does not fix."""

TEXT = ""
"""The part of a microbatch that is not a module's."""
TEXT_TENSORS = ("input_ids_T", "targets_T", "position_ids")
GENERATOR_LISTS = ("times", "grids_thw", "contexts", "counted", "held")
COUNTS = ("corrupt", "decoded_media", "read_bytes")
SCHEMA = pa.schema([(str(number), pa.large_binary()) for number in range(3)])
MAX_VALUES_BYTES = 8 * 10**6
"""Limit on the JSON of a message. Python objects of hostile JSON use some 20 times its bytes."""
MOST_RANKS = 1 << 16
DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}


class Request(NamedTuple):
    """What a trainer asks for.

    Attributes:
        fingerprint: of the data and how they are prepared.
        samples: source, epoch and index of each, by microbatch and pack of one rank's share of a
            step.
        reads: which of their images it decodes; None: all.
        most_bytes: of a message.
    """

    fingerprint: str
    samples: list[list[list[tuple[int, int, int]]]]
    reads: Reads | None = None
    most_bytes: int = 10**9


class Message(NamedTuple):
    """A part of an answer."""

    values: dict[str, Any]
    """For JSON; `microbatch` and `part` are always there."""
    tensors: dict[str, Tensor]


def names_of(microbatches: Sequence[Sequence[PackItems]]) -> list[list[list[tuple[int, int, int]]]]:
    """What a request says of these samples."""
    return [
        [[(item.feed, item.epoch, item.meta.index) for item in pack] for pack in packs]
        for packs in microbatches
    ]


def pack_request(request: Request) -> bytes:
    """As it is sent."""
    values: dict[str, Any] = {"version": VERSION} | request._asdict()
    values["reads"] = request.reads and [request.reads.shares, request.reads.context]
    return json.dumps(values).encode()


def unpack_request(data: bytes) -> Request:
    """What was asked for.

    Raises:
        ValueError: this is no such request.
    """
    try:
        request = json.loads(data)
        if request["version"] != VERSION:
            text = f"the protocol version is {request['version']}, but {VERSION} is expected"
            raise ValueError(f"{text}; use the same version of torchmm on both hosts")
        samples = [
            [[_sample(*sample) for sample in pack] for pack in packs]
            for packs in request["samples"]
        ]
        most_bytes = int(request["most_bytes"])
        return Request(str(request["fingerprint"]), samples, _reads(request["reads"]), most_bytes)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"invalid request for samples ({type(error).__name__}: {error})"
        ) from error


def messages_of(step: DecodedStep) -> list[Message]:
    """A decoded step of one microbatch, without its metadata, which the trainer has."""
    (microbatch,) = step.microbatches
    values = {"cu_seqlens": microbatch.cu_seqlens} | {key: getattr(step, key) for key in COUNTS}
    tensors = {key: getattr(microbatch, key) for key in TEXT_TENSORS}
    found = [Message({"part": TEXT} | values, tensors)]
    for name, inputs in microbatch.encoders.items():
        values = {
            "part": name,
            "grids_thw": inputs.grids_thw,
            "kept": inputs.kept,
            "patches_per_token": inputs.patches_per_token,
            "held": inputs.held,
            "blank": inputs.blank,
        }
        found.append(Message(values, {"pixels": inputs.pixels, "places": inputs.positions_K}))
    if (drawn := microbatch.generator) is not None:
        values = {"part": GENERATOR} | {key: getattr(drawn, key) for key in GENERATOR_LISTS}
        tensors = {"pixels": drawn.patches_PV, "places": drawn.context_positions_K}
        found.append(Message(values, tensors))
    return found


def to_arrow(message: Message, microbatch: int) -> tuple[pa.RecordBatch, bytes]:
    """A message about this microbatch, as it is sent."""
    columns: list[pa.Array] = []
    described = {}
    for name, tensor in message.tensors.items():
        described[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        data = pa.py_buffer(tensor.contiguous().numpy().reshape(-1).view(np.uint8))
        ends = pa.py_buffer(np.array([0, data.size], np.int64))
        columns.append(pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, data]))
    columns += [pa.nulls(1, pa.large_binary())] * (len(SCHEMA) - len(columns))
    values = message.values | {"microbatch": microbatch, "tensors": described}
    return pa.record_batch(columns, schema=SCHEMA), json.dumps(values).encode()


def from_arrow(chunk: flight.FlightStreamChunk) -> Message:
    """The message that was sent.

    Raises:
        ValueError: this is none.
    """
    batch = chunk.data
    if batch is None or chunk.app_metadata is None or batch.schema != SCHEMA:
        raise ValueError("a message of unknown format")
    if (size := chunk.app_metadata.size) > MAX_VALUES_BYTES:
        raise ValueError(
            f"a message with {size} bytes of JSON, above the limit of {MAX_VALUES_BYTES}"
        )
    batch.validate(full=True)
    try:
        values = json.loads(chunk.app_metadata.to_pybytes())
        described = values.pop("tensors")
        tensors = {
            name: _tensor(column[0].as_buffer(), *described[name])
            for column, name in zip(batch.columns, described, strict=False)
        }
        return Message(values, tensors)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(
            f"a message of unknown format ({type(error).__name__}: {error})"
        ) from error


def _tensor(data: pa.Buffer, dtype: str, shape: list[int]) -> Tensor:
    kind = np.dtype(str(DTYPES[dtype]).removeprefix("torch."))
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    values = np.frombuffer(data, kind) if data.size else np.zeros(0, kind)
    return torch.from_numpy(values.reshape(shape).copy())  # others may read the buffer


def _sample(feed: int, epoch: int, index: int) -> tuple[int, int, int]:
    for value in (feed, epoch, index):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"invalid request for samples (sample {[feed, epoch, index]!r})")
    return feed, epoch, index


def _reads(values: list[Any] | None) -> Reads | None:
    if values is None:
        return None
    shares, context = values
    return Reads({name: _share(*share) for name, share in shares.items()}, _share(*context))


def _share(part: int, of: int) -> Share:
    if type(part) is not int or type(of) is not int or not 0 <= part < of <= MOST_RANKS:
        raise ValueError(f"invalid request for samples (share {[part, of]!r})")
    return Share(part, of)
