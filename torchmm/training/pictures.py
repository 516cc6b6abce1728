"""One step of a pipeline as a picture, a trace and a file of records, in the run directory.

timeline/step-N.svg          what each rank did when; bubbles by class
timeline/step-N.trace.json   the same for Perfetto and chrome://tracing
timeline/step-N.json         the records, for `scripts/draw.py --records`
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from torchmm.common.batch import Microbatch
from torchmm.common.files import replace_atomically
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.draw import Panel, draw_timelines
from torchmm.pipelining.view.exchange import write_chrome_trace
from torchmm.pipelining.view.records import StepContent, write_records
from torchmm.training.step import StepOutcome


class _RankRecords(NamedTuple):
    rank: int
    host: str
    begin_s: float
    records: list[ActionRecord]


def save_timeline(
    directory: Path,
    step: int,
    outcome: StepOutcome,
    microbatches: Sequence[Microbatch],
    mesh: ParallelMesh,
) -> None:
    """Writes the step of the pipeline that rank 0 is part of; collective over all ranks."""
    records = outcome.result.records or []
    own = _RankRecords(mesh.rank, socket.gethostname(), outcome.result.begin_s, records)
    gathered: list[_RankRecords] = [own] * mesh.world_size
    dist.all_gather_object(gathered, own)
    if mesh.rank:
        return
    shown = [rank for rank in gathered if rank.rank in mesh.pipeline_ranks]
    aligned = _align(shown)
    directory.mkdir(exist_ok=True)
    graph = outcome.plan.graph
    content = StepContent(
        tuple(m.meta for m in microbatches), tuple(m.target_count for m in microbatches)
    )
    write_records(directory / f"step-{step}.json", aligned, graph, content)
    write_chrome_trace(directory / f"step-{step}.trace.json", aligned, graph.layout)
    panel = Panel("measured", aligned, graph.layout)
    picture = draw_timelines(f"step {step}", [panel])
    replace_atomically(directory / f"step-{step}.svg", picture.encode())


def _align(ranks: list[_RankRecords]) -> list[ActionRecord]:
    """All records on one clock: processes of a machine share theirs; those of others are taken to
    have begun together."""
    hosts = {rank.host for rank in ranks}
    first_s = {host: min(r.begin_s for r in ranks if r.host == host) for host in hosts}
    aligned = []
    for rank in ranks:
        late_ms = (rank.begin_s - first_s[rank.host]) * 1e3
        aligned += [
            r._replace(start_ms=r.start_ms + late_ms, end_ms=r.end_ms + late_ms)
            for r in rank.records
        ]
    return aligned
