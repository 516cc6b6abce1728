"""Files of recorded steps: a JSON object with the stage graph and one row per action.

A file contains the graph, so it can be plotted, analyzed and compared without the recipe. It also
contains the sizes of the microbatches, from which a cost model is calibrated. A Chrome trace has no
fields for either, and viewers round its times (`exchange` writes traces for Perfetto).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.files import replace_atomically
from torchmm.common.generated import GeneratedMeta
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord

_FORMAT = "torchmm timeline 1"
_COLUMNS = ["rank", "type", *Action._fields[1:], "start_ms", "end_ms"]


class StepContent(NamedTuple):
    """Sizes of the microbatches of a step."""

    microbatches: tuple[MicrobatchMeta, ...]
    targets: tuple[int, ...]
    """Number of token positions in the loss, by microbatch."""


def write_records(
    path: Path,
    records: Sequence[ActionRecord],
    graph: StageGraph,
    content: StepContent | None = None,
) -> None:
    """Write the records of a step. An existing file is replaced atomically.

    Args:
        path: File in an existing directory.
        records: Records of all ranks.
        graph: Graph of the step.
        content: Sizes of the microbatches, if available.

    Raises:
        ValueError: A time is infinite or not a number.
    """
    for r in records:
        if not (isfinite(r.start_ms) and isfinite(r.end_ms)):
            raise ValueError(
                f"record of {r.action} on rank {r.rank}, {r.start_ms} to {r.end_ms} ms: "
                "times must be finite"
            )
    layout = graph.layout
    header: dict[str, Any] = {
        "format": _FORMAT,
        "stages": [asdict(stage) for stage in layout.stages],
        "edges": layout.edges,
        "microbatches": graph.microbatches,
        "sub_microbatches": graph.sub_microbatches,
        "replica": [[*key, index] for key, index in graph.replica.items()],
        "columns": _COLUMNS,
    }
    if content is not None:
        header["content"] = [
            [*_meta_row(meta), targets] for meta, targets in zip(*content, strict=True)
        ]
    rows = [[r.rank, r.action.type.value, *r.action[1:], r.start_ms, r.end_ms] for r in records]
    # One line per key and per record: readable, and a diff shows what changed.
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in header.items()]
    body = ",\n".join(json.dumps(row) for row in rows)
    text = "{\n" + ",\n".join(lines) + f',\n"records": [\n{body}\n]\n}}\n'
    replace_atomically(path, text.encode())


def read_records(path: Path) -> tuple[list[ActionRecord], StageGraph]:
    """Read a file that `write_records` has written.

    Raises:
        ValueError: The file has a different format or is corrupt.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'"format" is not "{_FORMAT}"')
        if content["columns"] != _COLUMNS:
            raise ValueError(f"columns are {content['columns']}, but {_COLUMNS} is expected")
        return [_record(row) for row in content["records"]], _graph(content)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path}: not a recorded step ({reason}); use a file that write_records wrote"
        ) from error


def read_content(path: Path) -> StepContent | None:
    """Return the sizes of the microbatches of a recorded step, or None if the file has none.

    Raises:
        ValueError: The file is corrupt.
    """
    try:
        rows = json.loads(path.read_bytes()).get("content")
        if rows is None:
            return None
        metas = tuple(_meta(tokens, samples) for tokens, samples, _ in rows)
        return StepContent(metas, tuple(int(targets) for *_, targets in rows))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: content of microbatches is corrupt ({error})") from error


def _meta_row(meta: MicrobatchMeta) -> list[Any]:
    return [
        meta.tokens,
        [
            [
                sample.source,
                sample.index,
                sample.tokens,
                [list(astuple(image)) for image in sample.images],
                sample.encoder,
                [[*image.grid_thw, image.context] for image in sample.generated],
            ]
            for sample in meta.samples
        ],
    ]


def _meta(tokens: int, rows: Sequence[Any]) -> MicrobatchMeta:
    samples = tuple(
        SampleMeta(
            source,
            index,
            length,
            tuple(ImageMeta(*image) for image in images),
            encoder,
            tuple(GeneratedMeta((t, h, w), context) for t, h, w, context in generated),
        )
        for source, index, length, images, encoder, generated in rows
    )
    return MicrobatchMeta(samples, tokens)


def _record(row: Sequence[Any]) -> ActionRecord:
    if len(row) != len(_COLUMNS):
        raise ValueError(
            f"record {list(row)} has {len(row)} values, but {len(_COLUMNS)} are expected"
        )
    rank, kind, *fields, start_ms, end_ms = row
    if not all(isinstance(v, int) for v in (rank, *fields)):
        raise ValueError(
            f"record {list(row)} requires integers for all columns except type and times"
        )
    if not all(isinstance(v, int | float) for v in (start_ms, end_ms)):
        raise ValueError(f"record {list(row)} requires numbers as times")
    return ActionRecord(rank, Action(ActionType(kind), *fields), start_ms, end_ms)


def _graph(content: Mapping[str, Any]) -> StageGraph:
    stages = tuple(
        StageSpec(**{**stage, "ranks": tuple(stage["ranks"])}) for stage in content["stages"]
    )
    counts = {module: tuple(c) for module, c in content["sub_microbatches"].items()}
    layout = StageLayout(stages, tuple((s, d) for s, d in content["edges"]), frozenset(counts))
    replica = {(module, i, part): index for module, i, part, index in content["replica"]}
    return StageGraph(layout, content["microbatches"], counts, replica)
