"""A small model whose update is compared with another update, and non-finite steps."""

import torch
from torch import Tensor, nn

from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import OptimizerUpdate, build_optimizer
from torchmm.training.optimizers.weight_average import WeightAverage

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

    def tied_replica_parameters(self) -> list[nn.Parameter]:
        return []

    def set_gradients(self, seed: int, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter is not self.unused:
                gradient = torch.randn(parameter.shape, generator=generator) * size
                parameter.grad = gradient.to(parameter.dtype)


class Trained:
    """A net with all tensors that an update changes."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings) -> None:
        config = OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, **settings})
        self.net = Net(dtype)
        matrices = [p for p in self.net.parameters() if p.ndim == 2]
        self.optimizer = build_optimizer(self.net, lambda _: "llm", config, matrices=matrices)
        self.average = WeightAverage(self.net, 0.9)
        self.updates = OptimizerUpdate(
            self.net, self.optimizer, OneRank(), config, 10, self.average
        )

    def step(self, number: int, size: float = 1.0, loss: float = 1.0) -> float:
        """Do a step as the trainer does and return its gradient norm."""
        self.net.set_gradients(number, size)
        norm = self.updates.measure([torch.tensor(loss), torch.tensor(0.0)]).item()
        self.updates.apply(number)
        self.updates.finish()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of parameters, states and averages."""
        copies = {}
        for name, parameter in self.net.named_parameters():
            copies[name] = parameter.detach().clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                copies[f"{name}.{key}"] = value.clone()
            if parameter in self.average.averages:
                copies[f"{name}.average"] = self.average.averages[parameter].clone()
        return copies


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


BAD_STEPS = {"nan": {"size": NAN}, "inf": {"size": INF}, "overflow": {"size": 1e30}, "loss": {}}


def check_non_finite_step(settings: dict, dtype: torch.dtype, bad: str) -> None:
    """Fail if a step with a non-finite value changes parameters, states, averages or later steps.

    Args:
        settings: Keys of [optimizer].
        bad: Name in `BAD_STEPS`.
    """
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
