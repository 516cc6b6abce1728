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

On CUDA, encoders that fill bubbles run on a stream of their own (`SideStream`). Everything of
encoder stages goes to the side stream, all else stays on the stream of the caller: autograd runs
backwards on the stream of their forwards, and memory of encoders comes from and goes back to the
side stream's pool. The two wait for each other, as if there were one stream, with one
exception: an LLM action with fillers does not wait for them.

- The side stream waits for the main one before each of its actions: what that made, or released,
  is complete.
- The main stream waits for the side stream before each of its actions but transfers and reductions
  of gradients of its own; if the action has fillers, or runs alongside those of one before it, this
  was before the first of them.

Reductions of gradients have streams of their own, too (`StepSharding`): the main stream goes on
beside them and waits for them at the end of the step.

Of what encoders read, only gradients that the LLM's stage on the same rank hands over have main
memory that is released in the step; `StepState` records their use.

What is missing: streams of different priority (the encoder's kernels may delay the LLM's), and a
communicator of the encoders' own: their messages queue with the LLM's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from torchmm.parallel.p2p import P2PChannels
from torchmm.parallel.tensor.bubbles import TensorBubbles
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.run.ahead import Ahead, Span
from torchmm.pipelining.run.stage import PipelineStage
from torchmm.pipelining.run.step_state import StepState
from torchmm.pipelining.schedules.fillers import encoder_stages

TOGETHER = (
    ActionType.UNSHARD, ActionType.RESHARD, ActionType.REDUCE_GRAD, ActionType.REDUCE_TIED,
)  # fmt: skip
"""Begun from the main stream, of encoders too."""


class CudaStreams:
    """A main stream, the current one, and a side stream of a device.

    To be kept: memory belongs to the stream that allocated it.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def main_waits(self) -> None:
        """The main stream waits for all that is on the side stream."""
        torch.cuda.current_stream().wait_stream(self._side)

    def side_waits(self) -> None:
        """The reverse."""
        self._side.wait_stream(torch.cuda.current_stream())

    def on_side(self) -> AbstractContextManager:
        """What is begun inside goes to the side stream."""
        return torch.cuda.stream(self._side)


class SideStream:
    """One step of one rank."""

    def __init__(self, plan: PipelinePlan, streams: CudaStreams) -> None:
        self._streams = streams
        self._encoders = encoder_stages(plan.graph)
        self._filled: Mapping[Action, tuple[Action, ...]] = plan.fillers
        self._first = {fillers[0] for fillers in plan.fillers.values() if fillers}
        self._pending = False
        """Whether the side stream has work that the main one has not waited for."""

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Chooses the stream of an action, and lets one wait for the other where it must."""
        if action.stage in self._encoders and action.type not in TOGETHER:
            if action in self._first:
                self.join()
            self._streams.side_waits()
            self._pending = True
            with self._streams.on_side():
                yield
            return
        reduces_llm = action.type is ActionType.REDUCE_GRAD and action.stage not in self._encoders
        transfer = action.type not in (*COMPUTE, *TOGETHER)
        if not (transfer or reduces_llm or action in self._filled):
            self.join()
        yield

    def join(self) -> None:
        """Lets the main stream wait for all encoder work so far."""
        if self._pending:
            self._streams.main_waits()
            self._pending = False


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
        bubbles: to which its stages were tied when they were split; None: what plans launch ahead
            runs in its place.
    """

    def __init__(
        self,
        plan_rank: int,
        stages: Mapping[int, PipelineStage],
        channels: P2PChannels | None,
        device: torch.device | None = None,
        bubbles: TensorBubbles | None = None,
    ) -> None:
        self.plan_rank = plan_rank
        self.stages = dict(stages)
        self.channels = channels
        self.device = device or (channels.device if channels else torch.device("cpu"))
        self._bubbles = bubbles
        self._streams: CudaStreams | None = None

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

        Afterwards every trained parameter has a gradient, zero where no microbatch used it. On
        CUDA, fillers run alongside their actions, elsewhere before them; what actions launch runs
        while they communicate.

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
        side = self._side_stream(plan)
        begin_s = time.perf_counter()
        with (
            closing(state),
            torch.set_grad_enabled(plan.training),
            self._ahead(plan, state, clock) as handlers,
        ):
            action: Action | None = None
            try:
                if clock is None and not annotate and side is None:
                    for action in actions:
                        handlers[action.type](action)
                else:
                    for action in actions:
                        named = record_function(str(action)) if annotate else nullcontext()
                        with named, side.around(action) if side else nullcontext():
                            if clock is None:
                                handlers[action.type](action)
                            else:
                                clock.time(handlers[action.type], action)
            except (RuntimeError, ValueError) as error:
                error.add_note(f"in action {action} of the plan's rank {self.plan_rank}")
                raise
            if side is not None:
                side.join()
            state.finish()
        if clock is not None:
            clock.stop()
        return StepResult(state.losses, clock, begin_s)

    @contextmanager
    def _ahead(
        self, plan: PipelinePlan, state: StepState, clock: _Clock | None
    ) -> Iterator[Mapping[ActionType, Callable[[Action], Any]]]:
        """What runs each kind of action, those included that LLM actions launch."""
        handlers = state.handlers()
        if self._bubbles is None or not plan.launches:
            yield handlers
            return
        mark = None if clock is None else clock.mark
        ahead = Ahead(plan, handlers, self._bubbles, self.device, mark)
        try:
            yield ahead.handlers()
        finally:
            ahead.close()
            if clock is not None:
                clock.spans = ahead.spans

    def _side_stream(self, plan: PipelinePlan) -> SideStream | None:
        if self.device.type != "cuda" or not plan.fillers:
            return None
        self._streams = self._streams or CudaStreams(self.device)
        return SideStream(plan, self._streams)

    def _check(self, plan: PipelinePlan, microbatches: int) -> None:
        layout = plan.graph.layout
        missing = set(layout.stages_of(self.plan_rank)) - self.stages.keys()
        if missing:
            raise ValueError(
                f"the plan puts stages {sorted(missing)} on rank {self.plan_rank}, which has "
                f"{sorted(self.stages)}; build the stages from the plan's layout"
            )
        if microbatches != plan.graph.microbatches:
            raise ValueError(f"{microbatches} microbatches for a plan of {plan.graph.microbatches}")
        if self.channels is None and layout.rank_count > 1:
            raise ValueError(f"a plan of {layout.rank_count} ranks needs P2PChannels")


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
        self.spans: list[Span] = []
        """What ran inside of actions."""
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
        for llm, encoder, begin, end in self.spans:
            span_ms = self._since_ms(end) - self._since_ms(begin)
            earlier_ms[encoder] += span_ms
            within_ms[llm] += span_ms
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
