"""Tests of the LLM timeline: published times, deferred forward actions, bubbles by type."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import pytest
from colocated_cases import llm_step, random_timeline
from support.models.layer_pieces import layer_pieces

from torchmm.balance.optimus.idle_intervals import INFINITY_PS
from torchmm.balance.optimus.llm_timeline import build_llm_timeline
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.pipelining.schedules.registry import ORDERS


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(4, 1, 4), (4, 3, 8), (8, 2, 16)])
def test_interleaved_1f1b_has_published_makespan(ranks, virtual, microbatches):
    timeline = llm_step(ranks, virtual, microbatches)
    expected_ms = 3.0 * (microbatches * virtual + ranks - 1)
    assert timeline.llm_ps == expected_ms * PICOSECONDS_PER_MS


def starts(timeline) -> dict[Action, int]:
    return {
        action: int(start)
        for rank_schedule in timeline.ranks
        for action, start in zip(rank_schedule.actions, rank_schedule.start_ps, strict=True)
    }


def test_forwards_are_deferred_without_delaying_backwards():
    for seed in range(40):
        rng = random.Random(seed)
        timeline = random_timeline(rng, rng.choice((2, 3, 4)), rng.choice((4, 6)))
        late = starts(timeline)
        early = starts(timeline.with_release_times({}))
        for action, start in late.items():
            if action.type is ActionType.F:
                assert start >= early[action], seed
        # All forward actions can wait for their deferred starts together, but not longer.
        together = starts(timeline.with_release_times(late))
        assert together == late, seed
        for action in rng.sample(sorted(late, key=str), 10):
            if action.type is ActionType.F:
                moved = starts(timeline.with_release_times({**late, action: late[action] + 1}))
                later = [a for a in late if a.type is not ActionType.F and moved[a] > late[a]]
                assert later, (seed, action)


def test_figure_12_forwards_are_deferred():
    # Four devices with two chunks each and eight microbatches: F5 to F8 can wait, F1 to F4 cannot.
    early = llm_step(4, 2, 8, defer=False).deadline_ps / PICOSECONDS_PER_MS
    late = llm_step(4, 2, 8).deadline_ps / PICOSECONDS_PER_MS
    assert early[:4].tolist() == late[:4].tolist() == [0, 1, 2, 3]
    assert (late[4:] >= early[4:]).all() and (late[4:7] > early[4:7]).all()
    assert early[4] == 8


def test_fewer_warmups_defer_forwards_further():
    """Check Figure 12 with a different action order per device, which deferral does not change."""
    published, adjusted = (
        llm_step(4, 2, 8, partial(interleaved_1f1b, adjusted=each)) for each in (False, True)
    )
    assert published.llm_ps == adjusted.llm_ps == 57 * PICOSECONDS_PER_MS
    later_ms = (adjusted.deadline_ps - published.deadline_ps) / PICOSECONDS_PER_MS
    assert later_ms.tolist() == [0, 0, 0, 0, 6, 7, 9, 9]


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 6, 8, 11])
def test_adjusted_orders_do_not_save_more(virtual, microbatches):
    for ranks in (2, 4):
        layers = [ModuleLayers("llm", "llm", (1.0,) * ranks * virtual)]
        graph = StageGraph(megatron_layout(layers, ranks, virtual), microbatches)
        published, adjusted = (interleaved_1f1b(graph, adjusted=each) for each in (False, True))
        assert order_problems(graph, adjusted) == []
        kept = [[_max_in_flight(row) for row in order] for order in (published, adjusted)]
        assert all(after <= before for before, after in zip(*kept, strict=True))
        assert (adjusted == published) == (virtual == 1 or kept[0] == kept[1])


def _max_in_flight(row: Sequence[Action]) -> int:
    changes = [1 if action.type is ActionType.F else -1 for action in row]
    return max(accumulate(changes))


def test_timeline_matches_simulated_step():
    layers = ModuleLayers("llm", "llm", (1.0,) * 12)
    for seed, schedule in enumerate(("gpipe", "interleaved_1f1b", "zero_bubble")):
        graph = StageGraph(megatron_layout([layers], 3, 1 + seed % 2), 6)
        rng = random.Random(seed)
        order = ORDERS[schedule](graph)
        compute = {a: rng.uniform(1, 2) for row in order for a in row}
        stages = range(len(graph.layout.stages))
        costs = PlanCosts(
            compute,
            tp_comm_ms={a: 0.3 * ms for a, ms in compute.items()},
            gather_ms={s: 0.5 + s for s in stages},
            reduce_ms={s: 1.5 for s in stages},
        )
        pieces = layer_pieces(graph, costs)
        timeline = build_llm_timeline(graph, order, costs, pieces, sharding="step", defer=False)
        simulated = simulate(lower_plan(order, graph, {}, sharding="step"), costs).timeline
        assert timeline.llm_ps / PICOSECONDS_PER_MS == pytest.approx(simulated.makespan_ms)


def test_free_time_complements_busy_spans():
    timeline = random_timeline(random.Random(3), 2, 4)
    for free, kind in ((timeline.idle_compute(), 1), (timeline.idle_links(), 0)):
        for rank, busy_spans in enumerate(timeline.spans):
            rank_slice = slice(free.pointers[rank], free.pointers[rank + 1])
            start, end = free.start_ps[rank_slice], free.end_ps[rank_slice]
            assert start[0] == -INFINITY_PS and end[-1] == INFINITY_PS
            assert (start < end).all() and (end[:-1] < start[1:]).all()
            for begin, stop in busy_spans[kind].T:
                assert not ((start < stop) & (end > begin)).any()
            busy_ps = int((busy_spans[kind][1] - busy_spans[kind][0]).sum())
            assert int((end - start).sum()) + busy_ps == 2 * INFINITY_PS


def test_invalid_orders_are_rejected():
    layers = ModuleLayers("llm", "llm", (1.0,) * 4)
    graph = StageGraph(megatron_layout([layers], 2), 2)
    order = ORDERS["gpipe"](graph)
    compute = {a: 1.0 for row in order for a in row}
    pieces = layer_pieces(graph, PlanCosts(compute))
    with pytest.raises(SimulationError, match="0F0 on rank 0 has no duration"):
        costs = PlanCosts({a: ms for a, ms in compute.items() if str(a) != "0F0"})
        build_llm_timeline(graph, order, costs, pieces)
    with pytest.raises(ValueError, match=r"ranks \[1\] run no LLM action"):
        build_llm_timeline(graph, (order[0], ()), PlanCosts(compute), pieces)
    with pytest.raises(SimulationError, match="requires an action that is not in the order"):
        build_llm_timeline(graph, (order[0][1:], order[1]), PlanCosts(compute), pieces)
    with pytest.raises(SimulationError, match="form a cycle"):
        build_llm_timeline(graph, (order[0][::-1], order[1]), PlanCosts(compute), pieces)
