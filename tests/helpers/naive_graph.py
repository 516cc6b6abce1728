"""A slow, simple simulator of operator graphs, and random graphs that test it.

A graph is a list of `Operator`s. Time advances from one end of an operator to the next; at each
time, every queue starts its next operator if that is ready.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from torchmm.balance.simulation.operator_graph import OperatorGraph


class Operator(NamedTuple):
    queue: object
    duration_ps: int
    after: list[int]


def naive_times(operators: list[Operator]) -> tuple[list[int], list[int]]:
    """Return start and end of each operator in picoseconds."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    queues: dict[object, list[int]] = {}
    for node, operator in enumerate(operators):
        queue = ("separate", node) if operator.queue is None else operator.queue
        queues.setdefault(queue, []).append(node)
    now = 0
    while len(end) < len(operators):
        changed = True
        while changed:  # operators without duration may allow others to start at once
            changed = False
            for node, when in start.items():
                if node not in end and when + operators[node].duration_ps == now:
                    end[node] = now
                    changed = True
            for queue in queues.values():
                left = [node for node in queue if node not in end]
                if not left or left[0] in start:
                    continue
                if all(other in end for other in operators[left[0]].after):
                    start[left[0]] = now
                    changed = True
        running = [w + operators[n].duration_ps for n, w in start.items() if n not in end]
        now = min(running, default=now)
    return [start[n] for n in range(len(operators))], [end[n] for n in range(len(operators))]


def random_case(seed: int, size: int = 24) -> list[Operator]:
    """Return operators on up to four queues or none, each after random earlier operators."""
    rng = random.Random(seed)
    count, queues = rng.randint(1, size), rng.randint(1, 4)
    operators: list[Operator] = []
    for node in range(count):
        queue = None if rng.random() < 0.1 else rng.randrange(queues)
        dependencies = rng.choice((0, 1, 1, 2, 3))
        after = [rng.randrange(node) for _ in range(dependencies)] if node else []
        # Few different durations, so that many operators end at the same time.
        operators.append(Operator(queue, rng.randint(0, 4) * 10**9, after))
    return operators


def build(operators: list[Operator]) -> OperatorGraph:
    graph = OperatorGraph()
    for operator in operators:
        graph.add(operator.queue, operator.duration_ps / 10**9, operator.after)
    return graph
