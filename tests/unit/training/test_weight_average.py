"""Averages of weights, compared with the average of torch on a separate module."""

import copy
from types import SimpleNamespace

import pytest
import torch
from checkpoint_runs import make_manager
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchmm.common.errors import CheckpointError
from torchmm.planning.executions import parameter_states
from torchmm.recipe.recipe import Recipe
from torchmm.training.hooks.validation import validated_weights
from torchmm.training.optimizers.weight_average import WeightAverage

DECAY = 0.7


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    results = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    results[0].bias.requires_grad_(False)
    return results


def change_parameters(module: nn.Module, number: int) -> None:
    """Change trainable parameters."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter))


def averaged(module: nn.Module, steps: int) -> tuple[WeightAverage, AveragedModel]:
    """Return the averages of torchmm and of torch in float32 after some steps."""
    ours = WeightAverage(module, DECAY)
    theirs = AveragedModel(copy.deepcopy(module).float(), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(steps):
        change_parameters(module, number)
        ours.update()
        theirs.update_parameters(copy.deepcopy(module).float())
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_match_torch(dtype):
    module = model(dtype)
    ours, theirs = averaged(module, 4)
    named = dict(module.named_parameters())
    expected = dict(theirs.module.named_parameters())
    trained = {n for n, p in named.items() if p.requires_grad}
    assert {n for n, p in named.items() if p in ours.averages} == trained and len(trained) == 3
    for name in trained:
        actual = ours.averages[named[name]]
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected[name].data, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(actual, named[name].float(), rtol=1e-2), (
            "the average must differ from the parameter"
        )


def test_averages_replace_weights_temporarily():
    module = model()
    ours, theirs = averaged(module, 3)
    before = {n: p.clone() for n, p in module.named_parameters()}
    with pytest.raises(KeyError), ours.in_place():
        for name, value in theirs.module.named_parameters():
            torch.testing.assert_close(module.get_parameter(name), value, rtol=1e-6, atol=1e-7)
        raise KeyError
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert not torch.equal(before["1.weight"], theirs.module[1].weight)


@pytest.mark.parametrize("uses_average", [False, True])
def test_averages_are_validated_if_configured(uses_average):
    module = model()
    ours, theirs = averaged(module, 3)
    recipe = SimpleNamespace(validation=SimpleNamespace(ema=uses_average))
    components = SimpleNamespace(average=ours, run=SimpleNamespace(recipe=recipe))
    with validated_weights(components):
        validated = module[1].weight.clone()
    expected = theirs.module[1].weight if uses_average else module[1].weight
    torch.testing.assert_close(validated, expected, rtol=1e-6, atol=1e-7)


def test_model_without_trainable_parameters_has_no_average():
    module = model().requires_grad_(False)
    average = WeightAverage(module, DECAY)
    for _ in range(2):
        average.update()
    with average.in_place():
        assert average.averages == {}


def test_checkpoints_with_and_without_averages_load(tmp_path, caplog):
    module = model()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    ours, _ = averaged(module, 2)
    with make_manager(tmp_path, async_save=False) as manager:
        manager.save(1, module, optimizer, {}, average=ours)
        manager.save(2, module, optimizer, {})
        loaded = WeightAverage(module, DECAY)
        manager.load(tmp_path / "checkpoints/step-1", module, optimizer, loaded)
        assert all(torch.equal(loaded.averages[p], a) for p, a in ours.averages.items())
        manager.load(tmp_path / "checkpoints/step-1", module, optimizer)
        assert "averaged weights, which are not loaded because" in caplog.text
        manager.load(tmp_path / "checkpoints/step-2", module, optimizer, loaded)
        assert (
            loaded.averages == {}
            and "are initialized from the weights after the next step" in caplog.text
        )
        module[0].bias.requires_grad_(True)
        with pytest.raises(CheckpointError, match=r"missing from the checkpoint: ema\.0\.bias"):
            manager.load(
                tmp_path / "checkpoints/step-1", module, optimizer, WeightAverage(module, DECAY)
            )


@pytest.mark.parametrize("optimizer", [{}, {"name": "muon", "offload": True}])
def test_memory_of_averages_matches_plan(optimizer):
    """Compare the planned bytes with the bytes of averages of all trainable parameters."""
    ours, _ = averaged(module := model(), 1)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    average_bytes = sum(a.nbytes for a in ours.averages.values())
    with_, without = (
        parameter_states(Recipe.model_validate({"optimizer": optimizer, "training": training}))
        for training in ({"ema_decay": DECAY}, {})
    )
    assert (with_.moving_average - without.moving_average) * trained == average_bytes
    assert with_.update_traffic > without.update_traffic
