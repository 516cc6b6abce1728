"""Losses of preference pairs: DPO (arXiv 2305.18290), its length-normalized variant, IPO and SimPO.

The score of an answer is its log-probability minus that of the reference model. With d, the score
of the chosen minus the score of the rejected answer, the losses of a pair are:

    sigmoid        -log sigmoid(beta d)
    sigmoid_norm   the same, with scores divided by the number of targets (arXiv 2411.15124)
    ipo            (d - 1 / (2 beta))^2, with scores divided by the number of targets
    simpo          -log sigmoid(beta d - gamma), divided in the same way, without a reference

Shape legend: P pairs of a microbatch, A = 2 P answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchmm.extensions.preferences.section import PreferenceConfig

METRIC_NAMES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
"""Means over pairs that `PreferenceLoss` adds up, with the names of TRL."""


class PreferenceLoss:
    """Summed loss of preference pairs, an `AnswerLoss` of the LLM.

    Args:
        config: Section of the recipe.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self._sums_4: Tensor | None = None

    def __call__(self, log_probs_A: Tensor, counts_A: Tensor, reference_A: Tensor | None) -> Tensor:
        """Return the loss summed over pairs (`AnswerLoss`), and add up the rewards in training."""
        config = self.config
        assert config.uses_reference == (reference_A is not None), "wrong reference model"
        scores_A = log_probs_A if reference_A is None else log_probs_A - reference_A
        means_A = scores_A / counts_A.clamp(min=1)
        values_A = scores_A if config.loss_type == "sigmoid" else means_A
        chosen_P, rejected_P = values_A.view(-1, 2).unbind(1)
        # Corrupt samples have no targets.
        has_targets_P = (counts_A.view(-1, 2) > 0).all(1)
        if config.loss_type == "ipo":
            loss_P = (chosen_P - rejected_P - 1 / (2 * config.beta)) ** 2
        else:
            margin = config.simpo_gamma if config.loss_type == "simpo" else 0.0
            loss_P = -logsigmoid(config.beta * (chosen_P - rejected_P) - margin)
        if torch.is_grad_enabled():
            rewards_A = config.beta * (means_A if config.loss_type == "simpo" else scores_A)
            self._add_rewards(rewards_A.detach(), has_targets_P)
        return (loss_P * has_targets_P).sum()

    def _add_rewards(self, rewards_A: Tensor, has_targets_P: Tensor) -> None:
        chosen_P, rejected_P = rewards_A.view(-1, 2).unbind(1)
        is_larger_P = (chosen_P > rejected_P).float()
        values_4P = torch.stack([chosen_P, rejected_P, is_larger_P, torch.ones_like(chosen_P)])
        sums_4 = (values_4P * has_targets_P).sum(1)
        self._sums_4 = sums_4 if self._sums_4 is None else self._sums_4 + sums_4

    def pop_sums(self, device: torch.device) -> Tensor:
        """Return and reset the sums of `METRIC_NAMES` and the number of pairs, (4,), float32.

        Zero on ranks without the last stage of the LLM.
        """
        sums_4, self._sums_4 = self._sums_4, None
        return torch.zeros(4, device=device) if sums_4 is None else sums_4
