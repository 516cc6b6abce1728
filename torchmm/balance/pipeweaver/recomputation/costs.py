"""What it costs and saves to let layers run again in backward, task by task.

`plan_costs` knows one mode of recomputation per module. Where a plan chooses for itself
(`PipelinePlan.recompute`), its costs are those of keeping everything, and what each layer's mode
changes: a longer backward, fewer bytes kept, no backward in two halves, and the layer's own
activations once more while its backward runs.

The first layers are the best to recompute: when their turn comes, those after them have released
theirs. So only a task that recomputes its last layers needs memory beyond what it kept.

Where a device has memory of its own, a recomputed layer's input may wait in the host's ("offload").
It goes while the layer runs and comes back while the layer behind it has its backward
(`torchmm.parallel.host_inputs`): a layer takes as long as the longer of computing and copying, if
kernels are queued, and the sum of both if not. The next input is there ahead of its use, so a rank
that offloads holds the largest of them throughout. What a stage received stays on the device
whatever its first layer keeps, as the runtime holds it: that layer gains nothing by "offload".

Candidates of a stage, the ways to run its layers worth choosing from, are a multiple-choice
knapsack: each layer takes one mode, times and bytes add up, and what is neither faster nor leaner
than something else is dropped (the Pareto front). Equal layers are counted, not distinguished,
so the front of a stage is exact and small. Of a long front, the fastest and the leanest stay, and
of each of K - 2 equal ranges of bytes the fastest (PipeWeaver §6.3).

The front is that of a stage's mean task, which gives each task of the stage the same candidates, at
its own times and bytes: tasks differ in size, hardly in what their layers' modes cost per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import Peers, lockstep_tasks, plan_costs
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.execution import Recompute
from torchmm.costs.layers import layer_kept_bytes, received_bytes
from torchmm.costs.sizes import ModuleTasks, text_tokens
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageSpec, Task
from torchmm.pipelining.plan.plan import LayerMode, PipelinePlan

LAYER_MODES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Of any device."""
ALL_MODES: tuple[LayerMode, ...] = (*LAYER_MODES, "offload")
"""Of devices with memory of their own."""
Modes = tuple[LayerMode, ...]
PINNED_SHARE = 0.8
"""Of a link's bandwidth that copies to and from pinned memory reach; assumed."""


@dataclass(frozen=True, eq=False)
class StageRecompute:
    """Choices of one stage. N tasks with a backward, K kinds of layers, in M modes: `ALL_MODES`, or
    the first of them.

    Attributes:
        tasks: N of them.
        kinds: by layer: which kind it is.
        forward_ms_KMN: what a layer's mode adds to the forward.
        again_ms_KMN: what it adds to the backward.
        tensor_ms_KMN: of that, exposed tensor-parallel communication.
        kept_bytes_KMN: what the layer keeps on the device.
        received_bytes_MN: what the stage's input holds there beside what its first layer keeps.
        ranks: that have the stage.
    """

    tasks: tuple[Task, ...]
    kinds: tuple[int, ...]
    forward_ms_KMN: Float64s
    again_ms_KMN: Float64s
    tensor_ms_KMN: Float64s
    kept_bytes_KMN: Float64s
    received_bytes_MN: Float64s = field(default_factory=lambda: np.zeros((len(ALL_MODES), 1)))
    ranks: tuple[int, ...] = ()

    @property
    def ahead_bytes(self) -> int:
        """The largest input that may come back from the host."""
        if self.kept_bytes_KMN.shape[1] < len(ALL_MODES):
            return 0
        leaner_KN = self.kept_bytes_KMN[:, -1] < self.kept_bytes_KMN[:, ALL_MODES.index("full")]
        inputs_KN = self.kept_bytes_KMN[:, ALL_MODES.index("full")] * leaner_KN
        return round(float(inputs_KN.max(initial=0.0)))

    def extra_ms_N(self, modes: Modes) -> Float64s:
        """What modes of all layers add to forward and backward together."""
        return self.sum_N(self.forward_ms_KMN, modes) + self.sum_N(self.again_ms_KMN, modes)

    def saved_bytes_N(self, modes: Modes) -> Float64s:
        """What is not kept, compared with keeping everything."""
        saved_N = self.sum_N(self.kept_bytes_KMN[:, :1] - self.kept_bytes_KMN, modes)
        received_MN = self.received_bytes_MN
        return saved_N + received_MN[0] - received_MN[ALL_MODES.index(modes[0])]

    def host_bytes_N(self, modes: Modes) -> Float64s:
        """What waits in the host's memory, where torch rounds buffers up to a power of two."""
        if "offload" not in modes:
            return np.zeros(len(self.tasks))
        inputs_KN = self.kept_bytes_KMN[:, ALL_MODES.index("full")]
        buffers_KN = 2 ** np.ceil(np.log2(np.maximum(inputs_KN, 1.0)))
        inputs_KMN = np.zeros_like(self.kept_bytes_KMN)
        inputs_KMN[:, ALL_MODES.index("offload")] = buffers_KN
        return self.sum_N(inputs_KMN, modes)

    def passing_bytes_N(self, modes: Modes) -> Float64s:
        """What backward needs beyond what was kept, while it runs."""
        most_N = np.zeros(len(self.tasks))
        behind_N = np.zeros(len(self.tasks))
        for index, kind in reversed(list(enumerate(self.kinds))):
            kept_N = self.kept_bytes_KMN[kind, ALL_MODES.index(modes[index])]
            if index == 0:
                kept_N = kept_N + self.received_bytes_MN[ALL_MODES.index(modes[0])]
            whole_N = self.kept_bytes_KMN[kind, 0]
            most_N = np.maximum(most_N, whole_N - kept_N - behind_N)
            behind_N = behind_N + kept_N
        return most_N

    def sum_N(self, table_KMN: Float64s, modes: Modes) -> Float64s:
        """What a table says of modes of all layers together."""
        if len(modes) != len(self.kinds):
            raise ValueError(f"{len(modes)} modes for {len(self.kinds)} layers")
        found_N = np.zeros(len(self.tasks))
        counted: dict[tuple[int, int], int] = {}
        for kind, mode in zip(self.kinds, modes, strict=True):
            key = kind, ALL_MODES.index(mode)
            counted[key] = counted.get(key, 0) + 1
        for (kind, mode_index), count in counted.items():
            found_N += count * table_KMN[kind, mode_index]
        return found_N


_LayerTables = tuple[Float64s, Float64s, Float64s, Float64s, Float64s]
_Tables = dict[tuple[object, ...], _LayerTables]


def stage_choices(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    names: frozenset[str],
    offloads: frozenset[str] = frozenset(),
    targets: Sequence[int] | None = None,
    peers: Peers = (),
) -> dict[int, StageRecompute]:
    """Return the costs and savings of recomputation by stage, for stages with backward passes.

    Args:
        modules: encoders, LLM and generator, complete.
        names: modules whose tasks may choose.
        offloads: modules among them that may use host memory.
        targets: positions that are included in the loss, by microbatch. By default, all text.
        peers: as for `plan_costs`.
    """
    counts = [text_tokens(meta) for meta in microbatches] if targets is None else targets
    tables: _Tables = {}
    found = {}
    for module in modules:
        if module.name not in names:
            continue
        execution = model.execution(module.name)
        own = lockstep_tasks(graph, module, microbatches, counts, execution, peers)
        modes: Modes = ALL_MODES if module.name in offloads else LAYER_MODES
        for stage in graph.layout.stages:
            if stage.module == module.name:
                choices = _stage(graph, stage, own, model, modes, tables)
                if choices is not None:
                    found[stage.index] = choices
    return found


def _stage(
    graph: StageGraph,
    stage: StageSpec,
    own: ModuleTasks,
    model: CostModel,
    modes: Modes,
    tables: _Tables,
) -> StageRecompute | None:
    module = own.module
    needed_N = np.array([graph.needs_backward(stage.index, i) for i, _ in own.keys], bool)
    if stage.stop == stage.start or not needed_N.any():
        return None
    layers = module.layers[stage.start : stage.stop]
    distinct = list(dict.fromkeys(layers))
    arrives_N = own.gradient_arrives_N(graph, stage.index)
    if stage.start == 0 and module.kind == "generator" and module.connector_trainable:
        arrives_N = np.ones_like(arrives_N)  # to the connector, before the layers
    rows = []
    for layer in distinct:
        key = module.name, layer, arrives_N.tobytes()
        if key not in tables:
            tables[key] = _layer(layer, own, model, arrives_N, modes)
        rows.append(tables[key])
    forward, again, tensor, kept, received = (
        np.stack(each)[:, :, needed_N] for each in zip(*rows, strict=True)
    )
    tasks = [Task(stage.index, *key) for key, n in zip(own.keys, needed_N, strict=True) if n]
    kinds = tuple(map(distinct.index, layers))
    first = received[kinds[0]] * (stage.start > 0)
    return StageRecompute(
        tuple(tasks), kinds, forward, again, tensor, kept, first, ranks=stage.ranks
    )


def _layer(
    layer: LayerDescription,
    own: ModuleTasks,
    model: CostModel,
    arrives_N: np.ndarray,
    modes: Modes,
) -> _LayerTables:
    """Of one layer, by mode and task: time added to forward and backward, communication of the
    latter, bytes kept, and bytes of a received input beside them."""
    module = own.module
    sizes = own.of_ranks
    index = module.layers.index(layer)
    trained = module.trainable or bool(layer.adapters)
    has_backward_N = arrives_N | trained
    forward, again, tensor = [], [], []
    kept: list[np.ndarray] = []
    received: list[np.ndarray] = []
    for mode in LAYER_MODES:
        execution = replace(model.execution(module.name), recompute=mode)
        changed = replace(model, executions={**model.executions, module.name: execution})
        costs = changed.stage_costs(
            module, index, index + 1, sizes, arrives_N, own.useful, ranks=own.ranks
        )
        forward.append(costs.forward.total_ms)
        again.append(costs.backward.total_ms)
        tensor.append(costs.backward.tensor_ms)
        setting = changed.setting(module, own.sizes.tasks)
        kept_N = layer_kept_bytes(layer, sizes, setting, weights=trained)
        received_N = received_bytes(layer, sizes, setting, weights=trained)
        for found, own_N in ((kept, kept_N), (received, received_N)):
            of_ranks_RN = np.broadcast_to(own_N, sizes.tasks).reshape(own.ranks, -1)
            found.append(has_backward_N * of_ranks_RN.max(0))
    if "offload" in modes:
        for times in (forward, again):
            times.append(_beside_copy_ms(times[-1], kept[-1], model))
        tensor.append(tensor[-1])
        own_memory = model.profile.device.host_bytes_per_s > 0
        received.append(np.maximum(received[-1], kept[-1] * own_memory))
        kept.append(kept[-1] * (not own_memory))
    forward_MN, again_MN, tensor_MN = (
        np.maximum(np.stack(each) - each[0], 0.0) for each in (forward, again, tensor)
    )
    return forward_MN, again_MN, tensor_MN, np.stack(kept), np.stack(received)


def _beside_copy_ms(computing_ms_N: Float64s, nbytes_N: Float64s, model: CostModel) -> Float64s:
    """Of a layer, and of copying its input to the host's memory or back meanwhile; no more than the
    layer where that is the device's own."""
    device = model.profile.device
    rate = PINNED_SHARE * device.host_bytes_per_s
    if rate == 0:
        return computing_ms_N
    begun_ms_N = model.profile.call_us["copy"] / 1e3 * (nbytes_N > 0)
    copying_ms_N = nbytes_N / rate * 1e3
    if device.asynchronous:
        return np.maximum(computing_ms_N, copying_ms_N) + begun_ms_N
    return computing_ms_N + copying_ms_N + begun_ms_N


def costs_of_plan(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    targets: Sequence[int] | None = None,
    layerwise: bool = False,
    peers: Peers = (),
) -> PlanCosts:
    """Return the costs of a plan, with its recomputation.

    Args:
        model: modules whose tasks choose keep all activations in it.

    Raises:
        ValueError: as `plan_costs`.
    """
    costs = plan_costs(
        plan.graph,
        modules,
        microbatches,
        model,
        targets=targets,
        layerwise=layerwise,
        peers=peers,
    )
    if not plan.recompute:
        return costs
    names = frozenset(plan.graph.layout.stages[task.stage].module for task in plan.recompute)
    offloads = frozenset(
        plan.graph.layout.stages[task.stage].module
        for task, modes in plan.recompute.items()
        if "offload" in modes
    )
    choices = stage_choices(
        plan.graph,
        modules,
        microbatches,
        model,
        names=names,
        offloads=offloads,
        targets=targets,
        peers=peers,
    )
    return charged(costs, plan.recompute, choices)


def charged(
    costs: PlanCosts, recompute: Mapping[Task, Modes], choices: Mapping[int, StageRecompute]
) -> PlanCosts:
    """Return costs that include recomputation.

    Args:
        costs: costs without recomputation.
        recompute: modes of the layers of a stage, by task.
        choices: times and bytes of the modes, by stage.
    """
    # Tasks of one stage with the same modes have common tables.
    alike: dict[tuple[int, Modes], list[Task]] = {}
    for task, modes in recompute.items():
        if any(mode != "none" for mode in modes):
            alike.setdefault((task.stage, modes), []).append(task)
    compute = dict(costs.compute_ms)
    tensor = dict(costs.tensor_ms)
    kept = dict(costs.kept_bytes)
    waiting = dict(costs.kept_for_weights_bytes)
    temporary = dict(costs.temporary_bytes)
    places = {index: {t: i for i, t in enumerate(own.tasks)} for index, own in choices.items()}
    for (stage, modes), tasks in alike.items():
        own = choices[stage]
        tables = (own.forward_ms_KMN, own.again_ms_KMN, own.tensor_ms_KMN)
        before, extra, exposed = (own.sum_N(table, modes).tolist() for table in tables)
        saved = own.saved_bytes_N(modes).tolist()
        passing = own.passing_bytes_N(modes).tolist()
        for task in tasks:
            place = places[stage][task]
            whole, half, rest = (Action(kind, *task) for kind in _BACKWARDS)
            compute[Action(ActionType.F, *task)] += before[place]
            compute[whole] += extra[place]
            tensor[whole] = tensor.get(whole, 0.0) + exposed[place]
            temporary[whole] = round(passing[place])
            if half in compute:  # The backward with recomputation is not split.
                compute[half] = compute[whole]
                tensor[half] = tensor[whole]
                temporary[half] = temporary[whole]
            if rest in compute:
                compute[rest] = tensor[rest] = 0.0
            kept[task] = max(0, kept[task] - round(saved[place]))
            waiting[task] = 0
    # An offloaded input arrives from host memory before the layer runs.
    offloading = {task.stage for task, modes in recompute.items() if "offload" in modes}
    ahead = inputs_ahead({stage: choices[stage] for stage in offloading})
    static = [0] * max(len(costs.static_bytes), 1 + max(ahead, default=-1))
    static[: len(costs.static_bytes)] = costs.static_bytes
    for rank, nbytes in ahead.items():
        static[rank] += nbytes
    return replace(
        costs,
        compute_ms=compute,
        tensor_ms=tensor,
        kept_bytes=kept,
        kept_for_weights_bytes=waiting,
        temporary_bytes=temporary,
        static_bytes=tuple(static),
    )


def inputs_ahead(choices: Mapping[int, StageRecompute]) -> dict[int, int]:
    """By rank: the largest input of a layer that may come from the host ahead of its use."""
    found: dict[int, int] = {}
    for own in choices.values():
        for rank in own.ranks:
            found[rank] = max(found.get(rank, 0), own.ahead_bytes)
    return found


_BACKWARDS = (ActionType.B, ActionType.I, ActionType.W)


MOST_CANDIDATES = 16
"""K of the paper, which does not print it."""
MOST_PARTIAL = 256
"""Points of a front of some of the layers."""
FROM_THE_FRONT = tuple(map(ALL_MODES.index, ("full", "offload", "selective", "none")))
"""Which of equal layers have which mode. The first ones recompute more; the first one may be given
by the stage before, and then gains nothing from being offloaded."""


class _Point(NamedTuple):
    """Modes of some layers."""

    extra_ms: float
    kept_bytes: float
    counts: tuple[tuple[int, ...], ...]
    """By kind of layer: how many have which mode."""


def stage_candidates(choices: StageRecompute, most: int = MOST_CANDIDATES) -> list[Modes]:
    """Modes of all layers of a stage, from the fastest to the leanest.

    Args:
        choices: of the stage.
        most: how many at most; at least 2.

    Raises:
        ValueError: `most` is less than 2.
    """
    if most < 2:
        raise ValueError(
            f"{most} candidates; at least 2 are required, the fastest and the one with the least "
            "memory"
        )
    front = [_Point(0.0, 0.0, ())]
    kinds = len(choices.again_ms_KMN)
    extra_ms_KMN = choices.forward_ms_KMN + choices.again_ms_KMN
    for kind in range(kinds):
        again = extra_ms_KMN[kind].mean(1)
        kept = choices.kept_bytes_KMN[kind].mean(1)
        own = _kind_front(_counts(choices.kinds.count(kind), len(again)), again, kept)
        sums = [
            _Point(a.extra_ms + b.extra_ms, a.kept_bytes + b.kept_bytes, a.counts + b.counts)
            for a in front
            for b in own
        ]
        front = _thinned(_front(sums), most if kind == kinds - 1 else MOST_PARTIAL)
    return [_modes(choices.kinds, point.counts) for point in front]


def ordered(extra_ms_NC: Float64s, kept_bytes_NC: Int64s) -> Int64s:
    """By pair: indices of its candidates, so that times rise and bytes fall.

    What is neither faster nor leaner than another candidate of the same pair is left out; the last
    one then stands there again.
    """
    pairs, candidates = extra_ms_NC.shape
    found_NC = np.tile(np.arange(candidates), (pairs, 1))
    wrong_N = (np.diff(extra_ms_NC) < 0).any(1) | (np.diff(kept_bytes_NC) > 0).any(1)
    for pair in np.flatnonzero(wrong_N).tolist():
        own = zip(extra_ms_NC[pair].tolist(), kept_bytes_NC[pair].tolist(), strict=True)
        kept: list[int] = []
        for _, nbytes, index in sorted((ms, n, i) for i, (ms, n) in enumerate(own)):
            if not kept or nbytes < kept_bytes_NC[pair, kept[-1]]:
                kept.append(index)
        found_NC[pair] = kept + kept[-1:] * (candidates - len(kept))
    return found_NC


@cache
def _counts(layers: int, modes: int) -> Int64s:
    """All ways to give each of some equal layers a mode, as counts by mode: a row for each."""
    rest = np.indices((layers + 1,) * (modes - 1)).reshape(modes - 1, -1).T
    rest = rest[rest.sum(1) <= layers]
    return np.concatenate([layers - rest.sum(1, keepdims=True), rest], axis=1)


def _kind_front(counts: Int64s, extra_ms_M: Float64s, kept_bytes_M: Float64s) -> list[_Point]:
    """Of all ways to run layers of one kind, those that are faster or leaner than any other."""
    times = counts @ extra_ms_M
    nbytes = counts @ kept_bytes_M
    order = np.lexsort((nbytes, times))
    least = np.minimum.accumulate(nbytes[order])
    better = np.append(True, least[1:] < least[:-1])
    return [
        _Point(float(times[i]), float(nbytes[i]), (tuple(counts[i].tolist()),))
        for i in order[better].tolist()
    ]


def _front(points: list[_Point]) -> list[_Point]:
    """Those that are faster or leaner than any other, from the fastest to the leanest."""
    found: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.extra_ms, p.kept_bytes)):
        if not found or point.kept_bytes < found[-1].kept_bytes:
            found.append(point)
    return found


def _thinned(front: list[_Point], most: int) -> list[_Point]:
    """The first, the last, and the fastest of each of `most` - 2 equal ranges of bytes between."""
    if len(front) <= most:
        return front
    first = front[0]
    last = front[-1]
    width = (first.kept_bytes - last.kept_bytes) / max(1, most - 2)
    found: dict[int, _Point] = {}
    for point in front[1:-1]:  # the fastest of a range comes first
        found.setdefault(int((first.kept_bytes - point.kept_bytes) / width), point)
    return [first, *found.values(), last]


def _modes(kinds: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> Modes:
    """Modes by layer, see `FROM_THE_FRONT`."""
    left = [list(own) for own in counts]
    found = []
    for kind in kinds:
        mode = next(m for m in FROM_THE_FRONT if m < len(left[kind]) and left[kind][m])
        left[kind][mode] -= 1
        found.append(ALL_MODES[mode])
    return tuple(found)
