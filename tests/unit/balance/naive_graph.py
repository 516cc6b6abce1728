"""A simulator of operator graphs that is slow and plain, and random graphs to try it on.

A graph is a list of `Operator`s and a list of `Tensor`s. Time goes on in steps from one end to the
next; in every step each queue looks whether its next operator can start.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from torchmm.balance.simulation.operator_graph import OperatorGraph


class Operator(NamedTuple):
    queue: object
    duration_ps: int
    after: list[int]


class Tensor(NamedTuple):
    device: int
    nbytes: int
    producer: int
    consumers: list[int]


class Case(NamedTuple):
    operators: list[Operator]
    tensors: list[Tensor]


def naive_times(operators: list[Operator]) -> tuple[list[int], list[int]]:
    """Start and end of each operator in picoseconds."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    queues: dict[object, list[int]] = {}
    for node, operator in enumerate(operators):
        queue = ("own", node) if operator.queue is None else operator.queue
        queues.setdefault(queue, []).append(node)
    now = 0
    while len(end) < len(operators):
        moved = True
        while moved:  # operators that take no time may let others start at once
            moved = False
            for node, when in start.items():
                if node not in end and when + operators[node].duration_ps == now:
                    end[node] = now
                    moved = True
            for queue in queues.values():
                left = [node for node in queue if node not in end]
                if not left or left[0] in start:
                    continue
                if all(other in end for other in operators[left[0]].after):
                    start[left[0]] = now
                    moved = True
        running = [w + operators[n].duration_ps for n, w in start.items() if n not in end]
        now = min(running, default=now)
    return [start[n] for n in range(len(operators))], [end[n] for n in range(len(operators))]


def naive_peaks(case: Case, start: list[int], end: list[int]) -> dict[int, int]:
    """By device: the most bytes alive at any instant, where no operator takes zero time."""
    lives = [
        (t.device, t.nbytes, start[t.producer], max(end[n] for n in (t.producer, *t.consumers)))
        for t in case.tensors
    ]
    return {
        device: max(
            sum(n for d, n, begin, stop in lives if d == device and begin <= now < stop)
            for now in start
        )
        for device in {t.device for t in case.tensors}
    }


def random_case(seed: int, size: int = 24, least_ps: int = 0) -> Case:
    """Operators on a few queues or none, each after some earlier ones."""
    rng = random.Random(seed)
    count, queues = rng.randint(1, size), rng.randint(1, 4)
    operators: list[Operator] = []
    for node in range(count):
        queue = None if rng.random() < 0.1 else rng.randrange(queues)
        wanted = rng.choice((0, 1, 1, 2, 3))
        after = [rng.randrange(node) for _ in range(wanted)] if node else []
        # Few different durations, so that many operators end at the same time.
        operators.append(Operator(queue, rng.randint(least_ps, 4) * 10**9 + least_ps, after))
    tensors = [
        Tensor(
            rng.randrange(2),
            rng.randint(0, 9),
            producer := rng.randrange(count),
            [rng.randrange(producer, count) for _ in range(rng.randint(0, 3))],
        )
        for _ in range(rng.randint(0, count))
    ]
    return Case(operators, tensors)


def build(case: Case) -> OperatorGraph:
    graph = OperatorGraph()
    for operator in case.operators:
        graph.add(operator.queue, operator.duration_ps / 10**9, operator.after)
    for tensor in case.tensors:
        graph.add_tensor(*tensor)
    return graph
