"""Compute orders as CSV files, and recorded steps as Chrome traces.

Compute orders have the CSV format of torch.distributed.pipelining: one row per rank, one cell per
action. "2F0" is stage 2, forward, chunk 0. A chunk is the index of a task of a stage, sorted by
(microbatch, sub_microbatch), because torch has only one index. Without sub-microbatches, it is the
microbatch. Empty cells are idle slots and are skipped.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

from torchmm.common.errors import PlanError
from torchmm.common.files import replace_atomically
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.orders import action_in_step, order_problems
from torchmm.pipelining.plan.plan import ActionRecord, ComputeOrder

_ORDER_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def write_order(path: Path, order: ComputeOrder, graph: StageGraph) -> None:
    """Write a compute order as CSV. `_load_csv` of torch can read the file."""
    chunks = {task: chunk for tasks in _chunks(graph) for chunk, task in enumerate(tasks)}
    rows = [[f"{a.stage}{a.type.value}{chunks[a.task]}" for a in row] for row in order]
    text = StringIO(newline="")
    csv.writer(text).writerows(rows)
    replace_atomically(path, text.getvalue().encode())


def read_order(path: Path, graph: StageGraph) -> ComputeOrder:
    """Read a compute order that `write_order` or torch has written.

    If a stage needs only one of I and W (see `orders`), the other action of a file from torch is
    skipped.

    Raises:
        PlanError: Cells are not tasks of the step, or actions are missing, duplicated or on the
            wrong rank. The error message lists them.
        OSError: The file cannot be read.
    """
    chunks = _chunks(graph)

    def parse(cell: str) -> Action:
        match = _ORDER_CELL.fullmatch(cell)
        if match is None:
            raise ValueError("must be stage, F, B, I or W, and chunk, such as 2F0")
        stage, chunk = int(match[1]), int(match[3])
        if stage >= len(chunks):
            raise ValueError(f"the layout has {len(chunks)} stages")
        if chunk >= len(chunks[stage]):
            raise ValueError(f"stage {stage} has {len(chunks[stage])} chunks in this step")
        return Action(ActionType(match[2]), *chunks[stage][chunk])

    order = tuple(
        tuple(new for action in row if (new := _normalized_action(graph, action)) is not None)
        for row in _read_rows(path, parse)
    )
    problems = order_problems(graph, order)
    if problems:
        raise PlanError([f"{path}: {problem}" for problem in problems])
    return order


def _chunks(graph: StageGraph) -> list[list[Task]]:
    """Return the tasks of each stage, sorted by microbatch and sub-microbatch."""
    return [
        [
            Task(stage, m, p)
            for m in range(graph.microbatches)
            for p in range(graph.task_count(stage, m))
        ]
        for stage in range(len(graph.layout.stages))
    ]


def _normalized_action(graph: StageGraph, action: Action) -> Action | None:
    """Return the action of this step. A B that is not needed is returned, to be reported."""
    return action if action.type is ActionType.B else action_in_step(graph, action)


def _read_rows(path: Path, parse: Callable[[str], Action]) -> tuple[tuple[Action, ...], ...]:
    problems, rows = [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, cells in enumerate(csv.reader(file), start=1):
            row = []
            for column, cell in enumerate(cells, start=1):
                if not cell.strip():
                    continue
                try:
                    row.append(parse(cell.strip()))
                except ValueError as error:
                    problems.append(f"{path}, row {number}, column {column}: {cell!r} {error}")
            rows.append(tuple(row))
    if problems:
        raise PlanError(problems)
    return tuple(rows)


def write_chrome_trace(path: Path, records: Sequence[ActionRecord], layout: StageLayout) -> None:
    """Write a simulated or measured step for Perfetto or chrome://tracing.

    A rank is a process with two threads: one for computation, one for transfers and waits.

    Args:
        path: JSON file in an existing directory.
        records: Records of all ranks.
        layout: Layout with the module names.
    """
    events: list[dict[str, object]] = []
    for rank in sorted({record.rank for record in records}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for row, name in enumerate(("compute", "communication")):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            )
    for rank, action, start_ms, end_ms in records:
        module = layout.stages[action.stage].module
        arguments = action._asdict() | {"type": action.type.value, "module": module}
        computes = action.type in COMPUTE
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": "compute" if computes else "communication",
                "pid": rank,
                "tid": 0 if computes else 1,
                "ts": start_ms * 1000,  # microseconds
                "dur": (end_ms - start_ms) * 1000,
                "args": arguments,
            }
        )
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
    replace_atomically(path, text.encode())
