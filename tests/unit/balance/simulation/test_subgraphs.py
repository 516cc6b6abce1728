"""Tests of subgraphs: results match a flat graph of all operators, with and without reuse."""

import random

import pytest
from support.subgraphs import Buffer, Part, Subgraph, SubgraphCache, memory_changes

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.operator_graph import OperatorGraph


def random_subgraph(rng: random.Random, depth: int) -> Subgraph:
    """Return a subgraph of operators and nested subgraphs on a few queues.

    Nested subgraphs are chosen from two, so that they recur.
    """
    few = [random_subgraph(rng, depth - 1) for _ in range(2)] if depth else []
    parts = []
    for index in range(rng.randint(0 if depth else 1, 5)):
        nested = few and rng.random() < 0.5
        work = rng.choice(few) if nested else rng.choice((0, 0.5, 1, 2.25))
        after = tuple(rng.sample(range(index), min(index, rng.randint(0, 2))))
        parts.append(Part(rng.choice(("gpu", "nic", None)), work, after))
    count = len(parts)
    buffers = tuple(
        Buffer(rng.randint(0, 9), rng.randrange(count), (rng.randrange(count),))
        for _ in range(rng.randint(0, 3) if count else 0)
    )
    return Subgraph(tuple(parts), buffers)


class Flat:
    """Graph of all operators of a subgraph, including operators of nested subgraphs."""

    def __init__(self, subgraph: Subgraph):
        self.graph = OperatorGraph()
        self.operators_ps = 0
        self.buffers: list[Buffer] = []
        begin = self.graph.add(None, 0.0)
        self.end = self.expand(subgraph, begin)
        times_ps = self.graph.compile().times_ps()
        self.start_ps, self.end_ps = (times.tolist() for times in times_ps)
        self.changes = memory_changes(self.buffers, self.start_ps, self.end_ps)

    def expand(self, subgraph: Subgraph, begin: int) -> int:
        """Add the operators of a subgraph after `begin`. Return an operator that ends last."""
        starts, ends, last = [], [], {}
        for part in subgraph.parts:
            after = [begin, *(ends[index] for index in part.after)]
            if part.queue is not None and part.queue in last:
                after.append(last[part.queue])
            if isinstance(part.work, Subgraph):
                start = self.graph.add(None, 0.0, after)
                end = self.expand(part.work, start)
            else:
                start = end = self.graph.add(None, part.work, after)
                self.operators_ps += round(part.work * 10**9)
            starts.append(start)
            ends.append(end)
            last[part.queue] = end
        join = self.graph.add(None, 0.0, [begin, *ends])
        for buffer in subgraph.buffers:
            consumers = [ends[buffer.producer], *(ends[c] for c in buffer.consumers)]
            self.buffers.append(Buffer(buffer.nbytes, starts[buffer.producer], tuple(consumers)))
        return join


def test_nested_subgraphs_match_flat_graph():
    reused = 0
    for seed in range(500):
        subgraph = random_subgraph(random.Random(seed), 3)
        cache = SubgraphCache()
        result, flat = cache.simulate(subgraph), Flat(subgraph)
        assert result.duration_ps == flat.end_ps[flat.end], seed
        assert result.changes == flat.changes, seed
        assert result.device_ps == flat.operators_ps, seed
        reused += cache.reused
    assert reused > 500


LAYER = Subgraph(
    (Part("gpu", 1.0), Part("nic", 0.5, (0,)), Part("gpu", 2.0), Part("gpu", 0.25, (1,))),
    (Buffer(8, 0, (2,)), Buffer(4, 1, (3,))),
)


def test_equal_layers_are_simulated_once():
    twin = Subgraph(tuple(LAYER.parts), tuple(LAYER.buffers))
    stage = Subgraph(tuple(Part("gpu", layer) for layer in (LAYER, twin) * 20))
    cache = SubgraphCache()
    result = cache.simulate(stage)
    assert (cache.simulated, cache.reused) == (2, 39)
    assert result.duration_ms == 40 * 3.25
    assert result.peak_bytes == 12
    cache.simulate(Subgraph(stage.parts))
    assert (cache.simulated, cache.reused) == (2, 40)


@pytest.mark.parametrize(
    "other",
    [
        Subgraph(LAYER.parts, LAYER.buffers, device_class="a100"),
        Subgraph((*LAYER.parts[:3], Part("gpu", 0.5, (1,))), LAYER.buffers),
        Subgraph((*LAYER.parts[:3], Part("gpu", 0.25, (2,))), LAYER.buffers),
        Subgraph(LAYER.parts, (Buffer(9, 0, (2,)), LAYER.buffers[1])),
    ],
)
def test_different_subgraphs_are_not_reused(other):
    cache = SubgraphCache()
    cache.simulate(LAYER)
    cache.simulate(other)
    assert (cache.simulated, cache.reused) == (2, 0)


def test_symmetric_ranks_are_simulated_once():
    group = Subgraph((Part("pipeline", LAYER, copies=8), Part("pipeline", 1.0, copies=2)))
    result = SubgraphCache().simulate(group)
    assert result.duration_ms == 4.25
    assert result.device_ps == (3.75 * 8 + 1.0 * 2) * 10**9
    assert result.peak_bytes == 12


def test_busy_time_excludes_waiting():
    graph = Subgraph((Part("gpu", 1.0), Part("nic", 5.0, (0,)), Part("gpu", 1.0, (1,))))
    result = SubgraphCache().simulate(graph)
    assert result.duration_ms == 7
    assert result.busy_ps == {"gpu": 2 * 10**9, "nic": 5 * 10**9}


def test_invalid_parts_are_rejected():
    with pytest.raises(SimulationError, match=r"duration of -1.*\n.*operator 7"):
        SubgraphCache().simulate(Subgraph((Part("gpu", -1.0), Part("gpu", 1.0, (7,)))))
    with pytest.raises(SimulationError, match="form a cycle"):
        SubgraphCache().simulate(Subgraph((Part("gpu", 1.0, (1,)), Part("gpu", 1.0))))
