"""Mistakes of the kinds that the emulation is to find, put into torchmm on purpose."""

from collections.abc import Callable

import torch

from torchmm.common.device_copies import HostCopy
from torchmm.extensions.async_tp.backends import _StartedCollective
from torchmm.extensions.low_precision.cpu_offload import TransferStreams
from torchmm.models.encoder_graphs import _Graph
from torchmm.models.llm import LlmModule
from torchmm.parallel import torch_private
from torchmm.parallel.fsdp import StepSharding
from torchmm.parallel.host_inputs import InputStreams
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.run.runtime import _Clock
from torchmm.pipelining.run.step_state import StepState


def freed_early() -> None:
    """What a copy engine reads is let go of before it has been read."""
    plain = _StartedCollective.__init__
    _StartedCollective.__init__ = lambda self, started, rows, read=None: plain(self, started, rows)


def unreduced() -> None:
    """The end of a step does not wait for the reductions of gradients."""

    def finish(self):
        self._reducing, reducing = None, self._reducing
        if reducing is not None:
            stream = torch.cuda.current_stream
            torch.cuda.current_stream = torch.cuda.Stream  # somebody else waits
            try:
                torch_private.finish_reducing(self._root, reducing)
            finally:
                torch.cuda.current_stream = stream
            self._set_reducing(False)

    StepSharding.finish_reducing = finish


def slot_in_use() -> None:
    """States come from the host into memory whose last guests have not left."""

    def bring(self, visit):
        visit.slot.free = None
        plain(self, visit)

    plain = TransferStreams.bring
    TransferStreams.bring = bring


def not_arrived() -> None:
    """The update does not wait for the states it reads."""
    TransferStreams.await_arrival = lambda self, visit: None


def in_turn() -> None:
    """States come only once everything before is computed."""

    def bring(self, visit):
        self._coming.wait_stream(torch.cuda.current_stream(self._device))
        plain(self, visit)

    plain = TransferStreams.bring
    TransferStreams.bring = bring


def freed_inputs() -> None:
    """Memory of an input is used for something else before it is on the host."""
    InputStreams.let_go = lambda self, guest: None


def missing_inputs() -> None:
    """A layer runs again before its input has come back."""
    InputStreams.await_arrival = lambda self, guest: None


def inputs_without_room() -> None:
    """An input comes into memory that is still used for something else."""

    def bring(self, guest):
        home, guest.home = guest.home, torch.cuda.Stream()
        with torch.cuda.stream(home):
            guest.copy = torch.empty_like(guest.host, device=guest.device)
        empty_like = torch.empty_like
        torch.empty_like = lambda *_, **__: guest.copy
        try:
            plain(self, guest)
        finally:
            torch.empty_like, guest.home = empty_like, home

    plain = InputStreams.bring
    InputStreams.bring = bring


def inputs_in_turn() -> None:
    """Whoever computes waits for every copy."""

    def send(self, tensor):
        guest = plain_send(self, tensor)
        guest.home.wait_event(guest.gone)
        return guest

    def bring(self, guest):
        plain_bring(self, guest)
        guest.home.wait_event(guest.arrived)

    plain_send, plain_bring = InputStreams.send, InputStreams.bring
    InputStreams.send, InputStreams.bring = send, bring


def saved_early() -> None:
    """A checkpoint is taken while states are on their way to the host."""
    torch.cuda.Stream.synchronize = lambda self: None


def look_at_device() -> None:
    """A forward asks for a number of a device tensor."""
    plain = LlmModule.forward

    def forward(self, microbatch, *args):
        assert bool((microbatch.targets_T > -200).all())
        return plain(self, microbatch, *args)

    LlmModule.forward = forward


def timed_late() -> None:
    """The times of actions are read after an event that is recorded after the update."""
    plain = _Clock.records

    def records(self):
        self._end = self.mark()
        return plain(self)

    _Clock.records = records


def swapped_sends() -> None:
    """A rank receives two messages of the same length in the other order than they are sent."""
    plain = StepState.begin

    def begin(self):
        plain(self)
        channels = self._channels
        first = torch.zeros(4, device=channels.device)
        second = torch.zeros(4, dtype=torch.int32, device=channels.device)
        if channels.plan_rank == 0:
            channels.send((first, second), (first, second), 1, "swapped").wait("swapped")
        else:
            channels.receive((second, first), 0, "swapped").wait("swapped")

    StepState.begin = begin


def one_communicator() -> None:
    """Both directions of a pair of ranks use one process group."""
    plain = P2PChannels.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self._down = self._up

    P2PChannels.__init__ = init


def early_wait() -> None:
    """The host waits for losses and norm before it queues the update."""
    plain = HostCopy.__init__

    def init(self, tensor):
        plain(self, tensor)
        self._copied.synchronize()

    HostCopy.__init__ = init


def pageable_copy() -> None:
    """A copy to the device from memory that is not page-locked."""
    plain = LlmModule.forward

    def forward(self, microbatch, *args):
        torch.zeros(1).to(microbatch.targets_T.device)
        return plain(self, microbatch, *args)

    LlmModule.forward = forward


def stale_graph_input() -> None:
    """A CUDA graph of an encoder computes with the images of the pass that captured it."""
    plain = _Graph._fill
    filled = set()

    def fill(self, static, values):
        if id(static) not in filled:
            plain(self, static, values)
        filled.add(id(static))

    _Graph._fill = fill


DEFECTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        early_wait,
        not_arrived,
        freed_early,
        freed_inputs,
        in_turn,
        inputs_in_turn,
        inputs_without_room,
        look_at_device,
        missing_inputs,
        one_communicator,
        pageable_copy,
        saved_early,
        slot_in_use,
        stale_graph_input,
        swapped_sends,
        timed_late,
        unreduced,
    )
}
