"""What every action that a plan may contain needs, brings about and costs.

Validation has to look at thousands of actions in the time between two steps. So the graph is first
turned into a table: each action a rank may run, with numbers for the *facts* that must be
established before it, those it establishes, the bytes it allocates and frees, and the counter it
raises or waits for.

    action          needs                  gives          counter
    F of a task     its inputs, gathered   its output
    SEND_F          the output             sent           raises the channel's sends
    WAIT_SEND_F     sent                   released       awaits the channel's receives
    RECV_F                                 posted         raises the channel's receives
    WAIT_F          posted                 arrived        awaits the channel's sends
    B of a task     output, gradients      both gradients

All facts are needed by some action or are the purpose of the step. Every one must therefore be
established exactly once, which finds missing, duplicate and misplaced actions alike, and checking a
plan is one dictionary look-up and a few list operations per action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message, Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.reductions import reduction_turns
from torchmm.pipelining.plan.transfers import Transfer, tied_reductions, transfers

SHARDED = {ActionType.UNSHARD, ActionType.RESHARD, ActionType.REDUCE_GRAD}


class Rule(NamedTuple):
    """What one action of one rank needs and brings about."""

    needs: tuple[int, ...]
    """Facts to be established before it, by the same rank."""
    gives: tuple[int, ...]
    """Facts it establishes."""
    allocates: int = 0
    """Bytes of messages, when it begins."""
    frees: int = 0
    """Bytes of messages, when it ends."""
    raises: int | None = None
    """The counter it adds one to: of sends, or of receives, posted on a channel."""
    awaits: int | None = None
    """The counter of the other end that it waits for, until the partner of its own post is
    posted."""
    pair: int | None = None
    """The transfer or tied pair it belongs to, by the first fact of either; the same at both
    ends."""


@dataclass(slots=True)
class TaskFacts:
    """What the table collects about a task; pairs are for its forward and its backward."""

    rank: int
    output: int
    """Fact: its F has run."""
    gradient: int | None = None
    """Fact: its B or I has run; None if it has no backward."""
    weights: int | None = None
    """Fact: its B or W has run; None if nothing is trained."""
    inputs: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    allocates: list[int] = field(default_factory=lambda: [0, 0])
    frees: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def last(self) -> int:
        """The fact that nothing of the task comes after: they are numbered in order."""
        backward = self.gradient if self.weights is None else self.weights
        return self.output if backward is None else backward


@dataclass(frozen=True)
class MemoryModel:
    """Bytes a rank holds besides the messages, and besides parameters and their states.

    Attributes:
        kept_bytes: what a task's F keeps for its backward, its inputs included.
        kept_for_weights_bytes: what is kept between I and W, which may be more; None for the same.
    """

    kept_bytes: Callable[[Task], int]
    kept_for_weights_bytes: Callable[[Task], int] | None = None


class RuleBook:
    """All rules of a step.

    Attributes:
        rules: by rank: its actions; I and W only if the plan has any.
        givers: by fact: the action that establishes it.
        giver_ranks: by fact: the rank of that action.
        counters: by counter: the rank that raises it, and the rank that waits for it.
        tasks: the facts of every task.
        messages: all messages of the step.
        turns: by stage: that of its reduction.
    """

    def __init__(self, plan: PipelinePlan) -> None:
        """The rules of a plan. Others of its graph have the same, whatever their order, if they too
        train (or do not), split backwards and move parameters.

        Messages take memory from posting a receive to the end of the consumer, from a send to its
        WAIT_SEND, on one rank from the producer to the end of the consumer; without specs, none.
        """
        self.specs = plan.specs
        self.training = plan.training
        graph = self.graph = plan.graph
        kinds = {action.type for program in plan.actions for action in program}
        ranks = range(graph.layout.rank_count)
        self.turns = reduction_turns(graph.layout)
        self._split = ActionType.I in kinds or ActionType.W in kinds
        self.rules: list[dict[Action, Rule]] = [{} for _ in ranks]
        self.givers: list[Action] = []
        self.giver_ranks: list[int] = []
        self.counters: list[tuple[int, int]] = []
        self.messages: list[Message] = []
        self._first_counter: dict[tuple[int, ...], int] = {}
        self._tied_pairs: dict[int, int] = {}
        self._bytes: dict[tuple, tuple[int, int]] = {}
        self.tasks = {task: self._add_task(task) for task in graph.tasks()}
        for transfer in transfers(graph, plan.training):
            self._add_transfer(transfer)
        self._gathered = {
            (rank, stage): self._fact(rank, Action(ActionType.UNSHARD, stage))
            for rank in ranks if kinds & SHARDED
            for stage in graph.layout.stages_of(rank)
        }  # fmt: skip
        done: dict[tuple[int, int], list[int]] = defaultdict(list)
        for task, facts in self.tasks.items():
            self._add_compute(task, facts)
            done[facts.rank, task.stage].append(facts.last)
        for rank in ranks:
            self._add_ends(rank, done)
        self.together: dict[tuple[int, tuple[int, ...]], int] = {}
        """By rank and ranks with mirrors of the same stages: the counter of actions that it has
        begun together with them."""
        for (_, rank), alike in graph.layout.together.items():
            if (rank, alike) not in self.together:
                self.together[rank, alike] = len(self.counters)
                self.counters += [(rank, rank)] * 2  # they come in pairs; nothing meets these

    def name(self, fact: int) -> str:
        """What to call the action that establishes a fact."""
        action = self.givers[fact]
        if action.type is ActionType.B:
            return f"{action} (or {action._replace(type=ActionType.I)})"
        return str(action)

    def _fact(self, rank: int, action: Action) -> int:
        self.givers.append(action)
        self.giver_ranks.append(rank)
        return len(self.givers) - 1

    def _add_task(self, task: Task) -> TaskFacts:
        """Facts of a task: its output, the gradients of its inputs and of its weights."""
        rank = self.graph.rank(task)
        output = self._fact(rank, Action(ActionType.F, *task))
        facts = TaskFacts(rank, output)
        if self.training and self.graph.needs_backward(task.stage, task.microbatch):
            facts.gradient = self._fact(rank, Action(ActionType.B, *task))
            if self.graph.layout.stages[task.stage].trainable:
                facts.weights = self._fact(rank, Action(ActionType.W, *task))
        return facts

    def _nbytes(self, transfer: Transfer) -> tuple[int, int]:
        """On a rank that sends, and on one that receives."""
        specs = self.specs.get(transfer.message, ())
        key = specs, transfer.backward
        sizes = self._bytes.get(key)
        if sizes is None:
            moved = [spec for spec in specs if spec.requires_grad or not transfer.backward]
            first, second = (
                sum(spec.on_rank(source=source).nbytes for spec in moved)
                for source in (True, False)
            )
            sizes = self._bytes[key] = (second, first) if transfer.backward else (first, second)
        return sizes

    def _add_transfer(self, transfer: Transfer) -> None:
        backward = transfer.backward
        if not backward:
            self.messages.append(transfer.message)
        made = self.tasks[transfer.producer]
        used = self.tasks[transfer.consumer]
        sent_bytes, nbytes = self._nbytes(transfer)
        origin = made.gradient if backward else made.output
        assert origin is not None
        used.frees[backward] += nbytes
        if transfer.source == transfer.destination:
            used.inputs[backward].append(origin)
            made.allocates[backward] += nbytes
            return
        send, wait_send, receive, wait = transfer.actions()
        sent = self._fact(transfer.source, send)
        released = self._fact(transfer.source, wait_send)
        posted = self._fact(transfer.destination, receive)
        arrived = self._fact(transfer.destination, wait)
        used.inputs[backward].append(arrived)
        sends = self._counter(transfer.source, transfer.destination)
        receives = sends + 1
        here = self.rules[transfer.source]
        here[send] = Rule((origin,), (sent,), sent_bytes, 0, sends, None, sent)
        here[wait_send] = Rule((sent,), (released,), 0, sent_bytes, None, receives, sent)
        there = self.rules[transfer.destination]
        there[receive] = Rule((), (posted,), nbytes, 0, receives, None, sent)
        there[wait] = Rule((posted,), (arrived,), 0, 0, None, sends, sent)

    def _counter(self, source: int, destination: int, *tied: int) -> int:
        """The counter of what a rank posts for another; that of the way back is the next one."""
        key = (source, destination, *tied)
        first = self._first_counter.get(key)
        if first is None:
            first = self._first_counter[key] = len(self.counters)
            self.counters += [(source, destination), (destination, source)]
        return first

    def _add_compute(self, task: Task, facts: TaskFacts) -> None:
        rules = self.rules[facts.rank]
        needs, gradients = facts.inputs
        gathered = self._gathered.get((facts.rank, task.stage))
        rules[self.givers[facts.output]] = Rule(
            tuple(needs) if gathered is None else (gathered, *needs),
            (facts.output,),
            facts.allocates[False],
            facts.frees[False],
        )
        if facts.gradient is None:
            return
        for_inputs = (facts.output, *gradients)
        rules[self.givers[facts.gradient]] = Rule(
            for_inputs,
            (facts.gradient,) if facts.weights is None else (facts.gradient, facts.weights),
            facts.allocates[True],
            facts.frees[True],
        )
        if self._split:
            self._add_halves(task, facts, for_inputs)

    def _add_halves(self, task: Task, facts: TaskFacts, for_inputs: tuple[int, ...]) -> None:
        """The rules of I and W."""
        assert facts.gradient is not None
        rules = self.rules[facts.rank]
        if facts.weights is not None:
            rules[self.givers[facts.weights]] = Rule((facts.gradient,), (facts.weights,))
        rules[Action(ActionType.I, *task)] = Rule(
            for_inputs, (facts.gradient,), facts.allocates[True], facts.frees[True]
        )

    def bytes_of(self, rank: int, action: Action, memory: MemoryModel) -> tuple[int, int]:
        """What an action allocates when it begins, and frees when it ends: messages, and what its
        task keeps between F and B, or I and W.

        Raises:
            KeyError: the action has no place on the rank.
        """
        rule = self.rules[rank][action]
        facts = self.tasks[action.task] if action.type in COMPUTE else None
        if facts is None or facts.gradient is None:
            return rule.allocates, rule.frees
        kept = memory.kept_bytes(action.task)
        if action.type is ActionType.F:
            return rule.allocates + kept, rule.frees
        if action.type is ActionType.B:
            return rule.allocates, rule.frees + kept
        later = 0
        if facts.weights is not None:
            weights = memory.kept_for_weights_bytes
            later = kept if weights is None else weights(action.task)
        if action.type is ActionType.W:
            return rule.allocates, rule.frees + later
        more = max(0, later - kept)  # gradients that W needs may take more than what I frees
        return rule.allocates + more, rule.frees + kept + more - later

    def _add_ends(self, rank: int, done: dict[tuple[int, int], list[int]]) -> None:
        """What comes before and after the computation of a rank."""
        rules = self.rules[rank]
        finished: dict[int, tuple[int, ...]] = {}
        for stage in self.graph.layout.stages_of(rank):
            finished[stage] = tuple(done.get((rank, stage), ()))
            gathered = self._gathered.get((rank, stage))
            if gathered is None:
                continue
            rules[Action(ActionType.UNSHARD, stage)] = Rule((), (gathered,))
            reduce = self.training and self.graph.layout.stages[stage].trainable
            end = Action(ActionType.REDUCE_GRAD if reduce else ActionType.RESHARD, stage)
            fact = self._fact(rank, end)
            rules[end] = Rule((gathered, *finished[stage]), (fact,))
            finished[stage] = (fact,)
        for action in tied_reductions(self.graph, rank) if self.training else ():
            ends = sorted([(action.stage, rank), (action.other, action.peer)])
            first = self._counter(ends[0][1], ends[1][1], ends[0][0], ends[1][0])
            own, other = (first, first + 1) if ends[0][1] == rank else (first + 1, first)
            fact = self._fact(rank, action)
            rules[action] = Rule(
                finished[action.stage],
                (fact,),
                raises=own,
                awaits=other,
                pair=self._tied_pairs.setdefault(first, fact),
            )
