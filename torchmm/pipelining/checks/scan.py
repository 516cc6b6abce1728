"""One pass over the programs of a plan, and a joint simulation of all ranks.

`simulate_events` checks that all ranks can finish. Computation never blocks, so only posts and
waits are simulated. A transfer is complete when both ends are posted, and not before. All backends
behave this way for large tensors, so a valid plan does not depend on buffering. The k-th send of a
channel matches the k-th receive. `validate` checks that both have the same message.

Reductions wait for data-parallel replicas, which run different plans. Each plan must therefore be
safe with all other plans (`torchmm.pipelining.plan.reductions`). Each rank has a *turn*. It is one
more than the turn of its last reduction, or the turn of a rank that it has waited for since then,
if that is higher. A reduction is unsafe if its turn is lower than the turn of the rank. In this
example, replica A is unsafe, because rank 1 depends on turn 1 before it reduces turn 0. The
reductions of both replicas wait for each other forever:

    replica A, rank 0   reduce turn 1, send     replica B, rank 0   receive, reduce turn 1
    replica A, rank 1   receive, reduce turn 0  replica B, rank 1   reduce turn 0, send

Without unsafe reductions, turns never decrease along a chain of waiting ranks, and increase at each
reduction. No cycle of waiting ranks is possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torchmm.pipelining.checks.problems import PlanProblem, ProblemKind
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message
from torchmm.pipelining.plan.plan import PipelinePlan

Event = tuple[int, int, int]
"""A post, a wait or a reduction of one rank.

Tuples of integers are not tracked by the garbage collector, and each transfer has one or two:

- the counter that a post increments or a wait waits for, or the turn of a reduction;
- the count at which a wait stops to block, 0 for a post, `REDUCTION` for a reduction;
- the index of the action in the program of the rank.
"""
REDUCTION = -1


class ScanResult(NamedTuple):
    """Result of the joint simulation."""

    blocked: dict[int, Event]
    """Blocking wait of each rank that did not finish."""
    unsafe_reductions: list[tuple[int, Event, int]]
    """(rank, reduction, turn of the rank) of each unsafe reduction."""


def simulate_events(events: Sequence[Sequence[Event]], counters: int) -> ScanResult:
    """Simulate the events of all ranks until no rank can continue.

    Args:
        events: Events of each rank, in program order.
        counters: Number of counters.
    """
    posted: list[list[int]] = [[] for _ in range(counters)]
    """Turns of the rank at each post, by counter."""
    turns = [0] * len(events)
    unsafe: list[tuple[int, Event, int]] = []
    waiting: dict[int, list[int]] = {}
    next_index = [0] * len(events)
    ready = list(range(len(events)))
    while ready:
        rank = ready.pop()
        program = events[rank]
        index = next_index[rank]
        turn = turns[rank]
        while index < len(program):
            counter, needed, _ = program[index]
            if not needed:
                posted[counter].append(turn)
                if counter in waiting:
                    ready += waiting.pop(counter)
            elif needed == REDUCTION:
                if turn > counter:
                    unsafe.append((rank, program[index], turn))
                turn = max(turn, counter + 1)
            elif len(posted[counter]) < needed:
                waiting.setdefault(counter, []).append(rank)
                break
            elif posted[counter][needed - 1] > turn:
                turn = posted[counter][needed - 1]
            index += 1
        next_index[rank] = index
        turns[rank] = turn
    blocked = {
        rank: program[next_index[rank]]
        for rank, program in enumerate(events)
        if next_index[rank] < len(program)
    }
    return ScanResult(blocked, unsafe)


Finding = tuple[ProblemKind, str, str]
"""Kind, description and fix of a problem."""
FORWARDS_ONLY = ("the plan has only forward passes", "remove it, or lower with training=True")


class ProgramScan:
    """Pass over all ranks that checks facts and collects the events for `simulate_events`."""

    def __init__(self, book: PlanRules, plan: PipelinePlan) -> None:
        self.book, self.plan = book, plan
        self.problems: list[PlanProblem] = []
        self.established = bytearray(len(book.fact_actions))
        self.events: list[list[Event]] = []
        self.posts: dict[int, list[int]] = defaultdict(list)
        """IDs of the posted transfers, by counter, in program order."""

    def run(self, rank: int) -> None:
        """Check the actions of a rank."""
        rules = self.book.rules[rank] if rank < len(self.book.rules) else {}
        established = self.established
        transfers: list[tuple[int, int | None, int | None, int]] = []
        for position, action in enumerate(self.plan.actions[rank]):
            rule = rules.get(action)
            if rule is None:
                self._report(rank, position, explain_unexpected(self.book, rank, action))
                continue
            needs, gives, _, _, raises, awaits, pair = rule  # faster than attributes
            for fact in needs:
                if not established[fact]:
                    giver = self.book.describe_fact(fact)
                    text = f"{giver} has not run before it"
                    self._report(rank, position, ("dependency", text, f"put {giver} before it"))
            for fact in gives:
                if established[fact]:
                    self._report(rank, position, self._explain_duplicate(rank, position, fact))
                established[fact] = 1
            if pair is not None:
                transfers.append((position, raises, awaits, pair))
        events = self._transfer_events(transfers)
        more = self._reductions(rank)
        if self.book.mirror_counters:
            more += self._mirror_events(rank)
        if more:
            # The sort is stable: the post of an action comes before its waits.
            events = sorted(events + more, key=lambda event: event[2])
        self.events.append(events)

    def _transfer_events(
        self, transfers: Sequence[tuple[int, int | None, int | None, int]]
    ) -> list[Event]:
        """Return the posts and waits of a rank.

        Args:
            transfers: (program index, `raises`, `awaits`, `pair` of the rule) of each action.
        """
        events: list[Event] = []
        index: dict[int, int] = {}
        for position, raises, awaits, pair in transfers:
            if raises is not None:
                posted = self.posts[raises]
                posted.append(pair)
                index[pair] = len(posted)
                events.append((raises, 0, position))
            if awaits is not None and pair in index:
                events.append((awaits, index[pair], position))
        return events

    def _reductions(self, rank: int) -> list[Event]:
        turns = self.book.turns
        return [
            (turns[action.stage], REDUCTION, position)
            for position, action in enumerate(self.plan.actions[rank])
            if action.type is ActionType.REDUCE_GRAD and action.stage in turns
        ]

    def _mirror_events(self, rank: int) -> list[Event]:
        """Return the events of mirrors. Each action waits until all mirrors have started it."""
        mirror_ranks = self.book.graph.layout.mirror_ranks
        events: list[Event] = []
        for position, action in enumerate(self.plan.actions[rank]):
            mirrors = mirror_ranks.get((action.stage, rank))
            if action.type in COMPUTE and mirrors:
                counter = self.book.mirror_counters[rank, mirrors]
                posted = self.posts[counter]
                posted.append(len(posted))
                events.append((counter, 0, position))
                mirror_counters = (
                    self.book.mirror_counters[other, mirrors] for other in mirrors if other != rank
                )
                events += ((other, len(posted), position) for other in mirror_counters)
        return events

    def position(self, rank: int, counter: int, index: int) -> int:
        """Return the program index at which a rank increments a counter for the index-th time."""
        posts = [at for raised, needed, at in self.events[rank] if raised == counter and not needed]
        return posts[index]

    def _report(self, rank: int, position: int, finding: Finding) -> None:
        kind, text, fix = finding
        action = self.plan.actions[rank][position]
        self.problems.append(PlanProblem(kind, rank, position, action, text, fix))

    def _explain_duplicate(self, rank: int, position: int, fact: int) -> Finding:
        rules = self.book.rules[rank]
        program = self.plan.actions[rank]
        earlier = next(
            i
            for i, a in enumerate(program[:position])
            if a in rules and fact in rules[a].establishes
        )
        text = f"action {earlier} ({program[earlier]}) is the same"
        return "duplicate", text, "remove one of them"


def explain_unexpected(book: PlanRules, rank: int, action: Action) -> Finding:
    """Return the reason why an action does not belong to the program of a rank."""
    kind = action.type
    other_ranks = [r for r, rules in enumerate(book.rules) if action in rules]
    if other_ranks:
        ranks = " or ".join(str(r) for r in other_ranks)
        return "wrong_rank", f"it belongs to rank {ranks}", "move it there"
    for expected in book.rules[rank] if rank < len(book.rules) else ():
        if expected[:5] == action[:5] and expected.peer >= 0:
            text = f"the other end is not on rank {action.peer}"
            return "wrong_peer", text, f"set peer to {expected.peer}"
    stages = book.graph.layout.stages
    if not 0 <= action.stage < len(stages):
        text = f"there is no stage {action.stage}"
        return "unknown", text, f"stages are 0 to {len(stages) - 1}"
    if kind in COMPUTE:
        return _explain_compute(book, action)
    return "unknown", *_explain_other(book, rank, action)


def _explain_compute(book: PlanRules, action: Action) -> Finding:
    graph = book.graph
    task = action.task
    if task not in book.tasks:
        count = 0
        if 0 <= task.microbatch < graph.microbatches:
            count = graph.task_count(task.stage, task.microbatch)
        text = (
            f"stage {task.stage} has {count} task(s) for microbatch {task.microbatch} of "
            f"{graph.microbatches}"
        )
        return "unknown", text, "remove it, or make the order from the graph of this step"
    if action[4:] != Action(action.type, 0)[4:]:
        return (
            "unknown",
            "other and peer are set, but only transfers have them",
            "remove other and peer",
        )
    facts = book.tasks[task]
    if action.type is ActionType.W and facts.gradient is not None:
        return "unknown", f"no parameter of stage {task.stage} is trained", "remove it"
    if not book.training:
        return "unknown", *FORWARDS_ONLY
    text = "neither this stage nor anything that feeds it is trained"
    return "unknown", text, "remove it"


def _explain_other(book: PlanRules, rank: int, action: Action) -> tuple[str, str]:
    kind = action.type
    stage = book.graph.layout.stages[action.stage]
    if kind in (ActionType.UNSHARD, ActionType.RESHARD, ActionType.REDUCE_GRAD):
        if action != Action(kind, action.stage):
            text, fix = "it sets fields that only computation and transfers have", "remove them"
        elif rank not in stage.ranks:
            text = f"stage {stage.index} is not on this rank"
            fix = "remove it"
        elif kind is ActionType.RESHARD:
            text = f"stage {stage.index} is trained"
            fix = "use REDUCE_GRAD, which reshards too"
        else:
            text = f"stage {stage.index} is not trained in this plan"
            fix = "use RESHARD"
        return text, fix
    if kind is ActionType.REDUCE_TIED:
        text = f"no trained weight of stage {stage.index} is tied to stage {action.other}"
        return text, "remove it, or set tied_to in the layout"
    return _explain_transfer(book, action)


def _explain_transfer(book: PlanRules, action: Action) -> tuple[str, str]:
    kind = action.type
    ends = (action.stage, action.other)
    backward = kind in (ActionType.SEND_B, ActionType.RECV_B, ActionType.WAIT_B,
                        ActionType.WAIT_SEND_B)  # fmt: skip
    sends = "SEND" in kind.value
    source, destination = ends if sends != backward else ends[::-1]
    message = Message(source, destination, action.microbatch, action.sub_microbatch)
    if message not in book.messages:
        return f"the graph has no {message}", "remove it, or plan with the graph of this step"
    if backward and not book.training:
        return FORWARDS_ONLY
    if backward and not book.graph.sends_gradient(message):
        return "no gradient is sent for this message", "remove it"
    return "both stages are on one rank, where no transfer is required", "remove it"
