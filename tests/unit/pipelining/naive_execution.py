"""Naive execution of plans with names instead of tensors, independent of validation.

Each rank has a set of available tensors. Each action removes its inputs from this set. A channel
has two lists, posted sends and posted receives, which are matched in order. Waits block until both
are posted.

A single plan executes reductions in phases. In each phase, all ranks advance as far as possible,
but only one stage can be reduced, after all its ranks have arrived. `replicas_failure` runs the
plans of several data-parallel replicas together, without phases. There, a reduction synchronizes
the same rank of all replicas, and all ranks of a plan that have the stage.
"""

from __future__ import annotations

from collections import defaultdict

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, Task
from torchmm.pipelining.plan.plan import PipelinePlan

T = ActionType
COMPUTES = (T.F, T.B, T.I, T.W)
WAITING = (T.WAIT_F, T.WAIT_B, T.WAIT_SEND_F, T.WAIT_SEND_B)
COLLECTIVE = (T.UNSHARD, T.REDUCE_GRAD, T.REDUCE_TIED)


class Failure(Exception):  # noqa: N818
    """The plan cannot be executed."""


def expect(condition, *what):
    if not condition:
        raise Failure(*what)


class Execution:
    """Execution of a plan. `run` raises `Failure`, or leaves all sets of tensors empty."""

    def __init__(self, plan: PipelinePlan):
        self.plan, self.graph = plan, plan.graph
        self.tasks = set(self.graph.tasks())
        shards = (T.UNSHARD, T.RESHARD, T.REDUCE_GRAD)
        self.sharded = any(a.type in shards for program in plan.actions for a in program)
        self.boxes = [set() for _ in plan.actions]  # ("F" or "B", message): available on the rank
        self.outboxes = [set() for _ in plan.actions]  # computed on the rank, to be sent
        self.handles = [{} for _ in plan.actions]  # by wait: (is a send, channel, index)
        self.sends, self.receives = defaultdict(list), defaultdict(list)
        self.steps = [{} for _ in plan.actions]  # by task: types of its actions so far
        self.gathered = [set() for _ in plan.actions]
        self.closed = [set() for _ in plan.actions]  # stages that are reduced or resharded
        self.met = defaultdict(set)  # arrived ranks, by tied pair of (rank, stage)
        self.position = [0] * len(plan.actions)
        self.may_reduce = lambda rank, stage: True

    def run(self):
        for stage in self.stages_in_reduction_order():
            self.may_reduce = lambda rank, reduced, now=stage: (
                reduced == now and self.all_at_reduction(now)
            )
            self.advance_all()
        self.may_reduce = lambda rank, stage: False
        self.advance_all()
        self.check_end()

    def advance_all(self) -> bool:
        moved = False
        while any([self.advance(rank) for rank in range(len(self.position))]):
            moved = True
        return moved

    def stages_in_reduction_order(self):
        """Return the stages in reduction order: last stages first, mirrors in order."""
        layout = self.graph.layout
        return sorted(
            range(len(layout.stages)), key=lambda s: (-min(layout.mirror_stages[s]), s)
        )  # fmt: skip

    def all_at_reduction(self, stage) -> bool:
        """Return True if all ranks of a stage have reached or passed its reduction."""
        return all(
            stage in self.closed[rank] or self.waits_to_reduce(rank, stage)
            for rank in self.graph.layout.stages[stage].ranks
        )

    def waits_to_reduce(self, rank, stage) -> bool:
        program, position = self.plan.actions[rank], self.position[rank]
        action = program[position] if position < len(program) else None
        return action is not None and action[:2] == (T.REDUCE_GRAD, stage)

    def check_end(self):
        stuck = [r for r, p in enumerate(self.position) if p < len(self.plan.actions[r])]
        expect(not stuck, "stuck", stuck)
        for remaining in (self.boxes, self.outboxes, self.handles):
            expect(not any(remaining), "remaining", remaining)
        for task in self.graph.tasks():
            self.check_done(task)
        for rank, program in enumerate(self.plan.actions):
            self.check_collectives(rank, program)

    def advance(self, rank, until=None) -> bool:
        begin, program = self.position[rank], self.plan.actions[rank]
        while self.position[rank] < len(program) and self.position[rank] != until:
            if not self.execute(rank, program[self.position[rank]]):
                break
            self.position[rank] += 1
        return self.position[rank] > begin

    def execute(self, rank: int, action: Action) -> bool:
        kind = action.type
        if kind in COMPUTES:
            expect((action.other, action.peer) == (-1, -1), action)
            self.compute(rank, kind, Task(*action[1:4]))
        elif kind is T.REDUCE_GRAD and not self.may_reduce(rank, action.stage):
            return False
        elif kind in (T.UNSHARD, T.RESHARD, T.REDUCE_GRAD):
            self.shard(rank, action)
        elif kind is T.REDUCE_TIED:
            return self.reduce_tied(rank, action)
        elif kind.value.startswith("WAIT"):
            return self.wait(rank, action)
        else:
            self.post(rank, action)
        return True

    def compute(self, rank, kind, task):
        expect(task in self.tasks and self.graph.rank(task) == rank, "foreign", task)
        done = self.steps[rank].setdefault(task, [])
        expect(kind not in done and task.stage not in self.closed[rank], "again or late", task)
        expect(not self.sharded or task.stage in self.gathered[rank], "not gathered", task)
        backward = self.plan.training and self.graph.needs_backward(task.stage, task.microbatch)
        uses, makes = self.graph.incoming(task), self.graph.outgoing(task)
        if kind is T.F:
            self.take(rank, [("F", m) for m in uses])
            self.make(rank, [("F", m, self.graph.consumer(m)) for m in makes])
        else:
            expect(backward, "no backward", task)
            if kind is T.W:
                expect(T.I in done and self.graph.layout.stages[task.stage].trainable, "W", task)
            else:
                expect(T.F in done and not {T.B, T.I} & set(done), "order", task)
                carries = self.graph.sends_gradient
                self.take(rank, [("B", m) for m in makes if carries(m)])
                back = [("B", m, self.graph.producer(m)) for m in uses if carries(m)]
                self.make(rank, back)
        done.append(kind)

    def take(self, rank, names):
        for each in names:
            expect(each in self.boxes[rank], "not available", each)
            self.boxes[rank].remove(each)

    def make(self, rank, outputs):
        for kind, message, user in outputs:
            is_local = self.graph.rank(user) == rank
            (self.boxes if is_local else self.outboxes)[rank].add((kind, message))

    def post(self, rank, action):
        name = tensor(action)
        if action.type in (T.SEND_F, T.SEND_B):
            expect(name in self.outboxes[rank], "not made", action)
            self.outboxes[rank].remove(name)
            user = self.graph.consumer if name[0] == "F" else self.graph.producer
            expect(self.graph.rank(user(name[1])) == action.peer, "peer", action)
            channel, posted = (rank, action.peer), self.sends
        else:
            channel, posted = (action.peer, rank), self.receives
        wait = action._replace(type=WAIT_OF[action.type])
        expect(wait not in self.handles[rank], "twice", action)
        self.handles[rank][wait] = channel, len(posted[channel])
        posted[channel].append(name)

    def wait(self, rank, action) -> bool:
        expect(action in self.handles[rank], "not posted", action)
        channel, index = self.handles[rank][action]
        if min(len(self.sends[channel]), len(self.receives[channel])) <= index:
            return False
        del self.handles[rank][action]
        if action.type in (T.WAIT_F, T.WAIT_B):
            name = tensor(action)
            expect(self.sends[channel][index] == name == self.receives[channel][index], action)
            expect(name not in self.boxes[rank], "twice", action)
            self.boxes[rank].add(name)
        return True

    def shard(self, rank, action):
        stage = action.stage
        expect(rank in self.graph.layout.stages[stage].ranks, "foreign", action)
        if action.type is T.UNSHARD:
            expect(stage not in self.gathered[rank] | self.closed[rank], "again", action)
            self.gathered[rank].add(stage)
            return
        expect(stage in self.gathered[rank], "not gathered", action)
        trained = self.plan.training and self.graph.layout.stages[stage].trainable
        expect((action.type is T.REDUCE_GRAD) == trained, action)
        for task in self.graph.tasks():
            if task.stage == stage and self.graph.rank(task) == rank:
                self.check_done(task)
        self.gathered[rank].remove(stage)
        self.closed[rank].add(stage)

    def reduce_tied(self, rank, action) -> bool:
        stages = self.graph.layout.stages
        stage, other = stages[action.stage], stages[action.other]
        expect(action.other in (stage.tied_to,) or other.tied_to == action.stage, action)
        expect(stage.trainable and other.trainable and self.plan.training, action)
        expect(rank in stage.ranks and action.peer in other.ranks, action)
        expect(stage.ranks.index(rank) == other.ranks.index(action.peer), action)
        expect(not self.sharded or action.stage in self.closed[rank], action)
        arrived = self.met[frozenset([(rank, action.stage), (action.peer, action.other)])]
        arrived.add(rank)
        return len(arrived) == 2

    def check_done(self, task):
        stage = self.graph.layout.stages[task.stage]
        done = set(self.steps[self.graph.rank(task)].get(task, ()))
        if not (self.plan.training and self.graph.needs_backward(task.stage, task.microbatch)):
            legal = [{T.F}]
        else:
            legal = [{T.F, T.B}, {T.F, T.I, T.W} if stage.trainable else {T.F, T.I}]
        expect(done in legal, "incomplete", task, done)

    def check_collectives(self, rank, program):
        """Check that the collectives of a rank are complete and in a valid order."""
        stages = self.graph.layout.stages_on_rank(rank)
        trained = [
            s for s in stages if self.plan.training and self.graph.layout.stages[s].trainable
        ]
        pairs = []
        for stage in self.graph.layout.stages:
            pair = (stage.index, stage.tied_to)
            trainable = [self.graph.layout.stages[s].trainable for s in pair]
            if stage.tied_to >= 0 and self.plan.training and all(trainable):
                pairs.append(tuple(sorted(pair)))
        tied = [s for pair in sorted(set(pairs)) for s in pair if s in stages]
        reductions = [s for s in self.stages_in_reduction_order() if s in trained]
        expected = [(T.UNSHARD, s) for s in stages] + [(T.REDUCE_GRAD, s) for s in reductions]
        expected = (expected if self.sharded else []) + [(T.REDUCE_TIED, s) for s in tied]
        expect([a[:2] for a in program if a.type in COLLECTIVE] == expected, "collectives", rank)
        expect(not self.sharded or self.closed[rank] == set(stages), "not closed", rank)
        kinds = [a.type for a in program]
        for position, kind in enumerate(kinds):
            before, after = set(kinds[:position]), set(kinds[position:])
            expect(kind is not T.UNSHARD or not before & {*COMPUTES, *WAITING}, "late", rank)
            expect(kind is not T.REDUCE_TIED or not after & set(COMPUTES), "early", rank)


WAIT_OF = {T.SEND_F: T.WAIT_SEND_F, T.SEND_B: T.WAIT_SEND_B, T.RECV_F: T.WAIT_F, T.RECV_B: T.WAIT_B}
FORWARD_SENDERS = (T.SEND_F, T.WAIT_SEND_F, T.RECV_B, T.WAIT_B)


def tensor(action: Action) -> tuple[str, Message]:
    """Return ("F", message), or ("B", message whose gradient is transferred)."""
    ends = action.stage, action.other
    source, destination = ends if action.type in FORWARD_SENDERS else ends[::-1]
    return action.type.value[-1], Message(
        source, destination, action.microbatch, action.sub_microbatch
    )


def execution_failure(plan: PipelinePlan) -> str:
    """Return the reason why a plan cannot be executed, or "" if it can."""
    try:
        Execution(plan).run()
    except Failure as error:
        return str(error) or "failure"
    return ""


def replicas_failure(plans: list[PipelinePlan]) -> str:
    """Return the reason why plans of replicas cannot run together, or "" if they can."""
    runs = [Execution(plan) for plan in plans]

    def can_reduce(rank, stage):
        ranks = plans[0].graph.layout.stages[stage].ranks
        members = ranks if len(ranks) > 1 else (rank,)
        return all(
            stage in run.closed[r] or run.waits_to_reduce(r, stage) for run in runs for r in members
        )

    for run in runs:
        run.may_reduce = can_reduce
    try:
        while any([run.advance_all() for run in runs]):
            pass
        for run in runs:
            run.check_end()
    except Failure as error:
        return str(error) or "failure"
    return ""


def run_until(plan: PipelinePlan, rank: int, position: int) -> Execution:
    """Run a rank until it is at an action, and the other ranks no further than necessary."""
    run = Execution(plan)

    def drive(rank: int, until: int):
        while run.position[rank] < until:
            if run.advance(rank, run.position[rank] + 1):
                continue
            action = plan.actions[rank][run.position[rank]]
            channel, index = run.handles[rank][action]
            receives = action.type in (T.WAIT_F, T.WAIT_B)
            peer = channel[0] if receives else channel[1]
            posted = run.sends if receives else run.receives
            while len(posted[channel]) <= index:
                drive(peer, run.position[peer] + 1)

    drive(rank, position)
    return run
