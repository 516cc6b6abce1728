"""Cost model of stages: time, memory and communication, computed from sizes.

A `CostModel` combines a device profile with the parallelism and options of each module. Its inputs
are module descriptions (from Hugging Face configs, without weights) and sizes of tasks. It returns
the times of F, B, I and W of each stage, saved bytes, and the times of sharding and transfers.

    stage = blocks      before, equal layers x count, after     torchmm.costs.blocks
    block -> operators  per pass: forward, inputs, weights, again
    operators -> Work   compute_ms, matmul_ms, network_ms, host_ms  (arrays over tasks)
    Work -> Times       device_ms = compute_ms + network_ms - overlapped communication

The passes of the blocks add up to the times of actions:

    action   with recomputation         without recomputation
    F        forward                    forward
    B        inputs + weights + again   inputs + weights + again
    I        inputs + weights + again   inputs + again
    W        0                          weights

    time of an action = factor * max(device_ms, host_ms)

`again` contains recomputed operators. `factor` is the measured correction of the profile. With
FSDP2 per layer, `StageCosts.sharded` adds the communication that computation does not hide.

The model supports tensor parallelism with and without sequence parallelism, FSDP2 and HSDP,
activation checkpointing (adds time but no model FLOPs), and frozen blocks. See PipeWeaver, section
4: operators first, then a graph. A measured time per layer would not transfer to other sizes,
dtypes or devices.

Invariants:

- Arrays have one value per task. With several ranks in lockstep, values are listed rank by rank
  until `StageCosts.slowest` reduces them.
- Memory between F and B is `saved_bytes`. Memory while a task runs is larger by `workspace_bytes`.
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
    GradientFlags,
    LayerBlock,
    ModuleBlock,
    required_gradients,
    stage_blocks,
)
from torchmm.costs.components import generator_outside_bytes
from torchmm.costs.devices import BETWEEN_NODES, WITHIN_NODE, LinkRanks
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.flops import PassFlops, pass_flops
from torchmm.costs.layers import (
    StageParameters,
    module_tensors,
    muon_rounds,
    received_bytes,
    shared_bytes,
    stage_parameters,
)
from torchmm.costs.operators import (
    HOST_KINDS,
    DeviceProfile,
    Operator,
    OperatorKind,
    OperatorTimes,
    OperatorTotals,
    all_reduce_bytes,
    operator_time_ms,
)
from torchmm.costs.sizes import Array, TaskSizes

ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes of an element, by dtype name."""


CHECKPOINT_CALLS: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "full": (27, 55),
    "selective": (119, 180),
}
"""Overhead of activation checkpointing per layer in (forward, backward), in operator calls.

The overhead consists of hooks for every saved tensor. With "selective", every call also passes
through Python. The values were measured on layers with negligible computation. They do not include
the recomputed operators."""


UPDATE_CALLS = 0.4
"""Host time of a fused update and its norm, in eager operator launches per parameter tensor.

Measured: 0.95 ms of CPU time for 135 tensors, at 19 us per operator launch."""


COLLECTIVE_SM_FRACTION = 20 / 132
"""Fraction of the multiprocessors that collectives occupy while layers compute: 20 of 132 on an
H800 (DeepSeek-V3, arXiv 2412.19437, section 3.2.2)."""


class BlockWork(NamedTuple):
    """Work of one block, by pass."""

    forward: OperatorTotals
    inputs: OperatorTotals
    weights: OperatorTotals
    again: OperatorTotals


BlockCache = dict[ModuleBlock, BlockWork]
"""Cache of the work of the blocks of one module, for tasks of the same sizes."""


class StageCosts(NamedTuple):
    """Costs of the tasks of one stage; arrays over tasks."""

    forward: OperatorTimes
    backward: OperatorTimes
    inputs: OperatorTimes
    """Times of I. Recomputed layers cannot split the backward pass, so these are the times of B."""
    weights: OperatorTimes
    saved_bytes: Array
    saved_for_weights_bytes: Array
    workspace_bytes: Array
    """Largest temporaries, see `torchmm.costs.layers`.

    They include the activations of a layer that is recomputed or has no backward pass."""
    flops: PassFlops

    def slowest(self, ranks: int) -> StageCosts:
        """Return the costs of the slowest rank, by task: maximum times and maximum bytes.

        Args:
            ranks: Number of ranks whose tasks the arrays list, rank by rank.
        """
        if ranks == 1:
            return self

        def maximum(values: Array) -> Array:
            return values.reshape(ranks, -1).max(0)

        return StageCosts(
            _slowest_times(self.forward, ranks),
            _slowest_times(self.backward, ranks),
            _slowest_times(self.inputs, ranks),
            _slowest_times(self.weights, ranks),
            maximum(self.saved_bytes),
            maximum(self.saved_for_weights_bytes),
            maximum(self.workspace_bytes),
            self.flops,
        )

    def sharded(
        self, gather: OperatorTotals, reduce_N: OperatorTotals, units: int, overlaps: bool
    ) -> StageCosts:
        """Return the costs with FSDP2 communication of parameters in every pass.

        Casts and copies of parameters and gradients add device time, and hooks add host time.
        Communication overlaps with computation, except for the first FSDP unit to be gathered, the
        last to be reduced, and the excess over the computing time. With n units of stage time c
        and communication time t:

            exposed = t / n
            device = max(c + COLLECTIVE_SM_FRACTION * min(c, t - exposed), t - exposed) + exposed

        Args:
            gather: Work to all-gather the parameters of the stage.
            reduce_N: Work to reduce the gradients, by task. 0 in backward passes that do not
                reduce.
            units: Number of FSDP units of the stage.
            overlaps: Whether communication overlaps with computation.
        """

        def with_work(times: OperatorTimes, work: OperatorTotals) -> OperatorTimes:
            exposed_ms = work.network_ms / units if overlaps else work.network_ms
            device_ms = times.device_ms + work.compute_ms
            # Overlapped collectives occupy multiprocessors, which slows computation down.
            overlapped_ms = np.minimum(device_ms, work.network_ms - exposed_ms)
            device_ms = device_ms + COLLECTIVE_SM_FRACTION * overlapped_ms
            device_ms = np.maximum(device_ms, work.network_ms - exposed_ms) + exposed_ms
            runs = times.total_ms > 0
            return times._replace(
                device_ms=runs * device_ms, host_ms=runs * (times.host_ms + work.host_ms)
            )

        backward = with_work(self.backward, gather.add(reduce_N))
        return self._replace(forward=with_work(self.forward, gather), backward=backward)


def _shared_activation_bytes(
    module: ModuleDescription, start: int, stop: int, sizes: TaskSizes, setting: CostSetting
) -> Array:
    """Return the bytes that the layers of a stage save in common, by task."""
    if module.kind == "generator":
        return generator_outside_bytes(module, start, stop, sizes, setting)
    return shared_bytes(module, sizes, setting.element_bytes)


def _peak_workspace_bytes(block_bytes: Sequence[tuple[Array, Array]]) -> Array:
    """Return the maximum memory of a task beyond its total kept bytes.

    While block i runs, later blocks have not saved anything yet, or have already freed it:

        memory(i) = kept(0) + ... + kept(i) + temporary(i)
                  = kept(all) + temporary(i) - (kept(i + 1) + ...)

    Args:
        block_bytes: Temporaries of each block, and its saved bytes until its backward pass (not
            until W), in the order of the forward pass.
    """
    later_N: Array | float = 0.0
    peak_N: Array | float = 0.0
    for temporary_N, kept_N in reversed(block_bytes):
        peak_N = np.maximum(peak_N, temporary_N - later_N)
        later_N = later_N + kept_N
    return np.asarray(peak_N)


def _slowest_times(times: OperatorTimes, ranks: int) -> OperatorTimes:
    """Return the times of the slowest of `ranks` ranks, by task."""
    device_RN, tensor_RN, host_RN = (values.reshape(ranks, -1) for values in times)
    slowest_N = device_RN.argmax(0)
    tasks = np.arange(device_RN.shape[1])
    return OperatorTimes(device_RN[slowest_N, tasks], tensor_RN[slowest_N, tasks], host_RN.max(0))


class UpdateBytes(NamedTuple):
    """Bytes in use while the optimizer updates a stage."""

    persistent: int
    """Bytes of weights, optimizer states and gradients."""
    temporary: int
    """Bytes of temporaries."""


class _CommunicatedParameters(NamedTuple):
    """Parameters of a stage on one rank that FSDP2 communicates."""

    unsharded: StageParameters
    """Unsharded parameters."""
    shard: StageParameters
    """Shard of the rank."""
    sent: StageParameters
    """Parameters that an all-gather receives from other ranks, and whose gradients are sent."""
    units: int
    """Number of FSDP units."""
    expert_sent: float
    """Parameters of `sent` that belong to experts, if ranks divide the experts."""
    expert_units: int
    """Number of FSDP units with experts, if ranks divide the experts."""


def _communicated_parameters(
    module: ModuleDescription, start: int, stop: int, execution: Execution
) -> _CommunicatedParameters:
    """Return the communicated parameters of layers [start, stop).

    With expert parallelism, experts are gathered over shard / expert ranks, all other parameters
    over all shard ranks.
    """
    shards = execution.shard
    expert = execution.expert
    states = execution.states
    unsharded_experts = stage_parameters(module, start, stop, execution.tensor, states=states)
    unsharded = unsharded_experts
    if expert > 1:
        unsharded = stage_parameters(module, start, stop, execution.tensor, expert, states)
    shard = unsharded_experts.divide_by(shards)
    sent = StageParameters(
        unsharded.total - shard.total,
        unsharded.trained - shard.trained,
        quantized=unsharded.quantized - shard.quantized,
        quantized_bytes=unsharded.quantized_bytes - shard.quantized_bytes,
    )
    layers = module.layers[start:stop]
    experts, with_experts = 0.0, 0
    if expert > 1:
        # The difference is (1 - 1 / expert) of the experts. A rank has 1 / expert of the experts
        # after the all-gather, of which its shard is 1 / shards.
        experts = (
            (unsharded_experts.total - unsharded.total)
            / (1 - 1 / expert)
            * (1 / expert - 1 / shards)
        )
        with_experts = sum(bool(layer.experts) for layer in layers)
    return _CommunicatedParameters(
        unsharded, shard, sent, len(layers) + 1 + with_experts, experts, with_experts
    )


def _shard_collectives(
    kind: OperatorKind, sent: float, moved: _CommunicatedParameters, links: ShardLinks
) -> list[Operator]:
    """Return the collectives over the ranks that share parameters.

    Args:
        kind: "all_gather" or "reduce_scatter".
        sent: Bytes that a rank sends, including those of experts.
        moved: Parameters that are communicated.
        links: Placement of the ranks.
    """
    of_experts = sent * moved.expert_sent / moved.sent.total if moved.sent.total else 0.0
    units = moved.units - moved.expert_units
    operators = [Operator(kind, network_bytes=sent - of_experts, calls=units, link=links.shard)]
    if of_experts:
        calls = moved.expert_units
        operators.append(Operator(kind, network_bytes=of_experts, calls=calls, link=links.expert))
    return operators


class ShardLinks(NamedTuple):
    """Placement of the ranks that share the parameters of a module."""

    shard: LinkRanks
    expert: LinkRanks = WITHIN_NODE
    """Placement of the ranks that have the same experts."""


def all_gather_operators(
    module: ModuleDescription,
    start: int,
    stop: int,
    execution: Execution,
    element_bytes: int,
    links: ShardLinks,
) -> list[Operator]:
    """Return the operators that gather the parameters of layers [start, stop).

    The embedding and the head of the module are included if the stage has them.

    Args:
        module: Complete module.
        start: First layer.
        stop: Layer after the last layer.
        execution: Parallelism and options of the module.
        element_bytes: Bytes of an element in the compute dtype.
        links: Placement of the ranks.
    """
    moved = _communicated_parameters(module, start, stop, execution)
    calls = moved.units
    sent = moved.sent.compute_bytes(element_bytes)
    # The shard is cast, then copied into and out of the buffer of the collective.
    copied = moved.shard.compute_bytes(4) + 3 * moved.unsharded.compute_bytes(element_bytes)
    return [
        Operator("copy", memory_bytes=copied, calls=2 * calls),
        *_shard_collectives("all_gather", sent, moved, links),
        Operator("shard_unit", calls=calls),
    ]


@dataclass(frozen=True)
class CostModel:
    """Costs of modules on a device.

    Attributes:
        profile: Device, and the efficiencies of operators on it.
        dtype: Compute dtype. Parameters and accumulated gradients are float32.
        executions: Parallelism and options by module name. Missing modules use `Execution()`.

    Raises:
        ValueError: The dtype is unknown, or the device has no peak FLOP/s for it.
    """

    profile: DeviceProfile
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
        """Return the parallelism and options of a module."""
        return self.executions.get(module, Execution())

    def effective_execution(self, module: ModuleDescription) -> Execution:
        """Return the parallelism and options of a module, without async TP for generators."""
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
        needs_input_grad: GradientFlags,
        useful: TaskSizes | None = None,
        cache: BlockCache | None = None,
        ranks: int = 1,
    ) -> StageCosts:
        """Return the costs of the stage with layers [start, stop).

        Args:
            module: Complete module.
            sizes: Sizes of the tasks of the stage, as computed. With several ranks, those of each
                rank, rank by rank.
            start: First layer.
            stop: Layer after the last layer.
            needs_input_grad: Whether the stage sends a gradient to the preceding stage. An array
                has one flag per task.
            useful: Sizes without padding of the first rank, for FLOPs. Required with several
                ranks. By default, tasks have no padding.
            cache: Cache for other stages of the module with the same sizes.
            ranks: Number of ranks that run the layers in lockstep. Costs are those of the slowest
                rank in each task. FLOPs are those of the first rank.
        """
        setting = self.setting(module, sizes.tasks // ranks)
        if setting.execution.tensor > 1 and not module.loss_chunk_targets:
            module = replace(module, loss_chunk_targets=module.sharded_loss_chunk_targets)
        blocks = stage_blocks(module, start, stop)
        flops = pass_flops(blocks, useful or sizes, needs_input_grad)
        if ranks > 1 and not isinstance(needs_input_grad, bool):
            needs_input_grad = np.tile(needs_input_grad, ranks)
        forward, inputs, weights, again = (OperatorTotals.zero(sizes.tasks) for _ in range(4))
        kept_N, waiting_N = np.zeros((2, sizes.tasks))
        split = setting.execution.recompute == "none"
        block_bytes: list[tuple[Array, Array]] = []
        first_layers = next((block for block in blocks if isinstance(block, LayerBlock)), None)
        for block, needs_inputs, needs_weights in required_gradients(blocks, needs_input_grad):
            work = self._block_work(block, sizes, setting, {} if cache is None else cache)
            back_N = np.asarray(needs_inputs, float)
            has_backward = np.asarray(needs_inputs | needs_weights, float)
            forward = forward.add(work.forward, block.count)
            if block.backward_in_forward:
                forward = forward.add(work.inputs, block.count * back_N)
                forward = forward.add(work.weights, float(block.count * needs_weights))
            else:
                inputs = inputs.add(work.inputs, block.count * back_N)
                weights = weights.add(work.weights, float(block.count * needs_weights))
            again = again.add(work.again, block.count * has_backward)
            saved_N = block.count * block.saved_bytes(sizes, setting, needs_weights) * has_backward
            kept_N += saved_N
            if block is first_layers:
                shared_N = _shared_activation_bytes(module, start, stop, sizes, setting)
                if block is blocks[0]:
                    shared_N += received_bytes(block.layer, sizes, setting, weights=needs_weights)
                kept_N += has_backward * shared_N
            if needs_weights:
                waiting_N += saved_N + block.count * block.gradients_bytes(sizes, setting)
            temporary_N = block.temporary_bytes(sizes, setting, has_backward)
            block_bytes.append((temporary_N, saved_N * (not (split and needs_weights))))
        backward = inputs.add(weights).add(again)
        return StageCosts(
            forward=self._times(module, "F", forward),
            backward=self._times(module, "B", backward),
            inputs=self._times(module, "I", inputs.add(again) if split else backward),
            weights=self._times(
                module, "W", weights if split else OperatorTotals.zero(sizes.tasks)
            ),
            saved_bytes=kept_N,
            saved_for_weights_bytes=waiting_N * split,
            workspace_bytes=_peak_workspace_bytes(block_bytes),
            flops=flops,
        ).slowest(ranks)

    def _block_work(
        self, block: ModuleBlock, sizes: TaskSizes, setting: CostSetting, cache: BlockCache
    ) -> BlockWork:
        key = replace(block, count=1)
        if key not in cache:
            passes = block.operators(sizes, setting)
            compiled = setting.execution.compiled and isinstance(block, LayerBlock)
            for of_pass in (passes.forward, passes.recomputed) if not compiled else ():
                made = sum(o.calls for o in of_pass if o.kind not in HOST_KINDS)
                of_pass.append(Operator("forward_call", calls=made))
            if isinstance(block, LayerBlock) and not compiled:
                # Added after `forward_call`, so that these calls have no Python overhead.
                calls = CHECKPOINT_CALLS[setting.execution.recompute]
                for of_pass, count in zip((passes.forward, passes.recomputed), calls, strict=True):
                    of_pass.append(Operator("elementwise", calls=count))
            cache[key] = BlockWork(
                *(
                    OperatorTotals.from_operators(
                        of_pass, self.profile, self.dtype, sizes.tasks, compiled=compiled
                    )
                    for of_pass in passes
                )
            )
        return cache[key]

    def setting(self, module: ModuleDescription, tasks: int) -> CostSetting:
        """Return the inputs of operator counts other than sizes.

        Args:
            module: Complete module.
            tasks: Number of tasks of a step on one rank.
        """
        execution = self.effective_execution(module)
        return CostSetting(
            execution,
            self.element_bytes,
            self.group_link(execution.tensor),
            self.group_link(execution.expert, execution.tensor),
            self.group_link(execution.context, execution.tensor),
            calls_per_segment=not self.profile.device.asynchronous,
            accumulated_fraction=0.0
            if execution.reduces_every_microbatch
            else 1 - 1 / max(1, tasks),
        )

    def _times(
        self, module: ModuleDescription, action_type: str, work: OperatorTotals
    ) -> OperatorTimes:
        execution = self.effective_execution(module)
        hidden = 1 - 1 / execution.tensor if execution.async_tensor else 0.0
        factor = self.profile.factor(module.name, action_type)
        times = work.to_times(self.profile, hidden)
        return OperatorTimes(*(factor * own_ms for own_ms in times))

    def group_link(self, ranks: int, stride: int = 1) -> LinkRanks:
        """Return the placement of a group of ranks on nodes.

        Args:
            ranks: Number of ranks of the group.
            stride: Distance between adjacent ranks of the group, in global ranks.
        """
        local = max(1, min(ranks, self.profile.device.devices_per_node // stride))
        return LinkRanks(-(-ranks // local), local)

    def _shard_links(self, execution: Execution) -> ShardLinks:
        """Return the placement of the ranks that share parameters."""
        expert = execution.expert
        expert_link = self.group_link(max(1, execution.shard // expert), execution.tensor * expert)
        return ShardLinks(self.group_link(execution.shard, execution.tensor), expert_link)

    def gather_work(self, module: ModuleDescription, start: int, stop: int) -> OperatorTotals:
        """Return the work to gather the parameters of a stage from all shards (UNSHARD)."""
        execution = self.effective_execution(module)
        links = self._shard_links(execution)
        return self._work(
            *all_gather_operators(module, start, stop, execution, self.element_bytes, links)
        )

    def gather_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of `gather_work` in ms without overlap."""
        return self._unoverlapped_ms(self.gather_work(module, start, stop))

    def reduce_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of `reduce_work` in ms without overlap."""
        return self._unoverlapped_ms(self.reduce_work(module, start, stop))

    def reduce_work(
        self, module: ModuleDescription, start: int, stop: int, *, replicas: bool = True
    ) -> OperatorTotals:
        """Return the work to sum float32 gradients over data-parallel ranks (REDUCE_GRAD).

        Args:
            module: Complete module.
            start: First layer.
            stop: Layer after the last layer.
            replicas: Whether to include the all-reduce over the replicas of the shards (HSDP).
        """
        execution = self.effective_execution(module)
        moved = _communicated_parameters(module, start, stop, execution)
        unsharded_bytes = moved.unsharded.gradient_bytes
        calls = moved.units
        shards = execution.shard
        copies = execution.replicate
        outer = self.group_link(copies, execution.tensor * shards)
        if not unsharded_bytes:
            return OperatorTotals.zero(1)
        scattered = moved.sent.gradient_bytes
        shard_bytes = moved.shard.gradient_bytes
        summed = all_reduce_bytes(shard_bytes, copies) if replicas else 0.0
        added = (
            3 * shard_bytes if execution.reduces_every_microbatch else 0.0
        )  # accumulation of gradient shards
        return self._work(
            Operator("copy", memory_bytes=3 * unsharded_bytes + added, calls=calls),
            *_shard_collectives("reduce_scatter", scattered, moved, self._shard_links(execution)),
            Operator("all_reduce", network_bytes=summed, calls=calls, link=outer),
            Operator("shard_unit", calls=calls),
        )

    def update_ms(self, module: ModuleDescription, start: int, stop: int) -> float:
        """Return the time of the optimizer step of a stage in ms.

        The step consists of gradient norm, clipping and update. GPUs read gradients once for the
        norm. The fused update kernel also clips gradients and,
        without FSDP2, writes copies of the parameters in the compute dtype. CPUs write and sum
        squares, and clipping reads and writes gradients.
        """
        execution = self.effective_execution(module)
        states = execution.states
        shard = _communicated_parameters(module, start, stop, execution).shard
        fused = self.profile.device.asynchronous
        copied = 0.0
        if fused and not execution.uses_fsdp and self.element_bytes < states.weight:
            copied = states.weight + self.element_bytes
        calls = UPDATE_CALLS * module_tensors(module, start, stop) if fused else 1.0
        before_ms = self._operators_ms(
            Operator("elementwise", memory_bytes=(4 if fused else 12 + 8) * shard.trained)
        )
        updated = (states.fused_update_traffic if fused else states.update_traffic) + copied
        update = Operator("elementwise", memory_bytes=updated * shard.trained, calls=calls)
        update_ms = self._operators_ms(update, *self._muon_operators(module, shard, start, stop))
        # Offloaded states are copied in both directions at the same time, overlapped with updates.
        link = self.profile.device.host_bytes_per_s
        copied_ms = 1e3 * states.offloaded_moments * shard.trained / link if link else 0.0
        return before_ms + max(update_ms, copied_ms)

    def update_bytes(self, module: ModuleDescription, start: int, stop: int) -> UpdateBytes:
        """Return the bytes of a stage on one rank during the update, when activations are freed."""
        execution = self.effective_execution(module)
        states = execution.states
        shard = _communicated_parameters(module, start, stop, execution).shard
        temporary = states.update_buffer_bytes(shard.trained)
        if states.uses_muon:
            ranks = execution.parameter_ranks
            for matrices in muon_rounds(module, start, stop, ranks, execution.expert):
                needed = states.muon_buffer_bytes(matrices, ranks, self.element_bytes)
                temporary = max(temporary, needed)
        # Accumulated gradients are float32. The optimizer receives them in the weight dtype.
        gradient_bytes = states.weight * shard.trained
        persistent = shard.weight_bytes + shard.optimizer_bytes + gradient_bytes
        return UpdateBytes(round(persistent), round(temporary))

    def _muon_operators(
        self, module: ModuleDescription, shard: StageParameters, start: int, stop: int
    ) -> list[Operator]:
        """Return the operators of Muon: all-gather, orthogonalization per rank, all-reduce."""
        execution = self.effective_execution(module)
        ranks = execution.parameter_ranks
        if not execution.states.uses_muon or not shard.in_layers:
            return []
        rounds = muon_rounds(module, start, stop, ranks, execution.expert)
        flops = sum(matrix.orthogonal_flops for matrices in rounds for matrix in matrices)
        sent = self.element_bytes * shard.in_layers * execution.shard * (1 - 1 / ranks)
        link = self.group_link(ranks)
        return [
            Operator("matmul", flops=flops / ranks, memory_bytes=shard.in_layers),
            Operator("all_gather", network_bytes=sent, link=link),
            Operator("all_reduce", network_bytes=2 * sent, link=link),
        ]

    def pipeline_link(self, source: int, destination: int) -> LinkRanks:
        """Return the link between two ranks of a plan."""
        stride = self._pipeline_stride
        size = self.profile.device.devices_per_node
        return (
            WITHIN_NODE
            if source * stride // size == destination * stride // size
            else BETWEEN_NODES
        )

    @cached_property
    def _pipeline_stride(self) -> int:
        """Number of global ranks between adjacent ranks of a plan."""
        groups = (e.tensor * e.shard * e.replicate for e in self.executions.values())
        return max(groups, default=1)

    def transfer_times_ms(
        self, message_bytes: Sequence[float], links: Sequence[LinkRanks]
    ) -> list[float]:
        """Return the times of messages in ms.

        Args:
            message_bytes: Bytes of each message.
            links: Link of each message.
        """
        times_N = np.zeros(len(links))
        for link in set(links):
            indices = [i for i, other in enumerate(links) if other == link]
            sent_N = np.array([message_bytes[i] for i in indices])
            operator = Operator("p2p", network_bytes=sent_N, link=link)
            times_N[indices] = operator_time_ms(operator, self.profile, self.dtype)
        return times_N.tolist()

    def gather_slices_ms(self, whole_bytes: Sequence[float], ranks: int) -> list[float]:
        """Return the times in ms of all-gathering tensors over tensor-parallel ranks.

        Args:
            whole_bytes: Bytes of each gathered tensor.
            ranks: Tensor-parallel size.
        """
        sent_N = np.array(whole_bytes) * (ranks - 1) / ranks
        operator = Operator("all_gather", network_bytes=sent_N, link=self.group_link(ranks))
        return operator_time_ms(operator, self.profile, self.dtype).tolist()

    def tied_ms(self, module: ModuleDescription, link: LinkRanks) -> float:
        """Return the time in ms of exchanging and adding the gradient of a tied embedding."""
        execution = self.effective_execution(module)
        weight_bytes = 4 * module.embedding_parameters / (execution.tensor * execution.shard)
        return self._operators_ms(
            Operator("p2p", network_bytes=weight_bytes, link=link),
            Operator("elementwise", memory_bytes=3 * weight_bytes),
        )

    def _operators_ms(self, *operators: Operator) -> float:
        """Return the time of operators in ms without overlap."""
        return self._unoverlapped_ms(self._work(*operators))

    def _work(self, *operators: Operator) -> OperatorTotals:
        """Return the work of operators without those that transfer no bytes."""
        made = [
            o
            for o in operators
            if o.kind in HOST_KINDS or np.any(o.network_bytes) or np.any(o.memory_bytes)
        ]
        return OperatorTotals.from_operators(made, self.profile, self.dtype, 1)

    def _unoverlapped_ms(self, work: OperatorTotals) -> float:
        """Return the time of work in ms without overlap: the longer of device and host time."""
        return float(work.to_times(self.profile).total_ms[0])

    def gradient_bytes(
        self, module: ModuleDescription, start: int, stop: int, *, layerwise: bool = False
    ) -> int:
        """Return the bytes of gradients in `static_bytes`.

        If every backward pass reduces gradients, these are:

        - The gradient shards.
        - The gradients of one layer.
        - The float32 buffer for the reduce-scatter of the preceding layer.
        - The gradients outside of the layers, which FSDP2 reduces at the end of the backward pass.

        Args:
            module: Complete module.
            start: First layer.
            stop: Layer after the last layer.
            layerwise: Whether FSDP2 shards each layer.
        """
        execution = self.effective_execution(module)
        moved = _communicated_parameters(module, start, stop, execution)
        if not (layerwise and execution.reduces_every_microbatch and execution.uses_fsdp):
            return round(moved.unsharded.gradient_bytes)
        outside = moved.unsharded.trained - moved.unsharded.in_layers
        layer = moved.unsharded.in_layers / max(1, stop - start)
        passing = (4 + self.element_bytes) * layer + self.element_bytes * outside
        return round(moved.shard.gradient_bytes + passing)

    def static_bytes(
        self, module: ModuleDescription, start: int, stop: int, *, layerwise: bool = False
    ) -> int:
        """Return the bytes of weights, gradients and optimizer states of a stage on one rank.

        They are the weights and moments (`ParameterStates`), the gradients (`gradient_bytes`) and,
        if parameters are sharded or the compute dtype is not float32, the unsharded parameters.

        Args:
            module: Complete module.
            start: First layer.
            stop: Layer after the last layer.
            layerwise: Whether FSDP2 shards each layer. Two layers are then unsharded at a time.
        """
        execution = self.effective_execution(module)
        moved = _communicated_parameters(module, start, stop, execution)
        gathered = 0.0
        if execution.uses_fsdp and (execution.shard > 1 or self.element_bytes < 4):
            share = min(1.0, 2 / max(1, stop - start)) if layerwise else 1.0
            gathered = moved.unsharded.compute_bytes(self.element_bytes) * share
        elif self.element_bytes < execution.states.weight:  # copies in the compute dtype
            gathered = (moved.unsharded.total - moved.unsharded.quantized) * self.element_bytes
        state = moved.shard.weight_bytes + moved.shard.optimizer_bytes
        gradients = self.gradient_bytes(module, start, stop, layerwise=layerwise)
        return round(state + gathered) + gradients
