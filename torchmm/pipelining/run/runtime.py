"""Runs this rank's actions of a plan, one after the other; knows no schedule.

Everything that a step needs to remember is keyed by task or message, never by position, so any
legal order gives the same losses and gradients. Autograd is cut at every message: the receiver's
tensors are leaves, their gradients go back along the same edge and start the producer's backward.
Losses enter backward with `loss_scale`, so neither the number of microbatches nor that of ranks
changes the gradients.

Memory: what a forward keeps is released in its B or W, a sent tensor in its WAIT_SEND
(`torchmm.pipelining.run.step_state` says how long each tensor lives).

Rejected: `torch.distributed.pipelining`'s runtime and stages: one number of microbatches and one
shape for all, a backward for every forward, a line of stages, losses by order of execution.

Reductions of gradients have streams of their own, too (`StepSharding`): the main stream goes on
beside them and waits for them at the end of the step.
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
"""Functions that run each type of action."""
Interleave = Callable[
    [PipelinePlan, Handlers, torch.device, "_Clock | None"], AbstractContextManager[Handlers]
]
"""Hook around a step: return a context with handlers that run more during some actions. Times of
this work are added to `_Clock.spans`. Extensions have such hooks in the table "action_runners"."""


@dataclass
class StepResult:
    """What a step leaves on one rank, besides gradients.

    Attributes:
        module_losses: by module and microbatch, of the stages on this rank: float32 scalars,
            detached and not scaled (of the LLM: summed over targets; of a generator: over images).
        clock: what timed the actions, if they were to be.
        begin_s: time.perf_counter() at the step's start, from which the records count; processes
            of one machine share that clock.
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
        """By microbatch: the sum over modules."""
        sums: dict[int, Tensor] = {}
        for (_, microbatch), loss in self.module_losses.items():
            sums[microbatch] = sums[microbatch] + loss if microbatch in sums else loss
        return sums

    def losses_of(self, module: str) -> dict[int, Tensor]:
        """A module's, by microbatch."""
        return {m: loss for (name, m), loss in self.module_losses.items() if name == module}


class PipelineRuntime:
    """Executes plans on one rank.

    Args:
        plan_rank: this rank, counted within the plan.
        stages: this rank's, by index.
        channels: to the other ranks; None where the plan has only one.
        device: where the stages compute; None: the channels' device, or the CPU without any.
        interleave: hook around each step. If None, every action runs at its place.
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
        """Runs one step and, if the plan is a training plan, adds gradients to parameters.

        Afterwards every trained parameter has a gradient, zero where no microbatch used it.

        Args:
            plan: valid (see `validate_plan`), of the same step on all its ranks.
            microbatches: all of the data-parallel rank's, on the device; the stages of this rank
                read what they need.
            loss_scale: factor of the losses in backward: 1 / targets in the global batch; or one
                for each module.
            record: time each action; on CUDA, with events.
            annotate: name each action in profiles.

        Raises:
            PeerError: another rank was lost or did not answer in time.
            ValueError: plan, stages and microbatches do not fit each other, or the plan uses
                something before it is there, or leaves something behind.
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
        """Return what runs each type of action during the step."""
        if self._interleave is None:
            return nullcontext(state.handlers())
        return self._interleave(plan, state.handlers(), self.device, clock)

    def _check(self, plan: PipelinePlan, microbatches: int) -> None:
        layout = plan.graph.layout
        missing = set(layout.stages_of(self.plan_rank)) - self.stages.keys()
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
    """The channels that plans of this layout use, as (source, destination) ranks of the plan."""
    stages = layout.stages
    linked = [*layout.edges, *((s.index, s.tied_to) for s in stages if s.tied_to >= 0)]
    pairs: set[tuple[int, int]] = set()
    for source, destination in linked:
        ends = stages[source].ranks, stages[destination].ranks
        # A task's replica is the same in all stages of its module.
        alike = stages[source].module == stages[destination].module and len(ends[0]) == len(ends[1])
        pairs.update(zip(*ends, strict=True) if alike else product(*ends))
    return sorted({(a, b) for a, b in pairs | {p[::-1] for p in pairs} if a != b})


def channel_streams(layout: StageLayout) -> list[tuple[int, int]]:
    """The same, each as often as one rank has peers in it: between groups of tensor-parallel ranks
    of different sizes, one of the smaller exchanges slices with several of the larger."""
    pairs = channel_pairs(layout)
    sizes = {rank: layout.group_size(s.index) for s in layout.stages for rank in s.ranks}
    ends = {pair: sorted(sizes[rank] for rank in pair) for pair in pairs}
    return [pair for pair in pairs for _ in range(-(-ends[pair][1] // ends[pair][0]))]


class _Clock:
    """Start and end times of the actions of one step.

    CUDA events on the current stream; on the CPU, host time. Reading the times on CUDA requires the
    events to be complete. `stop` records the last event when the plan ends, so that `records` does
    not wait for later work such as the optimizer update.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._cuda = device.type == "cuda"
        self._rank = rank
        self._marks: list[tuple[Action, Any, Any]] = []
        self._joined: list[torch.cuda.Event] = []
        """Ends of actions on streams other than the current one, such as reductions."""
        self.spans: list[tuple[Action, Action, Any, Any]] = []
        """Action, other action that ran during it, begin and end of that."""
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
