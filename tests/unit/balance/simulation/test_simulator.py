"""Tests of simulated steps: naive simulation, memory recount, and hand-computed times."""

import math
from dataclasses import replace

import pytest
from naive_memory import naive_memory
from naive_plan import Play, random_costs, random_plan

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.checks.rules import MemoryModel
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.pipelining.schedules.registry import ORDERS, schedule_layout
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.timeline import simulate_order

T = ActionType


def llm_plan(
    schedule: str, ranks: int, microbatches: int, virtual: int = 1, tied: bool = False, **options
) -> PipelinePlan:
    llm = ModuleLayers("llm", "llm", (1.0,) * (ranks * virtual), tied=tied)
    graph = StageGraph(schedule_layout(schedule, [llm], ranks, virtual), microbatches)
    return lower_plan(ORDERS[schedule](graph), graph, {}, **options)


def flat_costs(plan: PipelinePlan, forward_ms=1.0, backward_ms=2.0, **others) -> PlanCosts:
    durations = {T.F: forward_ms, T.B: backward_ms, T.I: backward_ms / 2, T.W: backward_ms / 2}
    compute = [a for program in plan.actions for a in program if a.type in COMPUTE]
    return PlanCosts(compute_ms={a: durations[a.type] for a in compute}, **others)


def test_records_match_naive_simulation():
    for seed in range(520):
        plan = random_plan(seed)
        costs = random_costs(plan, seed)
        step = simulate(plan, costs)
        spans = [span for times in Play(plan, costs).times for span in times]
        assert [(r.start_ms, r.end_ms) for r in step.records] == [
            (start / 1e9, end / 1e9) for start, end in spans
        ], seed
        by_rank = [(rank, a) for rank, program in enumerate(plan.actions) for a in program]
        assert [(r.rank, r.action) for r in step.records] == by_rank, seed
        assert step.makespan_ms == max(end for _, end in spans) / 1e9


def test_tied_reductions_wait_for_both_ranks():
    for seed in range(20):
        plan = llm_plan("1f1b", 3, 4, tied=True, sharding="step" if seed % 2 else "none")
        costs = random_costs(plan, seed)
        step = simulate(plan, costs)
        spans = [s for times in Play(plan, costs).times for s in times]
        assert [(r.start_ms, r.end_ms) for r in step.records] == [
            (start / 1e9, end / 1e9) for start, end in spans
        ]
        reductions = [r for r in step.records if r.action.type is T.REDUCE_TIED]
        assert len(reductions) == 2
        tied_ms = [costs.tied_ms[r.action.stage] for r in reductions]
        start_ms = [r.end_ms - ms for r, ms in zip(reductions, tied_ms, strict=True)]
        ends = {(r.rank, r.action): r.end_ms for r in step.records}
        reduced = [ends.get((r.rank, Action(T.REDUCE_GRAD, r.action.stage)), 0) for r in reductions]
        assert start_ms == pytest.approx([max(*(r.start_ms for r in reductions), *reduced)] * 2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 4), (4, 9), (8, 16)])
def test_1f1b_has_published_makespan(ranks, microbatches):
    plan = llm_plan("1f1b", ranks, microbatches)
    step = simulate(plan, flat_costs(plan, 1.5, 2.5))
    assert step.makespan_ms == (microbatches + ranks - 1) * 4.0
    bubbles_ms = (ranks - 1) * 4.0 * ranks
    assert step.timeline.bubble_fraction == pytest.approx(bubbles_ms / ranks / step.makespan_ms)


def test_interleaved_1f1b_has_published_makespan():
    plan = llm_plan("interleaved_1f1b", 4, 8, virtual=3)
    step = simulate(plan, flat_costs(plan, 1.0, 2.0))
    assert step.makespan_ms == 8 * 3 * 3.0 + 3 * 3.0


def test_simulation_without_transfers_matches_plots():
    for seed in range(60):
        plan = random_plan(seed)
        costs = replace(random_costs(plan, seed), transfer_ms={}, gather_ms={}, reduce_ms={})
        compute_records = [r for r in simulate(plan, costs).records if r.action.type in COMPUTE]
        plotted = simulate_order(plan.actions, plan.graph, costs.compute_ms.__getitem__)
        plotted = {(r.rank, r.action): (r.start_ms, r.end_ms) for r in plotted}
        for rank, action, start_ms, end_ms in compute_records:
            assert (start_ms, end_ms) == pytest.approx(plotted[rank, action], abs=1e-6), seed


def test_gathers_overlap_and_leave_a_bubble():
    plan = llm_plan("gpipe", 1, 1, virtual=2, sharding="step")
    costs = flat_costs(plan, 2.0, 2.0, gather_ms={0: 1.0, 1: 3.0}, reduce_ms={0: 4.0, 1: 4.0})
    step = simulate(plan, costs)
    spans = {str(r.action): (r.start_ms, r.end_ms) for r in step.records}
    assert spans["0UNSHARD"] == (0, 1) and spans["1UNSHARD"] == (1, 4)
    assert spans["0F0"] == (1, 3) and spans["1F0"] == (4, 6)
    assert step.makespan_ms == 18
    assert step.timeline.bubble_ms["dp_all_gather"] == 2
    assert step.timeline.bubble_ms["dp_reduce_scatter"] == 8


def test_reductions_overlap_following_work():
    """Check that backward passes of the first of two stages hide the reduction of the second."""
    plan = llm_plan("interleaved_1f1b", 2, 4, virtual=2, sharding="step")
    free = simulate(plan, flat_costs(plan))
    costs = flat_costs(plan, reduce_ms=dict.fromkeys(range(4), 3.0))
    overlapped = simulate(plan, replace(costs, overlaps_communication=True))
    assert overlapped.makespan_ms == free.makespan_ms + 3
    assert overlapped.timeline.bubble_ms["dp_reduce_scatter"] == 2 * 3
    spans = {(r.rank, str(r.action)): (r.start_ms, r.end_ms) for r in overlapped.records}
    start, end = spans[0, "2REDUCE_GRAD"]
    assert (start, end) == (spans[0, "2B3"][1], spans[0, "2B3"][1] + 3)
    assert simulate(plan, costs).makespan_ms == free.makespan_ms + 6


def test_reduction_waits_for_the_last_rank():
    stages = (StageSpec(0, "vision", 0, 1, (0, 1)), StageSpec(1, "llm", 0, 1, (0,)))
    stages += (StageSpec(2, "llm", 1, 2, (1,)),)
    layout = StageLayout(stages, ((0, 1), (1, 2)), frozenset({"vision"}))
    replica = {("vision", 0, 0): 0, ("vision", 1, 0): 1}
    graph = StageGraph(layout, 2, {"vision": (1, 1)}, replica)
    kinds = {"F": T.F, "B": T.B}
    rows = ("0F0 1F0 1F1 1B0 0B0 1B1", "0F1 2F0 2B0 2F1 2B1 0B1")
    order = tuple(
        tuple(Action(kinds[a[1]], int(a[0]), int(a[2])) for a in row.split()) for row in rows
    )
    plan = lower_plan(order, graph, {}, sharding="step")
    for overlaps in (False, True):
        costs = flat_costs(plan, 1.0, 1.0, reduce_ms={0: 2.0}, overlaps_communication=overlaps)
        step = simulate(plan, costs)
        ends = {r.rank: r.end_ms for r in step.records if r.action == Action(T.REDUCE_GRAD, 0)}
        last_end = max(r.end_ms for r in step.records if r.action.type is T.B)
        assert ends == {0: last_end + 2, 1: last_end + 2}, overlaps


def test_channels_serialize_transfers_per_direction():
    plan = llm_plan("gpipe", 2, 3, receives_ahead=3)
    wire = {(Message(0, 1, m), back): 5.0 for m in range(3) for back in (False, True)}
    step = simulate(plan, flat_costs(plan, 1.0, 1.0, transfer_ms=wire))
    ends = [r.end_ms for r in step.records if r.rank == 1 and r.action.type is T.WAIT_F]
    assert ends == [6, 11, 16]
    # Backward passes of rank 1 end at 18, 19 and 20 ms. The gradients arrive at intervals of 5 ms.
    assert step.makespan_ms == 18 + 15 + 1


def test_late_receive_delays_its_transfer():
    wire = {(Message(0, 1, m), False): 1.0 for m in range(3)}
    makespans = {}
    for ahead in (0, 3):
        plan = llm_plan("gpipe", 2, 3, receives_ahead=ahead)
        makespans[ahead] = simulate(plan, flat_costs(plan, 1.0, 1.0, transfer_ms=wire)).makespan_ms
    assert makespans == {3: 1 + 1 + 6 + 1, 0: 1 + 1 + 6 + 2 + 1}


def test_exposed_tensor_communication_is_a_bubble():
    plan = llm_plan("1f1b", 2, 4)
    costs = flat_costs(plan)
    tp_comm_ms = {a: 0.25 for a in costs.compute_ms}
    with_tp = simulate(plan, replace(costs, tp_comm_ms=tp_comm_ms)).timeline
    without = simulate(plan, costs).timeline
    assert with_tp.bubble_ms["tp"] == 16 * 0.25
    for rank in range(2):
        assert with_tp.busy_ms[rank] == without.busy_ms[rank] - 8 * 0.25
    total_ms = sum(with_tp.busy_ms) + sum(with_tp.bubble_ms.values())
    assert total_ms == pytest.approx(2 * with_tp.makespan_ms)


def test_memory_peaks_match_naive_recount():
    for seed in range(200):
        plan = random_plan(seed)
        costs = random_costs(plan, seed)
        backward = plan.graph.needs_backward
        kept = {t: n for t, n in costs.saved_bytes.items() if backward(t.stage, t.microbatch)}
        later = {t: n for t, n in costs.saved_for_weights_bytes.items() if t in kept}
        costs = replace(costs, saved_bytes=kept, saved_for_weights_bytes=later)
        model = MemoryModel(
            lambda t, kept=kept: kept.get(t, 0),
            lambda t, later=later: later[t],
        )
        usage = naive_memory(plan, model, costs.static_bytes)
        peaks = [max(u, default=n) for u, n in zip(usage, costs.static_bytes, strict=True)]
        step = simulate(plan, costs)
        assert list(step.peak_bytes) == peaks, seed
        for timeline, static in zip(step.memory, costs.static_bytes, strict=True):
            assert timeline.used_bytes[0] == timeline.used_bytes[-1] == static
            assert (timeline.times_ms[1:] >= timeline.times_ms[:-1]).all()


def test_forward_without_backward_frees_its_memory():
    llm = ModuleLayers("llm", "llm", (1.0,) * 2, trainable=(False, True), embedding_trainable=False)
    graph = StageGraph(schedule_layout("1f1b", [llm], 2), 3)
    plan = lower_plan(ORDERS["1f1b"](graph), graph, {})
    kept = {task: 10 for task in graph.tasks()}
    step = simulate(plan, flat_costs(plan, saved_bytes=kept, static_bytes=(5, 7)))
    assert step.peak_bytes == (15, 17)
    assert step.memory[0].times_ms.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_update_memory_can_exceed_the_peak():
    plan = llm_plan("1f1b", 2, 2)
    costs = flat_costs(plan, saved_bytes={task: 10 for task in plan.graph.tasks()})
    step = simulate(plan, replace(costs, update_bytes=(15, 25), memory_limit_bytes=24))
    assert step.peak_bytes == (20, 25) and not step.fits


def test_step_fits_up_to_its_limit():
    plan = llm_plan("1f1b", 2, 2)
    costs = flat_costs(plan, saved_bytes={task: 10 for task in plan.graph.tasks()})
    peak = max(simulate(plan, costs).peak_bytes)
    assert peak == 20
    assert simulate(plan, costs).fits
    assert simulate(plan, replace(costs, memory_limit_bytes=peak)).fits
    assert not simulate(plan, replace(costs, memory_limit_bytes=peak - 1)).fits


def test_model_flops_sum_over_actions():
    plan = llm_plan("1f1b", 2, 3)
    costs = flat_costs(plan)
    flops = {a: 5.0 for a in costs.compute_ms} | {Action(T.W, 0, 0): 1e9}
    assert simulate(plan, replace(costs, flops=flops)).model_flops == 5.0 * 12


def test_simulated_step_is_plotted():
    plan = random_plan(3)
    step = simulate(plan, random_costs(plan, 3))
    plot = timelines_svg("predicted", [Panel("simulated", step.records, plan.graph.layout)])
    assert f"{step.makespan_ms:.4g} ms" in plot


def test_all_cost_problems_are_reported():
    plan = llm_plan("1f1b", 2, 2, sharding="step")
    costs = flat_costs(plan)
    compute_ms = {**costs.compute_ms, Action(T.F, 1, 1): math.nan, Action(T.B, 0, 0): -2.0}
    del compute_ms[Action(T.F, 0, 0)]
    bad = PlanCosts(
        compute_ms=compute_ms,
        tp_comm_ms={Action(T.F, 1, 0): 3.0, Action(T.B, 1, 0): -1.0},
        reduce_ms={1: math.inf},
        transfer_ms={(Message(0, 1, 0), False): -0.5},
        saved_bytes={Task(0, 0): 4, Task(0, 1): -4, Task(1, 0): math.inf},
        saved_for_weights_bytes={Task(0, 0): -5, Task(1, 1): math.inf},
        static_bytes=(1, math.inf, -3),
        memory_limit_bytes=0,
    )
    with pytest.raises(SimulationError) as caught:
        simulate(plan, bad)
    text = str(caught.value)
    for message in (
        "(1F1 on rank 1) has a duration of nan ms",
        "(0B0 on rank 0) has a duration of -2.0 ms",
        "0F0 on rank 0 has no duration",
        "1F0: 3.0 ms of exposed communication in 1.0 ms",
        "1B0: its exposed communication has a duration of -1.0 ms",
        "(1REDUCE_GRAD on rank 1) has a duration of inf ms",
        "(transfer of 0SEND_F0>1@1 from rank 0) has a duration of -0.5 ms",
        "saves 4 bytes, -5 between",
        "saves -4 bytes",
        "saves inf bytes",
        "saves 0 bytes, inf between",
        "static_bytes of 3 ranks for a plan of 2",
        "rank 1 has inf static bytes",
        "rank 2 has -3 static bytes",
        "memory limit 0 bytes",
    ):
        assert message in text, (message, text)
    assert len(caught.value.problems) == 15


def test_plans_with_cyclic_waits_are_rejected():
    plan = llm_plan("1f1b", 2, 2)
    first, second = map(list, plan.actions)
    # Rank 0 waits for its first gradient before it sends the output that the gradient depends on.
    wait = next(a for a in first if a.type is T.WAIT_B)
    first.remove(wait)
    begin = next(i for i, a in enumerate(first) if a.type is T.F)
    receive = next(a for a in first if a.type is T.RECV_B)
    first.remove(receive)
    first[begin:begin] = [receive, wait]
    with pytest.raises(SimulationError, match="form a cycle"):
        simulate(replace(plan, actions=(tuple(first), tuple(second))), flat_costs(plan))


def test_plan_without_a_send_is_rejected():
    plan = llm_plan("1f1b", 2, 2)
    sends = [a for a in plan.actions[0] if a.type is T.SEND_F]
    actions = tuple(a for a in plan.actions[0] if a != sends[0])
    with pytest.raises(SimulationError, match="no rank sends this message"):
        simulate(replace(plan, actions=(actions, plan.actions[1])), flat_costs(plan))


def test_memory_for_weights_can_exceed_forward_memory():
    llm = ModuleLayers("llm", "llm", (1.0,) * 2)
    graph = StageGraph(schedule_layout("zero_bubble", [llm], 2), 1)
    plan = lower_plan(ORDERS["zero_bubble"](graph), graph, {})
    costs = flat_costs(
        plan,
        saved_bytes={task: 10 for task in graph.tasks()},
        saved_for_weights_bytes={task: 16 for task in graph.tasks()},
    )
    step = simulate(plan, costs)
    assert step.peak_bytes == (10, 16)  # the first stage has no I action
    spans = {r.action.type: r for r in step.records if r.rank == 1}
    assert step.memory[1].times_ms.tolist() == [
        0, spans[T.F].start_ms, spans[T.I].start_ms, spans[T.W].end_ms
    ]  # fmt: skip
