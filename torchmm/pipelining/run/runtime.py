"""Pipeline runtime: executes the actions of this rank in the order of a plan.

The runtime is independent of schedules. The state of a step is keyed by task or message and never
by position, so every valid order has the same losses and gradients. Messages split the autograd
graph: received tensors are leaves, and their gradients are sent back along the same edge to start
the backward pass of the producer. Losses are multiplied by `loss_scale`, so gradients depend
neither on the number of microbatches nor on the number of ranks.

Saved activations are freed by the B or W action of the task, and sent tensors by WAIT_SEND
(`torchmm.pipelining.run.step_state`). Gradient reductions run on a separate stream
(`StepSharding`), and the main stream waits for them at the end of the step.

The runtime of torch.distributed.pipelining is not used. It requires one number of microbatches and
one shape for all stages, a backward pass for every forward pass, and a linear pipeline.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.run.stage import PipelineStage
from torchmm.pipelining.run.step_state import StepState

Handlers = Mapping[ActionType, Callable[[Action], Any]]
"""Function that runs each type of action."""
Interleave = Callable[
    [PipelinePlan, Handlers, torch.device, "_Clock | None"], AbstractContextManager[Handlers]
]
"""Hook around a step: returns a context with handlers that also run other work in some actions.
`_Clock.spans` has the times of this work. Extensions register hooks in "action_runners"."""


@dataclass
class StepResult:
    """Result of a step on one rank.

    Attributes:
        module_losses: Losses of the stages on this rank by module and microbatch. They are
            detached, unscaled float32 scalars. LLM losses are summed over targets, and generator
            losses over images.
        clock: Times of the actions, if they were recorded.
        begin_s: `time.perf_counter()` at the start of the step. Processes of one host share this
            clock.
    """

    module_losses: dict[tuple[str, int], Tensor]
    clock: _Clock | None
    begin_s: float

    @cached_property
    def records(self) -> list[ActionRecord] | None:
        """Times of the actions, if they were recorded.

        On CUDA, the first access waits until the plan has finished. A training step reads the
        losses before, so that it does not wait again.
        """
        return self.clock.records() if self.clock else None

    @property
    def span_ms(self) -> float:
        """Time from the start of the step to the end of its last action. 0 without records."""
        return max((record.end_ms for record in self.records or ()), default=0.0)

    @property
    def losses(self) -> dict[int, Tensor]:
        """Sum of the losses of all modules, by microbatch."""
        sums: dict[int, Tensor] = {}
        for (_, microbatch), loss in self.module_losses.items():
            sums[microbatch] = sums[microbatch] + loss if microbatch in sums else loss
        return sums

    def losses_of(self, module: str) -> dict[int, Tensor]:
        """Return the losses of a module by microbatch."""
        return {m: loss for (name, m), loss in self.module_losses.items() if name == module}


class PipelineRuntime:
    """Executes plans on one rank.

    Args:
        plan_rank: Rank within the plan.
        stages: Stages of this rank by index.
        channels: Channels to the other ranks. None if the plan has one rank.
        device: Device of the stages. Defaults to the device of the channels, or to the CPU.
        interleave: Hook around each step. If None, actions run in the order of the plan.
    """

    def __init__(
        self,
        plan_rank: int,
        stages: Mapping[int, PipelineStage],
        channels: P2PChannels | None,
        device: torch.device | None = None,
        interleave: Interleave | None = None,
    ) -> None:
        self.plan_rank = plan_rank
        self.stages = dict(stages)
        self.channels = channels
        self.device = device or (channels.device if channels else torch.device("cpu"))
        self._interleave = interleave

    def step(
        self,
        plan: PipelinePlan,
        microbatches: Sequence[Any],
        *,
        loss_scale: float | Mapping[str, float] = 1.0,
        record: bool = False,
        annotate: bool = False,
    ) -> StepResult:
        """Run a step. In training plans, accumulate gradients of all trainable parameters.

        After the step every trainable parameter has a gradient, which is zero if no microbatch used
        the parameter.

        Args:
            plan: Valid plan (see `validate_plan`). All ranks use plans of the same step.
            microbatches: Microbatches of the data-parallel rank, on the device.
            loss_scale: Factor of the losses in the backward pass, 1 / targets of the global batch,
                or one factor per module.
            record: Whether to measure the time of each action, with events on CUDA.
            annotate: Whether to annotate each action in profiles.

        Raises:
            PeerError: Another rank exited, or did not respond within the timeout.
            ValueError: Plan, stages and microbatches do not match, or the plan uses a tensor before
                it is available, or does not free a tensor.
        """
        self._check(plan, len(microbatches))
        state = StepState(
            self.plan_rank, self.stages, self.channels, plan, microbatches, loss_scale
        )
        state.begin()
        actions = plan.actions[self.plan_rank]
        clock = _Clock(self.device, self.plan_rank) if record else None
        begin_s = time.perf_counter()
        with (
            closing(state),
            torch.set_grad_enabled(plan.training),
            self._handlers(plan, state, clock) as handlers,
        ):
            action: Action | None = None
            try:
                if clock is None and not annotate:
                    for action in actions:
                        handlers[action.type](action)
                else:
                    for action in actions:
                        named = record_function(str(action)) if annotate else nullcontext()
                        with named:
                            if clock is None:
                                handlers[action.type](action)
                            else:
                                clock.time(handlers[action.type], action)
            except (RuntimeError, ValueError) as error:
                error.add_note(f"in action {action} of the plan's rank {self.plan_rank}")
                raise
            state.finish()
        if clock is not None:
            clock.stop()
        return StepResult(state.losses, clock, begin_s)

    def _handlers(
        self, plan: PipelinePlan, state: StepState, clock: _Clock | None
    ) -> AbstractContextManager[Handlers]:
        """Return the function that runs each type of action during the step."""
        if self._interleave is None:
            return nullcontext(state.handlers())
        return self._interleave(plan, state.handlers(), self.device, clock)

    def _check(self, plan: PipelinePlan, microbatches: int) -> None:
        layout = plan.graph.layout
        missing = set(layout.stages_on_rank(self.plan_rank)) - self.stages.keys()
        if missing:
            raise ValueError(
                f"the plan has stages {sorted(missing)} on rank {self.plan_rank}, but the "
                f"rank has {sorted(self.stages)}; build the stages from the layout of the plan"
            )
        if microbatches != plan.graph.microbatches:
            raise ValueError(
                f"{microbatches} microbatches for a plan of {plan.graph.microbatches} microbatches"
            )
        if self.channels is None and layout.rank_count > 1:
            raise ValueError(f"a plan of {layout.rank_count} ranks requires P2PChannels")


def channel_pairs(layout: StageLayout) -> list[tuple[int, int]]:
    """Return the (source, destination) ranks of the channels that plans of a layout use."""
    stages = layout.stages
    linked = [*layout.edges, *((s.index, s.tied_to) for s in stages if s.tied_to >= 0)]
    pairs: set[tuple[int, int]] = set()
    for source, destination in linked:
        ends = stages[source].ranks, stages[destination].ranks
        # A task's replica is the same in all stages of its module.
        same = stages[source].module == stages[destination].module and len(ends[0]) == len(ends[1])
        pairs.update(zip(*ends, strict=True) if same else product(*ends))
    return sorted({(a, b) for a, b in pairs | {p[::-1] for p in pairs} if a != b})


def channel_streams(layout: StageLayout) -> list[tuple[int, int]]:
    """Return the pairs of `channel_pairs`, repeated by the number of peers of a rank in a channel.

    If two modules have different tensor-parallel sizes, a rank of the module with the smaller size
    exchanges slices with several ranks of the other module.
    """
    pairs = channel_pairs(layout)
    sizes = {rank: layout.tensor_group_size(s.index) for s in layout.stages for rank in s.ranks}
    ends = {pair: sorted(sizes[rank] for rank in pair) for pair in pairs}
    return [pair for pair in pairs for _ in range(-(-ends[pair][1] // ends[pair][0]))]


class _Clock:
    """Start and end times of the actions of one step.

    Times are CUDA events on the current stream, or host times on the CPU. CUDA events must be
    complete to read their times. `stop` records the last event when the plan ends, so that
    `records` does not wait for later work such as the optimizer update.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._cuda = device.type == "cuda"
        self._rank = rank
        self._marks: list[tuple[Action, Any, Any]] = []
        self._joined: list[torch.cuda.Event] = []
        """End events of actions on other streams, such as reductions."""
        self.spans: list[tuple[Action, Action, Any, Any]] = []
        """(outer action, inner action that ran during it, begin, end of the inner action)."""
        self._begin = self._end = self.mark()

    def stop(self) -> None:
        """Record the end of the plan on the current stream, after the events of other streams."""
        for event in self._joined:
            event.wait()
        self._end = self.mark()

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, handler: Callable[[Action], Any], action: Action) -> None:
        begin = self.mark()
        end = handler(action)
        if end is not None:
            self._joined.append(end)
        self._marks.append((action, begin, self.mark() if end is None else end))

    def records(self) -> list[ActionRecord]:
        """Return the times of all actions. Wait on CUDA if the plan is still running."""
        if self._cuda and not self._end.query():
            self._end.synchronize()
        earlier_ms: dict[Action, float] = defaultdict(float)
        within_ms: dict[Action, float] = defaultdict(float)
        for outer, inner, begin, end in self.spans:
            span_ms = self._since_ms(end) - self._since_ms(begin)
            earlier_ms[inner] += span_ms
            within_ms[outer] += span_ms
        return [
            ActionRecord(
                self._rank,
                action,
                self._since_ms(begin) - earlier_ms[action],
                self._since_ms(end) - within_ms[action],
            )
            for action, begin, end in self._marks
        ]

    def _since_ms(self, mark: Any) -> float:
        if self._cuda:
            return self._begin.elapsed_time(mark)
        return (mark - self._begin) * 1e3
