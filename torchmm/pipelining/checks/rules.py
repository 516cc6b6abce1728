"""What every action that a plan may contain needs, brings about and costs.

Validation has to look at thousands of actions in the time between two steps. So the graph is first
turned into a table: each action a rank may run, with numbers for the *facts* that must be
established before it, those it establishes, the bytes it allocates and frees, and the counter it
raises or waits for. All facts are needed by someone or are the purpose of the step; so every one
must be established exactly once, which finds missing, duplicate and misplaced actions alike, and
checking a plan is one dictionary look-up and a few list operations per action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import MessageSpecs
from torchmm.pipelining.plan.transfers import (
    Transfer,
    tied_reductions,
    transfers,
)

NONE = -1
SHARDED = {ActionType.UNSHARD, ActionType.RESHARD, ActionType.REDUCE_GRAD}
UNPAIRED = (NONE, NONE, NONE)


@dataclass(slots=True)
class TaskFacts:
    """What the table collects about a task; pairs are for its forward and its backward."""

    rank: int
    output: int
    """Fact: its F has run."""
    gradient: int = NONE
    """Fact: its B or I has run; NONE if it has no backward."""
    weights: int = NONE
    """Fact: its B or W has run; NONE if nothing is trained."""
    inputs: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    allocates: list[int] = field(default_factory=lambda: [0, 0])
    frees: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True)
class MemoryModel:
    """Bytes a rank holds beside the messages.

    Attributes:
        kept_bytes: what a task's F keeps for its backward, its inputs included.
        kept_for_weights_bytes: what is kept between I and W, which may be more; None for the same.
        static_bytes: by rank of the plan: parameters, gradients, optimizer state.
    """

    kept_bytes: Callable[[Task], int]
    kept_for_weights_bytes: Callable[[Task], int] | None = None
    static_bytes: Sequence[int] = ()


Rule = tuple[tuple[int, ...], tuple[int, ...], int, int, int, int, int]
"""One action of one rank, as numbers (a plain tuple: making named ones takes as long as all else):

- facts to be established before, by the same rank;
- facts it establishes;
- bytes it allocates when it begins;
- bytes it frees when it ends;
- the counter it adds one to: sends, or receives, posted on a channel; or NONE;
- the counter of the other end that it waits for, until the partner of its own post is posted; or
  NONE;
- the number of the transfer or tied pair, the same at both ends; or NONE.
"""


class RuleBook:
    """All rules of a step.

    Attributes:
        rules: by rank: its actions; I and W only if the plan has any.
        givers: by fact: the action that establishes it.
        giver_ranks: by fact: the rank of that action.
        counters: by counter: the rank that raises it, and the rank that waits for it.
        tasks: the facts of every task.
        messages: all messages of the step.
    """

    def __init__(
        self,
        graph: StageGraph,
        specs: MessageSpecs,
        training: bool,
        kinds: Set[ActionType],
        memory: MemoryModel | None,
    ) -> None:
        """The rules of a graph.

        Args:
            graph: the step.
            specs: sizes of the messages.
            training: whether there are backwards.
            kinds: types of the actions in the plan.
            memory: sizes of what tasks keep.
        """
        self.graph, self.specs, self.training, self.memory = graph, specs, training, memory
        ranks = range(graph.layout.rank_count)
        self._split = ActionType.I in kinds or ActionType.W in kinds
        self.rules: list[dict[Action, Rule]] = [{} for _ in ranks]
        self.givers: list[Action] = []
        self.giver_ranks: list[int] = []
        self.counters: list[tuple[int, int]] = []
        self.messages: list[Message] = []
        self._first_counter: dict[tuple[int, ...], int] = {}
        self._bytes: dict[tuple, tuple[int, int]] = {}
        self.tasks = {task: self._add_task(task) for task in graph.tasks()}
        for transfer in transfers(graph, training):
            self._add_transfer(transfer)
        self._gathered = {
            (rank, stage): self._fact(rank, Action(ActionType.UNSHARD, stage))
            for rank in ranks if kinds & SHARDED
            for stage in graph.layout.stages_of(rank)
        }  # fmt: skip
        done: dict[tuple[int, int], list[int]] = defaultdict(list)
        for task, facts in self.tasks.items():
            self._add_compute(task, facts)
            done[facts.rank, task.stage].append(max(facts.output, facts.gradient, facts.weights))
        for rank in ranks:
            self._add_ends(rank, done)
        self.together: dict[int, int] = {}
        """By rank with mirrors: the counter of actions that it has begun together with others."""
        for rank in ranks if graph.layout.mirrors > 1 else ():
            self.together[rank] = len(self.counters)
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
        gradient = weights = NONE
        if self.training and self.graph.needs_backward(task.stage, task.microbatch):
            gradient = self._fact(rank, Action(ActionType.B, *task))
            if self.graph.layout.stages[task.stage].trainable:
                weights = self._fact(rank, Action(ActionType.W, *task))
        return TaskFacts(rank, output, gradient, weights)

    def _nbytes(self, transfer: Transfer) -> int:
        specs = self.specs.get(transfer.message, ())
        sizes = self._bytes.get(specs)
        if sizes is None:
            each = [(spec.nbytes, spec.requires_grad) for spec in specs]
            sizes = sum(s for s, _ in each), sum(s for s, grad in each if grad)
            self._bytes[specs] = sizes
        return sizes[transfer.backward]

    def _add_transfer(self, transfer: Transfer) -> None:
        message, backward, producer, consumer, source, destination = transfer
        if not backward:
            self.messages.append(message)
        made, used, nbytes = self.tasks[producer], self.tasks[consumer], self._nbytes(transfer)
        origin = made.gradient if backward else made.output
        used.frees[backward] += nbytes
        if source == destination:
            used.inputs[backward].append(origin)
            made.allocates[backward] += nbytes
            return
        send, wait_send, receive, wait = transfer.actions()
        pair = len(self.givers)
        sent, let_go, posted, arrived = (pair,), (pair + 1,), (pair + 2,), (pair + 3,)
        self.givers += (send, wait_send, receive, wait)
        self.giver_ranks += (source, source, destination, destination)
        used.inputs[backward].append(pair + 3)
        sends = self._counter(source, destination)
        receives = sends + 1
        here, there = self.rules[source], self.rules[destination]
        here[send] = ((origin,), sent, nbytes, 0, sends, NONE, pair)
        here[wait_send] = (sent, let_go, 0, nbytes, NONE, receives, pair)
        there[receive] = ((), posted, nbytes, 0, receives, NONE, pair)
        there[wait] = (posted, arrived, 0, 0, NONE, sends, pair)

    def _counter(self, source: int, destination: int, *tied: int) -> int:
        """The counter of what a rank posts for another; that of the way back is the next one."""
        key = (source, destination, *tied)
        first = self._first_counter.get(key)
        if first is None:
            first = self._first_counter[key] = len(self.counters)
            self.counters += [(source, destination), (destination, source)]
        return first

    def _add_compute(self, task: Task, facts: TaskFacts) -> None:
        rules, stage = self.rules[facts.rank], task.stage
        gathered = self._gathered.get((facts.rank, stage), NONE)
        kept = self.memory.kept_bytes(task) if self.memory and facts.gradient >= 0 else 0
        (needs, gradients), allocates, frees = facts.inputs, facts.allocates, facts.frees
        rules[self.givers[facts.output]] = (
            tuple(needs) if gathered < 0 else (gathered, *needs),
            (facts.output,),
            allocates[0] + kept,
            frees[0],
            *UNPAIRED,
        )
        if facts.gradient < 0:
            return
        for_inputs = (facts.output, *gradients)
        gives = (facts.gradient,) if facts.weights < 0 else (facts.gradient, facts.weights)
        b = (for_inputs, gives, allocates[1], frees[1] + kept, *UNPAIRED)
        rules[self.givers[facts.gradient]] = b
        if self._split:
            self._add_halves(task, facts, for_inputs, kept)

    def _add_halves(
        self, task: Task, facts: TaskFacts, for_inputs: tuple[int, ...], kept: int
    ) -> None:
        """The rules of I and W."""
        rules, (_, allocates), (_, frees) = self.rules[facts.rank], facts.allocates, facts.frees
        later = 0
        if facts.weights >= 0:
            later = kept
            if self.memory and self.memory.kept_for_weights_bytes:
                later = self.memory.kept_for_weights_bytes(task)
            w = ((facts.gradient,), (facts.weights,), 0, later, *UNPAIRED)
            rules[self.givers[facts.weights]] = w
        more = max(0, later - kept)  # gradients that W needs may take more than what I lets go
        i = (
            for_inputs,
            (facts.gradient,),
            allocates + more,
            frees + kept + more - later,
            *UNPAIRED,
        )
        rules[Action(ActionType.I, *task)] = i

    def _add_ends(self, rank: int, done: dict[tuple[int, int], list[int]]) -> None:
        """What stands before and behind the computation of a rank."""
        rules, finished = self.rules[rank], {}
        for stage in self.graph.layout.stages_of(rank):
            finished[stage] = tuple(done.get((rank, stage), ()))
            gathered = self._gathered.get((rank, stage))
            if gathered is None:
                continue
            rules[Action(ActionType.UNSHARD, stage)] = ((), (gathered,), 0, 0, *UNPAIRED)
            reduce = self.training and self.graph.layout.stages[stage].trainable
            end = Action(ActionType.REDUCE_GRAD if reduce else ActionType.RESHARD, stage)
            fact = self._fact(rank, end)
            rules[end] = ((gathered, *finished[stage]), (fact,), 0, 0, *UNPAIRED)
            finished[stage] = (fact,)
        for action in tied_reductions(self.graph, rank) if self.training else ():
            ends = sorted([(action.stage, rank), (action.other, action.peer)])
            first = self._counter(ends[0][1], ends[1][1], ends[0][0], ends[1][0])
            own, other = (first, first + 1) if ends[0][1] == rank else (first + 1, first)
            fact = self._fact(rank, action)
            pair = -2 - first  # transfers have numbers from 0
            rules[action] = (finished[action.stage], (fact,), 0, 0, own, other, pair)
