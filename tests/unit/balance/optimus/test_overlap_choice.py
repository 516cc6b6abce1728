"""Tests of the choice of launched encoder pieces, only if they shorten the simulated step."""

from dataclasses import replace

import numpy as np
import pytest
from test_optimus import random_step

from torchmm.balance.optimus.launches import add_launches
from torchmm.balance.optimus.layer_pieces import layer_collectives, layer_pieces
from torchmm.balance.optimus.schedule_selection import select_schedules, tp_comm_times_ms
from torchmm.balance.plan_costs import LayerPiece, LayerPieces
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.layers import LayerDescription
from torchmm.costs.execution import Execution
from torchmm.costs.sizes import TaskSizes
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan

CASES = 24
SHARE = 0.3
EVEN = LayerPieces(*(tuple(LayerPiece(1 / 24, False) for _ in range(24)),) * 2)


def choices_of(seed: int, pieces: LayerPieces, share: float = SHARE):
    graph, costs, schedule = random_step(seed, wires=True)
    encoders = {s.module for s in graph.layout.stages} & {"vision", "audio"}
    costs = replace(
        costs,
        overlaps_communication=True,
        pieces=dict.fromkeys(encoders, pieces),
        collectives=(4, 4),
    )
    choices = select_schedules(
        graph, costs, llm_schedule=schedule, granularity="fine", sharding="step",
        tp_comm_fraction=share, evaluations=6,
    )  # fmt: skip
    return graph, costs, list(choices)


def test_launches_are_chosen_if_step_is_shorter():
    chosen, shorter = 0, 0.0
    for seed in range(CASES):
        graph, costs, choices = choices_of(seed, EVEN)
        best = choices[-1]
        without = choices_of(seed, EVEN, 0.0)[2][-1]
        assert best.simulated.makespan_ms <= without.simulated.makespan_ms
        assert bool(best.step.launches) == (best.mode == "launched")
        if best.mode != "launched":
            continue
        chosen += 1
        shorter += without.simulated.makespan_ms / best.simulated.makespan_ms - 1
        assert best.simulated.makespan_ms < without.simulated.makespan_ms
        # The executed plan is the simulated plan.
        plan = lower_plan(best.step.order, best.step.graph, {}, "step", reduces_early=True)
        plan = add_launches(plan, best.step.launches)
        validate_plan(plan).raise_for_problems()
        assert plan == best.simulated.plan
        simulated_costs = replace(costs, tp_comm_ms=tp_comm_times_ms(graph, costs, SHARE))
        assert simulate(plan, simulated_costs).makespan_ms == best.simulated.makespan_ms
    assert chosen > CASES / 2
    assert shorter / chosen > 0.01


def test_unprofitable_launches_are_not_chosen():
    """Use pieces that are longer than bubbles."""
    kinds = {choices_of(seed, EVEN, share=1e-4)[2][-1].mode for seed in range(CASES)}
    assert "fine" in kinds and "launched" not in kinds


LAYER = LayerDescription(64, 4, 4, 16, 256, False, False, parameters=12 * 64**2)
SIZES = TaskSizes(
    *(np.full(2, 64.0) for _ in range(3)),
    lengths_S=np.full(2, 64.0),
    task_S=np.arange(2),
    contexts_S=np.zeros(2),
    context_inputs_N=np.zeros(2),
)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True)])
def test_pieces_match_layer_structure(tensor, sequence, recompute):
    execution = Execution(tensor=tensor, sequence_parallel=sequence, recompute=recompute)
    forward, backward = layer_pieces(LAYER, SIZES, execution)
    each = 8 if sequence else 6
    assert (len(forward), len(backward)) == (each, each * (2 if recompute == "full" else 1))
    for pieces in (forward, backward):
        assert sum(piece.compute_fraction for piece in pieces) == pytest.approx(1)
    sends = sum(piece.starts_collective for piece in forward)
    assert sends == {1: 0, 2: 4 if sequence else 2}[tensor]
    collectives = layer_collectives(execution)
    assert collectives == (0, 0) if tensor == 1 else collectives[0] == sends
    # The MLP matmuls have four times as many FLOPs as the attention output projection.
    shares = sorted(piece.compute_fraction for piece in forward)
    output = next(
        p.compute_fraction
        for p in forward
        if p.compute_fraction > 0 and p.compute_fraction < shares[-1] / 3.9
    )
    assert shares[-1] == pytest.approx(4 * output)
    assert layer_collectives(replace(execution, async_tensor=True)) == (0, 0)
