"""Norm, clipping, AdamW and the check for non-finite values, queued without the host."""

import copy

import pytest
import torch
from torch import Tensor, nn

from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import (
    LocalAdamW,
    Updates,
    build_optimizer,
    global_grad_norm,
    set_learning_rate,
)
from torchmm.training.optimizers.average import WeightAverage

NAN, INF = float("nan"), float("inf")


class OneRank:
    """The mesh of a single process."""

    device = torch.device("cpu")

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(200, 64), nn.LayerNorm(64), nn.Linear(64, 130))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def all_stages(self) -> list[nn.Module]:
        return [self]

    def tied_copy_parameters(self) -> list[nn.Parameter]:
        return []

    def set_gradients(self, seed: int, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter is not self.unused:
                gradient = torch.randn(parameter.shape, generator=generator) * size
                parameter.grad = gradient.to(parameter.dtype)


class Trained:
    """A net with all that an update changes."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings) -> None:
        config = OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, **settings})
        self.net = Net(dtype)
        matrices = [p for p in self.net.parameters() if p.ndim == 2]
        self.optimizer = build_optimizer(self.net, lambda _: "llm", config, matrices=matrices)
        self.average = WeightAverage(self.net, 0.9)
        self.updates = Updates(self.net, self.optimizer, OneRank(), config, 10, self.average)

    def step(self, number: int, size: float = 1.0, loss: float = 1.0) -> float:
        """Do a step as the trainer does and return its gradient norm."""
        self.net.set_gradients(number, size)
        norm = self.updates.measure([torch.tensor(loss), torch.tensor(0.0)]).item()
        self.updates.apply(number)
        self.updates.finish()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of parameters, states and averages."""
        found = {}
        for name, parameter in self.net.named_parameters():
            found[name] = parameter.detach().clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value.clone()
            if parameter in self.average.averages:
                found[f"{name}.average"] = self.average.averages[parameter].clone()
        return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


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
    """Bitwise without clipping. With it, gradients are divided instead of multiplied."""
    ours, theirs = Trained(max_grad_norm=max_norm, schedule="constant"), Net()
    assert isinstance(ours.optimizer, LocalAdamW)
    decays = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for number in range(1, 4):
        ours.step(number, size=1.0 / number)
        torch_step(theirs, adamw, number, 1.0 / number, max_norm)
    for mine, other in zip(ours.net.parameters(), theirs.parameters(), strict=True):
        states = [(ours.optimizer.state[mine][k], v) for k, v in adamw.state[other].items()]
        for x, y in [(mine, other), *states]:
            assert torch.equal(x, y) if not bound else torch.allclose(x, y, bound, bound * 0.1)


def test_clipped_gradients_are_accurate_to_float32():
    """The kernel stores the divided gradients, at most 3 roundings away from the exact ones."""
    trained = Trained(max_grad_norm=0.1)
    trained.net.set_gradients(1)
    exact = [p.grad.double() for p in trained.net.parameters() if p.grad is not None]
    factor = 0.1 / (torch.stack([g.square().sum() for g in exact]).sum().sqrt() + 1e-6)
    trained.updates.measure([torch.tensor(1.0)])
    trained.updates.apply(1)
    clipped = [p.grad.double() for p in trained.net.parameters() if p.grad is not None]
    for found, gradient in zip(clipped, exact, strict=True):
        assert torch.allclose(found, gradient * factor, rtol=1.5e-7, atol=0)


def test_small_gradients_are_not_scaled_up():
    trained = Trained()
    trained.step(1, size=1e-6)
    assert trained.optimizer.grad_scale.item() == 1.0


def test_norm_of_large_matrix_is_accurate():
    weight = nn.Parameter(torch.zeros(4096, 48))
    weight.grad = torch.rand(4096, 48, generator=torch.Generator().manual_seed(0))
    exact = weight.grad.double().norm().item()
    assert global_grad_norm({1: [weight]}).item() == pytest.approx(exact, rel=3e-7)


KINDS = [
    ("float32", {}, torch.float32),
    ("bfloat16 states", {"state_dtype": "bfloat16"}, torch.float32),
    ("int8 states", {"state_dtype": "int8"}, torch.bfloat16),
    ("host states", {"state_dtype": "int8", "offload": True}, torch.bfloat16),
    ("muon", {"name": "muon"}, torch.float32),
    ("muon, int8", {"name": "muon", "state_dtype": "int8"}, torch.bfloat16),
]
BAD_STEPS = {"nan": {"size": NAN}, "inf": {"size": INF}, "overflow": {"size": 1e30}, "loss": {}}


@pytest.mark.parametrize(("settings", "dtype"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
@pytest.mark.parametrize("bad", BAD_STEPS)
def test_non_finite_step_changes_nothing(settings, dtype, bad):
    trained, undisturbed = Trained(dtype, **settings), Trained(dtype, **settings)
    for number in (1, 2):
        trained.step(number)
        undisturbed.step(number)
    before = trained.tensors()
    trained.net.set_gradients(3, **BAD_STEPS[bad])
    loss = torch.tensor(NAN if bad == "loss" else 1.0)
    trained.updates.measure([torch.tensor(0.5), loss])
    trained.updates.apply(3)
    assert_equal(trained.tensors(), before)
    # As if there had been no such step; the next one counts as step 3.
    assert trained.step(3) == undisturbed.step(3)
    assert_equal(trained.tensors(), undisturbed.tensors())


def test_non_finite_first_step_leaves_zero_states():
    trained, fresh = Trained(), Trained()
    trained.net.set_gradients(1, NAN)
    trained.updates.measure([torch.tensor(1.0)])
    trained.updates.apply(1)
    assert all(not v.any() for s in trained.optimizer.state.values() for v in s.values())
    trained.step(1)
    fresh.step(1)
    assert_equal(trained.tensors(), fresh.tensors())


def test_unchecked_non_finite_step_is_noticed():
    """Without `found_inf`, the comparison above fails."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact_optimizer_divides_by_grad_scale(dtype):
    scaled, plain = Trained(dtype, state_dtype="bfloat16"), Trained(dtype, state_dtype="bfloat16")
    for trained, size in ((scaled, 4.0), (plain, 1.0)):
        trained.net.set_gradients(1, size)
        trained.optimizer.grad_scale = torch.tensor(size)
        trained.optimizer.step()
    parameters = zip(scaled.net.parameters(), plain.net.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in parameters)


def test_gradients_of_two_dtypes_are_in_one_norm():
    wide, narrow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    wide.grad, narrow.grad = torch.full((3,), 2.0), torch.full((4,), 1.0, dtype=torch.bfloat16)
    assert global_grad_norm({1: [wide, narrow]}).item() == 4.0


def test_optimizer_without_parameters_accepts_clip_factor():
    config = OptimizerConfig(lr=2.0)
    net = Net().requires_grad_(False)
    optimizer = build_optimizer(net, lambda _: "llm", config)
    updates = Updates(net, optimizer, OneRank(), config, 10)
    assert updates.measure([torch.tensor(1.0)]).item() == 0.0
    updates.apply(1)
    updates.finish()


def test_states_load_into_adamw_of_torch():
    """State tensors have the names, shapes and dtypes of torch, which continues from them."""
    trained = Trained()
    trained.step(1)
    theirs = copy.deepcopy(trained.net)
    adamw = torch.optim.AdamW(theirs.parameters(), fused=True)
    set_learning_rate(trained.optimizer, 0.5)
    for mine, other in zip(trained.net.parameters(), theirs.parameters(), strict=True):
        adamw.state[other] = {k: v.clone() for k, v in trained.optimizer.state[mine].items()}
    theirs.set_gradients(2)
    theirs.unused.grad = None
    adamw.step()
    steps = {float(s["step"]) for s in adamw.state.values() if s}
    assert steps == {2.0}
