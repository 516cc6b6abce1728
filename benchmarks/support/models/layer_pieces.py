"""Pieces of an action with equal layers, derived from its total time."""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.balance.optimus.idle_intervals import ActionPieces
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph


def layer_pieces(graph: StageGraph, costs: PlanCosts) -> ActionPieces:
    """Return actions as equal layers with gather, compute, scatter, gather, compute and scatter."""

    def pieces(action: Action) -> Sequence[float]:
        whole_ms = costs.compute_ms[action]
        tp_comm_ms = costs.tp_comm_ms.get(action, 0.0)
        if tp_comm_ms == 0:
            return 0.0, whole_ms
        stage = graph.layout.stages[action.stage]
        halves = 2 * (stage.stop - stage.start)
        collective_ms = tp_comm_ms / (2 * halves)
        compute_ms = (whole_ms - tp_comm_ms) / halves
        # A half ends with a scatter, the next begins with a gather: one bubble of both.
        inner = [2 * collective_ms, compute_ms] * (halves - 1)
        return [collective_ms, compute_ms, *inner, collective_ms]

    return pieces
