"""A checkpoint of every layout loads into every other layout with bitwise equal values.

One process saves a checkpoint. Four ranks load it into every layout and save one checkpoint per
layout. Two ranks load all of these and save again. One process loads every saved checkpoint.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from launch import run_distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchmm.common.errors import CheckpointError
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager

logger = logging.getLogger("test_checkpoint_layouts")
STEP = 3


class Block(nn.Module):
    """Model with indivisible dimensions, a frozen layer, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x):
        h = self.embed(x)
        h = self.frozen(h) + self.down(torch.relu(self.up(h)))
        return self.head(h) * self.scale


def build(seed: int, layout: str = "plain"):
    """Build a model in a layout: plain, fsdp, hsdp (2 x N/2), tp, fsdp_tp (N/2 x 2)."""
    torch.manual_seed(seed)
    model = Block()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"fsdp": (ranks, 1), "tp": (1, ranks), "fsdp_tp": (ranks // 2, 2)}.get(layout)
    data = None
    if layout == "hsdp":
        data = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif sizes is not None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        data = mesh["shard"] if sizes[0] > 1 else None
        if sizes[1] > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
    if data is not None:
        fully_shard(model.up, mesh=data)
        fully_shard(model, mesh=data)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1, foreach=False)


def train(model, optimizer) -> None:
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def gather_tensors(model, optimizer) -> dict:
    """Gather every tensor of the model and the optimizer."""
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name}.{key}"] = value
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}


def assert_equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def manager(run_dir: Path, asynchronous: bool = False) -> CheckpointManager:
    config = CheckpointConfig(async_save=asynchronous)
    return CheckpointManager(config, run_dir, logger, {}, "recipe")


def load(path: Path, layout: str):
    model, optimizer = build(1, layout)
    checkpoints = manager(path.parent.parent)
    restored = checkpoints.load(path, model, optimizer)
    assert restored.step == STEP and restored.state == {"position": 5}
    checkpoints.close()
    return model, optimizer, restored


def save(run_dir: Path, model, optimizer, asynchronous: bool = False) -> Path:
    checkpoints = manager(run_dir, asynchronous)
    checkpoints.save(STEP, model, optimizer, {"position": 5})
    checkpoints.close()
    return run_dir / f"checkpoints/step-{STEP}"


def reference():
    model, optimizer = build(0)
    train(model, optimizer)
    return model, optimizer


def reload_everywhere(sources: list[Path], layouts: list[str], target: Path) -> list[Path]:
    """Load every source into every layout and save one checkpoint per layout, on N ranks."""
    dist.init_process_group("gloo")
    expected = gather_tensors(*reference())
    saved = []
    for layout in layouts:
        for source in sources:
            model, optimizer, restored = load(source, layout)
            assert_equal(gather_tensors(model, optimizer), expected)
            assert restored.rng is None, "the checkpoint has a different number of ranks"
        saved.append(save(target / layout, model, optimizer, asynchronous=layout != "tp"))
        train(model, optimizer)  # a restored model can be trained
        _, _, restored = load(saved[-1], layout)
        assert restored.rng is not None
    if dist.get_world_size() == 2:
        check_rejections(target / "rejections")
    return saved


def check_rejections(run_dir: Path) -> None:
    """Check that an error on one rank is raised on all ranks."""
    model, optimizer = build(0, "fsdp")
    checkpoints = manager(run_dir)
    state = {"position": dist.get_rank()}
    expect_error(lambda: checkpoints.save(1, model, optimizer, state), "differs between ranks")
    checkpoints.save(2, model, optimizer, {})
    path = run_dir / "checkpoints/step-2"
    dist.barrier()
    if dist.get_rank() == 1:
        file = path / "rank-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    expect_error(lambda: checkpoints.load(path, model, optimizer), "rank-00001.safetensors has")
    checkpoints.close()


def expect_error(function, message: str) -> None:
    try:
        function()
    except CheckpointError as error:
        assert message in str(error), error
        return
    raise AssertionError(f"no error with {message!r}")


def test_checkpoint_loads_into_every_layout(tmp_path):
    first = save(tmp_path / "one", *reference())
    layouts = ["plain", "fsdp", "hsdp", "tp", "fsdp_tp"]
    four = run_distributed(reload_everywhere, 4, [first], layouts, tmp_path / "four")[0]
    layouts = ["fsdp", "tp"]
    two = run_distributed(reload_everywhere, 2, four, layouts, tmp_path / "two")[0]
    expected = gather_tensors(*reference())
    for path in [*four, *two]:
        model, optimizer, _ = load(path, "plain")
        assert_equal(gather_tensors(model, optimizer), expected)
