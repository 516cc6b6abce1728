"""Mixture of experts: the load-balancing loss and the measured expert loads.

If the model config has `output_router_logits = true`, training adds the load-balancing loss of
Switch Transformers (arXiv 2101.03961, equations 4-6) of each layer, times `router_aux_loss_coef`.
The logged loss remains the cross entropy.

The loss of a layer is added at its router: the backward pass of the routing weights also adds the
gradient of the loss. Pipeline stages therefore need no loss of other stages. The loss of Hugging
Face is different for several layers: it multiplies averages over all layers, which no stage has.

Shape legend: T tokens, E experts, K experts per token, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from torchmm.common.errors import ConfigError
from torchmm.models.layers.sequence_exchange import SequenceRanks

COMPILES_FROM = (5, 23)
"""First version of transformers with a traceable loop over experts, which CPUs use."""


@dataclass
class RouterBalance:
    """A forward hook of all routers of an LLM, which adds the load-balancing loss.

    Attributes:
        coefficient: Factor of the mean of the losses over layers.
        layers: Number of layers with a router in the full model.
        scale: Weight of a token, 1 / tokens of the global batch for gradients of a mean. 0 disables
            the loss.
        sequence_ranks: Context-parallel ranks that share a packed sequence, whose tokens are
            counted jointly. None if a rank has all tokens.
    """

    coefficient: float
    layers: int
    scale: float = 0.0
    sequence_ranks: SequenceRanks | None = None

    def __call__(self, router: Any, _: tuple, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Return the output of a router, whose weights carry the gradient of the loss.

        Args:
            router: Router module.
            output: Logits (T, E), weights (T, K) and expert indices (T, K).
        """
        logits_TE, weights_TK, experts_TK = output
        if not self.scale or not torch.is_grad_enabled():
            return output
        loss = balancing_loss(logits_TE, experts_TK, self.sequence_ranks)
        fraction = getattr(router, "balance_share", 1.0)
        factor = self.coefficient * self.scale * fraction * len(logits_TE) / self.layers
        weights_TK, _ = _JoinGradient.apply(weights_TK, loss, factor)
        return logits_TE, weights_TK, experts_TK


def balancing_loss(
    logits_TE: Tensor, experts_TK: Tensor, sequence_ranks: SequenceRanks | None = None
) -> Tensor:
    """Return E times the sum over experts of load times mean probability, a float32 scalar.

    The value for uniform loads is K.

    Args:
        logits_TE: (T, E), router logits.
        experts_TK: (T, K), int64, selected experts.
        sequence_ranks: Context-parallel ranks. Loads are those of the complete packed sequence, and
            probabilities those of local tokens. The mean over ranks, weighted by tokens, is the
            loss of the sequence.
    """
    experts = logits_TE.shape[1]
    loads_E = torch.zeros(experts, device=logits_TE.device)
    ones = torch.ones_like(experts_TK, dtype=torch.float32)
    loads_E = loads_E.index_add(0, experts_TK.flatten(), ones.flatten())
    if sequence_ranks is not None:
        loads_E = sequence_ranks.summed(loads_E)
    loads_E = loads_E / loads_E.sum() * experts_TK.shape[1]
    probabilities_E = logits_TE.softmax(-1, dtype=torch.float32).mean(0)
    return experts * (loads_E * probabilities_E).sum()


class _JoinGradient(torch.autograd.Function):
    """An operator that attaches a loss to `x`: in backward, the loss has the gradient `factor`.

    Stages return `x`, which is experts of the autograd graph, but cannot return the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x.view_as(x), loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        grad, of_loss = grads  # `of_loss` is zero, because no output depends on the loss
        return grad, torch.full_like(of_loss, ctx.factor), None


_ROUTERS = ("mlp.gate", "mlp.router")


def balance_routers(layers: nn.ModuleList, config: Any) -> RouterBalance | None:
    """Add the load-balancing loss to all routers if the config enables it.

    Returns:
        The hook of the routers, or None.
    """
    if not getattr(config, "output_router_logits", False):
        return None
    routers = [r for layer in layers for n, r in layer.named_modules() if n in _ROUTERS]
    balance = RouterBalance(config.router_aux_loss_coef, len(routers))
    for router in routers:
        router.register_forward_hook(balance)
    return balance


class ExpertLoads:
    """The number of tokens that each expert of an LLM processes in training, counted by hooks.

    Layers that the backward pass recomputes count tokens twice, for all their experts. Compiled
    layers are not counted, so that they remain one graph.

    Args:
        layers: Layers of the LLM in order, including those of other stages.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = expert_modules(layers)
        self._layers = len(modules)
        self._experts = max((len(stacked_weights(experts)[0]) for experts in modules), default=0)
        self._loads_LE: Tensor | None = None
        self._layer_indices = {experts: index for index, experts in enumerate(modules)}
        for experts in modules:  # one shared hook, so that all layers share compiled graphs
            experts.register_forward_pre_hook(self._count)

    def __bool__(self) -> bool:
        return self._layers > 0

    def _count(self, experts: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not experts.training or len(args) < 2:
            return
        chosen_TK = args[1]
        if self._loads_LE is None:
            self._loads_LE = torch.zeros(self._layers, self._experts, device=chosen_TK.device)
        chosen = chosen_TK.flatten()
        ones = torch.ones_like(chosen, dtype=torch.float32)
        self._loads_LE[self._layer_indices[experts]].index_add_(0, chosen, ones)

    def pop_loads(self, device: torch.device) -> Tensor:
        """Return and reset the tokens of this rank since the last call, (L, E), float32."""
        loads_LE, self._loads_LE = self._loads_LE, None
        if loads_LE is None:
            return torch.zeros(self._layers, self._experts, device=device)
        return loads_LE


def max_expert_load_ratio(loads_LE: Tensor) -> Tensor:
    """Return the ratio of maximum to mean expert load, averaged over layers, a float32 scalar.

    The minimum is 1.

    Args:
        loads_LE: (L, E), float32, tokens per expert.
    """
    ratio_L = loads_LE.amax(1) / loads_LE.mean(1).clamp(min=torch.finfo(loads_LE.dtype).tiny)
    return ratio_L.mean()


def has_experts(layer: nn.Module) -> bool:
    """Return True if the MLP of a layer is a mixture of experts."""
    return bool(expert_modules([layer]))


def expert_modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the expert modules of layers, whose weights are stacked tensors of all experts.

    Most of them are called with tokens, expert indices and routing weights.
    """
    return [
        experts
        for layer in layers
        for name, experts in layer.named_modules()
        if name.rpartition(".")[2] == "experts" and stacked_weights(experts)
    ]


def stacked_weights(experts: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that store one matrix per expert."""
    return [parameter for parameter in experts.parameters() if parameter.ndim == 3]


def check_compiles(name: str, layers: Iterable[nn.Module], device: str) -> None:
    """Check that torch.compile supports the experts of the layers of module `name`.

    Raises:
        ConfigError: Compiling the experts would fail in the first step.
    """
    version = tuple(int(experts) for experts in transformers.__version__.split(".")[:2])
    if device == "cpu" and version < COMPILES_FROM and any(map(has_experts, layers)):
        raise ConfigError(
            f"compile: experts of {name!r} cannot be compiled on a CPU with transformers "
            f"{transformers.__version__}; install 5.23, or remove {name!r} from "
            "compile.modules"
        )
