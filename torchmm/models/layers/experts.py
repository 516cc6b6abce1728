"""Mixture of experts: keeping the experts' loads equal, and how equal they are.

If the model's config says `output_router_logits = true`, training adds the load-balancing loss of
Switch Transformers (arXiv 2101.03961, equations 4-6) for every layer, times the config's
coefficient. The reported loss stays the cross entropy. Each layer's loss is added at its router, so
that a pipeline stage needs no other stage's: its gradient joins that of the routing weights.
Hugging Face's loss differs for more than one layer: it multiplies averages over all layers, which
no stage has. Rejected: a loss that travels from stage to stage with the hidden states.

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
from torchmm.models.layers.shared_rows import RowRanks

COMPILES_FROM = (5, 23)
"""First version of transformers whose loop over experts (used on the CPU) can be traced."""


@dataclass
class RouterBalance:
    """Hook of the routers of one LLM.

    Attributes:
        coefficient: factor of the mean over layers of the losses.
        layers: number of layers with a router in the whole model.
        scale: weight of a token: 1 / tokens of the global batch if gradients are those of a mean;
            0: no loss.
    """

    coefficient: float
    layers: int
    scale: float = 0.0
    row_ranks: RowRanks | None = None
    """Those that share a row, whose tokens count together; None: a rank has all of them."""

    def __call__(self, router: Any, _: tuple, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """A router's (logits, weights, experts), with the loss's gradient tied to the weights."""
        logits_TE, weights_TK, experts_TK = output
        if not self.scale or not torch.is_grad_enabled():
            return output
        loss = balancing_loss(logits_TE, experts_TK, self.row_ranks)
        share = getattr(router, "balance_share", 1.0)
        factor = self.coefficient * self.scale * share * len(logits_TE) / self.layers
        weights_TK, _ = _JoinGradient.apply(weights_TK, loss, factor)
        return logits_TE, weights_TK, experts_TK


def balancing_loss(
    logits_TE: Tensor, experts_TK: Tensor, row_ranks: RowRanks | None = None
) -> Tensor:
    """float32 scalar, K at best: E times the sum over experts of load times mean probability.

    Args:
        row_ranks: of ranks that share a row, loads are those of the whole row; probabilities of own
            tokens alone, so that what the ranks get, weighted by tokens, makes the row's loss.
    """
    experts = logits_TE.shape[1]
    loads_E = torch.zeros(experts, device=logits_TE.device)
    ones = torch.ones_like(experts_TK, dtype=torch.float32)
    loads_E = loads_E.index_add(0, experts_TK.flatten(), ones.flatten())
    if row_ranks is not None:
        loads_E = row_ranks.summed(loads_E)
    loads_E = loads_E / loads_E.sum() * experts_TK.shape[1]
    probabilities_E = logits_TE.softmax(-1, dtype=torch.float32).mean(0)
    return experts * (loads_E * probabilities_E).sum()


class _JoinGradient(torch.autograd.Function):
    """Ties a loss to `x`: when backward reaches `x`, the loss gets `factor` as its gradient.

    `x` is in the graph anyway, while no stage could return the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x.view_as(x), loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        grad, of_loss = grads  # `of_loss` is zero: nothing is computed from the loss
        return grad, torch.full_like(of_loss, ctx.factor), None


_ROUTERS = ("mlp.gate", "mlp.router")


def balance_routers(layers: nn.ModuleList, config: Any) -> RouterBalance | None:
    """Adds the loss to all routers, if the config wants it."""
    if not getattr(config, "output_router_logits", False):
        return None
    routers = [r for layer in layers for n, r in layer.named_modules() if n in _ROUTERS]
    balance = RouterBalance(config.router_aux_loss_coef, len(routers))
    for router in routers:
        router.register_forward_hook(balance)
    return balance


class ExpertLoads:
    """Counts the tokens that each expert of an LLM gets in training: hooks of its experts.

    A layer that backward runs again counts twice, all its experts alike. Compiled layers are not
    counted, so that they stay one graph.

    Args:
        layers: of the LLM, in order, those of other stages included.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        parts = expert_parts(layers)
        self._layers = len(parts)
        self._experts = max((len(stacked_weights(part)[0]) for part in parts), default=0)
        self._loads_LE: Tensor | None = None
        self._places = {part: place for place, part in enumerate(parts)}
        for part in parts:  # the same hook for all: graphs would differ in what it knows of a part
            part.register_forward_pre_hook(self._count)

    def __bool__(self) -> bool:
        return self._layers > 0

    def _count(self, part: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not part.training or len(args) < 2:
            return
        chosen_TK = args[1]
        if self._loads_LE is None:
            self._loads_LE = torch.zeros(self._layers, self._experts, device=chosen_TK.device)
        chosen = chosen_TK.flatten()
        ones = torch.ones_like(chosen, dtype=torch.float32)
        self._loads_LE[self._places[part]].index_add_(0, chosen, ones)

    def take(self, device: torch.device) -> Tensor:
        """float32 (layers, experts): tokens on this rank since the last call."""
        taken_LE, self._loads_LE = self._loads_LE, None
        if taken_LE is None:
            return torch.zeros(self._layers, self._experts, device=device)
        return taken_LE


def busiest_expert(loads_LE: Tensor) -> Tensor:
    """float32 scalar: tokens of a layer's busiest expert over the mean of its experts, on average
    over layers; 1 at best."""
    busiest_L = loads_LE.amax(1) / loads_LE.mean(1).clamp(min=torch.finfo(loads_LE.dtype).tiny)
    return busiest_L.mean()


def has_experts(layer: nn.Module) -> bool:
    """Whether a layer's feed-forward part is a mixture of experts."""
    return bool(expert_parts([layer]))


def expert_parts(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of layers that a router chooses among, whose weights are tensors of all experts;
    most are called with rows, their experts and weights."""
    return [
        part
        for layer in layers
        for name, part in layer.named_modules()
        if name.rpartition(".")[2] == "experts" and stacked_weights(part)
    ]


def stacked_weights(experts: nn.Module) -> list[nn.Parameter]:
    """Those that hold one matrix for each expert."""
    return [parameter for parameter in experts.parameters() if parameter.ndim == 3]


def check_compiles(name: str, layers: Iterable[nn.Module], device: str) -> None:
    """Layers of module `name`, on a device of this type.

    Raises:
        ConfigError: torch.compile would fail on their experts in the first step.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if device == "cpu" and version < COMPILES_FROM and any(map(has_experts, layers)):
        raise ConfigError(
            f"compile: experts of {name!r} cannot be compiled on a CPU with transformers "
            f"{transformers.__version__}; install 5.23, or remove {name!r} from "
            "compile.modules"
        )
