"""A small model with all kinds of tensors, and checkpoint managers, for tests."""

import logging
from pathlib import Path

import torch
from torch import nn

from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager


class Model(nn.Module):
    """A model with tied, frozen and non-float tensors of odd sizes."""

    def __init__(self, width: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width, dtype=dtype)
        self.frozen = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(width, 5, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("low_precision", torch.randn(2, 3).bfloat16())

    def forward(self, x):
        return self.head(self.frozen(self.embed(x))) * self.scale


def build(seed: int = 0, fused: bool = True, **kwargs):
    torch.manual_seed(seed)
    model = Model(**kwargs)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1, fused=fused)


def train(model, optimizer):
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.seen += 1


def everything(model, optimizer):
    state = optimizer.state_dict()["state"]
    values = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}
    return {**model.state_dict(), **values}


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def snapshot(model, optimizer):
    return {name: value.clone() for name, value in everything(model, optimizer).items()}


def make_manager(
    run_dir: Path, recipe="recipe", table=None, data=None, **config
) -> CheckpointManager:
    """Return a checkpoint manager, which saves synchronously by default."""
    settings = CheckpointConfig(**{"async_save": False, **config})
    logger = logging.getLogger("test_checkpoint")
    layout = {"shard": 1}
    return CheckpointManager(settings, run_dir, logger, layout, recipe, table, data=data)


def steps(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").glob("step-*"))


def saved(manager, *numbers: int, model=None, optimizer=None):
    """Save steps of a training run and return the last state.

    Args:
        model: Continues the training of this model; None: builds a new one.
    """
    if model is None:
        model, optimizer = build()
    for number in numbers:
        train(model, optimizer)
        manager.save(number, model, optimizer, {"position": number})
    return snapshot(model, optimizer)
