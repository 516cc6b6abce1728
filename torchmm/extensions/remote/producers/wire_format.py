"""Messages between trainers and producers: JSON requests, and tensors as Arrow record batches.

A request names samples (source, epoch, index) and the images that the rank decodes, so that
producers are stateless. It has no sizes. They are in the index of the producer, which is identical
to the index of the trainer, because fingerprints are compared. A request therefore cannot cause
large allocations in a producer.

The response is a stream of small messages: for every microbatch its text, then the inputs of each
module. Pixels are bytes (`torchmm.common.dtypes`), and noise is not sent. A message is one row of
bytes with a column for each tensor, so that tensors are not copied. All other values are JSON
metadata.

Requests do not have only (step, rank), as in DistTrain (section 4.2), because producers would then
also have to plan, in the order and from the state of the trainer. pickle is not used, because it
runs code of any peer.

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
from torchmm.common.sequence_slices import DecodeAssignment, RankShare
from torchmm.data.decode import DecodedStep
from torchmm.data.items import PackItems

PROTOCOL_VERSION = 7
BUSY = b"busy"
"""Marks errors of producers without capacity at the moment."""
REJECTED = b"refused"
"""Marks errors of invalid requests, which a retry does not fix."""
TOO_LARGE = b"too large"
"""Marks errors of responses above the size limit, which a retry does not fix."""

TEXT_PART = ""
"""Part of a microbatch with text, which is not specific to a module."""
TEXT_TENSORS = ("input_ids_T", "targets_T", "position_ids")
GENERATOR_LISTS = {
    "times": "times",
    "grids_thw": "grids_thw",
    "contexts": "contexts",
    "counted": "in_loss",
    "held": "local_images",
}
"""Lists of `GeneratorInputs` in messages: key of the message and field."""
COUNT_KEYS = ("corrupt", "decoded_media", "read_bytes")
SCHEMA = pa.schema([(str(number), pa.large_binary()) for number in range(3)])
MAX_VALUES_BYTES = 8 * 10**6
"""Limit on the JSON of a message. Python objects of hostile JSON use about 20 times its bytes."""
MAX_RANKS = 1 << 16
DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}


class SampleRequest(NamedTuple):
    """Request of a trainer for samples.

    Attributes:
        fingerprint: Fingerprint of the data and the preprocessing settings.
        samples: Source, epoch and index of each sample, by microbatch and pack of one rank and
            step.
        reads: Images to decode. If None, all images are decoded.
        most_bytes: Maximum size of a message in bytes.
    """

    fingerprint: str
    samples: list[list[list[tuple[int, int, int]]]]
    reads: DecodeAssignment | None = None
    most_bytes: int = 10**9


class TensorMessage(NamedTuple):
    """Part of a response."""

    values: dict[str, Any]
    """JSON values. `microbatch` and `part` are always present."""
    tensors: dict[str, Tensor]


def sample_keys(
    microbatches: Sequence[Sequence[PackItems]],
) -> list[list[list[tuple[int, int, int]]]]:
    """Return source, epoch and index of samples, for a request."""
    return [
        [[(item.feed, item.epoch, item.meta.index) for item in pack] for pack in packs]
        for packs in microbatches
    ]


def encode_request(request: SampleRequest) -> bytes:
    """Encode a request as JSON."""
    values: dict[str, Any] = {"version": PROTOCOL_VERSION} | request._asdict()
    values["reads"] = request.reads and [request.reads.shares, request.reads.context]
    return json.dumps(values).encode()


def decode_request(data: bytes) -> SampleRequest:
    """Decode a request.

    Raises:
        ValueError: The data are not a valid request.
    """
    try:
        request = json.loads(data)
        if request["version"] != PROTOCOL_VERSION:
            text = (
                f"the protocol version is {request['version']}, but {PROTOCOL_VERSION} is expected"
            )
            raise ValueError(f"{text}; use the same version of torchmm on both hosts")
        samples = [
            [[_check_sample_key(*sample) for sample in pack] for pack in packs]
            for packs in request["samples"]
        ]
        most_bytes = int(request["most_bytes"])
        return SampleRequest(
            str(request["fingerprint"]), samples, _decode_reads(request["reads"]), most_bytes
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"invalid request for samples ({type(error).__name__}: {error})"
        ) from error


def step_messages(step: DecodedStep) -> list[TensorMessage]:
    """Return the messages of a decoded step of one microbatch, without metadata of the samples."""
    (microbatch,) = step.microbatches
    values = {"cu_seqlens": microbatch.cu_seqlens} | {key: getattr(step, key) for key in COUNT_KEYS}
    tensors = {key: getattr(microbatch, key) for key in TEXT_TENSORS}
    messages = [TensorMessage({"part": TEXT_PART} | values, tensors)]
    for name, inputs in microbatch.encoders.items():
        values = {
            "part": name,
            "grids_thw": inputs.grids_thw,
            "kept": inputs.tile_regions,
            "patches_per_token": inputs.patches_per_token,
            "held": inputs.local_images,
            "blank": inputs.undecodable,
        }
        messages.append(
            TensorMessage(values, {"pixels": inputs.pixels, "places": inputs.positions_K})
        )
    if (generator := microbatch.generator) is not None:
        values = {"part": GENERATOR} | {
            key: getattr(generator, name) for key, name in GENERATOR_LISTS.items()
        }
        tensors = {"pixels": generator.patches_PV, "places": generator.context_positions_K}
        messages.append(TensorMessage(values, tensors))
    return messages


def encode_message(message: TensorMessage, microbatch: int) -> tuple[pa.RecordBatch, bytes]:
    """Encode a message about this microbatch as a record batch with JSON metadata."""
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


def decode_message(chunk: flight.FlightStreamChunk) -> TensorMessage:
    """Decode a message.

    Raises:
        ValueError: The data are not a valid message.
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
            name: _decode_tensor(column[0].as_buffer(), *described[name])
            for column, name in zip(batch.columns, described, strict=False)
        }
        return TensorMessage(values, tensors)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(
            f"a message of unknown format ({type(error).__name__}: {error})"
        ) from error


def _decode_tensor(data: pa.Buffer, dtype: str, shape: list[int]) -> Tensor:
    kind = np.dtype(str(DTYPES[dtype]).removeprefix("torch."))
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    values = np.frombuffer(data, kind) if data.size else np.zeros(0, kind)
    return torch.from_numpy(values.reshape(shape).copy())  # the buffer may be shared


def _check_sample_key(feed: int, epoch: int, index: int) -> tuple[int, int, int]:
    for value in (feed, epoch, index):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"invalid request for samples (sample {[feed, epoch, index]!r})")
    return feed, epoch, index


def _decode_reads(values: list[Any] | None) -> DecodeAssignment | None:
    if values is None:
        return None
    shares, context = values
    return DecodeAssignment(
        {name: _decode_share(*share) for name, share in shares.items()}, _decode_share(*context)
    )


def _decode_share(part: int, of: int) -> RankShare:
    if type(part) is not int or type(of) is not int or not 0 <= part < of <= MAX_RANKS:
        raise ValueError(f"invalid request for samples (share {[part, of]!r})")
    return RankShare(part, of)
