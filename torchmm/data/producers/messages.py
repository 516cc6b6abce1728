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
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import flight
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.dtypes import ByteValues
from torchmm.common.generated import GeneratorInputs
from torchmm.common.module_names import GENERATOR
from torchmm.common.row_slices import Reads, Share
from torchmm.common.tiles import Kept
from torchmm.data.decode import DecodedStep
from torchmm.data.items import PackItems, microbatch_meta

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
COUNTS = ("corrupt", "decoded_images", "read_bytes")
SCHEMA = pa.schema([(str(number), pa.large_binary()) for number in range(3)])
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
            text = f"it speaks version {request['version']} of the protocol, not {VERSION}"
            raise ValueError(f"{text}; use the same torchmm on both sides")
        samples = [
            [[_sample(*sample) for sample in pack] for pack in packs]
            for packs in request["samples"]
        ]
        most_bytes = int(request["most_bytes"])
        return Request(str(request["fingerprint"]), samples, _reads(request["reads"]), most_bytes)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a request for samples ({type(error).__name__}: {error})") from error


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
        raise ValueError("a message of another form")
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
        raise ValueError(f"a message of another form ({type(error).__name__}: {error})") from error


def unpack_step(
    messages: Iterable[Message],
    microbatches: Sequence[list[PackItems]],
    sequence_length: int,
    byte_values: Mapping[str, ByteValues | None],
) -> DecodedStep:
    """The decoded step that messages bring, still without noise.

    Args:
        microbatches: what was asked for.
        sequence_length: tokens of a pack.
        byte_values: what pixels stand for, by encoder.

    Raises:
        ValueError: this is no such step, or not of these microbatches.
    """
    parts: list[dict[str, Message]] = [{} for _ in microbatches]
    for message in messages:
        number: Any = message.values.get("microbatch")
        part: Any = message.values.get("part")
        if number not in range(len(parts)) or not isinstance(part, str) or part in parts[number]:
            raise ValueError(f"a message about part {part!r} of microbatch {number!r}")
        parts[number][part] = message
    step = DecodedStep([], {})
    for number, packs in enumerate(microbatches):
        meta = microbatch_meta(packs, sequence_length)
        try:
            step.microbatches.append(_microbatch(parts[number], meta, byte_values))
            values = parts[number][TEXT].values
            step.corrupt |= {str(name): str(why) for name, why in values["corrupt"].items()}
            step.decoded_images += int(values["decoded_images"])
            step.read_bytes += int(values["read_bytes"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            text = f"microbatch {number}: {type(error).__name__}: {error}"
            raise ValueError(text) from error
    return step


def _microbatch(
    parts: Mapping[str, Message],
    meta: MicrobatchMeta,
    byte_values: Mapping[str, ByteValues | None],
) -> Microbatch:
    text = parts[TEXT]
    ids_T, targets_T, position_ids = (text.tensors[key] for key in TEXT_TENSORS)
    starts = text.values["cu_seqlens"]
    _require(ids_T.shape == targets_T.shape == (meta.tokens,), f"{ids_T.shape} tokens")
    _require(position_ids.shape[-1:] == (meta.tokens,), f"{position_ids.shape} positions")
    _require(starts[0] == 0 and starts[-1] == meta.tokens, f"segments {starts}")
    _require(all(a < b for a, b in pairwise(starts)), f"segments {starts}")
    read = [name for name in byte_values if meta.images_read_by(name)]
    drawn = [GENERATOR] if meta.generated else []
    _require(set(parts) == {TEXT, *read, *drawn}, f"parts {sorted(parts)}")
    return Microbatch(
        input_ids_T=ids_T,
        targets_T=targets_T,
        position_ids=position_ids,
        cu_seqlens=starts,
        encoders={name: _encoder(parts[name], name, meta, byte_values[name]) for name in read},
        meta=meta,
        generator=_generator(parts[GENERATOR], meta) if drawn else None,
    )


def _encoder(
    message: Message, name: str, meta: MicrobatchMeta, byte_values: ByteValues | None
) -> EncoderInputs:
    values = message.values
    pixels = message.tensors["pixels"]
    wanted = torch.float32 if byte_values is None else torch.uint8
    if pixels.dtype != wanted:
        text = f"pixels of {name!r} are {pixels.dtype}, {wanted} here"
        raise ValueError(f"{text}; use the same torchmm and transformers on both sides")
    inputs = EncoderInputs(
        pixels,
        [_triple(grid) for grid in values["grids_thw"]],
        message.tensors["places"],
        values["kept"] and [Kept.from_json(each) for each in values["kept"]],
        values["patches_per_token"],
        values["held"],
        byte_values,
        values["blank"],
    )
    patches = [prod(grid) for grid in inputs.grids_thw]
    _require(patches == meta.patches(name), f"images of {patches} patches")
    _check_rows(pixels, inputs.pixel_rows, inputs.held)
    _check_places(inputs.positions_K, meta.tokens)
    _require(all(n in range(len(inputs.grids_thw)) for n in inputs.blank), "blank images")
    return inputs


def _generator(message: Message, meta: MicrobatchMeta) -> GeneratorInputs:
    values: dict[str, Any] = {key: message.values[key] for key in GENERATOR_LISTS}
    patches_PV = message.tensors["pixels"]
    values["grids_thw"] = [_triple(grid) for grid in values["grids_thw"]]
    inputs = GeneratorInputs(
        patches_PV=patches_PV,
        noise_PV=patches_PV[:0].float(),
        context_positions_K=message.tensors["places"],
        **values,
    )
    _require(patches_PV.dtype == torch.uint8, f"{patches_PV.dtype} to be drawn")
    grids = [image.grid_thw for image in meta.generated]
    _require(inputs.grids_thw == grids, f"images of {inputs.grids_thw} patches to be drawn")
    _check_rows(patches_PV, inputs.pixel_rows, inputs.held)
    _check_places(inputs.context_positions_K, meta.tokens)
    return inputs


def _check_rows(pixels: Tensor, rows: Sequence[int], held: Sequence[int] | None) -> None:
    """Whether these are the pixels of the images that are here."""
    here = range(len(rows)) if held is None else held
    _require(len(pixels) == sum(rows[image] for image in here), f"pixels of shape {pixels.shape}")


def _check_places(places_K: Tensor, tokens: int) -> None:
    inside = not len(places_K) or (int(places_K.min()) >= 0 and int(places_K.max()) < tokens)
    _require(places_K.ndim == 1 and inside, "places of images")


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"other than what was asked for: {found}")


def _tensor(data: pa.Buffer, dtype: str, shape: list[int]) -> Tensor:
    kind = np.dtype(str(DTYPES[dtype]).removeprefix("torch."))
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    values = np.frombuffer(data, kind) if data.size else np.zeros(0, kind)
    return torch.from_numpy(values.reshape(shape).copy())  # others may read the buffer


def _sample(feed: int, epoch: int, index: int) -> tuple[int, int, int]:
    for value in (feed, epoch, index):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"not a request for samples (sample {[feed, epoch, index]!r})")
    return feed, epoch, index


def _reads(values: list[Any] | None) -> Reads | None:
    if values is None:
        return None
    shares, context = values
    return Reads({name: _share(*share) for name, share in shares.items()}, _share(*context))


def _share(part: int, of: int) -> Share:
    if type(part) is not int or type(of) is not int or not 0 <= part < of <= MOST_RANKS:
        raise ValueError(f"not a request for samples (share {[part, of]!r})")
    return Share(part, of)


def _triple(values: list[int]) -> tuple[int, int, int]:
    frames, rows, columns = values
    return frames, rows, columns
