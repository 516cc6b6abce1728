"""Optimizers with narrow states, of bfloat16 parameters, on the host, and Muon, and averages of
weights: the same bits in every layout, also after a checkpoint of one layout was loaded into
another.

All layouts get the same gradients, so that nothing but the optimizer can differ.
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
from torchmm.parallel.torch_private import placed_like
from torchmm.planning.resolved import resolve
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
    """Keys of [optimizer], and the parameters' dtype."""

    name: str = "adamw"
    state_dtype: str = "float32"
    offload: bool = False
    dtype: torch.dtype = torch.float32

    def config(self) -> OptimizerConfig:
        given = asdict(self)
        del given["dtype"]
        return OptimizerConfig(lr=1e-2, lr_schedule="constant", **given)


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
    """Rows that do not divide by the number of ranks, blocks of 8 bits that are not full, a number,
    matrices in a stack."""

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
    """Made once: groups take longer than all else here."""
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
        if mesh["tensor"].size() == 1:  # as experts are sharded, over features
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
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        gradient = whole
        if isinstance(parameter, DTensor):
            starts = [*parameter.__create_chunk_list__()[0].offsets]
            sizes = parameter.to_local().shape
            own = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            gradient = placed_like(whole[own].contiguous(), parameter, parameter.shape)
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    average.update()


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage
) -> dict[str, Tensor]:
    """Every tensor, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        every = {"": parameter.detach(), "ema": average.averages[parameter]}
        for key, value in {**every, **optimizer.state[parameter]}.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = full.clone()
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal: bit by bit, but for float32, where torch's kernel for
    CPUs rounds otherwise where a row's end does not fill a vector register."""
    assert a.keys() == b.keys()
    found = []
    for name, value in a.items():
        bound = 1e-6 if value.dtype == torch.float32 else 0.0
        if value.dtype != b[name].dtype or not torch.allclose(value, b[name], bound, bound * 0.01):
            found.append(name)
    return found


def manager(run_dir: Path) -> CheckpointManager:
    logger = logging.getLogger("test_optimizer_layouts")
    return CheckpointManager(CheckpointConfig(async_save=False), run_dir, logger, {}, "recipe")


def in_all_layouts(directory: Path) -> list[str]:
    """What differs from one process in each layout: after two steps, and after a checkpoint of the
    layout before was loaded and a third one made."""
    dist.init_process_group("gloo")
    low_precision_optimizer.CHUNK_ELEMENTS = 500  # portions end within matrices
    return [
        f"{case}, {what}"
        for number, case in enumerate(CASES)
        for what in differences_of(case, directory / str(number))
    ]


def differences_of(case: Case, directory: Path) -> Iterator[str]:
    alone = build(case)
    for n in range(2):
        step(*alone, n)
    after_2 = whole(*alone)
    step(*alone, 2)
    after_3 = whole(*alone)
    saved = None
    for layout in LAYOUTS:
        built = build(case, layout)
        for n in range(2):
            step(*built, n)
        yield from (f"{layout}: {n}" for n in differing(whole(*built), after_2))
        checkpoints = manager(directory / layout)
        if saved is not None:
            built = build(case, layout)
            checkpoints.load(saved, *built)
        model, optimizer, average = built
        checkpoints.save(2, model, optimizer, {}, average=average)
        checkpoints.close()
        step(*built, 2)
        yield from (f"{layout}, resumed: {n}" for n in differing(whole(*built), after_3))
        saved = directory / layout / "checkpoints/step-2"


def test_all_layouts_give_the_same_bits(tmp_path):
    assert run_distributed(in_all_layouts, 4, tmp_path) == [[]] * 4


def with_defects() -> dict[str, list[str]]:
    """The same where something that equality rests on is spoiled."""
    dist.init_process_group("gloo")
    found = {}

    def compare(name: str, case: Case, layout: str) -> None:
        alone, sharded = build(case), build(case, layout)
        step(*alone, 0)
        step(*sharded, 0)
        found[name] = differing(whole(*sharded), whole(*alone))

    bf16 = Case(state_dtype="bfloat16")
    compare("nothing", bf16, "fsdp")
    slices = state_formats.local_slices
    state_formats.local_slices = lambda tensor: [
        slice(0, n) for n in state_formats.local_tensor(tensor).shape
    ]
    compare("places of the shard alone", bf16, "fsdp")
    state_formats.local_slices = slices
    shared = muon.orthogonalize_distributed
    low_precision_optimizer.orthogonalize_distributed = muon.orthogonalize_distributed = (
        lambda updates, _: [muon.orthogonalize(u) for u in updates]
    )
    compare("matrices that are not whole", Case(name="muon"), "fsdp")
    compare("bfloat16 matrices that are not whole", Case("muon", "bfloat16"), "fsdp")
    low_precision_optimizer.orthogonalize_distributed = muon.orthogonalize_distributed = shared
    update = WeightAverage.update
    WeightAverage.update = lambda self: self.restore(self.zeros())
    alone = build(bf16)
    step(*alone, 0)
    WeightAverage.update = update
    sharded = build(bf16, "fsdp")
    step(*sharded, 0)
    found["averages of nothing"] = differing(whole(*sharded), whole(*alone))
    state_formats.BLOCK = 128  # tensor parallelism leaves 64 columns of 256
    compare("blocks that shards cut", Case(state_dtype="int8"), "tp")
    return found


def test_the_comparison_sees_defects():
    found = run_distributed(with_defects, 4)[0]
    assert found.pop("nothing") == []
    assert len(found) == 5
    for name, differing in found.items():
        assert differing, name


def train_and_save(recipe: Recipe, found: Path) -> None:
    """A rank of a run; what its weights are in the end."""
    run = resolve(recipe, 2)
    model, tokenizer = build_meta_model(run)
    cut = choose_model_stages(run, model, tokenizer, torch.device("cpu"))
    run_rank(run, model, tokenizer, cut, found / os.environ["RANK"])


def test_copies_of_a_tied_embedding_stay_bit_equal(tmp_path, real_data):
    """The first and the last stage of a pipeline round theirs at random, each by itself."""
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
