"""How launches change what actions of a plan take.

What an LLM action launches at a collective runs while it communicates: for that time the encoder
action takes less in its own place. Where pieces last longer than the collective, the LLM action
takes longer by the rest. A collective of a split encoder goes on below the LLM's products, without
contention, unless the next piece is launched in the same bubble, where it waits for it. Where
communication takes the device's time from nobody (`PlanCosts.runs_beside` is False), nothing is
gained.

An LLM action's communication is divided equally among its collectives, which is a bound: not all of
it is at places where pieces are launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.balance.step_costs import PlanCosts
from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import PipelinePlan


class TimedPiece(NamedTuple):
    """Of an encoder action."""

    compute_ms: float
    send_ms: float
    """Of the collective that begins at its end."""


@dataclass(frozen=True)
class LaunchTimes:
    """What launches change.

    Attributes:
        shift_ms: by action: how much longer it takes in its place.
        covered: by LLM action: the share of its communication in which pieces run.
    """

    shift_ms: dict[Action, float] = field(default_factory=dict)
    covered: dict[Action, float] = field(default_factory=dict)


def timed_pieces(action: Action, graph: StageGraph, costs: PlanCosts) -> list[TimedPiece]:
    """Of an encoder action, in order; none where costs do not tell them."""
    stage = graph.layout.stages[action.stage]
    layer = costs.pieces.get(stage.module)
    layers = stage.stop - stage.start
    if layer is None or not layers:
        return []
    pieces = layer.forward if action.type is ActionType.F else layer.backward
    tensor_ms = costs.tensor_ms.get(action, 0.0)
    compute_ms = (costs.compute_ms[action] - tensor_ms) / layers
    sends = sum(piece.sends for piece in pieces)
    send_ms = tensor_ms / (layers * sends) if sends else 0.0
    own = [TimedPiece(share * compute_ms, send_ms * sends) for share, sends in pieces]
    # Behind the last stop comes nothing but the action's end. A backward stops before it begins:
    # at the gradient of its last output, where that is not on its way.
    rest = [TimedPiece(0.0, 0.0)]
    if action.type is ActionType.F or sends:
        return own * layers + rest
    return rest + own * layers


def collectives(action: Action, graph: StageGraph, costs: PlanCosts) -> int:
    """How often an LLM action communicates where pieces may be launched."""
    stage = graph.layout.stages[action.stage]
    if action.type is ActionType.W or stage.module != LLM:
        return 0
    forward, backward = costs.collectives
    return (stage.stop - stage.start) * (forward if action.type is ActionType.F else backward)


def launch_times(plan: PipelinePlan, costs: PlanCosts) -> LaunchTimes:
    """Of a plan; nothing where costs do not tell the encoders' pieces.

    Args:
        costs: with all actions of the plan.
    """
    found = LaunchTimes()
    for program in plan.actions if plan.launches and costs.pieces else ():
        pieces: deque[tuple[Action, TimedPiece]] = deque()
        for action in program:
            while pieces and pieces[0][0] == action:  # the rest runs here
                pieces.popleft()
            launch = plan.launches.get(action)
            if launch is None:
                continue
            for begun in launch.begins:
                pieces += ((begun, piece) for piece in timed_pieces(begun, plan.graph, costs))
            count = collectives(action, plan.graph, costs)
            tensor_ms = costs.tensor_ms.get(action, 0.0)
            room_ms = tensor_ms / count if count and costs.runs_beside else 0.0
            busy_ms = 0.0
            for load_ms in _loads(launch.pieces[:count], pieces, found.shift_ms):
                busy_ms += min(load_ms, room_ms)
                late_ms = max(0.0, load_ms - room_ms)
                found.shift_ms[action] = found.shift_ms.get(action, 0.0) + late_ms
            if tensor_ms > 0:
                found.covered[action] = min(1.0, busy_ms / tensor_ms)
    return found


def _loads(
    counts: tuple[int, ...], pieces: deque[tuple[Action, TimedPiece]], shift_ms: dict[Action, float]
) -> Iterator[float]:
    """How long what is launched at each collective takes; takes it from the encoder actions."""
    for count in counts:
        load_ms = waits_ms = 0.0
        for _ in range(min(count, len(pieces))):
            action, piece = pieces.popleft()
            load_ms += waits_ms + piece.compute_ms
            waits_ms = piece.send_ms
            saved_ms = piece.compute_ms + piece.send_ms
            shift_ms[action] = shift_ms.get(action, 0.0) - saved_ms
        yield load_ms
