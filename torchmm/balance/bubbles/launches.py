"""Which pieces of encoder actions a plan launches at the LLM's collectives (Optimus §4.2).

Given a plan of whole actions, every encoder action is moved ahead as far as it can be: piece after
piece into the first bubble that has room for it, behind those of the encoder action before it. An
action may begin in an LLM action that, in the plan as it stands, starts when everything that it
needs has arrived. A piece that is longer than a bubble, and all after it, stay in the action's
place, so no LLM action takes longer; after a piece that begins a collective the next one is in the
next bubble, so that the LLM computes meanwhile.

Pieces in the order of encoder actions and first bubbles first are the most that can be launched
with this order of actions: an exchange of two pieces never makes room. Rejected: launching by the
scheduler's own times (`scheduler`), which it promises before transfers wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.simulation.launched import TimedPiece, collectives, timed_pieces
from torchmm.balance.simulation.plan_graph import build_plan_graph, transfer_key
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import Launch, PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, WAIT
from torchmm.pipelining.schedules.fillers import encoder_stages

LEAST_MS = 1e-6
"""What launching an action has to save."""


def plan_launches(plan: PipelinePlan, costs: PlanCosts) -> dict[Action, Launch]:
    """By LLM action: what it launches (`with_launches`).

    Args:
        plan: without launches and fillers.
        costs: of its graph, with `pieces` and `collectives`; without: nothing is launched.
    """
    if not (costs.pieces and costs.runs_beside):
        return {}
    nodes = build_plan_graph(plan, costs)
    start_ps, end_ps = nodes.graph.times_ps()
    starts_ms = {a: start_ps[node] / PICOSECONDS_PER_MS for a, node in nodes.compute.items()}
    arrivals_ms = {key: end_ps[n] / PICOSECONDS_PER_MS for key, n in nodes.transfers.items()}
    book = RuleBook(plan)
    encoders = encoder_stages(plan.graph)
    found: dict[Action, Launch] = {}
    for rank, program in enumerate(plan.actions):
        bubbles = _Bubbles(plan, costs, program, encoders, starts_ms)
        for action in program:
            if action.type not in COMPUTE or action.stage not in encoders:
                continue
            needs = _needs(program, bubbles, book, rank, action)
            arrival_ms = max((arrivals_ms[transfer_key(w)] for w in needs.waits), default=0.0)
            pieces = timed_pieces(action, plan.graph, costs)
            bubbles.place(action, pieces, needs.behind, arrival_ms)
        found |= bubbles.launches()
    return found


class _Needs(NamedTuple):
    """What an encoder action waits for."""

    behind: int
    """Place in the program that LLM actions come behind in which it may begin."""
    waits: list[Action]


def _needs(
    program: tuple[Action, ...], bubbles: _Bubbles, book: RuleBook, rank: int, action: Action
) -> _Needs:
    rules = book.rules[rank]
    needs = set(rules[action].needs)
    behind, waits = -1, []
    for place, giver in enumerate(program[: bubbles.at[action]]):
        if needs.isdisjoint(rules[giver].gives):
            continue
        if giver.type in WAIT:
            waits.append(giver)
            received = giver._replace(type=RECV[WAIT.index(giver.type)])
            behind = max(behind, bubbles.at[received])
        elif giver not in bubbles.complete:
            behind = max(behind, place)
    return _Needs(behind, waits)


@dataclass
class _Slot:
    """A collective of an LLM action."""

    llm: Action
    place: int
    start_ms: float
    room_ms: float
    pieces: int = 0
    begins: list[Action] = field(default_factory=list)


class _Bubbles:
    """Those of one rank's program, in order."""

    def __init__(
        self,
        plan: PipelinePlan,
        costs: PlanCosts,
        program: tuple[Action, ...],
        encoders: frozenset[int],
        starts_ms: dict[Action, float],
    ) -> None:
        self.at = {action: place for place, action in enumerate(program)}
        self.complete: set[Action] = set()
        """Encoder actions of which nothing is left for their places."""
        self._slots: list[_Slot] = []
        for place, action in enumerate(program):
            if action.type not in COMPUTE or action.stage in encoders:
                continue
            count = collectives(action, plan.graph, costs)
            tensor_ms = costs.tensor_ms.get(action, 0.0)
            if count and tensor_ms > 0:
                start_ms = starts_ms[action]
                room_ms = tensor_ms / count
                self._slots += [_Slot(action, place, start_ms, room_ms) for _ in range(count)]
        self._next = 0
        """The first slot that the next encoder action may have."""

    def place(
        self, action: Action, pieces: list[TimedPiece], behind: int, arrival_ms: float
    ) -> None:
        """Launches what fits of an encoder action.

        Args:
            behind: place that LLM actions come behind in which it may begin.
            arrival_ms: when the last of its inputs from other ranks is there.
        """
        end = self.at[action]
        own = self._next
        while own < len(self._slots) and not (
            self._slots[own].place > behind and self._slots[own].start_ms >= arrival_ms
        ):
            own += 1
        chosen: list[tuple[int, float]] = []
        room_ms = 0.0  # in the slot that the last piece is in
        for piece in pieces:
            if not chosen or chosen[-1][0] != own:
                room_ms = self._slots[own].room_ms if own < len(self._slots) else 0.0
            while own < len(self._slots) and room_ms < piece.compute_ms:
                own += 1
                room_ms = self._slots[own].room_ms if own < len(self._slots) else 0.0
            if own >= len(self._slots) or self._slots[own].place > end:
                break
            room_ms -= piece.compute_ms
            chosen.append((own, piece.compute_ms))
            own += bool(piece.send_ms)
        if sum(ms for _, ms in chosen) > LEAST_MS:
            self._take(action, chosen)
        if len(chosen) == len(pieces) and pieces and sum(ms for _, ms in chosen) > LEAST_MS:
            self.complete.add(action)
            self._next = chosen[-1][0]
        else:  # what comes after begins behind its place
            while self._next < len(self._slots) and self._slots[self._next].place < end:
                self._next += 1

    def _take(self, action: Action, chosen: list[tuple[int, float]]) -> None:
        self._slots[chosen[0][0]].begins.append(action)
        for slot, ms in chosen:
            self._slots[slot].room_ms -= ms
            self._slots[slot].pieces += 1

    def launches(self) -> dict[Action, Launch]:
        """By LLM action."""
        found: dict[Action, Launch] = {}
        for slot in self._slots:
            begins, pieces = found.get(slot.llm, Launch((), ()))
            found[slot.llm] = Launch((*begins, *slot.begins), (*pieces, slot.pieces))
        return {llm: launch for llm, launch in found.items() if any(launch.pieces)}
