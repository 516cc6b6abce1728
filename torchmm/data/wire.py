"""What trainers and producers send each other: JSON for requests, safetensors for tensors.

A request names samples with the sizes they were planned with, and which of their images the rank
decodes, so that producers need no state and notice if their data are not the trainer's. Rejected:
asking only by (step, rank), as DistTrain (§4.2) describes, because producers would then also have
to plan, in the trainer's order and from its state; and pickle, which runs code of any peer that
answers.

Shape legend as in `torchmm.common.batch`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

from torchmm.common.batch import EncoderInputs, ImageMeta, Microbatch, SampleMeta
from torchmm.common.dtypes import ByteValues
from torchmm.common.generated import GeneratedMeta, GeneratorInputs
from torchmm.common.row_slices import Reads, Share
from torchmm.common.tiles import Kept
from torchmm.data.decode import DecodedStep
from torchmm.data.items import Item, PackItems, microbatch_meta

VERSION = 5
STEP = "step"
"""Key of the JSON text that accompanies the tensors."""

GENERATOR_TENSORS = ("patches_PV", "context_positions_K")
GENERATOR_LISTS = ("times", "contexts", "counted", "held")
STEP_VALUES = ("corrupt", "decoded_images", "read_bytes")


class Request(NamedTuple):
    """What a trainer asks for.

    Attributes:
        fingerprint: of the data and how they are prepared.
        microbatches: samples of one rank's share of a step.
        reads: which of their images it decodes; None: all.
    """

    fingerprint: str
    microbatches: list[list[PackItems]]
    reads: Reads | None = None


def pack_request(request: Request) -> bytes:
    """As it is sent."""
    items = [
        [[(i.feed, i.epoch, dataclasses.asdict(i.meta)) for i in pack] for pack in packs]
        for packs in request.microbatches
    ]
    values = {"version": VERSION, "fingerprint": request.fingerprint, "microbatches": items}
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
        items = [
            [[_item(*item) for item in pack] for pack in packs] for packs in request["microbatches"]
        ]
        return Request(str(request["fingerprint"]), items, _reads(request["reads"]))
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a request for samples ({type(error).__name__}: {error})") from error


def pack_step(step: DecodedStep) -> bytes:
    """A decoded step, without its metadata, which the trainer has."""
    tensors: dict[str, Tensor] = {}
    described = [_describe(m, f"{number}.", tensors) for number, m in enumerate(step.microbatches)]
    values = {"microbatches": described} | {key: getattr(step, key) for key in STEP_VALUES}
    return save(tensors, {STEP: json.dumps(values)})


def unpack_step(
    data: bytes,
    microbatches: list[list[PackItems]],
    sequence_length: int,
    byte_values: Mapping[str, ByteValues | None],
) -> DecodedStep:
    """The step that `pack_step` packed, still without noise.

    Args:
        microbatches: what was asked for.
        sequence_length: tokens of a pack.
        byte_values: what pixels stand for, by encoder.

    Raises:
        ValueError: this is no such step, or not of these microbatches.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    described = json.loads(header["__metadata__"][STEP])
    if len(described["microbatches"]) != len(microbatches):
        count = len(described["microbatches"])
        raise ValueError(f"{count} microbatches were sent, {len(microbatches)} asked for")
    tensors = load(data)
    found = []
    for number, (parts, packs) in enumerate(
        zip(described["microbatches"], microbatches, strict=True)
    ):
        prefix = f"{number}."
        encoders = {
            name: EncoderInputs(
                tensors[f"{prefix}{name}.pixels"],
                [_triple(grid) for grid in grids],
                tensors[f"{prefix}{name}.positions_K"],
                kept and [Kept.from_json(each) for each in kept],
                patches_per_token,
                held,
                byte_values[name],
                blank,
            )
            for name, (grids, kept, patches_per_token, held, blank) in parts["encoders"].items()
        }
        microbatch = Microbatch(
            input_ids_T=tensors[f"{prefix}input_ids_T"],
            targets_T=tensors[f"{prefix}targets_T"],
            position_ids=tensors[f"{prefix}position_ids"],
            cu_seqlens=parts["cu_seqlens"],
            encoders=encoders,
            meta=microbatch_meta(packs, sequence_length),
            generator=_generator(parts["generator"], prefix, tensors),
        )
        found.append(microbatch)
    return DecodedStep(found, **{key: described[key] for key in STEP_VALUES})


def _describe(microbatch: Microbatch, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    for key in ("input_ids_T", "targets_T", "position_ids"):
        tensors[prefix + key] = getattr(microbatch, key).contiguous()
    for name, inputs in microbatch.encoders.items():
        tensors[f"{prefix}{name}.pixels"] = inputs.pixels
        tensors[f"{prefix}{name}.positions_K"] = inputs.positions_K
    generator = None
    if microbatch.generator is not None:
        for key in GENERATOR_TENSORS:
            tensors[f"{prefix}generated.{key}"] = getattr(microbatch.generator, key)
        generator = {key: getattr(microbatch.generator, key) for key in GENERATOR_LISTS}
        generator["grids_thw"] = microbatch.generator.grids_thw
    return {
        "cu_seqlens": microbatch.cu_seqlens,
        "encoders": {
            name: (
                inputs.grids_thw,
                inputs.kept,
                inputs.patches_per_token,
                inputs.held,
                inputs.blank,
            )
            for name, inputs in microbatch.encoders.items()
        },
        "generator": generator,
    }


def _generator(
    parts: dict[str, Any] | None, prefix: str, tensors: dict[str, Tensor]
) -> GeneratorInputs | None:
    if parts is None:
        return None
    values: dict[str, Any] = {key: parts[key] for key in GENERATOR_LISTS}
    values |= {key: tensors[f"{prefix}generated.{key}"] for key in GENERATOR_TENSORS}
    values["noise_PV"] = values["patches_PV"][:0].float()
    return GeneratorInputs(**values, grids_thw=[_triple(grid) for grid in parts["grids_thw"]])


def _item(feed: int, epoch: int, meta: dict[str, Any]) -> Item:
    images = tuple(ImageMeta(**image) for image in meta["images"])
    generated = tuple(
        GeneratedMeta(_triple(drawn["grid_thw"]), drawn["context"]) for drawn in meta["generated"]
    )
    return Item(feed, epoch, SampleMeta(**{**meta, "images": images, "generated": generated}))


def _reads(values: list[Any] | None) -> Reads | None:
    if values is None:
        return None
    shares, context = values
    return Reads({name: Share(*share) for name, share in shares.items()}, Share(*context))


def _triple(values: list[int]) -> tuple[int, int, int]:
    frames, rows, columns = values
    return frames, rows, columns
