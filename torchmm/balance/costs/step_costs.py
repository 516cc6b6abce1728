"""Costs of a step as data (`PlanCosts`), the input of simulators in addition to the plan.

`compute_plan_costs` evaluates the cost model for all actions that a step can consist of. Durations,
bytes and FLOPs are stored by action, task, stage, message and rank. Simulators, searches and
timelines are therefore independent of devices and layers, and tests can use hand-written costs. See
PipeWeaver, section 4 (SEMU): operator costs first, then the simulation of a graph of operators.

    modules, microbatches                     CostModel
            |  lockstep_tasks                     |
            v                                     v
    ModuleTasks (sizes of tasks) ---------> stage_costs (per stage, arrays over tasks)
                                                  |  + FSDP2 per layer
                                                  v
    PlanCosts  compute_ms[action]      F, B, I, W of each task
               transfer_ms[message]    messages and gradients between ranks
               gather_ms, reduce_ms    UNSHARD and REDUCE_GRAD of each stage
               saved_bytes[task]        from F until B (or I)
               static_bytes[rank]      weights, gradients, states, inputs, largest workspace

The memory of rank r during a step is

    static_bytes[r] + sum of saved_bytes of the tasks of r between F and B,

plus `saved_for_weights_bytes` of the tasks between I and W.

Invariants:

- A task without a backward pass has saved_bytes = 0.
- The input of a stage is counted once, either as a tensor that its first layer saves or by
  `torchmm.costs.layers.received_bytes`.
- Times include all tensor-parallel communication. `tp_comm_ms` is the part that is not overlapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import add

import numpy as np

from torchmm.balance.costs.model import BlockCache, CostModel, StageCosts
from torchmm.balance.optimus.layer_pieces import layer_collectives, layer_pieces
from torchmm.balance.plan_costs import LayerPieces, PlanCosts
from torchmm.common.batch import MicrobatchMeta, cuda_graph_image_count
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM, VISION
from torchmm.costs.components import TIME_WIDTH
from torchmm.costs.devices import BETWEEN_NODES, WITHIN_NODE, LinkRanks
from torchmm.costs.execution import Execution
from torchmm.costs.operators import OperatorTotals
from torchmm.costs.sizes import ModuleTasks, module_tasks, text_tokens
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.slices import MessageSlices, Slices
from torchmm.pipelining.plan.transfers import tied_stages, transfers

PeerMicrobatches = Sequence[Sequence[MicrobatchMeta]]
"""Microbatches of the other ranks of a group, rank by rank."""
TOKEN_BYTES = 40
"""Input bytes per token: ID, target, position, and indices of targets and of images."""


def compute_plan_costs(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    targets: Sequence[int] | None = None,
    layerwise: bool = False,
    peers: PeerMicrobatches = (),
) -> PlanCosts:
    """Return the costs of all actions that a step can consist of.

    Args:
        graph: Task graph of the step.
        modules: Complete descriptions of the encoders, the LLM and the generator.
        microbatches: Metadata of the microbatches of the step.
        model: Cost model of the device that all stages run on. Its memory is the memory limit.
        targets: Number of positions that are included in the loss, by microbatch. By default, all
            text tokens.
        layerwise: Whether FSDP2 all-gathers each layer in every forward and backward pass, and
            reduces gradients in the last or every backward pass. On GPUs, this communication
            overlaps with computation.
        peers: Microbatches of the other ranks that run the layers in lockstep (`lockstep_tasks`).

    Raises:
        ValueError: The graph has a different number of microbatches, more sub-microbatches than
            images, or a module without a description.
    """
    counts = [text_tokens(meta) for meta in microbatches] if targets is None else targets
    layout = _check_modules(graph.layout, modules)
    tasks = {
        m.name: lockstep_tasks(graph, m, microbatches, counts, model.execution(m.name), peers)
        for m in modules
    }
    caches: dict[str, BlockCache] = {name: {} for name in tasks}
    collected = _CostCollector()
    workspace = [0.0] * layout.rank_count
    static = [sum(map(_input_bytes, tasks.values()))] * layout.rank_count
    graphs = [0] * layout.rank_count
    for stage in layout.stages:
        of_module = tasks[stage.module]
        span = of_module.module, stage.start, stage.stop
        needs_input_grad_N = of_module.sends_gradient_N(graph, stage.index)
        cache = caches[stage.module]
        costs = model.stage_costs(
            *span,
            of_module.all_rank_sizes,
            needs_input_grad_N,
            of_module.unpadded_sizes,
            cache,
            of_module.ranks,
        )
        collected.gather[stage.index] = model.gather_ms(of_module.module, stage.start, stage.stop)
        collected.reduce[stage.index] = model.reduce_ms(of_module.module, stage.start, stage.stop)
        costs = _add_fsdp_costs(costs, graph, stage, of_module, model) if layerwise else costs
        collected.add(graph, stage, of_module, costs, needs_input_grad_N)
        graphs_bytes = _graph_bytes(
            of_module, costs, model.execution(stage.module), model.element_bytes
        )
        for rank in stage.ranks:
            workspace[rank] = max(workspace[rank], costs.workspace_bytes.max(initial=0.0))
            static[rank] += _static_bytes(stage, of_module, model, layerwise)
            graphs[rank] += graphs_bytes
            # Activations of one pass in flight are in the memory pool of the CUDA graphs, so they
            # are subtracted from the graph memory.
            static[rank] += max(0, graphs_bytes - round(costs.saved_bytes.max(initial=0.0)))
    _add_feature_bytes(collected.kept, graph, tasks, model.element_bytes)
    _add_remote_feature_bytes(collected.kept, graph, tasks, microbatches, model.element_bytes)
    sent = _edge_messages(graph, tasks, model)
    _add_slice_gathers(collected, graph, sent, model)
    return PlanCosts(
        compute_ms=collected.compute_ms,
        tp_comm_ms=collected.tp_comm_ms,
        gather_ms=collected.gather,
        reduce_ms=collected.reduce,
        tied_ms=_tied_weight_ms(graph, tasks, model),
        transfer_ms=_transfer_times_ms(graph, sent, model),
        saved_bytes=collected.kept,
        saved_for_weights_bytes=collected.kept_for_weights,
        static_bytes=tuple(a + round(b) for a, b in zip(static, workspace, strict=True)),
        update_bytes=tuple(map(add, _update_bytes(layout, tasks, model), graphs)),
        memory_limit_bytes=round(model.profile.device.memory_bytes),
        flops=collected.flops,
        overlaps_communication=model.profile.device.asynchronous,
        pieces=_layer_pieces(tasks, model),
        collectives=layer_collectives(model.execution(LLM)),
    )


def lockstep_tasks(
    graph: StageGraph,
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int],
    execution: Execution,
    peers: PeerMicrobatches,
) -> ModuleTasks:
    """Return the tasks of a module and the same tasks on all ranks that run them in lockstep.

    FSDP2 with per-layer all-gathers runs ranks in lockstep. Every all-gather waits for the last
    rank of the shard group, and prefetching is limited to one layer. Expert-parallel ranks also run
    in lockstep, because they exchange tokens in every layer. Every task therefore has the time of
    the slowest rank. In a pipeline, this applies only to modules with experts.

    Args:
        graph: Task graph of the step.
        module: Complete module.
        microbatches: Metadata of the microbatches of the graph.
        targets: Number of positions that are included in the loss, by microbatch.
        execution: Parallelism and options of the module.
        peers: Microbatches of the other ranks of the group, rank by rank.
    """
    local = module_tasks(graph, module, microbatches, targets)
    if graph.layout.rank_count > 1 and execution.expert == 1:
        return local
    peer_tasks = tuple(
        module_tasks(graph, module, metas, [text_tokens(meta) for meta in metas]).sizes
        for metas in peers
    )
    return replace(local, lockstep_sizes=peer_tasks)


def _check_modules(layout: StageLayout, modules: Sequence[ModuleDescription]) -> StageLayout:
    if missing := {s.module for s in layout.stages} - {m.name for m in modules}:
        raise ValueError(f"no descriptions of the modules {sorted(missing)} of the layout")
    return layout


def _layer_pieces(tasks: Mapping[str, ModuleTasks], model: CostModel) -> dict[str, LayerPieces]:
    """Return the sub-layer chunks of the encoder layers, by module name."""
    return {
        name: layer_pieces(of_module.module.layers[0], of_module.sizes, model.execution(name))
        for name, of_module in tasks.items()
        if of_module.module.kind == "encoder"
    }


def _static_bytes(stage: StageSpec, tasks: ModuleTasks, model: CostModel, layerwise: bool) -> int:
    """Return the static bytes of a stage.

    If a step has only one backward pass, gradient shards replace activations as layers finish, so
    gradients are not counted. All gradients exist in the update only, without activations.
    """
    module = tasks.module
    static_bytes = model.static_bytes(module, stage.start, stage.stop, layerwise=layerwise)
    if not layerwise or tasks.sizes.tasks > 1:
        return static_bytes
    return static_bytes - model.gradient_bytes(module, stage.start, stage.stop, layerwise=True)


def _graph_bytes(tasks: ModuleTasks, costs: StageCosts, execution: Execution, element: int) -> int:
    """Return the memory of the CUDA graphs of a stage, see `torchmm.models.encoder_graphs`.

    These are the tensors of that module:

    - Activations, including those of padded images, and temporaries.
    - Two copies of the gradients of all trained parameters: in the graph, and for the accumulation.
    - Four copies of hidden states for each number of images: input, output, and their gradients.

    Args:
        tasks: Tasks of the module.
        costs: Costs of the stage.
        execution: Parallelism and options of the module.
        element: Bytes of a value of the compute dtype.
    """
    images_N = np.maximum(1, tasks.sizes.images_N)
    if not execution.graphs or not tasks.sizes.tasks:
        return 0
    padded_N = np.array([cuda_graph_image_count(int(count)) for count in images_N])
    kept_N = costs.saved_bytes * padded_N / images_N
    width = tasks.module.layers[0].hidden_size * element
    states_N = 4 * width * tasks.sizes.units_N * padded_N / images_N
    by_graph = dict(zip(padded_N.tolist(), states_N.tolist(), strict=True))
    layers = tasks.module.layers
    trained = sum(layer.parameters for layer in layers) if tasks.module.trainable else 0
    copies = 2 * element * trained
    return round(kept_N.max() + costs.workspace_bytes.max() + sum(by_graph.values()) + copies)


def _update_bytes(
    layout: StageLayout, tasks: Mapping[str, ModuleTasks], model: CostModel
) -> tuple[int, ...]:
    """Return the bytes in use on each rank while the optimizer updates the stages sequentially."""
    inputs = sum(map(_input_bytes, tasks.values()))
    persistent = [inputs] * layout.rank_count
    temporary = [0] * layout.rank_count
    for stage in layout.stages:
        update = model.update_bytes(tasks[stage.module].module, stage.start, stage.stop)
        for rank in stage.ranks:
            persistent[rank] += update.persistent
            temporary[rank] = max(temporary[rank], update.temporary)
    return tuple(map(sum, zip(persistent, temporary, strict=True)))


def slowest_update_ms(
    layout: StageLayout, modules: Sequence[ModuleDescription], model: CostModel
) -> float:
    """Return the time of the optimizer step on the slowest rank, in ms.

    Args:
        layout: Stages of the run.
        modules: Complete descriptions of the modules of the layout.
        model: Cost model of the device.
    """
    by_name = {module.name: module for module in modules}
    times_ms = [0.0] * layout.rank_count
    for stage in layout.stages:
        own_ms = model.update_ms(by_name[stage.module], stage.start, stage.stop)
        for rank in stage.ranks:
            times_ms[rank] += own_ms
    return max(times_ms)


def _add_fsdp_costs(
    costs: StageCosts, graph: StageGraph, stage: StageSpec, tasks: ModuleTasks, model: CostModel
) -> StageCosts:
    """Return the costs of a stage with the FSDP2 communication of each layer.

    Only the last backward pass reduces over replicas (HSDP). If `reduces_every_microbatch` is set,
    all other backward passes reduce-scatter over shards.
    """
    execution = model.execution(stage.module)
    if not execution.uses_fsdp:
        return costs
    gather = OperatorTotals.zero(1)
    if execution.shard > 1 or model.element_bytes < execution.states.weight:
        gather = model.gather_work(tasks.module, stage.start, stage.stop)
    last_N, earlier_N = np.zeros((2, len(tasks.keys)))
    with_backward = [
        i for i, key in enumerate(tasks.keys) if graph.needs_backward(stage.index, key[0])
    ]
    last_N[with_backward[-1:]] = 1.0
    earlier_N[with_backward[:-1]] = float(execution.reduces_every_microbatch)
    reduce = OperatorTotals.zero(1)
    for replicas, times_N in ((True, last_N), (False, earlier_N)):
        work = model.reduce_work(tasks.module, stage.start, stage.stop, replicas=replicas)
        reduce = reduce.add(work, times_N)
    overlaps = model.profile.device.asynchronous
    units = stage.stop - stage.start + 1
    return costs.sharded(gather, reduce, units, overlaps)


@dataclass
class _CostCollector:
    """Costs of all stages, by action and task."""

    compute_ms: dict[Action, float] = field(default_factory=dict)
    tp_comm_ms: dict[Action, float] = field(default_factory=dict)
    flops: dict[Action, float] = field(default_factory=dict)
    kept: dict[Task, int] = field(default_factory=dict)
    kept_for_weights: dict[Task, int] = field(default_factory=dict)
    gather: dict[int, float] = field(default_factory=dict)
    """Time of UNSHARD in ms, by stage."""
    reduce: dict[int, float] = field(default_factory=dict)
    """Time of REDUCE_GRAD in ms, by stage."""

    def add(
        self,
        graph: StageGraph,
        stage: StageSpec,
        tasks: ModuleTasks,
        costs: StageCosts,
        needs_input_grad_N: np.ndarray,
    ) -> None:
        """Add the costs of the tasks of a stage.

        All tasks have F. Tasks with a backward pass have B. Tasks whose gradient is sent to the
        preceding stage also have I and, if the stage is trainable, W.
        """
        index = stage.index
        keys = [Task(index, *key) for key in tasks.keys]
        needs = [graph.needs_backward(index, i) for i in range(graph.microbatches)]
        backward = [needs[task.microbatch] for task in keys]
        splits = needs_input_grad_N.tolist()
        flops = costs.flops
        both_N = flops.inputs_N + flops.weights_N
        for kind, times, flops_N, present in (
            (ActionType.F, costs.forward, flops.forward_N, [True] * len(keys)),
            (ActionType.B, costs.backward, both_N, backward),
            (ActionType.I, costs.inputs, flops.inputs_N, splits),
            (ActionType.W, costs.weights, flops.weights_N, splits if stage.trainable else []),
        ):
            actions = [Action(kind, *t) for t, p in zip(keys, present, strict=False) if p]
            indices = [i for i, p in enumerate(present) if p]
            self.compute_ms.update(zip(actions, times.total_ms[indices].tolist(), strict=True))
            shares_N = flops_N[indices] / len(graph.layout.mirror_stages[index])
            self.flops.update(zip(actions, shares_N.tolist(), strict=True))
            if times.tp_comm_ms.any():
                self.tp_comm_ms.update(
                    zip(actions, times.tp_comm_ms[indices].tolist(), strict=True)
                )
        for task, kept, waiting, has in zip(
            keys,
            costs.saved_bytes.tolist(),
            costs.saved_for_weights_bytes.tolist(),
            backward,
            strict=True,
        ):
            self.kept[task] = round(kept) if has else 0
            self.kept_for_weights[task] = round(waiting) if has else 0


def _add_feature_bytes(
    kept: dict[Task, int], graph: StageGraph, tasks: Mapping[str, ModuleTasks], element_bytes: int
) -> None:
    """Add tensors that are sent between stages to the kept bytes of the receiving tasks.

    - Encoder outputs that the LLM receives. They are autograd leaves. Outputs of several
      sub-microbatches are also saved as one concatenated tensor, which doubles the bytes.
    - Values that are sent in addition to hidden states within a module (`_extra_values`).
    - The context of a generator (`_add_context_bytes`).
    """
    stages = graph.layout.stages
    for source, destination in graph.layout.edges:
        module = tasks[stages[source].module].module
        if stages[destination].module == module.name:
            for key, values in _extra_values(graph.layout, (source, destination), tasks).items():
                message = Message(source, destination, *key)
                if graph.computes_gradient(message):
                    cuts = graph.slices(message)
                    cut = cuts.hidden if module.kind == "encoder" else cuts.additional
                    task = Task(destination, *key)
                    kept[task] = kept.get(task, 0) + round(
                        _saved_fraction(cut) * element_bytes * values
                    )
            continue
        if module.kind == "llm":
            _add_context_bytes(kept, graph, (source, destination), tasks, element_bytes)
        if module.kind != "encoder":
            continue
        of_module = tasks[module.name]
        width = tasks[stages[destination].module].module.layers[0].hidden_size
        width *= 1 + len(module.deepstack_layers)
        for key, tokens in zip(of_module.keys, of_module.sizes.outputs_N.tolist(), strict=True):
            message = Message(source, destination, *key)
            if graph.computes_gradient(message):
                copies = _saved_fraction(graph.slices(message).additional)
                if copies == 1 and graph.task_count(source, key[0]) > 1:
                    copies = 2
                task = Task(destination, key[0], 0)
                kept[task] = kept.get(task, 0) + round(copies * element_bytes * tokens * width)


def _add_remote_feature_bytes(
    kept: dict[Task, int],
    graph: StageGraph,
    tasks: Mapping[str, ModuleTasks],
    microbatches: Sequence[MicrobatchMeta],
    element_bytes: int,
) -> None:
    """Add the encoder features from other ranks to the kept bytes of the LLM.

    This applies if images are balanced over ranks. `index_copy` saves its source for the backward
    pass. Without balancing, the source is the encoder output, which is already counted. The number
    of bytes is tokens * width * element_bytes.
    """
    stages = graph.layout.stages
    for source, destination in graph.layout.edges:
        encoder = tasks[stages[source].module].module
        llm = tasks[stages[destination].module].module
        if encoder.kind != "encoder" or llm.kind != "llm":
            continue
        width = llm.layers[0].hidden_size * (1 + len(encoder.deepstack_layers))
        for index, meta in enumerate(microbatches):
            if graph.computes_gradient(Message(source, destination, index, 0)):
                tokens = dict(meta.received_tokens).get(encoder.name, 0)
                task = Task(destination, index, 0)
                kept[task] = kept.get(task, 0) + round(element_bytes * tokens * width)


def _saved_fraction(cut: Slices | None) -> float:
    """Return the saved bytes of a received tensor, as a fraction of the tensor.

    A rank saves the full tensor, or its slice and, if it gathers slices, the full tensor.

    Args:
        cut: Slices of the tensor per tensor-parallel rank. If None, ranks receive the full tensor.
    """
    if cut is None:
        return 1.0
    return cut.gathered + 1 / cut.destination


def _add_context_bytes(
    kept: dict[Task, int],
    graph: StageGraph,
    edge: tuple[int, int],
    tasks: Mapping[str, ModuleTasks],
    element_bytes: int,
) -> None:
    """Add the context from the LLM to the kept bytes of the first stage of a generator.

    A trained connector already counts the context as input of its linear layer.
    """
    of_module = tasks[graph.layout.stages[edge[1]].module]
    if of_module.module.connector_trainable:
        return
    width = tasks[graph.layout.stages[edge[0]].module].module.layers[0].hidden_size
    for key, tokens in zip(of_module.keys, of_module.sizes.context_inputs_N.tolist(), strict=True):
        message = Message(*edge, *key)
        if graph.computes_gradient(message):
            task = Task(edge[1], *key)
            nbytes = (
                _saved_fraction(graph.slices(message).additional) * element_bytes * tokens * width
            )
            kept[task] = kept.get(task, 0) + round(nbytes)


def _input_bytes(tasks: ModuleTasks) -> int:
    """Return the input bytes of a step per rank: IDs, targets and positions, or pixels."""
    module = tasks.module
    if module.kind == "llm":
        return round(TOKEN_BYTES * tasks.sizes.inputs_N.sum())
    if (latents := module.latents) is not None:
        of_patch = (
            latents.pixels_per_patch + 4 * latents.noise_per_patch
        )  # pixels are bytes, noise is float32
        return round(of_patch * tasks.sizes.target_patches_N.sum())
    values = module.embedding_linears[0][0] if module.embedding_linears else 0
    sizes = (
        tasks.unpadded_sizes if module.kind == "generator" else tasks.sizes
    )  # padded when it computes
    return round(module.input_value_bytes * values * sizes.inputs_N.sum())


def _transfer_times_ms(
    graph: StageGraph, sent: Mapping[tuple[int, int], _EdgeMessages], model: CostModel
) -> dict[tuple[Message, bool], float]:
    """Return the times in ms of all messages and gradients between ranks.

    If replicas are not assigned to tasks yet, all messages between replicas that can be on
    different ranks are included, with the slowest link.

    Returns:
        Times by (message, whether it is the gradient).
    """
    sent_over: dict[tuple[Message, bool], tuple[float, LinkRanks]] = {}
    slowest = {edge: _slowest_link(graph, edge, model) for edge in graph.layout.edges}
    for transfer in transfers(graph):
        message = transfer.message
        edge = message.source, message.destination
        link = slowest[edge]
        if link is None:
            if transfer.source == transfer.destination:
                continue
            link = model.pipeline_link(transfer.source, transfer.destination)
        sent_over[message, transfer.backward] = (
            sent[edge].sent_bytes(message, transfer.backward),
            link,
        )
    times_ms = model.transfer_times_ms(
        [n for n, _ in sent_over.values()], [k for _, k in sent_over.values()]
    )
    return dict(zip(sent_over, times_ms, strict=True))


def _add_slice_gathers(
    collected: _CostCollector,
    graph: StageGraph,
    sent: Mapping[tuple[int, int], _EdgeMessages],
    model: CostModel,
) -> None:
    """Add the times of all-gathering message slices over tensor-parallel ranks.

    The consumer gathers in F. The producer gathers gradients in B or I.
    """
    gathers: list[tuple[tuple[Action, ...], int, float]] = []
    slices = [cut for of_edge in sent.values() for cut in of_edge.slices]
    if not any(cut is not None and cut.gathered for cut in slices):
        return
    layout = graph.layout
    open_edges = {edge for edge in layout.edges if _slowest_link(graph, edge, model)}
    for message in graph.messages():
        edge = message.source, message.destination
        cuts = (
            layout.slices(*edge, same_rank=False) if edge in open_edges else graph.slices(message)
        )
        gathered_bytes = sent[edge].gathered_bytes(message, cuts)
        if not gathered_bytes:
            continue
        source, destination = sent[edge].sizes
        forward = Action(ActionType.F, *graph.consumer(message))
        gathers.append(((forward,), destination, gathered_bytes))
        if graph.sends_gradient(message):
            producer = graph.producer(message)
            backward = Action(ActionType.B, *producer), Action(ActionType.I, *producer)
            # Each destination mirror returns the gradient of its tokens only.
            share = (
                1 / layout.mirrors_per_source(*edge) if graph.splits_among_mirrors(message) else 1.0
            )
            gathers.append((backward, source, share * gathered_bytes))
    for size in {size for _, size, _ in gathers if size > 1}:
        chosen = [(actions, n) for actions, ranks, n in gathers if ranks == size]
        times_ms = model.gather_slices_ms([n for _, n in chosen], size)
        for (actions, _), ms in zip(chosen, times_ms, strict=True):
            for action in actions:
                if action in collected.compute_ms:
                    collected.compute_ms[action] += ms
                    collected.tp_comm_ms[action] = collected.tp_comm_ms.get(action, 0.0) + ms


@dataclass(frozen=True)
class _EdgeMessages:
    """Bytes of the unsliced messages over an edge, by (microbatch, sub-microbatch)."""

    slices: MessageSlices
    """Slices of a message between two ranks."""
    sizes: tuple[int, int]
    """Tensor-parallel sizes of source and destination."""
    groups: tuple[int, int]
    """Tensor-parallel ranks per rank of the plan, of source and destination."""
    hidden: Mapping[tuple[int, int], float]
    """Bytes of hidden states."""
    others: Mapping[tuple[int, int], float]
    """Bytes of all other tensors of the message."""

    def sent_bytes(self, message: Message, backward: bool) -> float:
        """Return the bytes of a message, or of its gradient, on the most loaded rank."""
        key = message[2:]
        parts = (self.hidden, self.slices.hidden), (self.others, self.slices.additional)
        return sum(n[key] * self._share(cut, backward) for n, cut in parts if key in n)

    def _share(self, cut: Slices | None, backward: bool) -> float:
        if cut is not None:
            return 1 / min(cut[:2])
        source, destination = self.groups[::-1] if backward else self.groups
        return max(1, -(-destination // source))  # copies if more ranks receive the full tensor

    def gathered_bytes(self, message: Message, cuts: MessageSlices) -> float:
        """Return the bytes of a message that the ranks of its consumer all-gather."""
        key = message[2:]
        parts = (self.hidden, cuts.hidden), (self.others, cuts.additional)
        return sum(n[key] for n, cut in parts if cut is not None and cut.gathered and key in n)


def _edge_messages(
    graph: StageGraph, tasks: Mapping[str, ModuleTasks], model: CostModel
) -> dict[tuple[int, int], _EdgeMessages]:
    """Return the message bytes of each edge."""
    layout = graph.layout
    by_edge = {}
    for edge in layout.edges:
        source, destination = edge
        # The module with sub-microbatches defines the sizes of messages.
        uses_destination = layout.has_sub_microbatches(
            destination
        ) and not layout.has_sub_microbatches(source)
        of_module = tasks[layout.stages[destination if uses_destination else source].module]
        hidden = dict(
            zip(of_module.keys, _message_bytes(layout, edge, of_module, model), strict=True)
        )
        beside = _extra_values(layout, edge, tasks).items()
        others = {key: model.element_bytes * values for key, values in beside}
        # Intermediate features for DeepStack connectors have the slices of hidden states.
        if of_module.module.kind == "encoder":
            hidden = {key: n + others.get(key, 0.0) for key, n in hidden.items()}
            others = {}
        sizes = layout.tensor_parallelism(source).size, layout.tensor_parallelism(destination).size
        groups = layout.tensor_group_size(source), layout.tensor_group_size(destination)
        cuts = layout.slices(*edge, same_rank=False)
        by_edge[edge] = _EdgeMessages(cuts, sizes, groups, hidden, others)
    return by_edge


def _slowest_link(graph: StageGraph, edge: tuple[int, int], model: CostModel) -> LinkRanks | None:
    """Return the slowest link between the replicas of an edge.

    Returns:
        None if replicas are already assigned to tasks, or if no message leaves its rank.
    """
    ends = [graph.layout.stages[stage] for stage in edge]
    if graph.replica or all(len(end.ranks) == 1 for end in ends):
        return None
    ranks = [end.ranks for end in ends]
    same = ends[0].module == ends[1].module  # replica i sends to replica i
    pairs = zip(*ranks, strict=True) if same else product(*ranks)
    links = {model.pipeline_link(*pair) for pair in pairs if pair[0] != pair[1]}
    return (BETWEEN_NODES if BETWEEN_NODES in links else WITHIN_NODE) if links else None


def _extra_values(
    layout: StageLayout, edge: tuple[int, int], tasks: Mapping[str, ModuleTasks]
) -> dict[tuple[int, int], float]:
    """Return the number of values that are sent in addition to hidden states, by task.

    This applies to edges within a module:

    - Encoders send the intermediate features of DeepStack layers before the edge.
    - The LLM sends the features that its layers after the edge add to hidden states.
    - Generators send their context, time embeddings and latents.
    """
    source, destination = (layout.stages[i] for i in edge)
    module = tasks[source.module].module
    if source.module != destination.module:
        return {}
    hidden = module.layers[0].hidden_size
    if module.kind == "generator":
        of_module = tasks[source.module]
        values_N = (
            of_module.sizes.context_inputs_N + TIME_WIDTH * of_module.sizes.images_N
        ) * hidden
        if module.latents is not None:
            values_N = (
                values_N + module.latents.latents_per_patch * of_module.sizes.target_patches_N
            )
        return dict(zip(of_module.keys, values_N.tolist(), strict=True))
    if not module.deepstack_layers:
        return {}
    if module.kind == "encoder":
        tapped = sum(tap < source.stop for tap in module.deepstack_layers)
        of_module = tasks[source.module]
        return dict(
            zip(of_module.keys, (tapped * hidden * of_module.sizes.units_N).tolist(), strict=True)
        )
    remaining = sum(tap >= source.stop for tap in module.deepstack_layers)
    values: dict[tuple[int, int], float] = {}
    vision = tasks[VISION]
    for (microbatch, _), tokens in zip(vision.keys, vision.sizes.outputs_N.tolist(), strict=True):
        key = microbatch, 0
        values[key] = values.get(key, 0.0) + remaining * hidden * tokens
    return values


def _message_bytes(
    layout: StageLayout, edge: tuple[int, int], tasks: ModuleTasks, model: CostModel
) -> list[float]:
    """Return the bytes of hidden states over an edge, by task of the module in `tasks`."""
    source, destination = (layout.stages[i] for i in edge)
    module = tasks.module
    sizes = tasks.sizes
    hidden = module.layers[0].hidden_size
    if source.module == destination.module:
        values_N = sizes.units_N * hidden
    elif module.kind == "encoder":
        width = module.head_linears[-1][1] if module.head_linears else hidden
        values_N = sizes.outputs_N * width * (1 + len(module.deepstack_layers))
    else:  # from the LLM to a generator
        values_N = sizes.context_inputs_N * hidden
    return (model.element_bytes * values_N).tolist()


def _tied_weight_ms(
    graph: StageGraph, tasks: Mapping[str, ModuleTasks], model: CostModel
) -> dict[int, float]:
    """Return the times in ms of REDUCE_TIED for weights on two stages, by stage."""
    times_ms: dict[int, float] = {}
    for pair in tied_stages(graph):
        ranks = [graph.layout.stages[stage].ranks[0] for stage in pair]
        module = tasks[graph.layout.stages[pair[0]].module].module
        time_ms = model.tied_ms(module, model.pipeline_link(*ranks))
        times_ms |= dict.fromkeys(pair, time_ms)
    return times_ms
