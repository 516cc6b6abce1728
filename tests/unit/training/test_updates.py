"""Norm, clipping, AdamW and the check for non-finite values, without host synchronization."""

import copy

import pytest
import torch
from torch import nn
from update_cases import BAD_STEPS, NAN, Net, OneRank, Trained, assert_equal, check_non_finite_step

from torchmm.recipe.training_section import OPTIMIZERS, OptimizerConfig
from torchmm.training.optim import (
    OptimizerUpdate,
    build_optimizer,
    global_grad_norm,
    set_learning_rate,
)
from torchmm.training.optimizers.adamw import LocalAdamW


def torch_step(
    net: Net, optimizer: torch.optim.Optimizer, number: int, size: float, max_norm: float
) -> None:
    """Do a step with torch alone: the host reads the norm, scales gradients, then updates."""
    net.set_gradients(number, size)
    norm = torch.nn.utils.get_total_norm(
        [p.grad.double() for p in net.parameters() if p.grad is not None]
    ).item()
    if (factor := max_norm / (norm + 1e-6)) < 1.0:
        torch._foreach_mul_([p.grad for p in net.parameters() if p.grad is not None], factor)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("max_norm", "bound"), [(1e3, 0.0), (1.0, 3e-7)])
def test_update_equals_fused_adamw_of_torch(max_norm, bound):
    """Compare bitwise without clipping.

    With clipping, gradients are divided instead of multiplied.
    """
    ours, theirs = Trained(max_grad_norm=max_norm, lr_schedule="constant"), Net()
    assert isinstance(ours.optimizer, LocalAdamW)
    decays = [p for p in theirs.parameters() if p.ndim > 1]
    no_decay = [p for p in theirs.parameters() if p.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for number in range(1, 4):
        ours.step(number, size=1.0 / number)
        torch_step(theirs, adamw, number, 1.0 / number, max_norm)
    for mine, reference in zip(ours.net.parameters(), theirs.parameters(), strict=True):
        states = [(ours.optimizer.state[mine][k], v) for k, v in adamw.state[reference].items()]
        for x, y in [(mine, reference), *states]:
            assert torch.equal(x, y) if not bound else torch.allclose(x, y, bound, bound * 0.1)


def test_clipped_gradients_are_accurate_to_float32():
    """Check that stored gradients are at most 3 roundings from the exact gradients."""
    trained = Trained(max_grad_norm=0.1)
    trained.net.set_gradients(1)
    exact = [p.grad.double() for p in trained.net.parameters() if p.grad is not None]
    factor = 0.1 / (torch.stack([g.square().sum() for g in exact]).sum().sqrt() + 1e-6)
    trained.updates.measure([torch.tensor(1.0)])
    trained.updates.apply(1)
    clipped = [p.grad.double() for p in trained.net.parameters() if p.grad is not None]
    for actual, gradient in zip(clipped, exact, strict=True):
        assert torch.allclose(actual, gradient * factor, rtol=1.5e-7, atol=0)


def test_small_gradients_are_not_scaled_up():
    trained = Trained()
    trained.step(1, size=1e-6)
    assert trained.optimizer.grad_scale.item() == 1.0


def test_norm_of_large_matrix_is_accurate():
    weight = nn.Parameter(torch.zeros(4096, 48))
    weight.grad = torch.rand(4096, 48, generator=torch.Generator().manual_seed(0))
    exact = weight.grad.double().norm().item()
    assert global_grad_norm({1: [weight]}).item() == pytest.approx(exact, rel=3e-7)


@pytest.mark.parametrize("name", [entry.name for entry in OPTIMIZERS])
@pytest.mark.parametrize("bad", BAD_STEPS)
def test_non_finite_step_changes_nothing(name, bad):
    check_non_finite_step({"name": name}, torch.float32, bad)


def test_non_finite_first_step_leaves_zero_states():
    trained, fresh = Trained(), Trained()
    trained.net.set_gradients(1, NAN)
    trained.updates.measure([torch.tensor(1.0)])
    trained.updates.apply(1)
    assert all(not v.any() for s in trained.optimizer.state.values() for v in s.values())
    trained.step(1)
    fresh.step(1)
    assert_equal(trained.tensors(), fresh.tensors())


def test_unchecked_non_finite_step_is_detected():
    """Check that the comparison above fails without `found_inf`."""
    trained = Trained()
    trained.step(1)
    before = trained.tensors()
    trained.net.set_gradients(2, NAN)
    trained.updates.measure([torch.tensor(1.0)])
    trained.optimizer.found_inf = None
    trained.updates.apply(2)
    after = trained.tensors()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(AssertionError):
        assert_equal(after, before)


def test_norm_includes_gradients_of_two_dtypes():
    wide, narrow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    wide.grad, narrow.grad = torch.full((3,), 2.0), torch.full((4,), 1.0, dtype=torch.bfloat16)
    assert global_grad_norm({1: [wide, narrow]}).item() == 4.0


def test_optimizer_without_parameters_accepts_clip_factor():
    config = OptimizerConfig(lr=2.0)
    net = Net().requires_grad_(False)
    optimizer = build_optimizer(net, lambda _: "llm", config)
    updates = OptimizerUpdate(net, optimizer, OneRank(), config, 10)
    assert updates.measure([torch.tensor(1.0)]).item() == 0.0
    updates.apply(1)
    updates.finish()


def test_states_load_into_adamw_of_torch():
    """Check names, shapes and dtypes of states, from which torch continues."""
    trained = Trained()
    trained.step(1)
    theirs = copy.deepcopy(trained.net)
    adamw = torch.optim.AdamW(theirs.parameters(), fused=True)
    set_learning_rate(trained.optimizer, 0.5)
    for mine, reference in zip(trained.net.parameters(), theirs.parameters(), strict=True):
        adamw.state[reference] = {k: v.clone() for k, v in trained.optimizer.state[mine].items()}
    theirs.set_gradients(2)
    theirs.unused.grad = None
    adamw.step()
    steps = {float(s["step"]) for s in adamw.state.values() if s}
    assert steps == {2.0}
