"""Preference losses against the formulas of TRL (`DPOTrainer` and `CPOTrainer`), written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from torchmm.extensions.preferences.loss import METRIC_NAMES, PreferenceLoss
from torchmm.extensions.preferences.section import PreferenceConfig

LOG_PROBS = torch.tensor([-12.0, -9.0, -30.0, -41.0, -7.5, -7.0])
REFERENCE = torch.tensor([-14.0, -8.0, -33.0, -40.0, -7.0, -7.25])
COUNTS = torch.tensor([4.0, 3.0, 10.0, 8.0, 5.0, 2.0])
BETA, GAMMA = 0.3, 0.7


def trl_losses(loss_type, log_probs, reference):
    """Return the loss of each pair."""
    chosen, rejected = log_probs[0::2] - reference[0::2], log_probs[1::2] - reference[1::2]
    if loss_type == "sigmoid":
        return -functional.logsigmoid(BETA * (chosen - rejected))
    delta = chosen / COUNTS[0::2] - rejected / COUNTS[1::2]
    if loss_type == "sigmoid_norm":
        return -functional.logsigmoid(BETA * delta)
    if loss_type == "ipo":
        return (delta - 1 / (2 * BETA)) ** 2
    return -functional.logsigmoid(BETA * (delta - GAMMA / BETA))


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo", "simpo"])
@pytest.mark.parametrize("reference_free", [False, True])
def test_losses_match_trl_formulas(loss_type, reference_free):
    config = PreferenceConfig(
        loss_type=loss_type, beta=BETA, simpo_gamma=GAMMA, reference_free=reference_free
    )
    assert config.uses_reference == (loss_type != "simpo" and not reference_free)
    reference = REFERENCE if config.uses_reference else None
    ours = LOG_PROBS.clone().requires_grad_()
    theirs = LOG_PROBS.clone().requires_grad_()
    loss = PreferenceLoss(config)(ours, COUNTS, reference)
    expected = trl_losses(loss_type, theirs, torch.zeros(6) if reference is None else reference)
    torch.testing.assert_close(loss, expected.sum())
    loss.backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_masked_pair_has_no_loss_gradient_or_reward():
    loss = PreferenceLoss(PreferenceConfig(beta=BETA))
    log_probs = LOG_PROBS * torch.tensor([1.0, 1, 0, 0, 1, 1])
    counts = COUNTS * torch.tensor([1.0, 1, 0, 0, 1, 1])
    ours = log_probs.clone().requires_grad_()
    total = loss(ours, counts, REFERENCE)
    total.backward()
    expected = trl_losses("sigmoid", log_probs, REFERENCE)[[0, 2]].sum()
    torch.testing.assert_close(total.detach(), expected)
    assert ours.grad[2:4].tolist() == [0, 0] and ours.grad[:2].abs().min() > 0
    assert loss.pop_sums(torch.device("cpu"))[-1] == 2


def test_rewards_are_those_of_training_pairs():
    loss = PreferenceLoss(PreferenceConfig(beta=BETA))
    with torch.no_grad():
        loss(LOG_PROBS, COUNTS, REFERENCE)  # validation
    assert not loss.pop_sums(torch.device("cpu")).any()
    loss(LOG_PROBS, COUNTS, REFERENCE)
    sums = loss.pop_sums(torch.device("cpu"))
    rewards = BETA * (LOG_PROBS - REFERENCE)
    expected = [rewards[0::2].sum().item(), rewards[1::2].sum().item(), 2.0, 3.0]
    assert METRIC_NAMES == ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
    assert sums.tolist() == pytest.approx(expected)


def test_loss_requires_its_reference():
    with pytest.raises(AssertionError, match="reference"):
        PreferenceLoss(PreferenceConfig())(LOG_PROBS, COUNTS, None)
