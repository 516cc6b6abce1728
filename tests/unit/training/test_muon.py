"""Muon: the values of torch, and the parameters that it updates."""

import torch
from torch import nn
from update_cases import Net

from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import build_optimizer
from torchmm.training.optimizers.muon import orthogonalize


def net() -> nn.Sequential:
    return Net().layers


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            # Columns have gradients of different sizes.
            sizes = torch.logspace(-3, 0, p.shape[-1])
            p.grad = torch.randn(p.shape, generator=generator) * sizes
        optimizer.step()


def test_muon_matches_torch():
    model, theirs = net(), net()
    settings = {"lr": 0.02, "weight_decay": 0.1}
    config = OptimizerConfig(name="muon", lr_schedule="constant", **settings)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    ours = build_optimizer(model, lambda _: "llm", config, (), matrices, torch.bfloat16)
    torch_muon = torch.optim.Muon(
        [p for p in theirs.parameters() if p.ndim == 2], adjust_lr_fn="match_rms_adamw", **settings
    )
    steps(model, ours, 3)
    steps(theirs, torch_muon, 3)
    for a, b, start in zip(
        model.parameters(), theirs.parameters(), net().parameters(), strict=True
    ):
        if a.ndim == 2:  # bfloat16 matmuls in a different order
            assert (a - b).norm() < 0.05 * (b - start).norm()


def test_orthogonal_matrices_have_singular_values_near_1():
    torch.manual_seed(0)
    actual = torch.linalg.svdvals(orthogonalize(torch.randn(3, 40, 24)))
    assert actual.shape == (3, 24) and actual.min() > 0.5 and actual.max() < 1.3


def test_muon_updates_matrices_of_layers_only():
    model = net()
    config = OptimizerConfig(name="muon", lr=1e-2, lr_schedule="constant")
    optimizer = build_optimizer(model, lambda _: "llm", config, matrices=[model[2].weight])
    steps(model, optimizer, 1)
    by_muon = [p for p, s in optimizer.state.items() if "momentum_buffer" in s]
    assert [id(p) for p in by_muon] == [id(model[2].weight)]
    assert "exp_avg" in optimizer.state[model[0].weight]
    states = optimizer.state[model[2].weight]
    assert sum(v.nbytes for k, v in states.items() if k != "step") == model[2].weight.nbytes
