"""Planning of steps by producers, for trainers that have neither the data nor their index.

With `data.producers.plan`, a producer accepts three more types of requests, as JSON:

    describe   identity of its data (order and content of samples), and names of sources
    plan       packs of the step after a state (`torchmm.data.steps.remote_steps`)
    pictures, references   images of a sample as PNG files, and reference text, to show them

All ranks ask the same producer, which plans a step once. If it fails, any other producer continues
from the state in the request. The trainer compares all settings that its recipe has.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from pyarrow import flight

from torchmm.common.batch import ImageMeta, SampleMeta
from torchmm.common.errors import CheckpointError, DataError, TorchmmError
from torchmm.common.generated import GeneratedMeta
from torchmm.data.corrupt import escape_text
from torchmm.data.items import Item, PackItems
from torchmm.data.media.images import decode_rgb
from torchmm.data.microbatch_builder import sample_name
from torchmm.data.sources.open import Samples
from torchmm.data.sources.reader import SampleReader
from torchmm.data.steps.remote_steps import StepPart, StepRequest, UnknownStateError
from torchmm.extensions.remote.producers.client import DifferentDataError, ProducerClient
from torchmm.extensions.remote.producers.rpc import read_single_response
from torchmm.recipe.data_section import DataConfig, ProducersConfig
from torchmm.recipe.training_section import TrainingConfig

ERROR_TYPES: dict[str, type[TorchmmError]] = {"checkpoint": CheckpointError, "data": DataError}
UNKNOWN_STATE = {"unknown": True}
END = {"end": True}
VALUE_ERRORS = (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors of reading values of a wrong type, in addition to ValueError."""
MAX_INTEGER = 1 << 53
MAX_PLAN_BYTES = 64 * 10**6
MAX_IMAGES_BYTES = 10**9

T = TypeVar("T")


class ProducerDataInfo(NamedTuple):
    """Description of the data of a producer.

    Attributes:
        listed: Fingerprint of the producer in a registry.
        fingerprint: Fingerprint of these samples. Validation samples have a different one.
        names: Names of the sources, in order.
        identity: See `torchmm.data.identity`.
        digest: See `Samples.digest`.
        global_batch_size: Number of packs of the planned steps.
    """

    listed: str
    fingerprint: str
    names: list[str]
    identity: dict[str, Any]
    digest: tuple[str, str]
    global_batch_size: int


DATA_INFO_TYPES = {
    "listed": str,
    "fingerprint": str,
    "names": list,
    "identity": dict,
    "digest": list,
    "global_batch_size": int,
}
"""JSON types of the fields of `ProducerDataInfo`."""


class PlanService:
    """Producer side of planning. Thread-safe.

    Args:
        data, training: Sections of the recipe.
        samples: Training samples.
        held_out: Validation samples, or None without validation.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, samples: Samples, held_out: Samples | None
    ) -> None:
        self._training = training
        self._samples = {False: samples} | ({True: held_out} if held_out else {})
        self._steps = {
            kind: each.make_plan_server(data, training) for kind, each in self._samples.items()
        }

    def answer(self, kind: str, body: bytes) -> bytes:
        """Return the response to a request. Raise ValueError for invalid requests."""
        try:
            request = json.loads(body)
            held_out = request["held_out"]
            if held_out not in self._samples:
                raise ValueError("its recipe has no validation data")
            if kind == "describe":
                return json.dumps(self._describe(held_out)._asdict()).encode()
            if kind == "plan":
                return json.dumps(self._plan(held_out, request)).encode()
            if kind in ("pictures", "references"):
                return json.dumps(self._encode_preview(kind, held_out, request)).encode()
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"invalid request ({type(error).__name__}: {error})") from error
        raise ValueError(f"cannot {kind[:20]!r}")

    def _describe(self, held_out: bool) -> ProducerDataInfo:
        samples = self._samples[held_out]
        return ProducerDataInfo(
            self._samples[False].fingerprint(),
            samples.fingerprint(),
            list(samples.feeds()),
            samples.identity,
            samples.digest(),
            self._training.global_batch_size,
        )

    def _plan(self, held_out: bool, values: Mapping[str, Any]) -> dict[str, Any]:
        step_request = StepRequest(**{key: values[key] for key in StepRequest._fields})
        count = self._training.global_batch_size
        if step_request.packs is not None and not set(step_request.packs) <= set(range(count)):
            raise ValueError(f"a step has {count} packed sequences")
        try:
            part = self._steps[held_out].part(step_request)
        except UnknownStateError:
            return UNKNOWN_STATE
        except (CheckpointError, DataError) as error:
            kind = next(kind for kind, each in ERROR_TYPES.items() if isinstance(error, each))
            return {"error": [kind, str(error)]}
        if part is None:
            return END
        packed = [(number, list(map(_encode_item, pack))) for number, pack in part.packs.items()]
        return part._asdict() | {"packs": packed}

    def _encode_preview(self, kind: str, held_out: bool, request: Mapping[str, Any]) -> list[str]:
        feed = int(request["feed"])
        index = int(request["index"])
        source = self._samples[held_out].sources[feed : feed + 1]
        if (
            feed < 0
            or not source
            or source[0].index is None
            or not source[0].index.is_usable(index)
        ):
            raise ValueError(f"source {feed} has no sample {index}")
        decoder = self._samples[held_out].decoder
        if kind == "references":
            return list(decoder.references(feed, index))
        files = []
        for image in decoder.images(feed, index):
            stream = io.BytesIO()
            image.save(stream, "PNG")
            files.append(base64.b64encode(stream.getvalue()).decode())
        return files


class PlanClient:
    """Trainer side of planning.

    Args:
        config: Section [data.producers] of the recipe.
        held_out: Whether to request validation samples.
        differences: Function that returns the differences between the data of a producer and the
            settings of this run.
        reader: Media of this run, which validate the sizes of samples.
        sequence_length: Limit on the tokens of the samples of a pack.

    Raises:
        ConfigError: A certificate cannot be read.
        DataError: No producer responds, or no producer has these data.
    """

    def __init__(
        self,
        config: ProducersConfig,
        held_out: bool,
        differences: Callable[[ProducerDataInfo], list[str]],
        reader: SampleReader,
        sequence_length: int,
    ) -> None:
        self._validation = held_out
        self._reader = reader
        self._sequence_length = sequence_length
        find = partial(self._find, differences)
        self.described = ProducerClient(config, None).call(0, find)
        self._client = ProducerClient(config, self.described.listed)

    def part(self, step_request: StepRequest) -> StepPart | None:
        """Return a part of a step, see `StepPlanServer.part`."""
        response = self._call(
            "plan", step_request._asdict(), partial(self._read_part, step_request)
        )
        if isinstance(response, Exception):
            raise response
        return response

    def images(self, feed: int, index: int) -> list[Image.Image]:
        """Return the images of a sample."""
        return self._call("pictures", {"feed": feed, "index": index}, _read_images)

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Return the reference text of a sample."""
        return self._call("references", {"feed": feed, "index": index}, _read_strings)

    def _call(self, kind: str, values: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        body = json.dumps(dict(values) | {"held_out": self._validation}).encode()
        return self._client.call(0, partial(_call_producer, kind, body, read))

    def _find(
        self,
        differences: Callable[[ProducerDataInfo], list[str]],
        client: flight.FlightClient,
        options: flight.FlightCallOptions,
    ) -> ProducerDataInfo:
        body = json.dumps({"held_out": self._validation}).encode()
        data_info = _call_producer("describe", body, _read_description, client, options)
        try:
            problems = differences(data_info)
        except VALUE_ERRORS as error:
            raise ValueError(f"identity: {type(error).__name__}: {error}") from error
        if problems:
            raise DifferentDataError(
                f"it uses different data than this run: {'; '.join(problems)}; start it with "
                "outputs/NAME/recipe.toml of the run"
            )
        return data_info

    def _read_part(
        self, step_request: StepRequest, values: Mapping[str, Any]
    ) -> StepPart | Exception | None:
        """Return a part of a step. Raise ValueError if it is not the requested part."""
        if values == END:
            return None
        if values == UNKNOWN_STATE:
            return UnknownStateError()
        if "error" in values:
            kind, text = values["error"]
            return ERROR_TYPES[kind](escape_text(str(text)))
        every = range(self.described.global_batch_size)
        packs = {
            _check_integer("pack", number, len(every) - 1): pack for number, pack in values["packs"]
        }
        if sorted(packs) != sorted(every if step_request.packs is None else step_request.packs):
            raise ValueError(
                f"packed sequences {escape_text(str(sorted(packs)), 200)} were not requested"
            )
        return StepPart(
            {number: self._read_pack(number, pack) for number, pack in packs.items()},
            [escape_text(str(each)) for each in values["skipped"]],
            dict(values["state"]),
            _check_number("epoch", values["epoch"]),
            escape_text(str(values["notice"])),
        )

    def _read_pack(self, number: int, values: list[list[Any]]) -> PackItems:
        names = self.described.names
        pack = [_decode_item(names, *each) for each in values]
        for item in pack:
            self._check_images(item.meta)
        tokens = sum(item.meta.tokens for item in pack)
        if tokens > (limit := self._sequence_length):
            text = (
                f"packed sequence {number} has {tokens} tokens, but training.sequence_length = "
                f"{limit}"
            )
            raise ValueError(text)
        return pack

    def _check_images(self, meta: SampleMeta) -> None:
        """Raise ValueError if the sizes of images do not match each other or the model."""
        name = sample_name(meta)
        known = self._reader.encoders
        if meta.encoder is not None and meta.encoder not in known:
            raise ValueError(f"{name} is for an unknown encoder")
        for each in meta.images:
            if (meta.encoder if each.encoder is None else each.encoder) not in known:
                raise ValueError(f"{name} has an image for an unknown encoder")
            if prod(self._reader.preprocessor_of(each).grid_thw(each)) != each.patches:
                raise ValueError(f"{name} has an image with a wrong number of patches")
            if each.tokens > meta.tokens:
                raise ValueError(f"{name} has fewer tokens than one of its images")
        target_preprocessor = self._reader.target_preprocessor
        for drawn in meta.generated:
            frames = drawn.grid_thw[0]
            if (
                target_preprocessor is None
                or frames < 1
                or drawn.grid_thw != target_preprocessor.spec.grid(frames)
            ):
                raise ValueError(f"{name} has a target image of a wrong size")
            if not 1 <= drawn.context <= min(meta.tokens, target_preprocessor.spec.context_tokens):
                raise ValueError(f"{name} has a target image with a wrong context")


def _call_producer(
    kind: str,
    body: bytes,
    read: Callable[[Any], T],
    client: flight.FlightClient,
    options: flight.FlightCallOptions,
) -> T:
    """Return a validated response. Raise ValueError if it is invalid."""
    max_bytes = MAX_PLAN_BYTES if kind in ("describe", "plan") else MAX_IMAGES_BYTES
    body = read_single_response(client.do_action(flight.Action(kind, body), options), max_bytes)
    try:
        return read(json.loads(body))
    except VALUE_ERRORS as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_description(values: Mapping[str, Any]) -> ProducerDataInfo:
    data_info = ProducerDataInfo(**values)
    for key, kind in DATA_INFO_TYPES.items():
        if type(getattr(data_info, key)) is not kind:
            raise ValueError(f"{key} is not of type {kind.__name__}")
    if not all(isinstance(text, str) for text in (*data_info.names, *data_info.digest)):
        raise ValueError("names or digest are not strings")
    if len(set(data_info.names)) != len(data_info.names) or len(data_info.digest) != 2:
        raise ValueError("names are not unique, or digest does not have two parts")
    first, second = map(escape_text, data_info.digest)
    return data_info._replace(digest=(first, second))


def _read_strings(values: list[str]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _read_images(values: list[str]) -> list[Image.Image]:
    files = [base64.b64decode(each, validate=True) for each in values]
    return [decode_rgb(file, max_pixels=1 << 28) for file in files]


def _check_integer(key: str, value: Any, limit: int = MAX_INTEGER) -> int:
    """Return an integer. Raise ValueError if it is not between 0 and `limit`."""
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{key} = {escape_text(repr(value), 200)} is not between 0 and {limit}")
    return value


def _check_number(key: str, value: Any) -> float:
    """Return a float. Raise ValueError if it is not a number between 0 and `MAX_INTEGER`."""
    if type(value) not in (int, float) or not 0 <= value <= MAX_INTEGER:  # False for NaN
        raise ValueError(f"{key} = {escape_text(repr(value), 200)} is not a number of passes")
    return float(value)


def _encode_item(item: Item) -> list[Any]:
    """Return a sample as JSON."""
    meta = item.meta
    images = [
        [i.width_px, i.height_px, i.patches, i.tokens, i.frames, i.encoder, i.duration_ms,
         i.frame_pixels, i.rows]
        for i in meta.images
    ]  # fmt: skip
    target_metas = [[list(each.grid_thw), each.context] for each in meta.generated]
    return [item.feed, item.epoch, meta.index, meta.tokens, images, meta.encoder, target_metas]


def _decode_item(
    names: list[str],
    feed: int,
    epoch: int,
    index: int,
    tokens: int,
    images: list[list[Any]],
    encoder: str | None,
    target_metas: list[list[Any]],
) -> Item:
    for key, value in (("epoch", epoch), ("index", index), ("tokens", tokens)):
        _check_integer(key, value)
    name = names[_check_integer("feed", feed, len(names) - 1)]
    generated = tuple(
        GeneratedMeta(
            (_check_integer("frames", t), _check_integer("rows", h), _check_integer("columns", w)),
            _check_integer("context", context),
        )
        for (t, h, w), context in target_metas
    )
    own = tuple(ImageMeta(*image) for image in images)
    for image in own:
        for field in fields(image):
            if field.name != "encoder":
                _check_integer(field.name, getattr(image, field.name))
    return Item(feed, epoch, SampleMeta(name, index, tokens, own, encoder, generated))
