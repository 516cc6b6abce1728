"""Random stage graphs and random legal compute orders of a graph, determined by a seed.

A sequence of the compute actions of the step is generated in which each action follows its
dependencies; the order of a rank is its part of the sequence. So every generated order can run, and
every order that can run can be generated.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.plan import ComputeOrder, MessageSpecs, TensorSpec

STYLES = ("uniform", "priority", "depth first", "breadth first")
SPLITS = (0.0, 0.5, 1.0)


def random_order(graph: StageGraph, seed: int, split: float | None = None) -> ComputeOrder:
    """Return a legal order of all F, B, I and W of a step.

    Args:
        split: Share of the backwards that are split into I and W. Only trained stages whose
            inputs need gradients are split; a frozen stage that passes gradients on has an I
            without W. None: one of 0, 0.5 and 1.
    """
    rng = random.Random(seed)
    share = rng.choice(SPLITS) if split is None else split
    needs = _needs(graph, rng, share)
    users = defaultdict(list)
    for action, needed in needs.items():
        for each in needed:
            users[each].append(action)
    style, priority = rng.choice(STYLES), {action: rng.random() for action in needs}
    open_needs = {action: len(needed) for action, needed in needs.items()}
    ready = [action for action, count in open_needs.items() if not count]
    programs: list[list[Action]] = [[] for _ in range(graph.layout.rank_count)]
    while ready:
        action = ready.pop(_pick(ready, style, priority, rng))
        programs[graph.rank(Task(*action[1:4]))].append(action)
        for user in users[action]:
            open_needs[user] -= 1
            if not open_needs[user]:
                ready.append(user)
    return tuple(tuple(program) for program in programs)


def _pick(ready: list[Action], style: str, priority: dict[Action, float], rng: random.Random):
    if style == "uniform":
        return rng.randrange(len(ready))
    if style == "priority":
        return max(range(len(ready)), key=lambda i: priority[ready[i]])
    few = rng.randrange(min(2, len(ready)))
    return len(ready) - 1 - few if style == "depth first" else few


def _needs(graph: StageGraph, rng: random.Random, share: float) -> dict[Action, list[Action]]:
    """Return the dependencies of every action of the step."""
    needs: dict[Action, list[Action]] = {}
    back: dict[Task, Action] = {}
    tasks = list(graph.tasks())
    for task in tasks:
        incoming = graph.incoming(task)
        needs[Action(ActionType.F, *task)] = [
            Action(ActionType.F, *graph.producer(message)) for message in incoming
        ]
        if graph.needs_backward(task.stage, task.microbatch):
            needs_input_gradient = any(graph.sends_gradient(message) for message in incoming)
            kind = ActionType.I if needs_input_gradient and rng.random() < share else ActionType.B
            back[task] = Action(kind, *task)
    for task, action in back.items():
        needs[action] = [Action(ActionType.F, *task)] + [
            back[graph.consumer(message)]
            for message in graph.outgoing(task)
            if graph.sends_gradient(message)
        ]
        if action.type is ActionType.I and graph.layout.stages[task.stage].trainable:
            needs[Action(ActionType.W, *task)] = [action]
    return needs


@dataclass
class _Draft:
    """A layout under construction."""

    rng: random.Random
    ranks: int
    spread: str
    stages: list[StageSpec] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, module: str, count: int, replicas: int = 1) -> list[int]:
        """Add a chain of stages and return their indices."""
        trainable = self.rng.choice(("all", "none", "some"))
        begin = len(self.stages)
        places = self.rng.sample(range(self.ranks), self.ranks)
        for i in range(count):
            ranks = [(begin + i) % self.ranks]
            if replicas > 1:
                ranks = [places[(i + r) % self.ranks] for r in range(replicas)]
            elif self.spread == "random":
                ranks = [self.rng.randrange(self.ranks)]
            trained = trainable == "all" or (trainable == "some" and self.rng.random() < 0.5)
            stage = StageSpec(begin + i, module, i, i + 1, tuple(ranks), trainable=trained)
            self.stages.append(stage)
        indices = list(range(begin, begin + count))
        self.edges += pairwise(indices)
        return indices


def random_graph(seed: int, ranks: int | None = None, microbatches: int | None = None):
    """Return a `StageGraph` of 1 to 4 ranks and 1 to 5 microbatches.

    The modules are a chain, an encoder before an LLM, or two encoders, an LLM and a generator.
    Each has 1 to 4 stages, round-robin or on random ranks, which may be frozen. Encoders and
    generators have 0 to 3 sub-microbatches per microbatch and may be replicated over ranks. An
    encoder may feed several stages of the LLM.
    """
    rng = random.Random(seed)
    ranks = ranks or rng.randint(1, 4)
    count = microbatches or rng.randint(1, 5)
    draft = _Draft(rng, ranks, rng.choice(("in turn", "random")))
    shape = rng.choice(("chain", "encoder", "tree"))
    divided = {"chain": [], "encoder": ["vision"], "tree": ["vision", "audio"]}[shape]
    encoders = {m: draft.add(m, rng.randint(1, 3), rng.randint(1, min(2, ranks))) for m in divided}
    llm = draft.add("llm", rng.randint(1, 4))
    for indices in encoders.values():
        draft.edges.append((indices[-1], llm[0]))
        if rng.random() < 0.3:  # as in models that feed features to several layers
            edge = (rng.choice(indices), rng.choice(llm))
            draft.edges += [] if edge in draft.edges else [edge]
    if shape == "tree":
        generator = draft.add("generator", rng.randint(1, 2), rng.randint(1, min(2, ranks)))
        draft.edges.append((llm[-1], generator[0]))
        divided = [*divided, "generator"]
    layout = StageLayout(tuple(_all_ranks_used(draft)), tuple(draft.edges), frozenset(divided))
    return _step(layout, count, divided, rng)


def random_step(layout: StageLayout, seed: int) -> StageGraph:
    """Return another step of the same stages, with other tasks and 1 to 5 microbatches."""
    rng = random.Random(seed)
    return _step(layout, rng.randint(1, 5), sorted(layout.sub_microbatched), rng)


def _step(layout: StageLayout, count: int, divided: list[str], rng: random.Random) -> StageGraph:
    parts = {m: tuple(rng.randint(0, 3) for _ in range(count)) for m in divided}
    replica = {
        (m, microbatch, part): rng.randrange(2)
        for m in divided
        for microbatch in range(count)
        for part in range(parts[m][microbatch])
        if len(layout.stages[_first(layout, m)].ranks) > 1
    }
    return StageGraph(layout, count, parts, replica)


def _first(layout: StageLayout, module: str) -> int:
    return next(s.index for s in layout.stages if s.module == module)


def _all_ranks_used(draft: _Draft) -> list[StageSpec]:
    """Return the stages with renumbered ranks, so that each rank has a stage."""
    used = sorted({rank for stage in draft.stages for rank in stage.ranks})
    return [
        StageSpec(s.index, s.module, s.start, s.stop, tuple(used.index(r) for r in s.ranks),
                  trainable=s.trainable)
        for s in draft.stages
    ]  # fmt: skip


def random_specs(graph: StageGraph, seed: int) -> MessageSpecs:
    """Return one or two tensors for each message; the second has no gradient."""
    rng = random.Random(seed)
    specs: dict[Message, tuple[TensorSpec, ...]] = {}
    for task in graph.tasks():
        for message in graph.incoming(task):
            tensors = [TensorSpec((rng.randint(1, 9), 4), torch.float32)]
            if rng.random() < 0.2:
                tensors.append(TensorSpec((rng.randint(1, 5),), torch.int64, False))
            specs[message] = tuple(tensors)
    return specs
