"""Pieces of an action with equal layers, derived from its total time."""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.balance.optimus.free_time import Pieces
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph


def layer_pieces(graph: StageGraph, costs: PlanCosts) -> Pieces:
    """Return actions as equal layers with gather, compute, scatter, gather, compute and scatter."""

    def pieces(action: Action) -> Sequence[float]:
        whole_ms = costs.compute_ms[action]
        tensor_ms = costs.tensor_ms.get(action, 0.0)
        if tensor_ms == 0:
            return 0.0, whole_ms
        stage = graph.layout.stages[action.stage]
        halves = 2 * (stage.stop - stage.start)
        collective_ms = tensor_ms / (2 * halves)
        compute_ms = (whole_ms - tensor_ms) / halves
        # A half ends with a scatter, the next begins with a gather: one bubble of both.
        inner = [2 * collective_ms, compute_ms] * (halves - 1)
        return [collective_ms, compute_ms, *inner, collective_ms]

    return pieces
