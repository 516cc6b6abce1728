"""Parameter groups, learning rate schedules, gradient norm."""

import math

import pytest
import torch
from torch import nn

from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import (
    build_optimizer,
    describe_schedule_change,
    global_grad_norm,
    group_by_replicas,
    lr_factor,
    set_learning_rate,
)


def _model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"llm": nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), "vision": nn.Linear(3, 4)}
    )


def _module_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def test_groups_split_by_module_and_decay():
    model = _model()
    config = OptimizerConfig(lr=1.0, module_lr={"vision": 0.5}, weight_decay=0.1)
    groups = build_optimizer(model, _module_of, config).param_groups
    actual = {(g["module"], g["lr"], g["weight_decay"]): len(g["params"]) for g in groups}
    # LLM: the matrix decays, but embedding and bias do not. Vision is equal with a separate rate.
    assert actual == {
        ("llm", 1.0, 0.1): 1,
        ("llm", 1.0, 0.0): 2,
        ("vision", 0.5, 0.1): 1,
        ("vision", 0.5, 0.0): 1,
    }


def test_frozen_parameters_are_in_no_group():
    model = _model()
    model["llm"].requires_grad_(False)
    groups = build_optimizer(model, _module_of, OptimizerConfig()).param_groups
    assert {g["module"] for g in groups} == {"vision"}


def test_copy_of_embedding_does_not_decay():
    model = _model()
    copy = model["llm"][1].weight
    groups = build_optimizer(model, _module_of, OptimizerConfig(), [copy]).param_groups
    decays = {id(p): g["weight_decay"] > 0 for g in groups for p in g["params"]}
    assert not decays[id(copy)] and decays[id(model["vision"].weight)]


def test_rank_without_trainable_parameters_is_supported():
    model = _model().requires_grad_(False)
    optimizer = build_optimizer(model, _module_of, OptimizerConfig(lr=2.0))
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert [(g["lr"], g["params"]) for g in optimizer.param_groups] == [(1.0, [])]


def test_norm_omits_copies_of_parameters():
    model = _model()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    copy = model["llm"][1].weight
    model.all_stages = model.values
    model.tied_replica_parameters = lambda: [copy]
    count = sum(p.numel() for p in model.parameters()) - copy.numel()
    norm = global_grad_norm(group_by_replicas(model)).item()
    assert norm == pytest.approx(2.0 * math.sqrt(count))


def test_learning_rate_follows_each_group_peak():
    model = _model()
    optimizer = build_optimizer(model, _module_of, OptimizerConfig(lr=2.0, module_lr={"llm": 4.0}))
    set_learning_rate(optimizer, 0.5)
    assert {g["module"]: g["lr"] for g in optimizer.param_groups} == {"llm": 2.0, "vision": 1.0}


def test_warmup_is_linear_to_peak():
    config = OptimizerConfig(warmup_steps=4, lr_schedule="constant")
    assert [lr_factor(s, 10, config) for s in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_schedule_ends_at_minimum():
    config = OptimizerConfig(warmup_steps=0, lr_schedule="cosine", min_lr_ratio=0.2)
    assert lr_factor(100, 100, config) == pytest.approx(0.2)
    assert lr_factor(50, 100, config) == pytest.approx(0.6)


def test_wsd_schedule_is_constant_then_linear():
    config = OptimizerConfig(lr_schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    factors = [lr_factor(s, 10, config) for s in range(1, 11)]
    assert factors[:8] == [1.0] * 8
    assert factors[8:] == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    ("schedule", "step", "steps", "rates"),
    [
        ("cosine", 10, 20, "from 1.000e-02 in step 10 to 4.796e-02 in step 11"),
        ("cosine", 4, 20, "from 6.891e-02 in step 4 to 8.682e-02 in step 5"),
        ("wsd", 10, 15, "from 1.000e-02 in step 10 to 1.000e-01 in step 11"),
        ("wsd", 4, 20, None),  # both are on the plateau
        ("cosine", 10, 10, None),
        ("cosine", 10, 5, None),  # no further steps
        ("constant", 10, 20, None),
    ],
)
def test_schedule_change_names_both_learning_rates(schedule, step, steps, rates):
    config = OptimizerConfig(lr=0.1, lr_schedule=schedule, min_lr_ratio=0.1)
    change = describe_schedule_change(step, 10, steps, config)
    assert (change is None) if rates is None else f"changes {rates}." in change


def test_global_norm_covers_all_parameters():
    model = _model()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in model.parameters())
    norm = global_grad_norm({1: list(model.parameters())}).item()
    assert norm == pytest.approx(2.0 * math.sqrt(count))
