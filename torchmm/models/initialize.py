"""Initial values, which are the same for every parallelism config.

`_init_weights` of the Hugging Face class samples the weights of a layer on the CPU. The seed
depends only on the seed of the run and the name of the layer. Each rank then copies its shard.
Buffers that are not in files (rotary frequencies) are filled in the same way.

Several threads initialize layers in parallel, each with a separate random generator. torch samples
with one core, which would require minutes for billions of weights. Sampling on sharded tensors
instead would make the weights depend on the number of ranks, and uneven shards would differ between
replicas.

Adapters have a separate seed from their name, so that adapters do not change the other weights.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from torchmm.models.hf.load import copy_slice, local_tensor
from torchmm.models.layered import WeightInitializer, named_units
from torchmm.models.layers.lora import CHILD, Lora, adapted_linears, initial_down
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.weight_formats import WeightFormat

MAX_PARALLEL_BYTES = 4 * 2**30
"""Maximum bytes of the layers that a rank initializes in parallel. A single layer may be larger."""
_GLOBAL_GENERATOR = Lock()


class _Target(NamedTuple):
    """A parameter or buffer to fill."""

    tensor: Tensor
    form: WeightFormat | None
    """Storage form of the parameter, or None if it is a tensor of its values."""


@torch.no_grad()
def init_weights(model: MultimodalModel, seed: int, skip: Collection[str] = ()) -> None:
    """Fill every parameter and buffer of `model` whose name is not in `skip`.

    Args:
        model: Materialized model. Parameters are plain tensors or DTensors on any device.
        seed: Seed of the run.
        skip: Names that already have their value, e.g. from `load_weights`.
    """
    layers: list[tuple[Callable[[], None], int]] = []
    for prefix, module in model.named_modality_modules():
        with torch.device("meta"):
            full_module = module.build_without_adapters()
        # A tied copy has the seed of the original, which is in a different stage.
        copies = module.tied_replicas()
        targets: dict[str, list[_Target]] = defaultdict(list)
        for name, tensor in named_tensors(module):
            if f"{prefix}.{name}" not in skip:
                target = _Target(tensor, module.find_weight_format(name, tensor))
                targets[copies.get(name, name)].append(target)
        for unit_fqn, unit in named_units(full_module, module.layers_fqn):
            sizes = {f"{unit_fqn}.{name}": t.nbytes for name, t in named_tensors(unit)}
            if targets.keys() & sizes.keys():
                key = f"{seed} {prefix}.{unit_fqn}"
                fill = partial(_initialize_unit, unit, unit_fqn, module.hf, key, targets)
                layers.append((fill, sum(sizes.values())))

    _initialize_in_parallel(layers)
    for prefix, module in model.named_modality_modules():
        for name, linear, lora in adapted_linears(module):
            _init_lora(linear, lora, f"{prefix}.{name}.{CHILD}", seed, skip)


def _initialize_in_parallel(layers: list[tuple[Callable[[], None], int]]) -> None:
    """Initialize layers in parallel threads.

    The number of cores per rank and `MAX_PARALLEL_BYTES` limit the number of concurrent layers.

    Args:
        layers: Pairs (function that initializes the layer, bytes of the layer).
    """
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    running: dict[Future[None], int] = {}
    with ThreadPoolExecutor(max(1, cores)) as threads:
        for fill, size_bytes in layers:
            while running and sum(running.values()) + size_bytes > MAX_PARALLEL_BYTES:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    running.pop(done)
                    done.result()
            running[threads.submit(fill)] = size_bytes
        for future in running:
            future.result()


def _initialize_unit(
    unit: nn.Module,
    unit_fqn: str,
    owner: WeightInitializer,
    key: str,
    targets: dict[str, list[_Target]],
) -> None:
    """Sample the weights of a layer and copy the shards of this rank."""
    with torch.no_grad():  # not inherited from the thread that starts this one
        for name, value in named_tensors(build_random_copy(unit, owner, key)):
            for target in targets.get(f"{unit_fqn}.{name}", ()):
                copy_slice(target.tensor, value, target.form)


def _init_lora(linear: nn.Linear, lora: Lora, name: str, seed: int, skip: Collection[str]) -> None:
    """Fill an adapter as PEFT does.

    The matrix B (`up`) is zero, so that the product is zero. Magnitudes are the norms of the weight
    rows.
    """
    if f"{name}.down" not in skip:
        generator = torch.Generator().manual_seed(_seed_of(f"{seed} {name}"))
        copy_slice(lora.down, initial_down(lora.down.shape, generator))
    if f"{name}.up" not in skip:
        local_tensor(lora.up).zero_()
    if lora.magnitude is None or f"{name}.magnitude" in skip:
        return
    weight = linear.weight
    squares = local_tensor(weight).float().square().sum(1)
    if isinstance(weight, DTensor):
        # Sum over mesh dimensions that shard columns. The other dimensions have different rows.
        sums = [
            Partial() if placement.is_shard(1) else Replicate() for placement in weight.placements
        ]
        of_mesh = DTensor.from_local(squares, weight.device_mesh, sums, run_check=False)
        squares = of_mesh.redistribute(placements=[Replicate()] * len(sums)).to_local()
    local_tensor(lora.magnitude).copy_(squares.sqrt())


@torch.no_grad()
def build_random_copy(
    unit: nn.Module, owner: WeightInitializer, key: str, unused: bool = False
) -> nn.Module:
    """Return a CPU copy of `unit` (on the meta device) with random weights seeded by `key`.

    Args:
        unit: Module on the meta device.
        owner: Model with the weight initialization.
        key: Seed string.
        unused: Whether the weights are never used. Weights without an initialization are then 0.
    """
    filled = copy.deepcopy(unit).to_empty(device="cpu")
    for _, tensor in named_tensors(filled):
        tensor.fill_(_unfilled_marker(tensor))
    with _LocalGeneratorMode(_seed_of(key)):
        for module in _postorder_modules(filled):
            owner._init_weights(module)
    unfilled = {}
    for name, tensor in named_tensors(filled):
        # The sum is NaN if an unfilled value remains. A sum needs no copy of the tensor.
        is_float = tensor.is_floating_point()
        if tensor.sum().isnan() if is_float else (tensor == _unfilled_marker(tensor)).any():
            unfilled[name] = tensor
    if unused:
        for tensor in unfilled.values():
            tensor.zero_()
        return filled
    assert not unfilled, f"{key}: {type(owner).__name__} does not initialize {[*unfilled]}"
    return filled


class _LocalGeneratorMode(TorchDispatchMode):
    """A mode in which random operators of the thread sample as after `torch.manual_seed`.

    Operators without a generator argument use the global generator, whose state is restored.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": self._generator})
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator.get_state())
            result = func(*args, **kwargs)
            self._generator.set_state(torch.get_rng_state())
            return result


def _seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _unfilled_marker(tensor: Tensor) -> float:
    """Return a value that no initialization produces, as a marker of unfilled elements."""
    return torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names, including non-persistent buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _postorder_modules(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _postorder_modules(child)
    yield module
