"""Effect of launches on the durations of actions (Optimus, bubbles inside of LLM layers).

A launch runs kernel groups ("pieces") of an encoder action during collectives of an LLM action:

    LLM action       | compute |~ collective ~| compute |~ collective ~| compute |
    encoder pieces             |  1  |  2  |            | 3 |
    encoder action   | 1 | 2 | 3 | 4 |   becomes   | 4 |

- A piece that runs during a collective reduces the duration of its encoder action.
- If the pieces take longer than the collective, the LLM action takes longer by the difference.
- The collective of a tensor-parallel encoder overlaps with LLM computation, unless the next piece
  runs during the same LLM collective and has to wait for it.
- On devices that do not compute while they communicate (`PlanCosts.overlaps_communication`),
  launches save no time.

The communication of an LLM action is divided equally between its collectives. This is optimistic,
because pieces cannot run during a part of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import PipelinePlan


class TimedPiece(NamedTuple):
    """Piece of an encoder action, and its times."""

    action: Action
    compute_ms: float
    send_ms: float
    """Duration of the collective that starts at its end."""


@dataclass(frozen=True)
class LaunchEffects:
    """Effect of launches on actions.

    Attributes:
        shift_ms: Change of the duration, by action.
        covered_fraction: Fraction of the communication during which pieces run, by LLM action.
    """

    shift_ms: dict[Action, float] = field(default_factory=dict)
    covered_fraction: dict[Action, float] = field(default_factory=dict)


def action_pieces(action: Action, graph: StageGraph, costs: PlanCosts) -> list[TimedPiece]:
    """Return the pieces of an encoder action in order, or none if costs do not define pieces."""
    stage = graph.layout.stages[action.stage]
    layer = costs.pieces.get(stage.module)
    layers = stage.stop - stage.start
    if layer is None or not layers:
        return []
    pieces = layer.forward if action.type is ActionType.F else layer.backward
    tp_comm_ms = costs.tp_comm_ms.get(action, 0.0)
    compute_ms = (costs.compute_ms[action] - tp_comm_ms) / layers
    sends = sum(piece.starts_collective for piece in pieces)
    send_ms = tp_comm_ms / (layers * sends) if sends else 0.0
    timed = [TimedPiece(action, share * compute_ms, send_ms * ends) for share, ends in pieces]
    # The last piece is empty, because only the end of the action follows its last stop. Backward
    # passes have an empty first piece instead: they stop before they start, when the gradient of
    # the last output is ready, unless it has to be communicated.
    empty_piece = [TimedPiece(action, 0.0, 0.0)]
    if action.type is ActionType.F or sends:
        return timed * layers + empty_piece
    return empty_piece + timed * layers


def collective_times_ms(action: Action, graph: StageGraph, costs: PlanCosts) -> list[float]:
    """Return the duration of each collective of an LLM action, during which pieces can run."""
    stage = graph.layout.stages[action.stage]
    if action.type is ActionType.W or stage.module != LLM:
        return []
    forward, backward = costs.collectives
    count = (stage.stop - stage.start) * (forward if action.type is ActionType.F else backward)
    each_ms = (
        costs.tp_comm_ms.get(action, 0.0) / max(count, 1) if costs.overlaps_communication else 0.0
    )
    return [each_ms] * count


def compute_launch_effects(plan: PipelinePlan, costs: PlanCosts) -> LaunchEffects:
    """Return the effect of the launches of a plan, which is empty if costs define no pieces."""
    times = LaunchEffects()
    shift_ms = times.shift_ms
    for program in plan.actions if plan.launches and costs.pieces else ():
        pieces: deque[TimedPiece] = deque()
        for action in program:
            while pieces and pieces[0].action == action:  # remaining pieces run in their action
                pieces.popleft()
            if (launch := plan.launches.get(action)) is None:
                continue
            for begun in launch.encoder_actions:
                pieces += action_pieces(begun, plan.graph, costs)
            busy_ms = 0.0
            collectives_ms = collective_times_ms(action, plan.graph, costs)
            for count, collective_ms in zip(
                launch.pieces_per_collective, collectives_ms, strict=False
            ):
                load_ms = send_ms = 0.0
                for _ in range(min(count, len(pieces))):
                    piece = pieces.popleft()
                    load_ms += send_ms + piece.compute_ms
                    send_ms = piece.send_ms
                    saved_ms = piece.compute_ms + send_ms
                    shift_ms[piece.action] = shift_ms.get(piece.action, 0.0) - saved_ms
                busy_ms += min(load_ms, collective_ms)
                shift_ms[action] = shift_ms.get(action, 0.0) + max(0.0, load_ms - collective_ms)
            if tp_comm_ms := costs.tp_comm_ms.get(action, 0.0):
                times.covered_fraction[action] = min(1.0, busy_ms / tp_comm_ms)
    return times
