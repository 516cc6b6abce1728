"""Tests of compiled schedules: makespans are bitwise identical to the list simulator."""

import numpy as np
import pytest
from schedule_cases import LAYOUTS, chain

from torchmm.balance.disttrain.reordering.compiled_schedule import compile_schedule
from torchmm.balance.disttrain.reordering.microbatch_order import makespans_ms
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.schedules.classic import one_f_one_b, zero_bubble
from torchmm.pipelining.view.timeline import simulate_order


def random_durations(layout, microbatches, rng):
    return rng.lognormal(0, 1, (2, len(layout.stages), microbatches))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 13])
def test_makespans_match_list_simulator(name, microbatches):
    layout, schedule = LAYOUTS[name]
    graph = StageGraph(layout, microbatches)
    order = schedule(graph)
    program = compile_schedule(order, graph)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        forward, backward = random_durations(layout, microbatches, rng)
        permutation = rng.permutation(microbatches)

        def duration(action, both=(forward, backward), permutation=permutation):
            kind = both[action.type is ActionType.B]
            return kind[action.stage, permutation[action.microbatch]]

        records = simulate_order(order, graph, duration)
        expected = max(record.end_ms for record in records)
        (makespan,) = makespans_ms(program, forward[None], backward[None], permutation[None])
        assert makespan == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 5), (4, 2), (4, 9), (12, 16)])
def test_equal_microbatches_match_published_time(ranks, microbatches):
    graph = StageGraph(chain(ranks), microbatches)
    program = compile_schedule(one_f_one_b(graph), graph)
    forward = np.full((1, ranks, microbatches), 2.0)
    assert makespans_ms(program, forward, forward * 1.5).tolist() == [
        (microbatches + ranks - 1) * 5
    ]


def test_slots_depend_on_preceding_slots_only():
    for name, (layout, schedule) in LAYOUTS.items():
        graph = StageGraph(layout, 6)
        tables = compile_schedule(schedule(graph), graph).tables
        rows = 2 * len(layout.stages) * 6
        slots = np.where(tables.duration_index_N < rows, tables.duration_index_N % 6, 0)
        count = len(slots)  # index that represents no operator
        for slot in range(6):
            stop = tables.slot_offsets_M[slot]
            assert (slots[:stop] < max(slot, 1)).all(), name
            for sources in (tables.first_source_N[:stop], tables.second_source_N[:stop]):
                assert ((sources < stop) | (sources == count)).all(), name


@pytest.mark.parametrize(
    ("name", "lag"),
    [("five ranks", 5), ("encoder beside the LLM", 3), ("two per rank", 0), ("frozen start", 0),
     ("gpipe", 0)],
)  # fmt: skip
def test_first_rank_1f1b_is_detected(name, lag):
    layout, schedule = LAYOUTS[name]
    graph = StageGraph(layout, 8)
    assert compile_schedule(schedule(graph), graph).lead_slots == lag


def test_unsupported_schedules_are_rejected():
    graph = StageGraph(chain(3), 4)
    with pytest.raises(ValueError, match="type I, W are not supported"):
        compile_schedule(zero_bubble(graph), graph)
    order = one_f_one_b(graph)
    with pytest.raises(ValueError, match="operators form a cycle"):
        compile_schedule([order[0], order[1][::-1], order[2]], graph)
    parts = StageLayout(chain(2).stages, chain(2).edges, frozenset({"llm"}))
    with pytest.raises(ValueError, match=r"'llm'.*sub-microbatches"):
        compile_schedule((), StageGraph(parts, 1, {"llm": (2,)}))


def test_invalid_durations_are_rejected():
    graph = StageGraph(chain(2), 3)
    program = compile_schedule(one_f_one_b(graph), graph)
    ones = np.ones((1, 2, 3))
    with pytest.raises(ValueError, match=r"\(3, 2\).*2 stages x 3 microbatches"):
        program.stack_durations(ones.transpose(0, 2, 1), ones)
    with pytest.raises(ValueError, match=r"-1\.0 to 1\.0 ms"):
        program.stack_durations(ones, -ones)
    with pytest.raises(ValueError, match="nan"):
        program.stack_durations(ones, ones * np.nan)
