"""Defects that are injected into torchmm, which the emulation must detect."""

from collections.abc import Callable

import torch

from torchmm.common.device_copies import HostCopy
from torchmm.extensions.async_tp.backends import _StartedCollective
from torchmm.extensions.low_precision.cpu_offload import TransferStreams
from torchmm.models.encoder_graphs import _Graph
from torchmm.models.llm import LlmModule
from torchmm.parallel import torch_compat
from torchmm.parallel.activation_offload import OffloadStreams
from torchmm.parallel.fsdp import StepSharding
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.run.runtime import _Clock
from torchmm.pipelining.run.step_state import StepState


def freed_early() -> None:
    """Free the source of a copy before it is read."""
    original = _StartedCollective.__init__
    _StartedCollective.__init__ = lambda self, started, rows, read=None: original(
        self, started, rows
    )


def missing_reduction_wait() -> None:
    """Finish a step without waiting for gradient reductions."""

    def finish(self):
        self._reducing, reducing = None, self._reducing
        if reducing is not None:
            stream = torch.cuda.current_stream
            torch.cuda.current_stream = torch.cuda.Stream  # another stream waits
            try:
                torch_compat.finish_reducing(self._root, reducing)
            finally:
                torch.cuda.current_stream = stream
            self._set_reducing(False)

    StepSharding.finish_reducing = finish


def used_state_slot() -> None:
    """Copy states into device memory whose previous states are still in use."""

    def copy_to_device(self, transfer):
        transfer.buffer.released = None
        original(self, transfer)

    original = TransferStreams.copy_to_device
    TransferStreams.copy_to_device = copy_to_device


def missing_state_wait() -> None:
    """Update without waiting for the states."""
    TransferStreams.wait_for_copy = lambda self, transfer: None


def serial_states() -> None:
    """Copy states to the device only after all previous computation."""

    def copy_to_device(self, transfer):
        self._device_stream.wait_stream(torch.cuda.current_stream(self._device))
        original(self, transfer)

    original = TransferStreams.copy_to_device
    TransferStreams.copy_to_device = copy_to_device


def freed_inputs() -> None:
    """Reuse the memory of an input before it is copied to the host."""
    OffloadStreams.wait_for_offload = lambda self, activation: None


def missing_input_wait() -> None:
    """Recompute a layer without waiting for its input."""
    OffloadStreams.wait_for_prefetch = lambda self, activation: None


def inputs_in_used_memory() -> None:
    """Copy an input into memory that is still in use."""

    def prefetch(self, activation):
        compute_stream, activation.compute_stream = activation.compute_stream, torch.cuda.Stream()
        with torch.cuda.stream(compute_stream):
            activation.device_copy = torch.empty_like(
                activation.host_copy, device=activation.device
            )
        empty_like = torch.empty_like
        torch.empty_like = lambda *_, **__: activation.device_copy
        try:
            original(self, activation)
        finally:
            torch.empty_like, activation.compute_stream = empty_like, compute_stream

    original = OffloadStreams.prefetch
    OffloadStreams.prefetch = prefetch


def serial_inputs() -> None:
    """Wait for every copy on the compute stream."""

    def offload(self, tensor):
        activation = original_offload(self, tensor)
        activation.compute_stream.wait_event(activation.offloaded)
        return activation

    def prefetch(self, activation):
        original_prefetch(self, activation)
        activation.compute_stream.wait_event(activation.prefetched)

    original_offload, original_prefetch = OffloadStreams.offload, OffloadStreams.prefetch
    OffloadStreams.offload, OffloadStreams.prefetch = offload, prefetch


def early_checkpoint() -> None:
    """Save a checkpoint while states are copied to the host."""
    torch.cuda.Stream.synchronize = lambda self: None


def read_device_value() -> None:
    """Read a value of a device tensor in the forward pass."""
    original = LlmModule.forward

    def forward(self, microbatch, *args):
        assert bool((microbatch.targets_T > -200).all())
        return original(self, microbatch, *args)

    LlmModule.forward = forward


def late_timing() -> None:
    """Read action times after an event that is recorded after the update."""
    original = _Clock.records

    def records(self):
        self._end = self.mark()
        return original(self)

    _Clock.records = records


def swapped_sends() -> None:
    """Receive two messages of equal length in the reverse order."""
    original = StepState.begin

    def begin(self):
        original(self)
        channels = self._channels
        first = torch.zeros(4, device=channels.device)
        second = torch.zeros(4, dtype=torch.int32, device=channels.device)
        if channels.plan_rank == 0:
            channels.send((first, second), (first, second), 1, "swapped").wait("swapped")
        else:
            channels.receive((second, first), 0, "swapped").wait("swapped")

    StepState.begin = begin


def shared_communicator() -> None:
    """Use one process group for both directions of a pair of ranks."""
    original = P2PChannels.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._down = self._up

    P2PChannels.__init__ = init


def early_wait() -> None:
    """Wait for losses and norm on the host before the update is queued."""
    original = HostCopy.__init__

    def init(self, tensor):
        original(self, tensor)
        self._copied.synchronize()

    HostCopy.__init__ = init


def pageable_copy() -> None:
    """Copy pageable host memory to the device."""
    original = LlmModule.forward

    def forward(self, microbatch, *args):
        torch.zeros(1).to(microbatch.targets_T.device)
        return original(self, microbatch, *args)

    LlmModule.forward = forward


def stale_graph_input() -> None:
    """Run a CUDA graph of an encoder with the images of its capture."""
    original = _Graph._copy_padded
    filled = set()

    def fill(self, static, values):
        if id(static) not in filled:
            original(self, static, values)
        filled.add(id(static))

    _Graph._copy_padded = fill


DEFECTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        early_wait,
        missing_state_wait,
        freed_early,
        freed_inputs,
        serial_states,
        serial_inputs,
        inputs_in_used_memory,
        read_device_value,
        missing_input_wait,
        shared_communicator,
        pageable_copy,
        early_checkpoint,
        used_state_slot,
        stale_graph_input,
        swapped_sends,
        late_timing,
        missing_reduction_wait,
    )
}
