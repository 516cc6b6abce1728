"""What stages cost: time, memory, communication, from sizes alone.

A `CostModel` is a device profile and how each module is run on such devices. From a module's
description (its Hugging Face config, no weights) and what microbatches contain it gives, for each
stage, how long F, B, I and W take, what they keep, and what sharding and transfers cost. It covers
tensor parallelism with and without sequence parallelism, FSDP2 (HSDP), activation checkpointing
(which adds time but no model FLOPs) and frozen blocks. PipeWeaver §4: operators, then a graph.

Rejected: one measured time per layer, which says nothing about other sizes, dtypes or devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchmm.common.dtypes import DTYPES
from torchmm.common.layers import ModuleDescription
from torchmm.costs.blocks import (
    Block,
    Flag,
    Layers,
    gradients,
    stage_blocks,
)
from torchmm.costs.components import around_generator_bytes
from torchmm.costs.devices import NETWORK, NODE, Link
from torchmm.costs.execution import Execution, Setting
from torchmm.costs.flops import PassFlops, pass_flops
from torchmm.costs.layers import (
    Parameters,
    matrix_rounds,
    module_tensors,
    received_bytes,
    shared_bytes,
    stage_parameters,
)
from torchmm.costs.operators import (
    HOST_KINDS,
    Kind,
    Operator,
    Profile,
    Times,
    Work,
    all_reduce_bytes,
    operator_ms,
)
from torchmm.costs.sizes import Array, TaskSizes

ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


CHECKPOINT_CALLS: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "full": (27, 55),
    "selective": (119, 180),
}
"""What activation checkpointing itself takes per layer, in forward and in backward, besides running
operators again: hooks for every tensor that is kept and, where only some results are, every call
through Python. In calls of an operator, as measured on layers too small to compute anything."""


UPDATE_CALLS = 0.4
"""Host time of a fused update and its norm, in launches of an eager operator for each parameter:
135 parameters took 0.95 ms of CPU time where an operator takes 19 us."""


COLLECTIVE_SHARE = 20 / 132
"""Fraction of the multiprocessors that collectives occupy while layers compute: 20 of 132 on an
H800 (DeepSeek-V3, arXiv 2412.19437, section 3.2.2)."""


class BlockWork(NamedTuple):
    """Work of one of equal blocks, by pass."""

    forward: Work
    inputs: Work
    weights: Work
    again: Work


BlockCache = dict[Block, BlockWork]
"""Of one module's blocks, for tasks of the same sizes."""


class StageCosts(NamedTuple):
    """Costs of the tasks of one stage; arrays over tasks."""

    forward: Times
    backward: Times
    inputs: Times
    """I; the whole backward where layers are recomputed, which cannot be split."""
    weights: Times
    kept_bytes: Array
    kept_for_weights_bytes: Array
    workspace_bytes: Array
    """Largest temporary, see `torchmm.costs.layers`; with it, activations of a
    layer that is recomputed or has no backward."""
    flops: PassFlops

    def slowest(self, ranks: int) -> StageCosts:
        """Return the costs of the slowest rank, by task: maximum times and maximum bytes.

        Args:
            ranks: Number of ranks whose tasks the arrays list, rank by rank.
        """
        if ranks == 1:
            return self

        def most(own: Array) -> Array:
            return own.reshape(ranks, -1).max(0)

        return StageCosts(
            _slowest(self.forward, ranks),
            _slowest(self.backward, ranks),
            _slowest(self.inputs, ranks),
            _slowest(self.weights, ranks),
            most(self.kept_bytes),
            most(self.kept_for_weights_bytes),
            most(self.workspace_bytes),
            self.flops,
        )

    def sharded(self, gather: Work, reduce_N: Work, pieces: int, hides: bool) -> StageCosts:
        """Return the costs with FSDP2 that gathers parameters in every forward and backward.

        Casts and copies of parameters and gradients add to the time of the device, and hooks to
        that of the host. Communication overlaps with computing, except for the first piece to be
        gathered, the last to be reduced, and the excess over the computing time.

        Args:
            gather: Work to gather the parameters of the stage.
            reduce_N: Work to reduce the gradients, by task; 0 in backwards that do not.
            pieces: Number of pieces in which the stage is gathered.
            hides: Whether communication overlaps with computing.
        """

        def longer(times: Times, own: Work) -> Times:
            alone_ms = own.network_ms / pieces if hides else own.network_ms
            device_ms = times.device_ms + own.compute_ms
            overlapped_ms = np.minimum(device_ms, own.network_ms - alone_ms)
            device_ms = device_ms + COLLECTIVE_SHARE * overlapped_ms
            device_ms = np.maximum(device_ms, own.network_ms - alone_ms) + alone_ms
            runs = times.total_ms > 0
            return times._replace(
                device_ms=runs * device_ms, host_ms=runs * (times.host_ms + own.host_ms)
            )

        backward = longer(self.backward, gather.plus(reduce_N))
        return self._replace(forward=longer(self.forward, gather), backward=backward)


def _beside_layers(
    module: ModuleDescription, start: int, stop: int, sizes: TaskSizes, setting: Setting
) -> Array:
    """What the layers of a stage keep together, by task."""
    if module.kind == "generator":
        return around_generator_bytes(module, start, stop, sizes, setting)
    return shared_bytes(module, sizes, setting.element_bytes)


def _workspace(held: Sequence[tuple[Array, Array]]) -> Array:
    """The most that a task needs beyond all that is kept of it.

    Args:
        held: by block, in the order of forward: temporaries, and what the block keeps until its
            backward (not until W). While a block runs, those behind it have kept nothing yet, or
            let go of it.
    """
    later_N: Array | float = 0.0
    most_N: Array | float = 0.0
    for temporary_N, kept_N in reversed(held):
        most_N = np.maximum(most_N, temporary_N - later_N)
        later_N = later_N + kept_N
    return np.asarray(most_N)


def _slowest(times: Times, ranks: int) -> Times:
    """Return the times of the slowest of `ranks` ranks, by task."""
    device_RN, tensor_RN, host_RN = (own.reshape(ranks, -1) for own in times)
    slowest_N = device_RN.argmax(0)
    tasks = np.arange(device_RN.shape[1])
    return Times(device_RN[slowest_N, tasks], tensor_RN[slowest_N, tasks], host_RN.max(0))


class UpdateBytes(NamedTuple):
    """While the optimizer updates a stage: what is held, and what it needs for a moment."""

    held: int
    room: int


class _Moved(NamedTuple):
    """Parameters of a stage on one rank, as FSDP2 moves them."""

    whole: Parameters
    """Gathered."""
    sharded: Parameters
    """What the rank keeps of them."""
    sent: Parameters
    """What it sends to the others, or receives gradients of."""
    units: int
    """In how many pieces."""
    expert_sent: float
    """Parameters of `sent` that belong to experts, if ranks divide the experts."""
    expert_units: int
    """Number of pieces with experts, if ranks divide the experts."""


def _moved(module: ModuleDescription, start: int, stop: int, execution: Execution) -> _Moved:
    """Of layers [start, stop): experts, where ranks divide them, are gathered over fewer ranks."""
    shards = execution.shard
    expert = execution.expert
    states = execution.states
    every = stage_parameters(module, start, stop, execution.tensor, states=states)
    whole = every
    if expert > 1:
        whole = stage_parameters(module, start, stop, execution.tensor, expert, states)
    kept = every.divided(shards)
    sent = Parameters(whole.all - kept.all, whole.trained - kept.trained)
    layers = module.layers[start:stop]
    experts, with_experts = 0.0, 0
    if expert > 1:
        experts = (every.all - whole.all) / (1 - 1 / expert) * (1 / expert - 1 / shards)
        with_experts = sum(bool(layer.experts) for layer in layers)
    return _Moved(whole, kept, sent, len(layers) + 1 + with_experts, experts, with_experts)


def _collective(kind: Kind, sent: float, moved: _Moved, links: ShardLinks) -> list[Operator]:
    """Return the collectives over the ranks that share parameters.

    Args:
        kind: "all_gather" or "reduce_scatter".
        sent: Bytes that a rank sends, of experts too.
        moved: Parameters that are communicated.
        links: Placement of the ranks.
    """
    of_experts = sent * moved.expert_sent / moved.sent.all if moved.sent.all else 0.0
    units = moved.units - moved.expert_units
    found = [Operator(kind, network_bytes=sent - of_experts, calls=units, link=links.shard)]
    if of_experts:
        own = Operator(kind, network_bytes=of_experts, calls=moved.expert_units, link=links.expert)
        found.append(own)
    return found


class ShardLinks(NamedTuple):
    """Placement of the ranks that share the parameters of a module."""

    shard: Link
    expert: Link = NODE
    """Ranks that have the same experts."""


def gather_operators(
    module: ModuleDescription,
    start: int,
    stop: int,
    execution: Execution,
    element_bytes: int,
    links: ShardLinks,
) -> list[Operator]:
    """Return the operators that gather the parameters of layers [start, stop).

    The embedding and the head of the module are included if the stage has them.
    """
    moved = _moved(module, start, stop, execution)
    calls = moved.units
    sent = element_bytes * moved.sent.all
    # Casting the shard, and copies into and out of the collective's buffer.
    copied = 4 * moved.sharded.all + 3 * element_bytes * moved.whole.all
    return [
        Operator("copy", memory_bytes=copied, calls=2 * calls),
        *_collective("all_gather", sent, moved, links),
        Operator("shard_unit", calls=calls),
    ]


@dataclass(frozen=True)
class CostModel:
    """Costs of modules on a device.

    Attributes:
        profile: the device and what operators reach on it.
        dtype: in which modules compute; parameters, gradients and their sums are float32.
        executions: by module name; `Execution()` where missing.

    Raises:
        ValueError: the dtype is unknown, or the device has no peak for it.
    """

    profile: Profile
    dtype: str = "bfloat16"
    executions: Mapping[str, Execution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.profile.device
        if self.dtype not in ELEMENT_BYTES or self.dtype not in device.peak_flops:
            known = sorted(set(ELEMENT_BYTES) & set(device.peak_flops))
            raise ValueError(
                f"dtype {self.dtype!r}: device {device.name!r} has peak FLOP/s only for "
                f"{', '.join(known)}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ELEMENT_BYTES[self.dtype]

    def execution(self, module: str) -> Execution:
        """How a module is run."""
        return self.executions.get(module, Execution())

    def execution_of(self, module: ModuleDescription) -> Execution:
        """How a module is run; the communication of generators does not overlap with products."""
        execution = self.execution(module.name)
        if module.kind == "generator" and execution.async_tensor:
            return replace(execution, async_tensor=False)
        return execution

    def stage_costs(
        self,
        module: ModuleDescription,
        start: int,
        stop: int,
        sizes: TaskSizes,
        arrives: Flag,
        useful: TaskSizes | None = None,
        cache: BlockCache | None = None,
        ranks: int = 1,
    ) -> StageCosts:
        """Return the costs of the stage with layers [start, stop).

        Args:
            module: Complete module.
            sizes: Sizes of the tasks of the stage, as computed. With several ranks, those of each
                rank, rank by rank.
            arrives: Whether a gradient goes back to the preceding stage; an array has one flag for
                each task.
            useful: Sizes without padding, for FLOPs, of the first rank. Required with several
                ranks; by default, there is no padding.
            cache: Cache for other stages of the module with the same sizes.
            ranks: Number of ranks that run the layers in lockstep. Costs are those of the slowest
                rank in each task, FLOPs those of the first rank.
        """
        setting = self.setting(module, sizes.tasks // ranks)
        if setting.execution.tensor > 1 and not module.loss_rows:
            module = replace(module, loss_rows=module.sharded_loss_rows)
        blocks = stage_blocks(module, start, stop)
        flops = pass_flops(blocks, useful or sizes, arrives)
        if ranks > 1 and not isinstance(arrives, bool):
            arrives = np.tile(arrives, ranks)
        forward, inputs, weights, again = (Work.none(sizes.tasks) for _ in range(4))
        kept_N, waiting_N = np.zeros((2, sizes.tasks))
        split = setting.execution.recompute == "none"
        held: list[tuple[Array, Array]] = []
        first_layers = next((block for block in blocks if isinstance(block, Layers)), None)
        for block, needs_inputs, needs_weights in gradients(blocks, arrives):
            own = self._block_work(block, sizes, setting, {} if cache is None else cache)
            back_N = np.asarray(needs_inputs, float)
            has_backward = np.asarray(needs_inputs | needs_weights, float)
            forward = forward.plus(own.forward, block.count)
            if block.backward_in_forward:
                forward = forward.plus(own.inputs, block.count * back_N)
                forward = forward.plus(own.weights, float(block.count * needs_weights))
            else:
                inputs = inputs.plus(own.inputs, block.count * back_N)
                weights = weights.plus(own.weights, float(block.count * needs_weights))
            again = again.plus(own.again, block.count * has_backward)
            found_N = block.count * block.kept_bytes(sizes, setting, needs_weights) * has_backward
            kept_N += found_N
            if block is first_layers:
                beside_N = _beside_layers(module, start, stop, sizes, setting)
                if block is blocks[0]:
                    beside_N += received_bytes(block.layer, sizes, setting, weights=needs_weights)
                kept_N += has_backward * beside_N
            if needs_weights:
                waiting_N += found_N + block.count * block.gradients_bytes(sizes, setting)
            own_N = block.temporary_bytes(sizes, setting, has_backward)
            held.append((own_N, found_N * (not (split and needs_weights))))
        backward = inputs.plus(weights).plus(again)
        return StageCosts(
            forward=self._times(module, "F", forward),
            backward=self._times(module, "B", backward),
            inputs=self._times(module, "I", inputs.plus(again) if split else backward),
            weights=self._times(module, "W", weights if split else Work.none(sizes.tasks)),
            kept_bytes=kept_N,
            kept_for_weights_bytes=waiting_N * split,
            workspace_bytes=_workspace(held),
            flops=flops,
        ).slowest(ranks)

    def _block_work(
        self, block: Block, sizes: TaskSizes, setting: Setting, cache: BlockCache
    ) -> BlockWork:
        key = replace(block, count=1)
        if key not in cache:
            found = block.operators(sizes, setting)
            compiled = setting.execution.compiled and isinstance(block, Layers)
            for own in (found.forward, found.again) if not compiled else ():
                made = sum(o.calls for o in own if o.kind not in HOST_KINDS)
                own.append(Operator("forward_call", calls=made))
            if isinstance(block, Layers) and not compiled:
                # After the above: these calls are all that they take.
                calls = CHECKPOINT_CALLS[setting.execution.recompute]
                for own, count in zip((found.forward, found.again), calls, strict=True):
                    own.append(Operator("elementwise", calls=count))
            cache[key] = BlockWork(
                *(
                    Work.of(own, self.profile, self.dtype, sizes.tasks, compiled=compiled)
                    for own in found
                )
            )
        return cache[key]

    def setting(self, module: ModuleDescription, tasks: int) -> Setting:
        """What a module's operators depend on besides sizes."""
        execution = self.execution_of(module)
        return Setting(
            execution,
            self.element_bytes,
            self.group_link(execution.tensor),
            self.group_link(execution.expert, execution.tensor),
            self.group_link(execution.context, execution.tensor),
            segment_calls=not self.profile.device.asynchronous,
            accumulated=0.0 if execution.reduces_each else 1 - 1 / max(1, tasks),
        )

    def _times(self, module: ModuleDescription, action_type: str, work: Work) -> Times:
        execution = self.execution_of(module)
        hidden = 1 - 1 / execution.tensor if execution.async_tensor else 0.0
        factor = self.profile.factor(module.name, action_type)
        found = work.times(self.profile, hidden)
        return Times(*(factor * own_ms for own_ms in found))

    def group_link(self, ranks: int, stride: int = 1) -> Link:
        """Return the placement of a group of ranks on nodes.

        Args:
            ranks: Number of ranks of the group.
            stride: Distance between neighbors of the group, in global ranks.
        """
        local = max(1, min(ranks, self.profile.device.devices_per_node // stride))
        return Link(-(-ranks // local), local)

    def _shard_links(self, execution: Execution) -> ShardLinks:
        """Return the placement of the ranks that share parameters."""
        expert = execution.expert
        own = self.group_link(max(1, execution.shard // expert), execution.tensor * expert)
        return ShardLinks(self.group_link(execution.shard, execution.tensor), own)

    def gather_work(self, module: ModuleDescription, start: int, stop: int) -> Work:
        """Return the work to gather the parameters of a stage from all shards (UNSHARD)."""
        execution = self.execution_of(module)
        links = self._shard_links(execution)
        return self._work(
            *gather_operators(module, start, stop, execution, self.element_bytes, links)
        )

    def gather_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of `gather_work` if nothing hides it."""
        return self._alone_ms(self.gather_work(module, start, stop))

    def reduce_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of `reduce_work` if nothing hides it."""
        return self._alone_ms(self.reduce_work(module, start, stop))

    def reduce_work(
        self, module: ModuleDescription, start: int, stop: int, *, replicas: bool = True
    ) -> Work:
        """Return the work to sum float32 gradients over data-parallel ranks (REDUCE_GRAD).

        Args:
            replicas: Whether to include the all-reduce over the replicas of the shards (HSDP).
        """
        execution = self.execution_of(module)
        moved = _moved(module, start, stop, execution)
        whole = moved.whole.gradient_bytes
        calls = moved.units
        shards = execution.shard
        copies = execution.replicate
        outer = self.group_link(copies, execution.tensor * shards)
        if not whole:
            return Work.none(1)
        scattered = moved.sent.gradient_bytes
        own = moved.sharded.gradient_bytes
        summed = all_reduce_bytes(own, copies) if replicas else 0.0
        added = 3 * own if execution.reduces_each else 0.0  # to the sharded sums
        return self._work(
            Operator("copy", memory_bytes=3 * whole + added, calls=calls),
            *_collective("reduce_scatter", scattered, moved, self._shard_links(execution)),
            Operator("all_reduce", network_bytes=summed, calls=calls, link=outer),
            Operator("shard_unit", calls=calls),
        )

    def update_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of the optimizer for a stage: norm of the gradients, clipping, update.

        GPUs read gradients once for the norm; the kernel that updates also clips and, without
        FSDP2, writes the copies of the parameters that are computed with. On CPUs squares are
        written and summed, and clipping reads and writes gradients.
        """
        execution = self.execution_of(module)
        states = execution.states
        own = _moved(module, start, stop, execution).sharded
        fused = self.profile.device.asynchronous
        copied = 0.0
        if fused and not execution.uses_fsdp and self.element_bytes < states.weight:
            copied = states.weight + self.element_bytes
        calls = UPDATE_CALLS * module_tensors(module, start, stop) if fused else 1.0
        before_ms = self._sum_ms(
            Operator("elementwise", memory_bytes=(4 if fused else 12 + 8) * own.trained)
        )
        updated = (states.fused if fused else states.updated) + copied
        update = Operator("elementwise", memory_bytes=updated * own.trained, calls=calls)
        update_ms = self._sum_ms(update, *self._orthogonal(module, own, start, stop))
        # States that are on the host come and go meanwhile, both ways at a time.
        link = self.profile.device.host_bytes_per_s
        copied_ms = 1e3 * states.visiting * own.trained / link if link else 0.0
        return before_ms + max(update_ms, copied_ms)

    def update_bytes(self, module: ModuleDescription, start: int, stop: int) -> UpdateBytes:
        """Of a stage on one rank, once activations are gone and gradients are reduced."""
        execution = self.execution_of(module)
        states = execution.states
        own = _moved(module, start, stop, execution).sharded
        room = states.room_bytes(own.trained)
        if states.orthogonal:
            ranks = execution.sharing
            for together in matrix_rounds(module, start, stop, ranks, execution.expert):
                needed = states.room_of_matrices_bytes(together, ranks, self.element_bytes)
                room = max(room, needed)
        gradient_bytes = states.weight * own.trained  # sums are float32, what is handed over is not
        held = own.weight_bytes + own.optimizer_bytes + gradient_bytes
        return UpdateBytes(round(held), round(room))

    def _orthogonal(
        self, module: ModuleDescription, own: Parameters, start: int, stop: int
    ) -> list[Operator]:
        """Of Muon: matrices are gathered, ranks take turns, and results are summed."""
        execution = self.execution_of(module)
        ranks = execution.sharing
        if not execution.states.orthogonal or not own.in_layers:
            return []
        rounds = matrix_rounds(module, start, stop, ranks, execution.expert)
        flops = sum(own.orthogonal_flops for together in rounds for own in together)
        sent = self.element_bytes * own.in_layers * execution.shard * (1 - 1 / ranks)
        link = self.group_link(ranks)
        return [
            Operator("matmul", flops=flops / ranks, memory_bytes=own.in_layers),
            Operator("all_gather", network_bytes=sent, link=link),
            Operator("all_reduce", network_bytes=2 * sent, link=link),
        ]

    def pipeline_link(self, source: int, destination: int) -> Link:
        """What connects two ranks of a plan."""
        stride = self._pipeline_stride
        size = self.profile.device.devices_per_node
        return NODE if source * stride // size == destination * stride // size else NETWORK

    @cached_property
    def _pipeline_stride(self) -> int:
        """Ranks of one place in the pipeline, which neighbours of a plan are apart."""
        groups = (e.tensor * e.shard * e.replicate for e in self.executions.values())
        return max(groups, default=1)

    def transfers_ms(self, message_bytes: Sequence[float], links: Sequence[Link]) -> list[float]:
        """Times of messages on the wire."""
        times_N = np.zeros(len(links))
        for link in set(links):
            chosen = [i for i, found in enumerate(links) if found == link]
            sent_N = np.array([message_bytes[i] for i in chosen])
            operator = Operator("p2p", network_bytes=sent_N, link=link)
            times_N[chosen] = operator_ms(operator, self.profile, self.dtype)
        return times_N.tolist()

    def gather_rows_ms(self, whole_bytes: Sequence[float], ranks: int) -> list[float]:
        """Times of gathering slices over tensor-parallel ranks."""
        sent_N = np.array(whole_bytes) * (ranks - 1) / ranks
        operator = Operator("all_gather", network_bytes=sent_N, link=self.group_link(ranks))
        return operator_ms(operator, self.profile, self.dtype).tolist()

    def tied_ms(self, module: ModuleDescription, link: Link) -> float:
        """Exchanging the gradient of a module's table of embeddings, and adding it."""
        execution = self.execution_of(module)
        whole = 4 * module.pre_parameters / (execution.tensor * execution.shard)
        return self._sum_ms(
            Operator("p2p", network_bytes=whole, link=link),
            Operator("elementwise", memory_bytes=3 * whole),
        )

    def _sum_ms(self, *operators: Operator) -> float:
        """Return the time of operators if nothing hides it."""
        return self._alone_ms(self._work(*operators))

    def _work(self, *operators: Operator) -> Work:
        """Return the work of operators; collectives without anything to send are not made."""
        made = [
            o
            for o in operators
            if o.kind in HOST_KINDS or np.any(o.network_bytes) or np.any(o.memory_bytes)
        ]
        return Work.of(made, self.profile, self.dtype, 1)

    def _alone_ms(self, work: Work) -> float:
        """Return the time of work that runs alone: of the device or, if longer, of the host."""
        return float(work.times(self.profile).total_ms[0])

    def gradient_bytes(
        self, module: ModuleDescription, start: int, stop: int, *, layerwise: bool = False
    ) -> int:
        """Return the bytes of gradients in `static_bytes`.

        If every backward reduces them: the sharded sums, the gradients of a layer, the float32
        buffer of the reduce-scatter of the preceding layer, and the gradients of the parameters
        outside of the layers, which FSDP2 reduces at the end of the backward pass.
        """
        execution = self.execution_of(module)
        moved = _moved(module, start, stop, execution)
        if not (layerwise and execution.reduces_each and execution.uses_fsdp):
            return round(moved.whole.gradient_bytes)
        outside = moved.whole.trained - moved.whole.in_layers
        layer = moved.whole.in_layers / max(1, stop - start)
        passing = (4 + self.element_bytes) * layer + self.element_bytes * outside
        return round(moved.sharded.gradient_bytes + passing)

    def static_bytes(
        self, module: ModuleDescription, start: int, stop: int, *, layerwise: bool = False
    ) -> int:
        """Weights, gradients and optimizer state of a stage on one rank, while it computes.

        Weights and moments as `States` defines them, gradients (`gradient_bytes`) and, if
        parameters are sharded or computing is not in float32, the gathered parameters.

        Args:
            layerwise: whether FSDP2 gathers layer by layer, so that a layer and the next are there.
        """
        execution = self.execution_of(module)
        moved = _moved(module, start, stop, execution)
        gathered = 0.0
        if execution.uses_fsdp and (execution.shard > 1 or self.element_bytes < 4):
            share = min(1.0, 2 / max(1, stop - start)) if layerwise else 1.0
            gathered = moved.whole.all * self.element_bytes * share
        elif self.element_bytes < execution.states.weight:  # copies that are computed with
            gathered = moved.whole.all * self.element_bytes
        state = moved.sharded.weight_bytes + moved.sharded.optimizer_bytes
        gradients = self.gradient_bytes(module, start, stop, layerwise=layerwise)
        return round(state + gathered) + gradients
