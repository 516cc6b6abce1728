"""Updates of sharded parameters equal those of torch, and non-finite values skip the update.

All ranks have shards of the same gradients, so that only norm, clipping and optimizer can differ.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from meshes import mesh_for
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchmm.parallel.gather import gather_floats
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import OptimizerUpdate, build_optimizer
from torchmm.training.optimizers.weight_average import WeightAverage

LAYOUTS = {
    2: {
        "plain": {},
        "fsdp": {"shard": 2},
        "hsdp": {"replicate": 2},
        "tp": {"tensor": 2},
    },
    4: {
        "hsdp": {"replicate": 2, "shard": 2},
        "fsdp and tp": {"shard": 2, "tensor": 2},
        "hsdp and tp": {"replicate": 2, "tensor": 2},
    },
}
"""Mesh sizes by number of ranks; "plain" parameters are replicated over `shard` ranks."""
KINDS = (
    {},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "int8", "offload": True},
    {"name": "muon"},
)
NAN = float("nan")


class Net(nn.Module):
    """Model with indivisible dimensions, a scalar, and linear layers for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 70)
        self.up = nn.Linear(70, 256)
        self.down = nn.Linear(256, 13)
        self.narrow = nn.Linear(30, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def all_stages(self) -> list[nn.Module]:
        return [self]

    def tied_replica_parameters(self) -> list[nn.Parameter]:
        return []


class TrainedNet:
    """A net in a layout, with its optimizer and weight averages."""

    def __init__(self, layout: str, mesh: ParallelMesh, **settings: object) -> None:
        self.net = net = Net()
        if layout != "plain":
            if mesh.module_mesh.sizes.tensor > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(net, mesh.module_mesh.tensor, plan)
            fully_shard(net, mesh=mesh.module_mesh.fsdp)
        config = OptimizerConfig(**{"lr": 1e-2, "lr_schedule": "constant", **settings})
        matrices = [p for p in net.parameters() if p.ndim > 1 and p is not net.embed.weight]
        self.optimizer = build_optimizer(net, lambda _: "llm", config, matrices=matrices)
        self.average = WeightAverage(net, 0.6)
        self.updates = OptimizerUpdate(net, self.optimizer, mesh, config, 10, self.average)

    def step(self, number: int, loss: float = 1.0, bad_rank: int | None = None) -> float:
        """Do a step and return its gradient norm; non-finite steps are not finished."""
        set_gradients(self.net, number)
        if bad_rank == dist.get_rank():
            gradient = next(p.grad for p in self.net.parameters() if local(p.grad).numel())
            local(gradient).view(-1)[-1] = NAN
        norm = self.updates.measure([torch.tensor(loss)]).item()
        self.updates.apply(number)
        if not self.optimizer.found_inf.item():
            self.updates.finish()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the local parameters, states and averages."""
        tensors = {}
        for name, parameter in self.net.named_parameters():
            tensors[name] = local(parameter.detach()).clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = local(value).clone()
            if parameter in self.average.averages:
                tensors[f"{name}.average"] = local(self.average.averages[parameter]).clone()
        return tensors


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter.grad = gradient


def different_names(a: dict[str, Tensor], b: dict[str, Tensor], bound: float = 0.0) -> list[str]:
    assert a.keys() == b.keys()
    if bound:
        return [k for k in a if not torch.allclose(a[k], b[k], bound, bound * 0.1)]
    return [k for k in a if not torch.equal(a[k], b[k])]


def meshes() -> Iterator[tuple[str, ParallelMesh]]:
    for layout, sizes in LAYOUTS[dist.get_world_size()].items():
        yield layout, mesh_for(ParallelConfig(**sizes))


def compare_with_torch(max_norm: float, bound: float) -> list[str]:
    """Return differences from fused AdamW on DTensors, clipped by a factor of the host."""
    dist.init_process_group("gloo")
    problems = []
    for layout, mesh in meshes():
        torchmm_net = TrainedNet(layout, mesh, max_grad_norm=max_norm)
        torch_net = TrainedNet(layout, mesh)
        settings = ("params", "weight_decay")
        groups = [{k: g[k] for k in settings} for g in torch_net.optimizer.param_groups]
        torch_net.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
        for number in range(1, 4):
            norm = torchmm_net.step(number)
            set_gradients(torch_net.net, number)
            grads = [p.grad for p in torch_net.net.parameters()]
            full = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
            exact = torch.stack([g.double().square().sum() for g in full]).sum().sqrt().item()
            if abs(norm / exact - 1) > 2e-7:
                problems.append(f"{layout}: norm {norm}, expected {exact}")
            if len({row[0] for row in gather_floats([norm])}) > 1:
                problems.append(f"{layout}: ranks have different norms")
            if (factor := max_norm / (exact + 1e-6)) < 1:
                for grad in grads:
                    local(grad).mul_(factor)
            torch_net.optimizer.step()
            torch_net.average.update()
        names = different_names(torchmm_net.tensors(), torch_net.tensors(), bound)
        problems += [f"{layout}: {name}" for name in names]
    return problems


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("max_norm", "bound"), [(1e6, 0.0), (1.0, 3e-7)])
def test_update_equals_fused_adamw_on_dtensors(ranks, max_norm, bound):
    """Bitwise without clipping."""
    assert run_distributed(compare_with_torch, ranks, max_norm, bound) == [[]] * ranks


def update_with_non_finite_values() -> list[str]:
    """Return the problems after non-finite numbers of one rank in the middle of a run."""
    dist.init_process_group("gloo")
    problems = []
    last = dist.get_world_size() - 1
    bad_steps = ({"bad_rank": last}, {"bad_rank": 0}, {"loss": NAN if dist.get_rank() else 1.0})
    for layout, mesh in meshes():
        for kind in KINDS:
            if kind.get("state_dtype") == "int8" and mesh.module_mesh.sizes.tensor > 1:
                continue  # shards would split 8-bit blocks
            trained, undisturbed = (
                TrainedNet(layout, mesh, **kind),
                TrainedNet(layout, mesh, **kind),
            )
            for number in (1, 2):
                trained.step(number)
                undisturbed.step(number)
            before = trained.tensors()
            for bad in bad_steps:
                trained.step(3, **bad)
                names = different_names(trained.tensors(), before)
                problems += [f"{layout}, {kind}, {bad}: {name} changed" for name in names]
            trained.step(3)
            undisturbed.step(3)
            names = different_names(trained.tensors(), undisturbed.tensors())
            problems += [f"{layout}, {kind}: {name} differs afterwards" for name in names]
    return problems


@pytest.mark.parametrize("ranks", [2, 4])
def test_non_finite_values_on_one_rank_skip_update(ranks):
    assert run_distributed(update_with_non_finite_values, ranks) == [[]] * ranks


def update_without_agreement() -> bool:
    """Return True if this rank changes, when flags are not summed over ranks."""
    dist.init_process_group("gloo")
    mesh = mesh_for(ParallelConfig(shard=2))
    trained = TrainedNet("fsdp", mesh)
    trained.step(1)
    trained.updates._mesh = SimpleNamespace(sum_over_ranks=lambda values: values)
    before = trained.tensors()
    trained.step(2, bad_rank=1)
    return bool(different_names(trained.tensors(), before))


def test_ranks_without_agreement_update_differently():
    """Negative control of the previous test."""
    assert run_distributed(update_without_agreement, 2) == [True, False]


def update_from_partial_sums() -> list[str]:
    """Return differences between partial and complete gradients."""
    dist.init_process_group("gloo")
    mesh = mesh_for(ParallelConfig(tensor=2))
    complete, partial = TrainedNet("tp", mesh), TrainedNet("tp", mesh)
    for trained in (complete, partial):
        set_gradients(trained.net, 1)
    replicated = [
        p
        for p in partial.net.parameters()
        if len(p.placements) == 2 and p.placements[1].is_replicate()
    ]
    assert replicated
    for parameter in replicated:
        half = parameter.grad.to_local() * 0.5
        sums = [parameter.placements[0], Partial()]
        parameter.grad = DTensor.from_local(
            half, parameter.device_mesh, sums, shape=parameter.shape, stride=half.stride()
        )
    norms = []
    for trained in (complete, partial):
        norms.append(trained.updates.measure([torch.tensor(1.0)]).item())
        trained.updates.apply(1)
        trained.updates.finish()
    wrong = different_names(complete.tensors(), partial.tensors())
    return wrong if norms[0] == norms[1] else [*wrong, f"norms {norms}"]


def test_partial_gradients_are_reduced_before_the_norm():
    assert run_distributed(update_from_partial_sums, 2) == [[]] * 2
