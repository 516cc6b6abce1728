"""Validate producer responses: the trainer accepts a step only if it matches the request.

The trainer has the metadata of all requested samples. It computes all values of a microbatch that
follow from the metadata (`StepDecoder.rebuild`) and compares. Only token ids, targets, image
positions, tile crops and pixels come from the producer. Their dtype, shape and range are checked.

Each message is checked when it arrives, so that a response is never much larger than the step.

Shape legend as in `torchmm.common.batch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmm.common.batch import IGNORE_TARGET, ImageMeta, Microbatch
from torchmm.common.module_names import GENERATOR
from torchmm.common.tiles import TileRegion
from torchmm.data.corrupt import escape_text
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.items import PackItems
from torchmm.data.microbatch_builder import sample_name
from torchmm.extensions.remote.producers.wire_format import (
    COUNT_KEYS,
    TEXT_PART,
    TEXT_TENSORS,
    TensorMessage,
    step_messages,
)

PIXELS, POSITIONS = "pixels", "places"
MAX_REASON_CHARACTERS = 10_000
VALUE_ERRORS = (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)
"""Errors of reading values of a wrong type, in addition to ValueError."""
DOWNSAMPLE_STRUCTURE = [[0, 0], [0, 0], 0, 0, [0, 0], [0, 0]]
"""`TileDownsample` as JSON."""


def unpack_step(
    messages: Iterable[TensorMessage],
    microbatches: Sequence[list[PackItems]],
    decoder: StepDecoder,
) -> DecodedStep:
    """Return the decoded step in the messages, without noise.

    Args:
        messages: Messages of the response.
        microbatches: Requested samples.
        decoder: Decoder of the trainer, for this rank.

    Raises:
        ValueError: The messages are not the requested step. The error names the wrong field.
    """
    expected = [
        _RequestedMicrobatch(packs, images, decoder)
        for packs, images in zip(
            microbatches, decoder.images_to_decode(list(microbatches)), strict=True
        )
    ]
    for message in messages:
        number = message.values.get("microbatch")
        if type(number) is not int or not 0 <= number < len(expected):
            raise ValueError(f"microbatch = {_shorten(number)} was not requested")
        try:
            expected[number].receive(message)
        except (ValueError, *VALUE_ERRORS) as error:
            raise ValueError(f"microbatch {number}: {_describe_error(error)}") from error
    step = DecodedStep([], {})
    for number, each in enumerate(expected):
        try:
            each.finish(step)
        except (ValueError, *VALUE_ERRORS) as error:
            raise ValueError(f"microbatch {number}: {_describe_error(error)}") from error
    return step


class _RequestedMicrobatch:
    """A requested microbatch, and the messages that were received for it.

    Args:
        packs: Requested samples.
        images: Images that the producer decodes, by module (`StepDecoder.images_to_decode`).
        decoder: Decoder of the trainer.
    """

    def __init__(
        self, packs: list[PackItems], images: Mapping[str, range], decoder: StepDecoder
    ) -> None:
        self._packs = packs
        self._images = images
        self._decoder = decoder
        self._template = decoder.rebuild(packs, images)
        """Microbatch of zeroed samples, with the dtypes and shapes of all tensors except pixels."""
        self._expected = _messages_by_part(self._template)
        self._parts: dict[str, TensorMessage] = {}

    def receive(self, message: TensorMessage) -> None:
        """Store a part of the microbatch. Raise ValueError if its form is wrong."""
        part = message.values.get("part")
        if not isinstance(part, str) or part not in self._expected:
            raise ValueError(f"part = {_shorten(part)} was not requested")
        if part in self._parts:
            raise ValueError(f"part {part!r} was sent twice")
        expected = self._expected[part]
        what = f"part {part!r}: "
        _require_equal(
            f"{what}keys", sorted(message.values), sorted({*expected.values, "microbatch"})
        )
        _require_equal(f"{what}tensors", sorted(message.tensors), sorted(expected.tensors))
        for name, tensor in expected.tensors.items():
            shape = list(tensor.shape)
            if name == PIXELS:
                inputs = (
                    self._template.generator if part == GENERATOR else self._template.encoders[part]
                )
                assert inputs is not None
                rows = inputs.pixel_rows
                shape[0] = sum(
                    rows
                    if inputs.local_images is None
                    else (rows[image] for image in inputs.local_images)
                )
            received = message.tensors[name]
            _require_equal(f"{what}dtype of {name}", str(received.dtype), str(tensor.dtype))
            _require_equal(f"{what}shape of {name}", list(received.shape), shape)
        self._parts[part] = message

    def finish(self, step: DecodedStep) -> None:
        """Append the microbatch to a step. Raise ValueError if a value is wrong."""
        _require_equal("parts", sorted(self._parts), sorted(self._expected))
        counts = self._parts[TEXT_PART].values
        corrupt = self._read_corrupt(counts["corrupt"])
        received = self._copy_positions(corrupt)
        self._check_text(received)
        self._check_positions(received)
        microbatch = self._decoder.rebuild(self._packs, self._images, received, corrupt)
        for part, message in _messages_by_part(microbatch).items():
            self._compare(part, message)
        for name, inputs in microbatch.encoders.items():
            inputs.pixels = self._parts[name].tensors[PIXELS]
        if microbatch.generator is not None:
            microbatch.generator.patches_PV = self._parts[GENERATOR].tensors[PIXELS]
        step.microbatches.append(microbatch)
        step.corrupt |= corrupt
        images = self._template.meta.image_count + len(self._template.meta.generated)
        step.decoded_media += _check_count("decoded_media", counts["decoded_media"], images)
        step.read_bytes += _check_count("read_bytes", counts["read_bytes"], 1 << 62)

    def _read_corrupt(self, values: Any) -> dict[str, str]:
        """Return the reasons why samples are corrupt, by sample name."""
        names = {sample_name(item.meta) for pack in self._packs for item in pack}
        if not isinstance(values, dict):
            raise ValueError(f"corrupt = {_shorten(values)} is not an object")
        for name, reason in values.items():
            if (
                name not in names
                or not isinstance(reason, str)
                or len(reason) > MAX_REASON_CHARACTERS
            ):
                raise ValueError(
                    f"corrupt = {_shorten(values)} is not a reason for a requested sample"
                )
        return {name: escape_text(reason, MAX_REASON_CHARACTERS) for name, reason in values.items()}

    def _copy_positions(self, corrupt: Mapping[str, str]) -> Microbatch:
        """Return the microbatch with the text, positions and tile crops that were sent."""
        texts = self._parts[TEXT_PART].tensors
        encoders = {
            name: replace(
                inputs,
                positions_K=self._parts[name].tensors[POSITIONS],
                tile_regions=self._read_kept(name, self._parts[name].values["kept"], corrupt),
            )
            for name, inputs in self._template.encoders.items()
        }
        generator_inputs = self._template.generator
        if generator_inputs is not None:
            places_K = self._parts[GENERATOR].tensors[POSITIONS]
            generator_inputs = replace(generator_inputs, context_positions_K=places_K)
        tensors: dict[str, Any] = {key: texts[key] for key in TEXT_TENSORS}
        return replace(self._template, encoders=encoders, generator=generator_inputs, **tensors)

    def _read_kept(
        self, name: str, values: Any, corrupt: Mapping[str, str]
    ) -> list[TileRegion] | None:
        """Return the cropped rectangles of tiles, or None if the encoder has no cropped tiles."""
        if not self._decoder.reader.media[name].spec.ends_lines:
            return None  # `_compare` detects a value that was sent nevertheless
        samples = [s for s in self._template.meta.samples for _ in s.images_of_encoder(name)]
        images = self._template.meta.images_of_encoder(name)
        if not isinstance(values, list) or len(values) != len(images):
            text = f"part {name!r}: kept = {_shorten(values)} does not have one rectangle per image"
            raise ValueError(text)
        found = []
        for value, image, sample in zip(values, images, samples, strict=True):
            _, rows, columns = self._decoder.reader.preprocessor_of(image).token_grid(image)
            is_masked = sample_name(sample) in corrupt  # `_compare` checks the rectangle
            if not is_masked and not _is_tile_region(value, image, rows, columns, len(images)):
                raise ValueError(f"part {name!r}: kept = {_shorten(value)} is not a part of a tile")
            found.append(TileRegion(0, 0, 0, 0, 0) if is_masked else TileRegion.from_json(value))
        return found

    def _check_text(self, received: Microbatch) -> None:
        """Check ids against the vocabulary, and targets against ids."""
        size = self._decoder.reader.text_spec.vocab_size
        ids_T = received.input_ids_T
        if not ((ids_T >= 0) & (ids_T < size)).all():
            raise ValueError(f"part '': input_ids_T is out of range for a vocabulary of {size} ids")
        next_T = torch.cat([ids_T[1:], ids_T.new_full([1], IGNORE_TARGET)])
        next_T[torch.tensor(self._template.cu_seqlens[1:]) - 1] = IGNORE_TARGET
        targets_T = received.targets_T
        if not ((targets_T == next_T) | (targets_T == IGNORE_TARGET)).all():
            raise ValueError("part '': targets_T has targets that are not the next token")

    def _check_positions(self, received: Microbatch) -> None:
        """Check that images use placeholders of their sample, each of them once."""
        meta = received.meta
        spec = self._decoder.reader.text_spec
        known = [spec.image_token_id, spec.video_token_id, spec.sound_token_id]
        placeholders = torch.tensor([token for token in known if token is not None])
        firsts, stops = self._sample_bounds()
        exclusive = []
        for name, inputs in received.encoders.items():
            tokens = [sum(i.tokens for i in s.images_of_encoder(name)) for s in meta.samples]
            positions_K = inputs.positions_K
            _require_inside(name, positions_K, np.repeat(firsts, tokens), np.repeat(stops, tokens))
            if not torch.isin(received.input_ids_T[positions_K], placeholders).all():
                raise ValueError(f"part {name!r}: positions are not image placeholders")
            each = positions_K.split([image.tokens for image in meta.images_of_encoder(name)])
            if any(len(positions.unique()) != len(positions) for positions in each):
                raise ValueError(f"part {name!r}: an image uses a position twice")
            # Tiles that are shrunk together share tokens with adjacent tiles.
            shared = self._decoder.reader.media[name].spec.ends_lines
            exclusive.append(positions_K.unique() if shared else positions_K)
        every = torch.cat(exclusive) if exclusive else torch.zeros(0)
        if len(every.unique()) != len(every):
            raise ValueError(f"parts {sorted(received.encoders)}: images use the same positions")
        if received.generator is not None:
            counts = [sum(g.context for g in s.generated) for s in meta.samples]
            positions_K = received.generator.context_positions_K
            lower, upper = (np.repeat(bounds, counts) for bounds in (firsts, stops))
            _require_inside(GENERATOR, positions_K, lower, upper)

    def _sample_bounds(self) -> tuple[list[int], list[int]]:
        """Return the first position of each sample, and the position after its last token."""
        firsts, stops = [], []
        pack_tokens = self._template.meta.tokens // max(1, len(self._packs))
        for number, pack in enumerate(self._packs):
            start = number * pack_tokens
            for item in pack:
                firsts.append(start)
                start += item.meta.tokens
                stops.append(start)
        return firsts, stops

    def _compare(self, part: str, expected: TensorMessage) -> None:
        """Raise ValueError if a part differs from the rebuilt part in more than pixels."""
        message = self._parts[part]
        for key, value in expected.values.items():
            if key not in COUNT_KEYS:
                _require_equal(f"part {part!r}: {key}", message.values[key], value)
        for name, tensor in expected.tensors.items():
            if name != PIXELS and not torch.equal(message.tensors[name], tensor):
                raise ValueError(f"part {part!r}: {name} differs from the requested samples")


def _messages_by_part(microbatch: Microbatch) -> dict[str, TensorMessage]:
    return {m.values["part"]: m for m in step_messages(DecodedStep([microbatch], {}))}


def _is_tile_region(values: Any, image: ImageMeta, rows: int, columns: int, tiles: int) -> bool:
    """Return True if values are a rectangle of a tile that contains the tokens of the image.

    Args:
        values: `TileRegion` as JSON.
        image: Metadata of the image.
        rows, columns: Output tokens of a tile.
        tiles: Upper bound on the number of tiles of an image.
    """
    if _with_zeros(values) not in ([0] * 5 + [None], [0] * 5 + [DOWNSAMPLE_STRUCTURE]):
        return False
    kept = TileRegion.from_json(values)
    inside = (
        0 <= kept.top <= kept.bottom <= rows
        and 0 <= kept.left <= kept.right <= columns
        and 0 <= kept.line_ends <= rows
    )
    if (shrunk := kept.downsample) is not None:
        height = kept.bottom - kept.top
        width = kept.right - kept.left
        inside &= _is_row_mapping(
            shrunk.rows, shrunk.from_row, height, shrunk.to_rows, rows * tiles
        )
        inside &= _is_row_mapping(
            shrunk.columns, shrunk.from_column, width, shrunk.to_columns, columns * tiles
        )
    return inside and kept.tokens == image.tokens


def _is_row_mapping(
    sizes: tuple[int, int], first: int, length: int, to: tuple[int, int], limit: int
) -> bool:
    """Return True if `length` rows from `first` on map to the rows `to` of the smaller image.

    Args:
        sizes: Rows of all tiles, before and after.
        first: First row.
        length: Number of rows.
        to: First row and number of rows in the smaller image.
        limit: Upper bound on the number of rows before.
    """
    before, after = sizes
    return (
        0 <= first <= first + length <= before <= limit and 0 <= to[0] <= to[1] <= after <= before
    )


def _with_zeros(values: Any) -> Any:
    """Return nested lists with each integer replaced by 0, to compare their form."""
    if isinstance(values, list):
        return [_with_zeros(each) for each in values]
    return 0 if type(values) is int else values


def _require_inside(name: str, positions_K: Tensor, firsts: np.ndarray, stops: np.ndarray) -> None:
    """Raise ValueError if a position is outside its sample."""
    inside = (positions_K.numpy() >= firsts) & (positions_K.numpy() < stops)
    if not inside.all():
        raise ValueError(f"part {name!r}: positions are outside of their samples")


def _require_equal(what: str, value: Any, expected: Any) -> None:
    """Raise ValueError if two JSON values differ, also in type (1, 1.0, true)."""
    if json.dumps(value) != json.dumps(expected):
        raise ValueError(f"{what} = {_shorten(value)}; expected {_shorten(expected)}")


def _check_count(key: str, value: Any, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{key} = {_shorten(value)} is not between 0 and {maximum}")
    return value


def _shorten(value: Any) -> str:
    return escape_text(repr(value), 200)


def _describe_error(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
