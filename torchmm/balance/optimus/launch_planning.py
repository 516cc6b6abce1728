"""Choice of the encoder pieces that run during collectives of the LLM (Optimus §4.2).

Every encoder action of a plan starts as early as possible. Each piece goes into the first bubble
that is long enough and follows the pieces of the previous encoder action:

    LLM action   | matmul | all-gather    | matmul | reduce-scatter | ...
    encoder               | piece | piece |        | piece          |

An action can start in an LLM action that, in the simulated plan, starts after all inputs of the
encoder action have arrived. If a piece is longer than all remaining bubbles, it runs with all later
pieces at the position of the action, so no LLM action takes longer. After a piece that starts a
collective, the next piece is in a later bubble, because the LLM computes in the meantime.

The times of `bubble_scheduler` cannot be used, because messages do not wait for each other there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.launch_effects import TimedPiece, action_pieces, collective_times_ms
from torchmm.balance.simulation.plan_graph import TransferKey, build_plan_graph, transfer_key
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import EncoderLaunch, PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, WAIT
from torchmm.pipelining.schedules.colocated import encoder_stages


@dataclass
class _Bubble:
    """Collective of an LLM action."""

    number: int
    llm: Action
    position: int
    free_ms: float
    begins: list[Action] = field(default_factory=list)
    pieces: int = 0


def plan_launches(plan: PipelinePlan, costs: PlanCosts) -> dict[Action, EncoderLaunch]:
    """Return the launch of each LLM action, for `add_launches`.

    Args:
        plan: Plan without launches.
        costs: Costs of the graph. Without `pieces` and `collectives`, nothing is launched.
    """
    if not (costs.pieces and costs.overlaps_communication):
        return {}
    nodes = build_plan_graph(plan, costs)
    start_ps, end_ps = nodes.graph.times_ps()
    start_ms = {a: start_ps[node] / PICOSECONDS_PER_MS for a, node in nodes.compute.items()}
    arrival_ms = {key: end_ps[n] / PICOSECONDS_PER_MS for key, n in nodes.transfers.items()}
    book = PlanRules(plan)
    launches: dict[Action, EncoderLaunch] = {}
    for rank in range(len(plan.actions)):
        for bubble in _fill_bubbles(plan, costs, book, rank, start_ms, arrival_ms):
            begins, counts = launches.get(bubble.llm, EncoderLaunch((), ()))
            launches[bubble.llm] = EncoderLaunch(
                (*begins, *bubble.begins), (*counts, bubble.pieces)
            )
    return {llm: launch for llm, launch in launches.items() if any(launch.pieces_per_collective)}


def _fill_bubbles(
    plan: PipelinePlan,
    costs: PlanCosts,
    book: PlanRules,
    rank: int,
    start_ms: dict[Action, float],
    arrival_ms: dict[TransferKey, float],
) -> list[_Bubble]:
    """Return the bubbles of a rank with the pieces that run in them.

    Args:
        plan: Plan without launches.
        costs: Costs of the graph.
        book: Rules of the plan.
        rank: Rank of the bubbles.
        start_ms: Start of each action in the simulated plan.
        arrival_ms: Arrival of each transfer in the simulated plan.
    """
    encoders = encoder_stages(plan.graph)
    positions = {a: i for i, a in enumerate(plan.actions[rank])}
    computing = [a for a in positions if a.type in COMPUTE]
    bubbles: list[_Bubble] = []
    for llm in computing:
        if llm.stage not in encoders:
            for free_ms in collective_times_ms(llm, plan.graph, costs):
                bubbles.append(_Bubble(len(bubbles), llm, positions[llm], free_ms))
    first = 0  # first bubble in which the next encoder action can start
    complete: set[Action] = set()  # encoder actions that end before their position
    for action in (a for a in computing if a.stage in encoders):
        givers = {book.fact_actions[fact] for fact in book.rules[rank][action].requires}
        min_position, ready_ms = _inputs_ready(givers - complete, positions, arrival_ms)
        pieces = action_pieces(action, plan.graph, costs)
        placed = _place_pieces(
            (
                bubble
                for bubble in map(bubbles.__getitem__, range(first, len(bubbles)))
                if bubble.position > min_position and start_ms[bubble.llm] >= ready_ms
            ),
            positions[action],
            pieces,
        )
        gains = sum(piece.compute_ms for piece in pieces[: len(placed)]) > 0
        if gains:
            placed[0].begins.append(action)
            for bubble, piece in zip(placed, pieces, strict=False):
                bubble.free_ms -= piece.compute_ms
                bubble.pieces += 1
        if gains and len(placed) == len(pieces):
            complete.add(action)
            first = placed[-1].number
        else:  # the next action starts after this one, at its position
            while first < len(bubbles) and bubbles[first].position < positions[action]:
                first += 1
    return bubbles


def _inputs_ready(
    givers: set[Action], positions: dict[Action, int], arrival_ms: dict[TransferKey, float]
) -> tuple[int, float]:
    """Return the index and the time after which a rank has the results of actions."""
    waits = [giver for giver in givers if giver.type in WAIT]
    needed = givers.difference(waits)
    needed |= {wait._replace(type=RECV[WAIT.index(wait.type)]) for wait in waits}
    ready_ms = max((arrival_ms[transfer_key(wait)] for wait in waits), default=0.0)
    return max((positions[action] for action in needed), default=-1), ready_ms


def _place_pieces(bubbles: Iterator[_Bubble], end: int, pieces: list[TimedPiece]) -> list[_Bubble]:
    """Return the bubble of each piece, up to the first piece without a bubble before a position."""
    placed: list[_Bubble] = []
    bubble = None
    free_ms = -1.0
    for piece in pieces:
        while bubble is None or free_ms < piece.compute_ms:
            bubble = next(bubbles, None)
            if bubble is None or bubble.position > end:
                return placed
            free_ms = bubble.free_ms
        placed.append(bubble)
        # After the start of a collective, the next piece is in a later bubble.
        free_ms = -1.0 if piece.send_ms else free_ms - piece.compute_ms
    return placed
