"""AdamW with float32 states: the fused kernel of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.parallel.torch_compat import local_tensors
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optimizers.optimizer import RunOptimizer, count_step, local_gradients


class LocalAdamW(RunOptimizer, torch.optim.AdamW):
    """Fused AdamW that updates local tensors, without the per-operator cost of DTensors."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        names: Mapping[int, str],
        dtype: torch.dtype,
    ) -> None:
        beta1, beta2 = config.betas
        super().__init__(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)

    def new_state(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        updated = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        for group, parameters in zip(self.param_groups, updated, strict=True):
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self.new_state(parameter, group)
        steps = [self.state[p]["step"] for parameters in updated for p in parameters]
        count_step(steps, self.found_inf)
        for group, parameters in zip(self.param_groups, updated, strict=True):
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            local_tensors(parameters),
            local_gradients(parameters),
            local_tensors([state["exp_avg"] for state in states]),
            local_tensors([state["exp_avg_sq"] for state in states]),
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
