"""Tests of messages about non-finite values: module, weights, input or gradient."""

import pytest
import torch
from torch import Tensor, nn

from torchmm.parallel.health.non_finite import find_non_finite_origin


class Divide(nn.Module):
    """1 / (x - pole), which is infinite at the pole."""

    pole = 3.0

    def forward(self, x_BD: Tensor) -> Tensor:
        return 1 / (x_BD - self.pole)


class Root(nn.Module):
    """Square root, which is finite at 0, while its gradient is not."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD.sqrt()


def model(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Identity(), middle)
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 1))


def step(net: nn.Module, x_BD: Tensor) -> None:
    net(x_BD).sum().backward()


def non_finite_message(net: nn.Module, x_BD: Tensor) -> str:
    step(net, x_BD)
    message = find_non_finite_origin(net, lambda: step(net, x_BD))
    assert not any(module._forward_hooks for module in net.modules())
    return message


def test_innermost_non_finite_module_is_named():
    net = model(Divide())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(3.0)
    assert non_finite_message(net, torch.ones(2, 4)).endswith("that of 1.1 (Divide) on rank 0")


def test_non_finite_weights_are_named():
    net = model(nn.Identity())
    with torch.no_grad():
        net[2].bias.fill_(float("nan"))
    assert "that of 2 (Linear), whose weights are not finite: bias" in non_finite_message(
        net, torch.ones(2, 4)
    )


def test_non_finite_input_is_named():
    x_BD = torch.ones(2, 4)
    x_BD[0, 1] = float("nan")
    assert "0 (Linear), whose input is not finite" in non_finite_message(model(nn.Identity()), x_BD)


def test_non_finite_gradients_are_named():
    net = model(Root())
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    message = non_finite_message(net, torch.ones(2, 4))
    assert message == (
        "outputs of all modules are finite, but gradients are not: those of 2 of 4 parameters, "
        "last 0.bias on rank 0"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_finite_repetition_of_step_is_reported(compiled):
    net = model(Divide())
    if compiled:
        net[1].compile(backend="eager")
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    bad_BD = torch.full((2, 4), 3.0)
    assert non_finite_message(net, bad_BD).endswith("that of 1.1 (Divide) on rank 0")
    net.zero_grad()
    step(net, torch.ones(2, 4))
    again = find_non_finite_origin(net, lambda: step(net, torch.ones(2, 4)))
    assert "all values are finite" in again
