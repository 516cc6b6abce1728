"""CUDA graphs of the layers of encoders whose images all have one size.

The layers of such encoders have many short kernels. The host may need more time to launch a layer
than the GPU needs to compute it. A CUDA graph launches all layers at once.

A graph has constant shapes and addresses, so that:

- The number of images is rounded up to `cuda_graph_image_count` with images of zeros. Their outputs
  are dropped. The gradients of their outputs are zero, so that they do not change any gradient.
- Inputs are copied to constant addresses. Outputs and gradients are copied out.
- A forward pass overwrites the activations of the one before. A pass that begins before the
  backward pass of the previous one has ended runs eagerly, and so do passes without gradients.

A graph is captured when its number of images first occurs. All graphs share one memory pool,
because only one of them runs at once. `torch.cuda.make_graphed_callables` is not used: its capture
mode forbids CUDA calls in other threads, such as threads that pin memory. Its gradients also share
memory with the graph, so that the next microbatch would overwrite them.

Shape legend: N images of a microbatch, B images of a graph, S positions of an image, D features.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchmm.common.batch import cuda_graph_image_count

logger = logging.getLogger(__name__)


class EncoderGraphs:
    """CUDA graphs of the layers of one encoder, one graph per number of images.

    Args:
        name: Name of the encoder in messages.
        layers: Layers of the encoder. The addresses of their parameters must not change.
        run: Function that runs the layers on hidden states (N, S, D).

    Attributes:
        failure: Reason why the layers run eagerly, or "".
        replays: Number of forward passes that ran as graphs.
    """

    def __init__(
        self, name: str, layers: Sequence[nn.Module], run: Callable[[Tensor], Tensor]
    ) -> None:
        self.name = name
        self.failure = ""
        self.replays = 0
        self._layers = list(layers)
        self._run = run
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._weights: list[tuple[nn.Module, str, nn.Parameter, int]] = []
        self._pass: weakref.ref[_PendingPass] | None = None
        self._gradients: list[Tensor] = []
        """Gradients of the trained parameters, into which all graphs write."""
        self._pool: Any = None

    def __call__(self, hidden_NSD: Tensor) -> Tensor:
        """Return the output of the layers (N, S, D)."""
        if self.failure or not torch.is_grad_enabled() or self._is_in_use():
            return self._run(hidden_NSD)
        if not self._weights:
            self._list_weights()
        elif not self._weights_are_in_place():
            self._fail("its parameters have new addresses")
            return self._run(hidden_NSD)
        trained = [weight for _, _, weight, _ in self._weights if weight.requires_grad]
        key = (
            cuda_graph_image_count(len(hidden_NSD)),
            hidden_NSD.shape[1:],
            hidden_NSD.dtype,
            hidden_NSD.requires_grad,
        )
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(key[0], hidden_NSD, trained)
            except RuntimeError as error:  # also torch.OutOfMemoryError
                self._fail(str(error) or type(error).__name__)
        if self.failure:  # outside the handler, which references the memory of the capture
            return self._run(hidden_NSD)
        graph = self._graphs[key]
        self.replays += 1
        if not graph.inputs:
            return graph.replay_forward(hidden_NSD)
        pending_pass = _PendingPass()
        self._pass = weakref.ref(pending_pass)
        output: Tensor = _Replay.apply(self, graph, pending_pass, hidden_NSD, *trained)
        return output

    def end_pass(self, pending_pass: _PendingPass) -> None:
        """Allow the next forward pass to overwrite the activations of a pass.

        Raises:
            RuntimeError: The activations were overwritten, or the backward pass runs twice.
        """
        if self._pass is None or self._pass() is not pending_pass:
            raise RuntimeError(f"the activations of {self.name} in its CUDA graph were overwritten")
        self._pass = None

    def _is_in_use(self) -> bool:
        """Return True if a pass still needs its activations for backward."""
        return self._pass is not None and self._pass() is not None

    def _list_weights(self) -> None:
        self._weights = [
            (owner, name, parameter, parameter.data_ptr())
            for layer in self._layers
            for owner in layer.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        trained = [weight for _, _, weight, _ in self._weights if weight.requires_grad]
        self._gradients = [torch.empty_like(weight) for weight in trained]
        self._pool = torch.cuda.graph_pool_handle()

    def _weights_are_in_place(self) -> bool:
        return all(
            owner._parameters[name] is parameter and parameter.data_ptr() == address
            for owner, name, parameter, address in self._weights
        )

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._graphs.clear()
        self._gradients.clear()
        text = (
            "layers of %s run without CUDA graphs, because capturing failed: %s. The run "
            "continues. Set compile.cuda_graphs = false to skip the attempt"
        )
        logger.warning(text, self.name, reason.strip())

    def _capture(self, images: int, like_NSD: Tensor, trained: list[nn.Parameter]) -> _Graph:
        """Capture the passes for a number of images. The host waits for the device."""
        # Autograd synchronizes the streams on which a leaf was used, which a capture must not do.
        aliases = [weight.detach().requires_grad_() for weight in trained]
        graph = _Graph(images, like_NSD, aliases, self._gradients)
        stream = torch.cuda.Stream()
        with self._replaced(dict(zip(trained, aliases, strict=True))):
            # cuBLAS handles and lazily loaded kernels must exist before they are captured.
            graph.warm_up(self._run)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool of the graphs cannot use memory of the cache
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture(self._run, self._pool)
        torch.cuda.current_stream().wait_stream(stream)
        logger.info("CUDA graph of %s captured for %d images", self.name, images)
        return graph

    @contextmanager
    def _replaced(self, aliases: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Replace the parameters of the layers by aliases within the context."""
        try:
            for owner, name, parameter, _ in self._weights:
                owner._parameters[name] = aliases.get(parameter, parameter)  # type: ignore[assignment]
            yield
        finally:
            for owner, name, parameter, _ in self._weights:
                owner._parameters[name] = parameter


class _PendingPass:
    """A forward pass with a pending backward pass. Its lifetime is that of the autograd graph."""

    __slots__ = ("__weakref__",)


class _Graph:
    """Forward and backward pass for a constant number of images.

    Args:
        images: Number of images B.
        like_NSD: Example of hidden states, for shape, dtype and `requires_grad`.
        trained: Parameters that need gradients.
        gradients: Buffers for their gradients.

    Attributes:
        inputs: Tensors that need gradients. If empty, the graph has no backward pass.
    """

    def __init__(
        self,
        images: int,
        like_NSD: Tensor,
        trained: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        self._input_BSD = torch.zeros(
            images, *like_NSD.shape[1:], dtype=like_NSD.dtype, device=like_NSD.device
        ).requires_grad_(like_NSD.requires_grad)
        self._needs_input_gradient = like_NSD.requires_grad
        self.inputs = list(trained)
        if self._needs_input_gradient:
            self.inputs.insert(0, self._input_BSD)
        self._gradients = list(gradients)
        self._output_BSD = self._output_gradient_BSD = self._input_BSD
        self._input_gradient_BSD: Tensor | None = None
        self._images = 0
        """Number of images of the last forward pass."""
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[Tensor], Tensor]) -> None:
        """Run both passes eagerly."""
        output_BSD = run(self._input_BSD)
        if self.inputs:
            gradient_BSD = torch.zeros_like(output_BSD)
            torch.autograd.grad(output_BSD, self.inputs, gradient_BSD, allow_unused=True)

    def capture(self, run: Callable[[Tensor], Tensor], pool: Any) -> None:
        """Capture both passes on the current stream."""
        with _capturing(self._forward, pool):
            output_BSD = run(self._input_BSD)
        self._output_BSD = output_BSD.detach()
        if not self.inputs:
            return
        self._output_gradient_BSD = torch.zeros_like(self._output_BSD)
        with _capturing(self._backward, pool):
            gradients = torch.autograd.grad(
                output_BSD,
                self.inputs,
                self._output_gradient_BSD,
                allow_unused=True,
                materialize_grads=True,
            )
            of_weights = gradients[self._needs_input_gradient :]
            if of_weights:
                torch._foreach_copy_(self._gradients, list(of_weights))
        if self._needs_input_gradient:
            self._input_gradient_BSD = gradients[0]

    def replay_forward(self, hidden_NSD: Tensor) -> Tensor:
        """Return a copy of the output (N, S, D)."""
        self._images = len(hidden_NSD)
        with torch.no_grad():
            self._copy_padded(self._input_BSD, hidden_NSD)
        self._forward.replay()
        return self._output_BSD[: self._images].clone()

    def replay_backward(self, gradient_NSD: Tensor) -> tuple[Tensor | None, ...]:
        """Return copies of the gradients of the hidden states and of the trained parameters."""
        self._copy_padded(self._output_gradient_BSD, gradient_NSD)
        self._backward.replay()
        of_input_NSD = None
        if self._input_gradient_BSD is not None:
            of_input_NSD = self._input_gradient_BSD[: self._images].clone()
        # A multiplication by 1 is an exact copy, and one kernel copies many tensors.
        copies = torch._foreach_mul(self._gradients, 1.0) if self._gradients else ()
        return of_input_NSD, *copies

    def _copy_padded(self, static_BSD: Tensor, values_NSD: Tensor) -> None:
        static_BSD[: self._images].copy_(values_NSD)
        if self._images < len(static_BSD):
            static_BSD[self._images :].zero_()


class _Replay(torch.autograd.Function):
    """The layers as one node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: EncoderGraphs,
        graph: _Graph,
        pending_pass: _PendingPass,
        hidden_NSD: Tensor,
        *_: Tensor,
    ) -> Tensor:
        ctx.graphs, ctx.graph, ctx.pending_pass = graphs, graph, pending_pass
        return graph.replay_forward(hidden_NSD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NSD: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graphs.end_pass(ctx.pending_pass)
        return None, None, None, *ctx.graph.replay_backward(gradient_NSD)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the context. Other threads may call CUDA at the same time."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()
