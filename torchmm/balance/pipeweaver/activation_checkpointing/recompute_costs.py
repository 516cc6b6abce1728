"""Time and memory of recomputing layers, by stage, task and recomputation mode.

`compute_plan_costs` supports one recomputation mode per module. If a plan has a mode per layer and
task (`PipelinePlan.recompute`), its costs are those of saving all activations, plus the changes of
each layer (`add_recompute_costs`):

    mode         backward             saved on the device        host memory
    none         -                    all activations            -
    selective    + cheap operators    input, matmul results      -
    full         + forward            input                      -
    offload      + forward, copy      -                          input

Recomputation also disables the split of a backward pass into I and W, and needs the activations of
one layer while its backward pass runs (`transient_bytes_N`). Recomputing the first layers is best,
because later layers have already freed their activations at that time. Only tasks that recompute
their last layers need more memory than they saved.

With "offload", the input of a recomputed layer is stored in host memory, if the device has separate
memory. It is copied while the layer runs, and copied back during the backward pass of the following
layer (`torchmm.parallel.activation_offload`). On GPUs, the time of the layer is the maximum of
computing and copying. Otherwise, it is the sum. The next input is prefetched, so a rank with
offloading always has memory for the largest input. The runtime retains the received input of a
stage on the device, so offloading does not help for the first layer of such a stage.

The candidates of a stage are the Pareto front of a multiple-choice knapsack problem. Each layer has
one mode, times and bytes are added, and dominated combinations are dropped:

    saved bytes
      ^ x  none for all layers (fastest)
      |   x
      |     x   .  <- dominated
      |         x
      |               x  full or offload for all layers (lowest memory)
      +----------------------> extra time

Equal layers are counted instead of enumerated, so the front of a stage is exact and small. A long
front is reduced to its two ends and the fastest point of K - 2 equal ranges of bytes (PipeWeaver,
section 6.3). The front is computed for the mean task of a stage. All tasks of the stage have the
same candidates, with times and bytes per task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import PeerMicrobatches, compute_plan_costs, lockstep_tasks
from torchmm.balance.numba_utils import Float64s, Int64s
from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.execution import RecomputeSetting
from torchmm.costs.layers import layer_saved_bytes, received_bytes
from torchmm.costs.sizes import ModuleTasks, text_tokens
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageSpec, Task
from torchmm.pipelining.plan.plan import PipelinePlan, RecomputeMode

LAYER_MODES: tuple[RecomputeSetting, ...] = ("none", "selective", "full")
"""Modes on all devices."""
ALL_MODES: tuple[RecomputeMode, ...] = (*LAYER_MODES, "offload")
"""Modes on devices with separate memory. Their indices are the mode indices M of arrays."""
Modes = tuple[RecomputeMode, ...]
"""Mode of each layer of a stage."""
PINNED_BANDWIDTH_FRACTION = 0.8
"""Assumed fraction of the link bandwidth that copies to and from pinned memory achieve."""


@dataclass(frozen=True, eq=False)
class StageRecompute:
    """Times and bytes of the recomputation modes of one stage.

    Shapes are N tasks with a backward pass, K layer types, and M modes. The modes are `ALL_MODES`,
    or its first elements.

    Attributes:
        tasks: The N tasks.
        kinds: Index of the layer type of each layer.
        forward_ms_KMN: Time that a mode adds to the forward pass of a layer.
        backward_ms_KMN: Time that a mode adds to the backward pass of a layer.
        tp_comm_ms_KMN: Exposed tensor-parallel communication in `backward_ms_KMN`.
        kept_bytes_KMN: Bytes that a layer saves on the device.
        received_bytes_MN: Bytes of the stage input that `kept_bytes_KMN` does not include.
        ranks: Ranks of the plan with the stage.
    """

    tasks: tuple[Task, ...]
    kinds: tuple[int, ...]
    forward_ms_KMN: Float64s
    backward_ms_KMN: Float64s
    tp_comm_ms_KMN: Float64s
    kept_bytes_KMN: Float64s
    received_bytes_MN: Float64s = field(default_factory=lambda: np.zeros((len(ALL_MODES), 1)))
    ranks: tuple[int, ...] = ()

    @property
    def prefetch_bytes(self) -> int:
        """Bytes of the largest input that is prefetched from host memory."""
        if self.kept_bytes_KMN.shape[1] < len(ALL_MODES):
            return 0
        # Inputs are offloaded only if this saves memory.
        leaner_KN = self.kept_bytes_KMN[:, -1] < self.kept_bytes_KMN[:, ALL_MODES.index("full")]
        inputs_KN = self.kept_bytes_KMN[:, ALL_MODES.index("full")] * leaner_KN
        return round(float(inputs_KN.max(initial=0.0)))

    def extra_ms_N(self, modes: Modes) -> Float64s:
        """Return the time that modes add to the forward and backward pass, by task."""
        return self.sum_N(self.forward_ms_KMN, modes) + self.sum_N(self.backward_ms_KMN, modes)

    def saved_bytes_N(self, modes: Modes) -> Float64s:
        """Return the bytes that modes save compared with saving all activations, by task."""
        saved_N = self.sum_N(self.kept_bytes_KMN[:, :1] - self.kept_bytes_KMN, modes)
        received_MN = self.received_bytes_MN
        return saved_N + received_MN[0] - received_MN[ALL_MODES.index(modes[0])]

    def host_bytes_N(self, modes: Modes) -> Float64s:
        """Return the bytes in pinned host memory by task, which torch rounds to powers of 2."""
        if "offload" not in modes:
            return np.zeros(len(self.tasks))
        inputs_KN = self.kept_bytes_KMN[:, ALL_MODES.index("full")]
        buffers_KN = 2 ** np.ceil(np.log2(np.maximum(inputs_KN, 1.0)))
        inputs_KMN = np.zeros_like(self.kept_bytes_KMN)
        inputs_KMN[:, ALL_MODES.index("offload")] = buffers_KN
        return self.sum_N(inputs_KMN, modes)

    def transient_bytes_N(self, modes: Modes) -> Float64s:
        """Return the bytes that a backward pass needs beyond the saved bytes, by task.

        A recomputed layer needs all of its activations. The saved bytes of later layers are free by
        then.
        """
        peak_N = np.zeros(len(self.tasks))
        later_N = np.zeros(len(self.tasks))
        for index, kind in reversed(list(enumerate(self.kinds))):
            kept_N = self.kept_bytes_KMN[kind, ALL_MODES.index(modes[index])]
            if index == 0:
                kept_N = kept_N + self.received_bytes_MN[ALL_MODES.index(modes[0])]
            full_N = self.kept_bytes_KMN[kind, 0]
            peak_N = np.maximum(peak_N, full_N - kept_N - later_N)
            later_N = later_N + kept_N
        return peak_N

    def sum_N(self, table_KMN: Float64s, modes: Modes) -> Float64s:
        """Return the sum over layers of the entries of their modes, by task.

        Raises:
            ValueError: The number of modes differs from the number of layers.
        """
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


def stage_recompute_costs(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    names: frozenset[str],
    offloads: frozenset[str] = frozenset(),
    targets: Sequence[int] | None = None,
    peers: PeerMicrobatches = (),
) -> dict[int, StageRecompute]:
    """Return the costs and savings of recomputation by stage, for stages with backward passes.

    Args:
        graph: Task graph of the step.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the graph.
        model: Cost model of the device.
        names: Modules with a mode per layer and task.
        offloads: Modules of `names` that can offload to host memory.
        targets: Number of positions that are included in the loss, by microbatch. By default, all
            text tokens.
        peers: Microbatches of the ranks that run in lockstep, as for `compute_plan_costs`.
    """
    counts = [text_tokens(meta) for meta in microbatches] if targets is None else targets
    tables: _Tables = {}
    by_stage = {}
    for module in modules:
        if module.name not in names:
            continue
        execution = model.execution(module.name)
        of_module = lockstep_tasks(graph, module, microbatches, counts, execution, peers)
        modes: Modes = ALL_MODES if module.name in offloads else LAYER_MODES
        for stage in graph.layout.stages:
            if stage.module == module.name:
                choices = _build_stage(graph, stage, of_module, model, modes, tables)
                if choices is not None:
                    by_stage[stage.index] = choices
    return by_stage


def _build_stage(
    graph: StageGraph,
    stage: StageSpec,
    of_module: ModuleTasks,
    model: CostModel,
    modes: Modes,
    tables: _Tables,
) -> StageRecompute | None:
    module = of_module.module
    needed_N = np.array([graph.needs_backward(stage.index, i) for i, _ in of_module.keys], bool)
    if stage.stop == stage.start or not needed_N.any():
        return None
    layers = module.layers[stage.start : stage.stop]
    distinct = list(dict.fromkeys(layers))
    needs_input_grad_N = of_module.sends_gradient_N(graph, stage.index)
    if stage.start == 0 and module.kind == "generator" and module.connector_trainable:
        needs_input_grad_N = np.ones_like(needs_input_grad_N)  # for the connector before the layers
    rows = []
    for layer in distinct:
        key = module.name, layer, needs_input_grad_N.tobytes()
        if key not in tables:
            tables[key] = _build_layer_tables(layer, of_module, model, needs_input_grad_N, modes)
        rows.append(tables[key])
    forward, again, tensor, kept, received = (
        np.stack(each)[:, :, needed_N] for each in zip(*rows, strict=True)
    )
    tasks = [Task(stage.index, *key) for key, n in zip(of_module.keys, needed_N, strict=True) if n]
    kinds = tuple(map(distinct.index, layers))
    first = received[kinds[0]] * (stage.start > 0)
    return StageRecompute(
        tuple(tasks), kinds, forward, again, tensor, kept, first, ranks=stage.ranks
    )


def _build_layer_tables(
    layer: LayerDescription,
    of_module: ModuleTasks,
    model: CostModel,
    needs_input_grad_N: np.ndarray,
    modes: Modes,
) -> _LayerTables:
    """Return the tables of one layer, by mode and task.

    Returns:
        Time added to the forward pass, time added to the backward pass, exposed communication in
        the latter, saved bytes, and bytes of a received input that are not in the saved bytes.
    """
    module = of_module.module
    sizes = of_module.all_rank_sizes
    index = module.layers.index(layer)
    trained = module.trainable or bool(layer.adapters)
    has_backward_N = needs_input_grad_N | trained
    forward, again, tensor = [], [], []
    kept: list[np.ndarray] = []
    received: list[np.ndarray] = []
    for mode in LAYER_MODES:
        execution = replace(model.execution(module.name), recompute=mode)
        changed = replace(model, executions={**model.executions, module.name: execution})
        costs = changed.stage_costs(
            module,
            index,
            index + 1,
            sizes,
            needs_input_grad_N,
            of_module.unpadded_sizes,
            ranks=of_module.ranks,
        )
        forward.append(costs.forward.total_ms)
        again.append(costs.backward.total_ms)
        tensor.append(costs.backward.tp_comm_ms)
        setting = changed.setting(module, of_module.sizes.tasks)
        kept_N = layer_saved_bytes(layer, sizes, setting, weights=trained)
        received_N = received_bytes(layer, sizes, setting, weights=trained)
        for by_mode, own_N in ((kept, kept_N), (received, received_N)):
            of_ranks_RN = np.broadcast_to(own_N, sizes.tasks).reshape(of_module.ranks, -1)
            by_mode.append(has_backward_N * of_ranks_RN.max(0))
    if "offload" in modes:
        for times in (forward, again):
            times.append(_with_copy_ms(times[-1], kept[-1], model))
        tensor.append(tensor[-1])
        own_memory = model.profile.device.host_bytes_per_s > 0
        received.append(np.maximum(received[-1], kept[-1] * own_memory))
        kept.append(kept[-1] * (not own_memory))
    forward_MN, again_MN, tensor_MN = (
        np.maximum(np.stack(each) - each[0], 0.0) for each in (forward, again, tensor)
    )
    return forward_MN, again_MN, tensor_MN, np.stack(kept), np.stack(received)


def _with_copy_ms(computing_ms_N: Float64s, nbytes_N: Float64s, model: CostModel) -> Float64s:
    """Return the time of a layer while its input is copied to or from host memory.

    Devices without separate memory copy nothing.
    """
    device = model.profile.device
    rate = PINNED_BANDWIDTH_FRACTION * device.host_bytes_per_s
    if rate == 0:
        return computing_ms_N
    launch_ms_N = model.profile.call_us["copy"] / 1e3 * (nbytes_N > 0)
    copying_ms_N = nbytes_N / rate * 1e3
    if device.asynchronous:
        return np.maximum(computing_ms_N, copying_ms_N) + launch_ms_N
    return computing_ms_N + copying_ms_N + launch_ms_N


def compute_plan_costs_with_recompute(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    targets: Sequence[int] | None = None,
    layerwise: bool = False,
    peers: PeerMicrobatches = (),
) -> PlanCosts:
    """Return the costs of a plan, with its recomputation.

    Args:
        plan: Plan of the step.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the plan.
        model: Cost model. Modules with a mode per layer must save all activations in it.
        targets: Number of positions that are included in the loss, by microbatch. By default, all
            text tokens.
        layerwise: Whether FSDP2 shards each layer.
        peers: Microbatches of the ranks that run in lockstep, as for `compute_plan_costs`.

    Raises:
        ValueError: `compute_plan_costs` raises.
    """
    costs = compute_plan_costs(
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
    choices = stage_recompute_costs(
        plan.graph,
        modules,
        microbatches,
        model,
        names=names,
        offloads=offloads,
        targets=targets,
        peers=peers,
    )
    return add_recompute_costs(costs, plan.recompute, choices)


def add_recompute_costs(
    costs: PlanCosts, recompute: Mapping[Task, Modes], choices: Mapping[int, StageRecompute]
) -> PlanCosts:
    """Return costs that include recomputation.

    Args:
        costs: Costs without recomputation.
        recompute: Modes of the layers of a stage, by task.
        choices: Times and bytes of the modes, by stage.
    """
    # Tasks of one stage with the same modes share the sums over layers.
    by_modes: dict[tuple[int, Modes], list[Task]] = {}
    for task, modes in recompute.items():
        if any(mode != "none" for mode in modes):
            by_modes.setdefault((task.stage, modes), []).append(task)
    compute = dict(costs.compute_ms)
    tensor = dict(costs.tp_comm_ms)
    kept = dict(costs.saved_bytes)
    waiting = dict(costs.saved_for_weights_bytes)
    temporary = dict(costs.temporary_bytes)
    task_indices = {
        index: {t: i for i, t in enumerate(of_stage.tasks)} for index, of_stage in choices.items()
    }
    for (stage, modes), tasks in by_modes.items():
        of_stage = choices[stage]
        tables = (of_stage.forward_ms_KMN, of_stage.backward_ms_KMN, of_stage.tp_comm_ms_KMN)
        forward_extra, extra, exposed = (of_stage.sum_N(table, modes).tolist() for table in tables)
        saved = of_stage.saved_bytes_N(modes).tolist()
        passing = of_stage.transient_bytes_N(modes).tolist()
        for task in tasks:
            task_index = task_indices[stage][task]
            backward_action, input_action, weight_action = (
                Action(kind, *task) for kind in _BACKWARDS
            )
            compute[Action(ActionType.F, *task)] += forward_extra[task_index]
            compute[backward_action] += extra[task_index]
            tensor[backward_action] = tensor.get(backward_action, 0.0) + exposed[task_index]
            temporary[backward_action] = round(passing[task_index])
            if input_action in compute:  # A backward pass with recomputation is not split.
                compute[input_action] = compute[backward_action]
                tensor[input_action] = tensor[backward_action]
                temporary[input_action] = temporary[backward_action]
            if weight_action in compute:
                compute[weight_action] = tensor[weight_action] = 0.0
            kept[task] = max(0, kept[task] - round(saved[task_index]))
            waiting[task] = 0
    # An offloaded input arrives from host memory before the layer runs.
    offloading = {task.stage for task, modes in recompute.items() if "offload" in modes}
    ahead = prefetched_input_bytes({stage: choices[stage] for stage in offloading})
    static = [0] * max(len(costs.static_bytes), 1 + max(ahead, default=-1))
    static[: len(costs.static_bytes)] = costs.static_bytes
    for rank, nbytes in ahead.items():
        static[rank] += nbytes
    return replace(
        costs,
        compute_ms=compute,
        tp_comm_ms=tensor,
        saved_bytes=kept,
        saved_for_weights_bytes=waiting,
        temporary_bytes=temporary,
        static_bytes=tuple(static),
    )


def prefetched_input_bytes(choices: Mapping[int, StageRecompute]) -> dict[int, int]:
    """Return the bytes of the largest prefetched layer input, by rank."""
    by_rank: dict[int, int] = {}
    for of_stage in choices.values():
        for rank in of_stage.ranks:
            by_rank[rank] = max(by_rank.get(rank, 0), of_stage.prefetch_bytes)
    return by_rank


_BACKWARDS = (ActionType.B, ActionType.I, ActionType.W)


MAX_CANDIDATES = 16
"""Maximum number of candidates per stage, K in the paper, which does not state its value."""
MAX_PARTIAL_POINTS = 256
"""Maximum number of points of a front of some of the layer types."""
MODE_ORDER = tuple(map(ALL_MODES.index, ("full", "offload", "selective", "none")))
"""Modes of equal layers, from the first layer to the last.

The first layers recompute more. Full recomputation comes before offloading, because the first layer
does not benefit from offloading a received input."""


class _ParetoPoint(NamedTuple):
    """Time, memory and mode counts of some layers."""

    extra_ms: float
    saved_bytes: float
    counts: tuple[tuple[int, ...], ...]
    """Number of layers by layer type and mode."""


def stage_candidates(choices: StageRecompute, max_candidates: int = MAX_CANDIDATES) -> list[Modes]:
    """Return candidates of a stage, from the fastest to the lowest memory.

    Args:
        choices: Times and bytes of the stage.
        max_candidates: Maximum number of candidates, at least 2.

    Raises:
        ValueError: `max_candidates` is less than 2.
    """
    if max_candidates < 2:
        raise ValueError(
            f"{max_candidates} candidates; at least 2 are required, the fastest and the one with "
            "the least memory"
        )
    front = [_ParetoPoint(0.0, 0.0, ())]
    kinds = len(choices.backward_ms_KMN)
    extra_ms_KMN = choices.forward_ms_KMN + choices.backward_ms_KMN
    for kind in range(kinds):
        again = extra_ms_KMN[kind].mean(1)
        kept = choices.kept_bytes_KMN[kind].mean(1)
        of_kind = _layer_type_front(
            _mode_counts(choices.kinds.count(kind), len(again)), again, kept
        )
        sums = [
            _ParetoPoint(
                a.extra_ms + b.extra_ms, a.saved_bytes + b.saved_bytes, a.counts + b.counts
            )
            for a in front
            for b in of_kind
        ]
        front = _thin_front(
            _pareto_front(sums), max_candidates if kind == kinds - 1 else MAX_PARTIAL_POINTS
        )
    return [_layer_modes(choices.kinds, point.counts) for point in front]


def sort_candidates(extra_ms_NC: Float64s, kept_bytes_NC: Int64s) -> Int64s:
    """Return indices of the candidates of each pair, by increasing time and decreasing bytes.

    Dominated candidates of a pair are dropped, and the last candidate is repeated instead.
    """
    pairs, candidates = extra_ms_NC.shape
    index_NC = np.tile(np.arange(candidates), (pairs, 1))
    wrong_N = (np.diff(extra_ms_NC) < 0).any(1) | (np.diff(kept_bytes_NC) > 0).any(1)
    for pair in np.flatnonzero(wrong_N).tolist():
        of_pair = zip(extra_ms_NC[pair].tolist(), kept_bytes_NC[pair].tolist(), strict=True)
        kept: list[int] = []
        for _, nbytes, index in sorted((ms, n, i) for i, (ms, n) in enumerate(of_pair)):
            if not kept or nbytes < kept_bytes_NC[pair, kept[-1]]:
                kept.append(index)
        index_NC[pair] = kept + kept[-1:] * (candidates - len(kept))
    return index_NC


@cache
def _mode_counts(layers: int, modes: int) -> Int64s:
    """Return all assignments of modes to equal layers as counts by mode, one row each."""
    other_modes = np.indices((layers + 1,) * (modes - 1)).reshape(modes - 1, -1).T
    other_modes = other_modes[other_modes.sum(1) <= layers]
    return np.concatenate([layers - other_modes.sum(1, keepdims=True), other_modes], axis=1)


def _layer_type_front(
    counts: Int64s, extra_ms_M: Float64s, kept_bytes_M: Float64s
) -> list[_ParetoPoint]:
    """Return the Pareto front of all assignments of modes to layers of one type."""
    times = counts @ extra_ms_M
    nbytes = counts @ kept_bytes_M
    order = np.lexsort((nbytes, times))
    min_bytes = np.minimum.accumulate(nbytes[order])
    better = np.append(True, min_bytes[1:] < min_bytes[:-1])
    return [
        _ParetoPoint(float(times[i]), float(nbytes[i]), (tuple(counts[i].tolist()),))
        for i in order[better].tolist()
    ]


def _pareto_front(points: list[_ParetoPoint]) -> list[_ParetoPoint]:
    """Return the Pareto front, from the fastest point to the lowest memory."""
    front: list[_ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.extra_ms, p.saved_bytes)):
        if not front or point.saved_bytes < front[-1].saved_bytes:
            front.append(point)
    return front


def _thin_front(front: list[_ParetoPoint], max_points: int) -> list[_ParetoPoint]:
    """Return both ends, and the fastest point of each of `max_points` - 2 equal ranges of bytes."""
    if len(front) <= max_points:
        return front
    first = front[0]
    last = front[-1]
    width = (first.saved_bytes - last.saved_bytes) / max(1, max_points - 2)
    by_range: dict[int, _ParetoPoint] = {}
    for point in front[1:-1]:  # the fastest of a range comes first
        by_range.setdefault(int((first.saved_bytes - point.saved_bytes) / width), point)
    return [first, *by_range.values(), last]


def _layer_modes(kinds: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> Modes:
    """Return the mode of each layer from counts, in the order of `MODE_ORDER`."""
    remaining = [list(of_type) for of_type in counts]
    modes: list[RecomputeMode] = []
    for kind in kinds:
        mode = next(m for m in MODE_ORDER if m < len(remaining[kind]) and remaining[kind][m])
        remaining[kind][mode] -= 1
        modes.append(ALL_MODES[mode])
    return tuple(modes)
