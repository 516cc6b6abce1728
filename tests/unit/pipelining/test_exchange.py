"""Tests of CSV files that torch can read and write, of their errors, and of Chrome traces."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
from module_cases import LLM, MODELS, VISION, freeze_cases, steps
from order_checks import F, assert_complete, chain, simulate_order
from torch.distributed.pipelining import schedules as torch_schedules

from torchmm.common.errors import PlanError
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.schedules.classic import interleaved_1f1b, zero_bubble
from torchmm.pipelining.schedules.layouts import separated_layout
from torchmm.pipelining.schedules.registry import ORDERS, find_order, schedule_layout
from torchmm.pipelining.view.file_formats import (
    read_order,
    write_chrome_trace,
    write_order,
)


def cells(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("name", ORDERS)
def test_orders_survive_csv_files(name, tmp_path):
    for case, modules in enumerate(freeze_cases(MODELS["generator"]).values()):
        layout = schedule_layout(name, modules, 4)
        for graph in steps(layout, 5, seed=case):
            order = ORDERS[name](graph)
            write_order(tmp_path / "order.csv", order, graph)
            assert read_order(tmp_path / "order.csv", graph) == order
            again = find_order(f"csv:{tmp_path / 'order.csv'}")(graph)
            assert again == order


def test_torch_reads_exported_cells(tmp_path):
    graph = StageGraph(separated_layout([VISION, LLM], 2), 3, {"vision": (2, 0, 3)})
    order = ORDERS["separated"](graph)
    write_order(tmp_path / "order.csv", order, graph)
    read = [
        [torch_schedules._Action.from_str(cell) for cell in row]
        for row in cells(tmp_path / "order.csv")
    ]
    assert [[str(a) for a in row] for row in read] == cells(tmp_path / "order.csv")
    forwards = [a.microbatch_index for a in read[0] if a.stage_index == 0 and str(a)[1] == "F"]
    assert sorted(forwards) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("planner", [interleaved_1f1b, zero_bubble])
def test_torch_runtime_loads_exported_order(planner, tmp_path):
    """Include the checks of torch, and the insertion of communication."""
    graph = StageGraph(chain(4, 2), 8)
    write_order(tmp_path / "order.csv", planner(graph), graph)
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    vars(runtime).update(
        pipeline_order={},
        pp_group_size=4,
        _num_stages=8,
        _n_microbatches=8,
        _stages=[],
        _defer_pp_recv=False,
    )
    runtime._load_csv(str(tmp_path / "order.csv"))
    assert runtime.stage_index_to_group_rank == {stage: stage % 4 for stage in range(8)}
    assert sum(map(len, runtime.pipeline_order_with_comms.values())) > 8 * 8 * 2


@pytest.mark.parametrize("chunks", [1, 2])
def test_files_of_torch_are_read(chunks, tmp_path):
    """Include idle cells, and I and W actions of the first stage, which has no input gradient."""
    config = SimpleNamespace(
        n_local_stages=chunks, pp_group_size=4, microbatches_per_round=4, _n_microbatches=8
    )
    torch_schedule = torch_schedules.ScheduleInterleavedZeroBubble
    config.pipeline_order = {
        rank: torch_schedule._calculate_single_rank_operations(config, rank) for rank in range(4)
    }
    torch_schedule._dump_csv(config, str(tmp_path / "torch.csv"), format="compute_only")
    assert [c for c in cells(tmp_path / "torch.csv")[0] if c == "0I0"] == ["0I0"]
    graph = StageGraph(chain(4, chunks), 8)
    order = read_order(tmp_path / "torch.csv", graph)
    assert_complete(graph, order, split=True)
    simulate_order(graph, order, lambda action: 1.0)


def test_nonexistent_backward_halves_are_omitted(tmp_path):
    graph = StageGraph(chain(3, trainable=[True, False, True]), 1)
    rows = ["0F0,0I0,0W0", "1F0,1I0,1W0", "2F0,2I0,2W0"]
    (tmp_path / "order.csv").write_text("\n".join(rows))
    order = read_order(tmp_path / "order.csv", graph)
    assert [[str(a) for a in row] for row in order] == [
        ["0F0", "0B0"],
        ["1F0", "1I0"],
        ["2F0", "2I0", "2W0"],
    ]


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        (
            ["0F0,0F1,0B0,0B9", "1F0,1X0,1B0,,2B1"],
            [
                "row 1, column 4: '0B9' stage 0 has 2 chunks in this step",
                "row 2, column 2: '1X0' must be stage, F, B, I or W, and chunk, such as 2F0",
                "row 2, column 5: '2B1' the layout has 2 stages",
            ],
        ),
        (["0F0,0F1,0B0,0B1,0SEND_F0"], ["row 1, column 5: '0SEND_F0' must be stage, F,"]),
        (["\xff\x00"], ["row 1, column 1: '\ufffd"]),
        (
            ["0F0,0F1,0F0,0B0,1B1", "1F0,1I1,1F1,1B0,1B1"],
            [
                "rank 0: 0F0 occurs twice",
                "rank 0: 1B1 belongs to rank 1",
                "rank 0: found no backward, expected 0B1",
                "rank 1: found 1B1, 1I1, expected 1B1 or 1I1 and 1W1",
            ],
        ),
        (
            ["0F1,0B0,0B1", "1F0,1F1,1B0,1I1"],
            [
                "rank 0: 0F0 is missing",
                "rank 1: found 1I1, expected 1B1 or 1I1 and 1W1",
            ],
        ),
        (["0F0,0F1,0B0,0B1"], ["1 ranks, the layout has 2"]),
    ],
)
def test_invalid_orders_are_listed_with_cells(rows, problems, tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes("\n".join(rows).encode("latin-1"))
    with pytest.raises(PlanError) as caught:
        read_order(path, StageGraph(chain(2), 2))
    for actual, expected in zip(caught.value.problems, problems, strict=True):
        assert actual.startswith(str(path))
        assert expected in actual


def test_backward_of_frozen_stage_is_reported():
    graph = StageGraph(chain(1, trainable=[False]), 1)
    order = ((Action(F, 0, 0), Action(ActionType.B, 0, 0), Action(ActionType.SEND_F, 0, 0)),)
    assert order_problems(graph, order) == [
        "rank 0: 0SEND_F0 is not one of F, B, I, W",
        "rank 0: 0B0 is set, but neither it nor an earlier stage is trained; remove it",
    ]


def test_replicas_have_separate_csv_rows(tmp_path):
    stages = (StageSpec(0, "vision", 0, 1, (0, 1)), StageSpec(1, "llm", 0, 1, (2,)))
    layout = StageLayout(stages, ((0, 1),), frozenset({"vision"}))
    graph = StageGraph(layout, 2, {"vision": (2, 1)}, {("vision", 0, 1): 1})
    order = ORDERS["separated"](graph)
    assert [str(action) for action in order[1]] == ["0F0.1", "0B0.1"]
    write_order(tmp_path / "order.csv", order, graph)
    assert read_order(tmp_path / "order.csv", graph) == order


def test_chrome_traces_name_ranks_and_modules(tmp_path):
    layout = separated_layout([VISION, LLM], 2)
    graph = StageGraph(layout, 2, {"vision": (1, 2)})
    records = simulate_order(graph, ORDERS["separated"](graph), lambda action: 1.5)
    records.append(ActionRecord(0, Action(ActionType.WAIT_F, 2, 0, 0, 1, 1), 0.0, 0.25))
    write_chrome_trace(tmp_path / "trace.json", records, layout)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(records)
    for event, record in zip(spans, records, strict=True):
        assert (event["pid"], event["name"]) == (record.rank, str(record.action))
        assert event["ts"] == record.start_ms * 1000
        assert event["dur"] == (record.end_ms - record.start_ms) * 1000
        assert event["tid"] == (record.action.type is ActionType.WAIT_F)
        assert event["args"]["module"] == layout.stages[record.action.stage].module


def test_missing_order_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"order\.csv"):
        read_order(tmp_path / "order.csv", StageGraph(chain(2), 2))
