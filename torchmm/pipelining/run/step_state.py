"""State of a rank during one step, and the handlers of all action types."""

# [Note: Tensors of a step]
#
# A plan can run tasks in any valid order. All state is therefore stored in dicts, with the task or
# the message as the key. A `_DirectionBuffers` contains the tensors of one direction: outputs of
# forward passes, or their gradients. A message and its gradient take this path:
#
#            rank of the producer                            rank of the consumer
#
#   F --> outbox --SEND_F--> sending   ~~ network ~~>   receiving --WAIT_F--> inbox --> F
#   |                      (WAIT_SEND_F)                 (RECV_F)                       |
#   | _SavedTask.roots                                                _SavedTask.leaves |
#   v                      (RECV_B)                    (WAIT_SEND_B)                    v
#   B <-- inbox <--WAIT_B-- receiving  <~~ network ~~   sending <--SEND_B-- outbox <--- B
#
# If both ends are on one rank, the task puts the tensor directly into the inbox.
#
# Invariants:
# - The autograd graph of a task ends at its messages. Inputs of a task are leaves (`_store_input`),
#   and their gradients are sent back. Outputs of a task are the roots of its backward pass, which
#   starts with the received gradients. The plan determines the order of backward passes.
# - Every entry is stored once and removed once (`_pop`). An action that runs too early does not
#   find its entry, and `finish` reports unused entries. A wrong plan raises an error.
# - Losses are multiplied by `loss_scale`, and parameter gradients are summed. The result does not
#   depend on the number of microbatches or ranks.
#
# Lifetimes of tensors, which validation and the simulator use for memory:
# - Outputs: from F to WAIT_SEND_F, or to B of the consumer on the same rank. The root (`Root`) is
#   an edge of the autograd graph, so a producer that waits for its backward pass stores no output.
# - Inputs: from RECV_F, which allocates the buffer, to B or I of the consumer.
# - Saved activations: from F to B. After I, the tensors that weight gradients need are stored
#   until W (`_weight_groups`).
# - Gradients: from B or I to WAIT_SEND_B, or to B of the producer on the same rank.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchmm.models.hf.load import local_tensor
from torchmm.parallel.activation_offload import PendingInputs
from torchmm.parallel.fsdp import LayerSharding, StepSharding
from torchmm.parallel.p2p import P2PChannels, PendingTransfer, SliceCounts
from torchmm.parallel.precision import MixedPrecision
from torchmm.parallel.torch_compat import (
    stage_backward_input,
    stage_backward_weight,
    supports_weight_split,
)
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message, Task
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.stage import PipelineStage

K = TypeVar("K")
V = TypeVar("V")


Root = Tensor | GradientEdge
"""Start of a backward pass: an edge of the autograd graph, which stores no output. Split backward
passes need tensors in torch, so they use an `_EmptyOutput` tensor."""


class _EmptyOutput(torch.autograd.Function):
    """Identity whose result has a shape and a gradient, but no memory.

    The backward pass starts from the result, so only the consumer stores the real output. The
    output can also be a view. `stage_backward_input` of torch detaches roots in place, which is not
    allowed for views.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _DirectionBuffers:
    """Tensors of one direction, by message."""

    def __init__(self) -> None:
        self.outbox: dict[Message, tuple[Tensor, ...]] = {}
        self.sending: dict[Message, PendingTransfer] = {}
        self.receiving: dict[Message, PendingTransfer] = {}
        self.inbox: dict[Message, tuple[Tensor, ...]] = {}


class _SavedTask(NamedTuple):
    """Autograd state between F and the backward pass of a task."""

    leaves: list[tuple[Message, tuple[Tensor, ...]]]
    """Inputs that require gradients."""
    roots: list[tuple[Message, tuple[Root | None, ...]]]
    """Outputs that receive gradients. None for tensors of a message that require no gradient."""
    loss: Tensor | None


class StepState:
    """State of one step on one rank. See `PipelineRuntime` for the arguments."""

    def __init__(
        self,
        plan_rank: int,
        stages: Mapping[int, PipelineStage],
        channels: P2PChannels | None,
        plan: PipelinePlan,
        microbatches: Sequence[Any],
        loss_scale: float | Mapping[str, float],
    ) -> None:
        self.losses: dict[tuple[str, int], Tensor] = {}
        self._rank = plan_rank
        self._stages = stages
        self._channels: Any = channels
        self._plan = plan
        self._graph = plan.graph
        self._specs = plan.specs
        self._microbatches = microbatches
        self._loss_scales = [
            loss_scale[s.module] if isinstance(loss_scale, Mapping) else loss_scale
            for s in plan.graph.layout.stages
        ]
        self._buffers = (_DirectionBuffers(), _DirectionBuffers())
        self._forward_buffers, self._backward_buffers = self._buffers
        self._saved_tasks: dict[Task, _SavedTask] = {}
        self._weight_groups: dict[Task, list[dict[str, Any]] | None] = {}
        """Parameter groups of torch between I and W. None if the weight gradients are complete."""
        self._weights: dict[int, list[nn.Parameter]] = {}
        self._offloaded_inputs: dict[Task, PendingInputs] = {}
        """Offloaded layer inputs of tasks that wait for their backward pass."""
        self._offloaded_tasks = {t for t, modes in plan.recompute.items() if "offload" in modes}
        self._next_offloaded_task = _next_offloaded(plan, plan_rank, self._offloaded_tasks)
        self._splits_backward = any(a.type is ActionType.I for a in plan.actions[plan_rank])
        # Stages that exist only on this rank. Their tasks need no lookup of the rank.
        self._local_stages = {s.index for s in self._graph.layout.stages if s.ranks == (plan_rank,)}

    def handlers(self) -> dict[ActionType, Callable[[Action], torch.cuda.Event | None]]:
        """Return the handler of each action type.

        A handler of an asynchronous operation returns an event that marks its end.
        """
        kind = ActionType
        computing = {
            kind.F: self._forward,
            kind.B: self._backward,
            kind.I: self._backward_input,
            kind.W: self._backward_weight,
        }
        if self._offloaded_tasks:
            computing = {
                k: partial(self._run_with_prefetch, handler) for k, handler in computing.items()
            }
        return {
            **computing,
            kind.SEND_F: partial(self._send, False),
            kind.RECV_F: partial(self._receive, False),
            kind.WAIT_F: partial(self._wait, False),
            kind.WAIT_SEND_F: partial(self._wait_send, False),
            kind.SEND_B: partial(self._send, True),
            kind.RECV_B: partial(self._receive, True),
            kind.WAIT_B: partial(self._wait, True),
            kind.WAIT_SEND_B: partial(self._wait_send, True),
            kind.UNSHARD: partial(self._run_collective, StepSharding.unshard),
            kind.RESHARD: partial(self._run_collective, StepSharding.reshard),
            kind.REDUCE_GRAD: self._reduce,
            kind.REDUCE_TIED: self._reduce_tied,
        }

    def begin(self) -> None:
        """Pass the number of backward passes to stages that need it at the start of a step."""
        actions = self._plan.actions[self._rank]
        passes = (ActionType.B, ActionType.W)
        backwards = Counter(a.stage for a in actions if a.type in passes)
        for index in self._graph.layout.stages_on_rank(self._rank):
            sharding = self._stages[index].sharding
            if isinstance(sharding, LayerSharding | MixedPrecision):
                sharding.begin_step(backwards[index])

    def close(self) -> None:
        """Restore the original parameters of modules, also after an error."""
        for index in self._graph.layout.stages_on_rank(self._rank):
            if isinstance(sharding := self._stages[index].sharding, MixedPrecision):
                sharding.end_step()

    def finish(self) -> None:
        """Wait for reductions, and set missing gradients of trainable parameters to zero.

        Raises:
            ValueError: The plan is incomplete.
        """
        unfinished = [
            f"{task} has no backward" for task in (*self._saved_tasks, *self._weight_groups)
        ]
        for buffers in self._buffers:
            for box in (buffers.outbox, buffers.sending, buffers.receiving, buffers.inbox):
                unfinished += [f"{message} was not sent, waited for or used" for message in box]
        if unfinished:
            raise ValueError(
                f"the plan of rank {self._rank} is incomplete: {'; '.join(unfinished[:5])}; run "
                "validate_plan to find the missing action"
            )
        for index in self._graph.layout.stages_on_rank(self._rank) if self._plan.training else ():
            stage = self._stages[index]
            self._finish_reducing(index)
            sharded = isinstance(stage.sharding, StepSharding | LayerSharding)
            for parameter in () if sharded else self._trainable_parameters(index):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    # Computation.

    def _run_with_prefetch(self, handler: Callable[[Action], None], action: Action) -> None:
        """Run a compute action while the inputs of the next backward pass are prefetched.

        If the action is a backward pass with offloaded inputs, these inputs are copied first.
        """
        following = self._next_offloaded_task.get(action)
        if following in self._offloaded_inputs:
            current = (
                None if action.type is ActionType.F else self._offloaded_inputs.get(action.task)
            )
            if current is not None:
                current.next_inputs = self._offloaded_inputs[following]
            else:
                self._offloaded_inputs[following].prefetch()
        handler(action)

    def _forward(self, action: Action) -> None:
        task = action.task
        graph, inbox = self._graph, self._forward_buffers.inbox
        incoming = graph.incoming(task)
        inputs = [_pop(inbox, message, action) for message in incoming]
        microbatch = self._microbatches[task.microbatch]
        stage = self._stages[task.stage]
        if isinstance(stage.sharding, LayerSharding):
            stage.sharding.before_forward()
        offloaded = stage.set_recompute_modes(self._plan.recompute.get(task))
        output = stage.run(task, inputs, microbatch, graph, self._specs)
        if offloaded is not None:
            stage.free_offloaded()
            self._offloaded_inputs[task] = offloaded
        needs_backward = self._plan.training and graph.needs_backward(task.stage, task.microbatch)
        roots = [
            self._pass_output(message, tensors, needs_backward)
            for message, tensors in zip(graph.outgoing(task), output.messages, strict=True)
        ]
        if output.loss is not None:
            key = graph.layout.stages[task.stage].module, task.microbatch
            loss = output.loss.detach()
            self.losses[key] = self.losses[key] + loss if key in self.losses else loss
        if needs_backward:
            leaves = [
                (message, tuple(t for t in tensors if t.requires_grad))
                for message, tensors in zip(incoming, inputs, strict=True)
                if graph.computes_gradient(message)
            ]
            self._saved_tasks[task] = _SavedTask(leaves, roots, output.loss)

    def _pass_output(
        self, message: Message, tensors: tuple[Tensor, ...], needs_backward: bool
    ) -> tuple[Message, tuple[Root | None, ...]]:
        """Pass an output on, and return the roots of its backward pass."""
        destination = message.destination
        if destination in self._local_stages or self._is_local(self._graph.consumer(message)):
            self._store_input(message, tuple(t.detach() for t in tensors))
        else:
            self._forward_buffers.outbox[message] = tuple(t.detach() for t in tensors)
        if not needs_backward or not self._graph.sends_gradient(message):
            return message, ()
        root: Callable[[Tensor], Root] = (
            _EmptyOutput.apply if self._splits_backward else get_gradient_edge
        )
        roots = [
            root(t) if t.requires_grad else None
            for t, spec in zip(tensors, self._specs[message], strict=True)
            if spec.requires_grad
        ]
        return message, tuple(roots)

    def _store_input(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Make the inputs of a task leaves, and put them into the inbox."""
        if self._plan.training and self._graph.computes_gradient(message):
            for tensor, spec in zip(tensors, self._specs[message], strict=True):
                if spec.requires_grad:
                    tensor.requires_grad_()
        self._forward_buffers.inbox[message] = tensors

    def _backward(self, action: Action) -> None:
        self._full_backward(action.task, action)

    def _backward_input(self, action: Action) -> None:
        task = action.task
        weights = self._trainable_parameters(task.stage)
        saved = self._saved_tasks.get(task)
        if saved is not None and not any(leaves for _, leaves in saved.leaves):
            return  # no stage needs gradients of the inputs, so W runs the full backward pass
        splits = self._stages[task.stage].splits_backward and supports_weight_split()
        if not weights or not splits or self._plan.recomputes(task):
            self._full_backward(task, action)
            if weights:
                self._weight_groups[task] = None
            return
        saved = _pop(self._saved_tasks, task, action)
        roots, gradients = self._roots(saved, action)
        leaves = [leaf for _, leaves in saved.leaves for leaf in leaves]
        if roots:
            _, groups = stage_backward_input(roots, gradients, leaves, iter(weights))
            self._weight_groups[task] = groups
        else:
            self._weight_groups[task] = None
        self._return_gradients(saved, [leaf.grad for leaf in leaves])

    def _backward_weight(self, action: Action) -> None:
        task = action.task
        if task in self._saved_tasks:
            self._full_backward(task, action)
            return
        groups = _pop(self._weight_groups, task, action)
        if groups is None:
            return
        weights = self._trainable_parameters(task.stage)
        new = [weight for weight in weights if weight.grad is None]
        # Paths to a weight that is used twice can lead through the groups of other weights.
        shared = any(len(group["intermediates"]) > 1 for group in groups)
        stage_backward_weight(iter(weights), groups, retain_graph=shared)
        for weight in new:
            # The first gradient can share memory with a gradient that is being sent. The next W
            # would add to it in place.
            if weight.grad is not None:
                weight.grad = weight.grad.clone()
        sharding = self._stages[task.stage].sharding
        if isinstance(sharding, StepSharding | MixedPrecision):
            sharding.accumulate_gradients()

    def _full_backward(self, task: Task, action: Action) -> None:
        saved = _pop(self._saved_tasks, task, action)
        self._offloaded_inputs.pop(task, None)  # the autograd graph references it until it has run
        roots, gradients = self._roots(saved, action)
        leaves = [leaf for _, leaves in saved.leaves for leaf in leaves]
        sharding = self._stages[task.stage].sharding
        if isinstance(sharding, LayerSharding):
            sharding.before_backward()
        if roots:  # otherwise, the task has used no trainable parameter
            torch.autograd.backward(roots, gradients)
        if isinstance(sharding, MixedPrecision):
            sharding.accumulate_gradients()
        self._return_gradients(saved, [leaf.grad for leaf in leaves])

    def _roots(self, saved: _SavedTask, action: Action) -> tuple[list[Any], list[Tensor]]:
        """Return the roots of a backward pass, and the gradients that were received for them."""
        roots: list[Root] = []
        gradients: list[Tensor] = []
        for message, message_roots in (root for root in saved.roots if root[1]):
            arrived = _pop(self._backward_buffers.inbox, message, action)
            for root, gradient in zip(message_roots, arrived, strict=True):
                if root is not None:
                    roots.append(root)
                    gradients.append(gradient)
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            gradients.append(torch.full_like(saved.loss, self._loss_scales[action.stage]))
        return roots, gradients

    def _return_gradients(self, saved: _SavedTask, gradients: Sequence[Tensor | None]) -> None:
        """Pass the gradients of the inputs of a task to their producers."""
        remaining = iter(gradients)
        for message, leaves in saved.leaves:
            pairs = [(next(remaining), leaf) for leaf in leaves]
            returned = tuple(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)
            same_rank = message.source in self._local_stages or self._is_local(
                self._graph.producer(message)
            )
            buffers = self._backward_buffers
            if self._graph.sends_gradient(message):  # if not, a different mirror sends it
                (buffers.inbox if same_rank else buffers.outbox)[message] = returned

    def _trainable_parameters(self, index: int) -> list[nn.Parameter]:
        """Return the trainable parameters of a stage. The list is cached after unsharding."""
        if index not in self._weights:
            self._weights[index] = self._stages[index].trained_parameters()
        return self._weights[index]

    def _is_local(self, task: Task) -> bool:
        return self._graph.rank(task) == self._rank

    # Communication.

    def _send(self, backward: bool, action: Action) -> None:
        message = _message(action, backward)
        buffers = self._buffers[backward]
        tensors = _pop(buffers.outbox, message, action)
        specs, slice_counts = self._transfer_specs(message, backward, sends=True)
        buffers.sending[message] = self._channels.send(
            tensors, specs, action.peer, action, slice_counts
        )

    def _receive(self, backward: bool, action: Action) -> None:
        message = _message(action, not backward)
        specs, slice_counts = self._transfer_specs(message, backward, sends=False)
        receive = self._channels.receive(specs, action.peer, action, slice_counts)
        self._buffers[backward].receiving[message] = receive

    def _wait(self, backward: bool, action: Action) -> None:
        message = _message(action, not backward)
        arrived = _pop(self._buffers[backward].receiving, message, action).wait(action)
        if backward:
            self._backward_buffers.inbox[message] = arrived
        else:
            self._store_input(message, arrived)

    def _wait_send(self, backward: bool, action: Action) -> None:
        message = _message(action, backward)
        _pop(self._buffers[backward].sending, message, action).wait(action)

    def _transfer_specs(
        self, message: Message, backward: bool, *, sends: bool
    ) -> tuple[list[TensorSpec], list[SliceCounts]]:
        """Return the local specs of the tensors of a transfer, and their numbers of slices.

        For backward transfers, only tensors that require gradients have specs.

        Returns:
            Specs on this rank, and (source slices, destination slices) of each tensor, swapped for
            backward transfers.
        """
        sent_specs = [spec for spec in self._specs[message] if spec.requires_grad or not backward]
        slice_counts = [spec.slices[:2] if spec.slices else (1, 1) for spec in sent_specs]
        local_specs = [spec.local_spec(source=sends != backward) for spec in sent_specs]
        return local_specs, [counts[::-1] for counts in slice_counts] if backward else slice_counts

    # Sharded parameters.

    def _run_collective(
        self, collective: Callable[[StepSharding], torch.cuda.Event | None], action: Action
    ) -> torch.cuda.Event | None:
        self._weights.pop(action.stage, None)
        if isinstance(sharding := self._stages[action.stage].sharding, StepSharding):
            return collective(sharding)
        return None

    def _reduce(self, action: Action) -> torch.cuda.Event | None:
        # FSDP would reduce gradients of later backward passes a second time, without the replicas.
        for task in (*self._saved_tasks, *self._weight_groups):
            if task.stage == action.stage:
                raise ValueError(
                    f"{action} runs before the backward of {task}; run validate_plan to find "
                    "the missing or misplaced action"
                )
        return self._run_collective(StepSharding.start_reducing, action)

    def _finish_reducing(self, stage: int) -> None:
        sharding = self._stages[stage].sharding
        if isinstance(sharding, StepSharding):
            sharding.finish_reducing()
        elif isinstance(sharding, MixedPrecision):
            sharding.end_step()
            self._weights.pop(stage, None)

    def _reduce_tied(self, action: Action) -> None:
        """Add the gradient of the other replica. Both ranks compute bitwise identical sums."""
        self._finish_reducing(action.stage)
        parameter = self._stages[action.stage].tied_parameter()
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        local = local_tensor(grad)
        sending = self._channels.send((local,), (local,), action.peer, action)
        (received,) = self._channels.receive((local,), action.peer, action).wait(action)
        sending.wait(action)
        local += received


def _next_offloaded(
    plan: PipelinePlan, rank: int, offloaded_tasks: set[Task]
) -> dict[Action, Task]:
    """Return the next backward task with offloaded inputs, by the preceding compute action.

    Tasks whose backward pass is not the next compute action are not included.
    """
    if not offloaded_tasks:
        return {}
    graph = plan.graph
    computing = [action for action in plan.actions[rank] if action.type in COMPUTE]
    next_tasks = {}
    for action, following in pairwise(computing):
        task = following.task
        if task in offloaded_tasks:
            sends_gradients = any(map(graph.computes_gradient, graph.incoming(task)))
            last_type = (
                ActionType.I if sends_gradients else ActionType.W
            )  # of a split backward pass
            if following.type in (ActionType.B, last_type):
                next_tasks[action] = task
    return next_tasks


def _message(action: Action, other_is_source: bool) -> Message:
    """Return the message of a transfer. The source is this stage, or the stage at the other end."""
    ends = (action.stage, action.other)
    source, destination = ends[::-1] if other_is_source else ends
    return Message(source, destination, action.microbatch, action.sub_microbatch)


def _pop(box: dict[K, V], key: K, action: Action) -> V:
    try:
        return box.pop(key)
    except KeyError:
        raise ValueError(
            f"action {action} requires {key}, which is not available; run validate_plan to "
            "find the missing or misplaced action"
        ) from None
