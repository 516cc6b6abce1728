"""Preconditions, effects and memory of all actions of a step.

Validation checks thousands of actions between two steps. `PlanRules` therefore converts the graph
into one `Rule` per action of a rank. A rule contains integers: the *facts* that must be established
before the action, the facts that the action establishes, the bytes that it allocates and frees, and
the counters that it increments or waits for.

    action          needs                  gives          counter
    F of a task     its inputs, gathered   its output
    SEND_F          the output             sent           raises the sends of the channel
    WAIT_SEND_F     sent                   released       awaits the receives of the channel
    RECV_F                                 posted         raises the receives of the channel
    WAIT_F          posted                 arrived        awaits the sends of the channel
    B of a task     output, gradients      both gradients

Invariant: a correct plan establishes each fact exactly once. Each fact is needed by another action
or is a result of the step. This invariant detects missing, duplicate and misplaced actions. The
check needs one dictionary lookup and a few list operations per action.
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
    """Preconditions and effects of an action on a rank."""

    requires: tuple[int, ...]
    """Facts that the same rank must establish before the action."""
    establishes: tuple[int, ...]
    """Facts that the action establishes."""
    allocates: int = 0
    """Bytes of messages that are allocated when the action starts."""
    frees: int = 0
    """Bytes of messages that are freed when the action ends."""
    increments: int | None = None
    """Counter that the action increments: the sends or receives that are posted on a channel."""
    waits_for: int | None = None
    """Counter of the other end that the action waits for, until the matching operation is
    posted."""
    pair_id: int | None = None
    """ID of the transfer or the tied pair: the first fact of it. Both ends have the same ID."""


@dataclass(slots=True)
class TaskFacts:
    """Facts and bytes of a task. Pairs have one entry for F and one for the backward pass."""

    rank: int
    output: int
    """Fact that F has run."""
    gradient: int | None = None
    """Fact that B or I has run. None without a backward pass."""
    weights: int | None = None
    """Fact that B or W has run. None if the stage has no trainable parameters."""
    inputs: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    allocates: list[int] = field(default_factory=lambda: [0, 0])
    frees: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def last(self) -> int:
        """Last fact of the task. Facts of a task are numbered in the order of its actions."""
        backward = self.gradient if self.weights is None else self.weights
        return self.output if backward is None else backward


@dataclass(frozen=True)
class MemoryModel:
    """Activation memory of a rank, in bytes, without messages, parameters and optimizer states.

    Attributes:
        saved_bytes: Bytes that F of a task saves for the backward pass, including its inputs.
        saved_for_weights_bytes: Bytes that are saved between I and W. They can exceed
            `saved_bytes`. None if they are equal.
    """

    saved_bytes: Callable[[Task], int]
    saved_for_weights_bytes: Callable[[Task], int] | None = None


class PlanRules:
    """Rules of all actions of a step.

    Attributes:
        rules: Rule of each action, by rank. I and W have rules only if the plan contains any.
        fact_actions: Action that establishes each fact.
        fact_ranks: Rank of the action that establishes each fact.
        counters: (rank that increments the counter, rank that waits for it) of each counter.
        tasks: Facts of each task.
        messages: All messages of the step.
        turns: Turn of the gradient reduction of each stage (see `reduction_turns`).
    """

    def __init__(self, plan: PipelinePlan) -> None:
        """Build the rules for a plan.

        The rules depend on the graph, on `training`, and on whether the plan splits backward passes
        and shards parameters. They do not depend on the order of actions. Messages use memory on
        the receiver from RECV to the end of the consumer, on the sender from SEND to WAIT_SEND, and
        within a rank from the producer to the end of the consumer. Without specs they use none.
        """
        self.specs = plan.specs
        self.training = plan.training
        graph = self.graph = plan.graph
        kinds = {action.type for program in plan.actions for action in program}
        ranks = range(graph.layout.rank_count)
        self.turns = reduction_turns(graph.layout)
        self._split = ActionType.I in kinds or ActionType.W in kinds
        self.rules: list[dict[Action, Rule]] = [{} for _ in ranks]
        self.fact_actions: list[Action] = []
        self.fact_ranks: list[int] = []
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
            for stage in graph.layout.stages_on_rank(rank)
        }  # fmt: skip
        done: dict[tuple[int, int], list[int]] = defaultdict(list)
        for task, facts in self.tasks.items():
            self._add_compute(task, facts)
            done[facts.rank, task.stage].append(facts.last)
        for rank in ranks:
            self._add_ends(rank, done)
        self.mirror_counters: dict[tuple[int, tuple[int, ...]], int] = {}
        """Counter of actions that a rank has started with a group of mirrors, by (rank, ranks of
        the group)."""
        for (_, rank), mirrors in graph.layout.mirror_ranks.items():
            if (rank, mirrors) not in self.mirror_counters:
                self.mirror_counters[rank, mirrors] = len(self.counters)
                self.counters += [
                    (rank, rank)
                ] * 2  # counters are allocated in pairs; the second is unused

    def describe_fact(self, fact: int) -> str:
        """Return the name of the action that establishes a fact."""
        action = self.fact_actions[fact]
        if action.type is ActionType.B:
            return f"{action} (or {action._replace(type=ActionType.I)})"
        return str(action)

    def _fact(self, rank: int, action: Action) -> int:
        self.fact_actions.append(action)
        self.fact_ranks.append(rank)
        return len(self.fact_actions) - 1

    def _add_task(self, task: Task) -> TaskFacts:
        """Create the facts of a task: output, gradients of inputs, gradients of weights."""
        rank = self.graph.rank(task)
        output = self._fact(rank, Action(ActionType.F, *task))
        facts = TaskFacts(rank, output)
        if self.training and self.graph.needs_backward(task.stage, task.microbatch):
            facts.gradient = self._fact(rank, Action(ActionType.B, *task))
            if self.graph.layout.stages[task.stage].trainable:
                facts.weights = self._fact(rank, Action(ActionType.W, *task))
        return facts

    def _nbytes(self, transfer: Transfer) -> tuple[int, int]:
        """Return the bytes of a transfer on the sending rank and on the receiving rank."""
        specs = self.specs.get(transfer.message, ())
        key = specs, transfer.backward
        sizes = self._bytes.get(key)
        if sizes is None:
            moved = [spec for spec in specs if spec.requires_grad or not transfer.backward]
            first, second = (
                sum(spec.local_spec(source=source).nbytes for spec in moved)
                for source in (True, False)
            )
            sizes = self._bytes[key] = (second, first) if transfer.backward else (first, second)
        return sizes

    def _add_transfer(self, transfer: Transfer) -> None:
        backward = transfer.backward
        if not backward:
            self.messages.append(transfer.message)
        producer = self.tasks[transfer.producer]
        consumer = self.tasks[transfer.consumer]
        sent_bytes, nbytes = self._nbytes(transfer)
        origin = producer.gradient if backward else producer.output
        assert origin is not None
        consumer.frees[backward] += nbytes
        if transfer.source == transfer.destination:
            consumer.inputs[backward].append(origin)
            producer.allocates[backward] += nbytes
            return
        send, wait_send, receive, wait = transfer.actions()
        sent = self._fact(transfer.source, send)
        released = self._fact(transfer.source, wait_send)
        posted = self._fact(transfer.destination, receive)
        arrived = self._fact(transfer.destination, wait)
        consumer.inputs[backward].append(arrived)
        sends = self._counter(transfer.source, transfer.destination)
        receives = sends + 1
        source_rules = self.rules[transfer.source]
        source_rules[send] = Rule((origin,), (sent,), sent_bytes, 0, sends, None, sent)
        source_rules[wait_send] = Rule((sent,), (released,), 0, sent_bytes, None, receives, sent)
        destination_rules = self.rules[transfer.destination]
        destination_rules[receive] = Rule((), (posted,), nbytes, 0, receives, None, sent)
        destination_rules[wait] = Rule((posted,), (arrived,), 0, 0, None, sends, sent)

    def _counter(self, source: int, destination: int, *tied: int) -> int:
        """Return the counter of operations from `source` to `destination`.

        The next counter has the opposite direction.
        """
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
        rules[self.fact_actions[facts.output]] = Rule(
            tuple(needs) if gathered is None else (gathered, *needs),
            (facts.output,),
            facts.allocates[False],
            facts.frees[False],
        )
        if facts.gradient is None:
            return
        for_inputs = (facts.output, *gradients)
        rules[self.fact_actions[facts.gradient]] = Rule(
            for_inputs,
            (facts.gradient,) if facts.weights is None else (facts.gradient, facts.weights),
            facts.allocates[True],
            facts.frees[True],
        )
        if self._split:
            self._add_halves(task, facts, for_inputs)

    def _add_halves(self, task: Task, facts: TaskFacts, for_inputs: tuple[int, ...]) -> None:
        """Add the rules of I and W."""
        assert facts.gradient is not None
        rules = self.rules[facts.rank]
        if facts.weights is not None:
            rules[self.fact_actions[facts.weights]] = Rule((facts.gradient,), (facts.weights,))
        rules[Action(ActionType.I, *task)] = Rule(
            for_inputs, (facts.gradient,), facts.allocates[True], facts.frees[True]
        )

    def bytes_of(self, rank: int, action: Action, memory: MemoryModel) -> tuple[int, int]:
        """Return the bytes that an action allocates when it starts and frees when it ends.

        They include messages and the activations that are saved between F and B, or I and W.

        Raises:
            KeyError: The action does not belong to the rank.
        """
        rule = self.rules[rank][action]
        facts = self.tasks[action.task] if action.type in COMPUTE else None
        if facts is None or facts.gradient is None:
            return rule.allocates, rule.frees
        saved = memory.saved_bytes(action.task)
        if action.type is ActionType.F:
            return rule.allocates + saved, rule.frees
        if action.type is ActionType.B:
            return rule.allocates, rule.frees + saved
        saved_for_weights = 0
        if facts.weights is not None:
            weights = memory.saved_for_weights_bytes
            saved_for_weights = saved if weights is None else weights(action.task)
        if action.type is ActionType.W:
            return rule.allocates, rule.frees + saved_for_weights
        growth = max(
            0, saved_for_weights - saved
        )  # gradients that W needs can exceed the bytes that I frees
        return rule.allocates + growth, rule.frees + saved + growth - saved_for_weights

    def _add_ends(self, rank: int, done: dict[tuple[int, int], list[int]]) -> None:
        """Add the rules of UNSHARD, RESHARD, REDUCE_GRAD and REDUCE_TIED of a rank."""
        rules = self.rules[rank]
        finished: dict[int, tuple[int, ...]] = {}
        for stage in self.graph.layout.stages_on_rank(rank):
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
            raised, awaited = (first, first + 1) if ends[0][1] == rank else (first + 1, first)
            fact = self._fact(rank, action)
            rules[action] = Rule(
                finished[action.stage],
                (fact,),
                increments=raised,
                waits_for=awaited,
                pair_id=self._tied_pairs.setdefault(first, fact),
            )
