"""Optimizers give the same bits in every layout, also after a checkpoint of another layout.

The optimizers have low-precision states, bfloat16 parameters or CPU offload. Muon and weight
averages are included. All layouts get the same gradients, so that only the optimizer can differ.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from fuzz.ranks import run_rank
from launch import run_distributed
from tiny_recipe import tiny_recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchmm.extensions.low_precision import low_precision_optimizer, state_formats
from torchmm.parallel.torch_compat import dtensor_like
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import CheckpointConfig, OptimizerConfig
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.model_build import build_meta_model, choose_model_stages
from torchmm.training.optim import build_optimizer
from torchmm.training.optimizers import muon
from torchmm.training.optimizers.weight_average import WeightAverage

LAYOUTS = ("fsdp", "hsdp", "tp", "fsdp_tp")


@dataclass(frozen=True)
class Case:
    """Keys of [optimizer], and the dtype of parameters."""

    name: str = "adamw"
    state_dtype: str = "float32"
    offload: bool = False
    dtype: torch.dtype = torch.float32

    def config(self) -> OptimizerConfig:
        keys = asdict(self)
        del keys["dtype"]
        return OptimizerConfig(lr=1e-2, lr_schedule="constant", **keys)


CASES = [
    Case(state_dtype="bfloat16"),
    Case(state_dtype="int8"),
    Case(state_dtype="int8", offload=True, dtype=torch.bfloat16),
    Case(name="muon"),
    Case(name="muon", state_dtype="int8", offload=True, dtype=torch.bfloat16),
]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(2, 12, 66))


class Block(nn.Module):
    """Model with indivisible dimensions, incomplete 8-bit blocks, a scalar and stacked matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 70)
        self.up = nn.Linear(70, 256)
        self.down = nn.Linear(256, 13)
        self.narrow = nn.Linear(30, 3, bias=False)
        self.experts = Experts()
        self.scale = nn.Parameter(torch.ones(1))


@cache
def mesh_of(layout: str) -> DeviceMesh:
    """Return a cached mesh, because creating process groups is slow."""
    sizes = {"fsdp": (1, 4, 1), "hsdp": (2, 2, 1), "tp": (1, 1, 4), "fsdp_tp": (1, 2, 2)}
    names = ("replicate", "shard", "tensor")
    return init_device_mesh("cpu", sizes[layout], mesh_dim_names=names)


Built = tuple[nn.Module, torch.optim.Optimizer, WeightAverage]


def build(case: Case, layout: str = "plain") -> Built:
    torch.manual_seed(0)
    model = Block().to(case.dtype)
    if layout != "plain":
        mesh = mesh_of(layout)
        if mesh["tensor"].size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        data = mesh["replicate", "shard"] if layout == "hsdp" else mesh["shard"]
        if mesh["tensor"].size() == 1:  # experts are sharded over features
            fully_shard(model.experts, mesh=data, shard_placement_fn=lambda _: Shard(1))
        fully_shard(model, mesh=data)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not model.embed.weight]
    optimizer = build_optimizer(model, lambda _: "llm", case.config(), matrices=matrices)
    return model, optimizer, WeightAverage(model, 0.6)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage, number: int
) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        gather_tensors = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        gradient = gather_tensors
        if isinstance(parameter, DTensor):
            starts = [*parameter.__create_chunk_list__()[0].offsets]
            sizes = parameter.to_local().shape
            local_slices = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            gradient = dtensor_like(
                gather_tensors[local_slices].contiguous(), parameter, parameter.shape
            )
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    average.update()


def gather_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage
) -> dict[str, Tensor]:
    """Gather every tensor."""
    tensors = {}
    for name, parameter in model.named_parameters():
        values = {"": parameter.detach(), "ema": average.averages[parameter]}
        for key, value in {**values, **optimizer.state[parameter]}.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[f"{name}.{key}"] = full.clone()
    return tensors


def different_names(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise equal.

    float32 tensors are compared with a tolerance, because the CPU kernel of torch rounds
    differently at the end of a row that does not fill a vector register.
    """
    assert a.keys() == b.keys()
    names = []
    for name, value in a.items():
        bound = 1e-6 if value.dtype == torch.float32 else 0.0
        if value.dtype != b[name].dtype or not torch.allclose(value, b[name], bound, bound * 0.01):
            names.append(name)
    return names


def manager(run_dir: Path) -> CheckpointManager:
    logger = logging.getLogger("test_optimizer_layouts")
    return CheckpointManager(CheckpointConfig(async_save=False), run_dir, logger, {}, "recipe")


def compare_in_all_layouts(directory: Path) -> list[str]:
    """Return the differences from one process in each layout.

    Tensors are compared after two steps. They are compared again after the checkpoint of the
    previous layout is loaded and a third step is made.
    """
    dist.init_process_group("gloo")
    low_precision_optimizer.CHUNK_ELEMENTS = 500  # chunks end within matrices
    return [
        f"{case}, {difference}"
        for number, case in enumerate(CASES)
        for difference in differences_of(case, directory / str(number))
    ]


def differences_of(case: Case, directory: Path) -> Iterator[str]:
    alone = build(case)
    for n in range(2):
        step(*alone, n)
    after_2 = gather_tensors(*alone)
    step(*alone, 2)
    after_3 = gather_tensors(*alone)
    saved = None
    for layout in LAYOUTS:
        built = build(case, layout)
        for n in range(2):
            step(*built, n)
        yield from (f"{layout}: {n}" for n in different_names(gather_tensors(*built), after_2))
        checkpoints = manager(directory / layout)
        if saved is not None:
            built = build(case, layout)
            checkpoints.load(saved, *built)
        model, optimizer, average = built
        checkpoints.save(2, model, optimizer, {}, average=average)
        checkpoints.close()
        step(*built, 2)
        yield from (
            f"{layout}, resumed: {n}" for n in different_names(gather_tensors(*built), after_3)
        )
        saved = directory / layout / "checkpoints/step-2"


def test_optimizer_layouts_give_same_bits(tmp_path):
    assert run_distributed(compare_in_all_layouts, 4, tmp_path) == [[]] * 4


def compare_with_defects() -> dict[str, list[str]]:
    """Return the differences for each injected defect, and without a defect."""
    dist.init_process_group("gloo")
    differences = {}

    def compare(name: str, case: Case, layout: str) -> None:
        alone, sharded = build(case), build(case, layout)
        step(*alone, 0)
        step(*sharded, 0)
        differences[name] = different_names(gather_tensors(*sharded), gather_tensors(*alone))

    bf16 = Case(state_dtype="bfloat16")
    compare("nothing", bf16, "fsdp")
    slices = state_formats.local_slices
    state_formats.local_slices = lambda tensor: [
        slice(0, n) for n in state_formats.local_tensor(tensor).shape
    ]
    compare("local instead of global offsets", bf16, "fsdp")
    state_formats.local_slices = slices
    shared = muon.orthogonalize_distributed
    low_precision_optimizer.orthogonalize_distributed = muon.orthogonalize_distributed = (
        lambda updates, _: [muon.orthogonalize(u) for u in updates]
    )
    compare("sharded matrices", Case(name="muon"), "fsdp")
    compare("sharded bfloat16 matrices", Case("muon", "bfloat16"), "fsdp")
    low_precision_optimizer.orthogonalize_distributed = muon.orthogonalize_distributed = shared
    update = WeightAverage.update
    WeightAverage.update = lambda self: self.restore(self.zeros())
    alone = build(bf16)
    step(*alone, 0)
    WeightAverage.update = update
    sharded = build(bf16, "fsdp")
    step(*sharded, 0)
    differences["averages of zeros"] = different_names(
        gather_tensors(*sharded), gather_tensors(*alone)
    )
    state_formats.BLOCK = 128  # each tensor-parallel rank has 64 of 256 columns
    compare("blocks that are split by shards", Case(state_dtype="int8"), "tp")
    return differences


def test_comparison_detects_optimizer_defects():
    by_defect = run_distributed(compare_with_defects, 4)[0]
    assert by_defect.pop("nothing") == []
    assert len(by_defect) == 5
    for name, differences in by_defect.items():
        assert differences, name


def train_and_save(recipe: Recipe, directory: Path) -> None:
    """Train a rank and save its final weights."""
    run = resolve_recipe(recipe, 2)
    model, tokenizer = build_meta_model(run)
    cut = choose_model_stages(run, model, tokenizer, torch.device("cpu"))
    run_rank(run, model, tokenizer, cut, directory / os.environ["RANK"])


def test_tied_embedding_replicas_stay_bitwise_equal(tmp_path, real_data):
    """The first and last stage of a pipeline use stochastic rounding independently."""
    narrow = {
        "training__dtype": "bfloat16",
        "training__parameter_dtype": "bfloat16",
        "optimizer__state_dtype": "bfloat16",
        "training__steps": 3,
        "training__global_batch_size": 4,
        "parallel__pipeline": 2,
    }
    recipe = tiny_recipe(tmp_path / "run", real_data, 2, **narrow)
    run_distributed(train_and_save, 2, recipe, tmp_path)
    first, last = (torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2))
    ((copy, original),) = last["copies"].items()
    assert torch.equal(last["weights"][copy], first["weights"][original])
    assert last["weights"][copy].dtype == torch.bfloat16
