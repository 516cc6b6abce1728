"""Write boxes and points in the coordinates and the text format of the model.

A record has boxes in one of two forms:

    column `objects`   as in ms-swift: {"ref": ["a dog"], "bbox": [[10, 20, 30, 40]]}, with the
                       placeholders <ref-object> and <bbox> in text
    text               as in Qwen-VL: {"bbox_2d": [10, 20, 30, 40]}, {"point_2d": [10, 20]} or
                       <|box_start|>(10,20),(30,40)<|box_end|>. It is converted only if
                       `SourceConfig.box_format` is set.

`BoxFormat` describes the format of a model. A box has 4 numbers, x1, y1, x2, y2, and a point has 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from torchmm.common.batch import BoxFormat
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_keys import is_empty
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import truncate_repr
from torchmm.data.record_formats.json_text import parse_json
from torchmm.data.record_formats.sample import (
    FileSegment,
    ImageSegment,
    Record,
    Sample,
    Segment,
    TextSegment,
)

_PLACEHOLDER = re.compile("<ref-object>|<bbox>")
_TEXT_BOX = re.compile(
    r"""(?P<start>["'](?:bbox_2d|point_2d)["']\s*:\s*\[|<\|box_start\|>)(?P<values>[^\[\]<>]*)"""
)
"""Pattern of the coordinates of a box or point in the formats of Qwen-VL."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_UNITS = {"real": "pixels", "norm1": "norm1"}
"""Maps `bbox_type` of ms-swift to values of `SourceConfig.box_format`."""
_MAX_COORDINATE = 1e9
_THOUSAND = (1000, 1000)


class ImageSize(NamedTuple):
    """Width and height of an image in pixels."""

    original: tuple[int, int]
    resized: tuple[int, int]
    """Size of the encoder input."""


SizeReader = Callable[[FileSegment], ImageSize]
"""Function that reads the size of an image from its header. May raise CorruptSampleError."""


def write_boxes(
    content: Sample | Conversation, record: Record, form: BoxFormat | None, read_size: SizeReader
) -> tuple[Sample | Conversation, Sequence[str]]:
    """Write the boxes of a sample or conversation in the format of the model.

    Args:
        content: Parsed record.
        record: Record with the column `objects`.
        form: Format of the model. None: `objects` is not read.
        read_size: Function that returns the size of an image.

    Returns:
        The changed content, and the placeholders that were filled.

    Raises:
        CorruptSampleError: The number of boxes differs from the number of placeholders, a box is
            malformed or outside of its image, or the model has no format.
    """
    unit = record.options.box_format
    if form is None:
        if unit is not None:
            raise CorruptSampleError(
                f"box_format = {unit!r} of the source requires a model whose box format torchmm "
                "supports; remove it, and write boxes as the model expects"
            )
        return content, ()
    parts = content.segments if isinstance(content, Sample) else _parts(content)
    images = [part for part in parts if isinstance(part, ImageSegment)]
    scaler = _Scaler(form, images, cache(read_size))
    if unit is not None:  # first, because placeholders have no coordinates yet
        content = _map_texts(content, partial(_convert_text, unit, scaler))
    marks = [mark for text in _texts(content) for mark in _PLACEHOLDER.findall(text)]
    objects = record.columns.get("objects")
    if not marks or objects is None:
        return content, ()
    names, boxes = _read_objects(objects, marks, scaler)
    queues = {"<ref-object>": map(form.name_text.format, names), "<bbox>": map(form.write, boxes)}
    content = _map_texts(
        content, lambda text: _PLACEHOLDER.sub(lambda mark: next(queues[mark[0]]), text)
    )
    return content, tuple(queues)


def split_at_tokens(sample: Sample, pattern: re.Pattern[str] | None) -> Sample:
    """Return a sample whose special tokens for boxes are separate template segments.

    Other special tokens in data remain ordinary text.

    Args:
        sample: Sample with text.
        pattern: Pattern of these tokens as a group. None: no tokens.
    """
    if pattern is None:
        return sample
    segments: list[Segment] = []
    for segment in sample.segments:
        if not isinstance(segment, TextSegment) or segment.is_template:
            segments.append(segment)
            continue
        for number, text in enumerate(pattern.split(segment.text)):
            if text:
                segments.append(TextSegment(text, segment.loss, is_template=number % 2 == 1))
    return replace(sample, segments=tuple(segments))


def _parts(conversation: Conversation) -> list[Any]:
    return [part for turn in conversation.turns for part in turn.parts]


def _map_texts(
    content: Sample | Conversation, change: Callable[[str], str]
) -> Sample | Conversation:
    """Return the content with changed texts. `change` is called in reading order."""
    if isinstance(content, Sample):
        return replace(
            content,
            segments=tuple(
                replace(s, text=change(s.text)) if isinstance(s, TextSegment) else s
                for s in content.segments
            ),
        )
    turns = []
    for turn in content.turns:
        reasoning = None if turn.reasoning is None else change(turn.reasoning)
        parts = tuple(change(part) if isinstance(part, str) else part for part in turn.parts)
        turns.append(replace(turn, reasoning=reasoning, parts=parts))
    return replace(content, turns=tuple(turns))


def _texts(content: Sample | Conversation) -> list[str]:
    """Return the texts of a content in reading order."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_texts(content, collect)
    return texts


def _read_objects(
    objects: Any, marks: Sequence[str], scaler: _Scaler
) -> tuple[list[str], list[list[int]]]:
    """Return the names and the scaled boxes of the column `objects`.

    Args:
        objects: Value of the column.
        marks: Placeholders in the texts of the record.
        scaler: Coordinates of the model.
    """
    if isinstance(objects, str):
        objects = parse_json(objects, "column objects")
    if not isinstance(objects, Mapping):
        raise CorruptSampleError(
            f"column objects is {truncate_repr(objects)}, not an object with ref and bbox"
        )
    names, boxes, ids = (_read_list(objects, key) for key in ("ref", "bbox", "image_id"))
    for mark, key, values in (("<ref-object>", "ref", names), ("<bbox>", "bbox", boxes)):
        if marks.count(mark) != len(values):
            raise CorruptSampleError(
                f"{marks.count(mark)} {mark} placeholders but {len(values)} entries in "
                f"objects.{key}; use one placeholder per entry"
            )
    for name in names:
        if not isinstance(name, str) or _PLACEHOLDER.search(name):
            raise CorruptSampleError(f"objects.ref contains {truncate_repr(name)}; use a name")
    if ids and len(ids) != len(boxes):
        raise CorruptSampleError(
            f"objects.image_id has {len(ids)} entries, but objects.bbox has {len(boxes)}; use "
            "one image index per box"
        )
    kind = objects.get("bbox_type")
    kind = "real" if is_empty(kind) else kind
    if not isinstance(kind, str) or kind not in _UNITS:
        raise CorruptSampleError(f"objects.bbox_type is {truncate_repr(kind)}; use real or norm1")
    unit = _UNITS[kind]
    scaled = [
        scaler.scale(box, unit, image, f"box {number} of column objects")
        for number, (box, image) in enumerate(zip(boxes, ids or [0] * len(boxes), strict=True))
    ]
    return names, scaled


def _read_list(objects: Mapping[str, Any], key: str) -> list[Any]:
    value = objects.get(key)
    if is_empty(value):
        return []
    if not isinstance(value, list):
        raise CorruptSampleError(f"objects.{key} is {truncate_repr(value)}, not a list")
    return value


def _convert_text(unit: str, scaler: _Scaler, text: str) -> str:
    """Convert the boxes in a text. The separators between numbers are unchanged."""

    def convert(match: re.Match[str]) -> str:
        if len(scaler.images) != 1:
            raise CorruptSampleError(
                f"{match[0]!r:.80} with box_format = {unit!r} of the source requires one image, "
                f"but the record has {len(scaler.images)}; use placeholders and the column objects"
            )
        text = match["values"]
        is_valid = not _NUMBER.sub("", text).strip(" \t\r\n,()")
        values = [float(number) for number in _NUMBER.findall(text)] if is_valid else text
        scaled = iter(scaler.scale(values, unit, 0, f"{match[0]!r:.80}"))
        return match["start"] + _NUMBER.sub(lambda _: str(next(scaled)), text)

    return _TEXT_BOX.sub(convert, text)


class _Scaler(NamedTuple):
    """Converter of boxes of one record to the coordinates of the model."""

    form: BoxFormat
    images: list[ImageSegment]
    """Images in reading order."""
    read_size: SizeReader

    def scale(self, values: Any, unit: str, image: Any, name: str) -> list[int]:
        """Return a box or point in the coordinates of the model.

        Args:
            values: Coordinates of the box.
            unit: A value of `SourceConfig.box_format`.
            image: Index of the image.
            name: Description of the box, for messages.
        """
        are_numbers = isinstance(values, list | tuple) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _MAX_COORDINATE
            for v in values
        )
        if not are_numbers or len(values) not in (2, 4):
            raise CorruptSampleError(
                f"{name} is {truncate_repr(values)}; use [x1, y1, x2, y2], or [x, y] for a point"
            )
        size, resized = _THOUSAND, _THOUSAND
        if "pixels" in (unit, self.form.coordinates):
            size, resized = self._size(image, name)
        source = {"pixels": size, "norm1": (1, 1), "norm1000": _THOUSAND}[unit]
        target = resized if self.form.coordinates == "pixels" else _THOUSAND
        scaled = [
            round(v / old * new)
            for v, old, new in zip(values, source * 2, target * 2, strict=False)
        ]
        if not all(0 <= value <= new for value, new in zip(scaled, target * 2, strict=False)):
            raise CorruptSampleError(
                f"{name} is {list(values)}, which is outside of its image of {source[0]} x "
                f"{source[1]}" + (" pixels" if unit == "pixels" else "")
            )
        if len(scaled) == 4 and (scaled[0] > scaled[2] or scaled[1] > scaled[3]):
            raise CorruptSampleError(
                f"{name} is {list(values)}, but its second corner is left of or above the first; "
                "use [x1, y1, x2, y2]"
            )
        return scaled

    def _size(self, image: Any, name: str) -> ImageSize:
        is_index = isinstance(image, int) and not isinstance(image, bool)
        if not is_index or not 0 <= image < len(self.images):
            raise CorruptSampleError(
                f"{name} belongs to image {truncate_repr(image)}, but the record has "
                f"{len(self.images)} images; image_id counts from 0"
            )
        return self.read_size(self.images[image])
