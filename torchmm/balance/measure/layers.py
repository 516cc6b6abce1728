"""Small models of a few layers, for measuring what a call costs among others.

Operators measured alone find their code and the framework's in caches. In a layer every call
follows another one, with views, modules and autograd's bookkeeping between them. Layers that are
split over ranks, or whose parameters are, have more of that: DTensors are dispatched in Python, and
so are FSDP2's hooks. What such layers take beyond their operators and collectives is that, and
ranks that wait for each other. On CPUs this is measured on layers that compute: those that do
nothing, one after the other, keep Python's code in caches and ranks in step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmm.balance.costs.calibration import SplitLayers, WorkingLayers
from torchmm.balance.costs.model import ShardLinks, gather_operators
from torchmm.balance.measure.network import world_link
from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.blocks import Layers, stage_blocks
from torchmm.costs.devices import Link
from torchmm.costs.execution import Execution, Setting
from torchmm.costs.operators import HOST_KINDS, Operator, Operators
from torchmm.costs.sizes import llm_sizes
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.fsdp import LayerSharding, apply_fsdp
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

DEPTHS = (2, 6)
Split = Literal["whole", "tensor", "sequence", "shard"]
"""How layers are on several ranks: whole on each, tensor-parallel without or with sequence
parallelism, or gathered by FSDP2 layer by layer."""
SPLITS: tuple[Split, ...] = ("whole", "tensor", "sequence", "shard")
SPLIT_DEPTH, SPLIT_RUNS = 4, 3
SPLIT_HEADS, SPLIT_TOKENS = 4, 512
"""At least as many heads, of `HEAD_SIZE`."""
TINY_HEAD, TINY_TOKENS = 8, 8
WORKING = ((320, 448), (192, 640))
"""Width and tokens of layers that drive what calls need out of caches, as real ones do."""
HEAD_SIZE = 64
WORKING_RUNS = 2


class LayerCase(NamedTuple):
    """A model, by what runs in it."""

    forward_operators: list[Operator]
    backward_operators: list[Operator]
    forward: Callable[[], Tensor]
    """Of one microbatch; the loss."""

    @property
    def calls(self) -> float:
        """Of all operators."""
        every = (*self.forward_operators, *self.backward_operators)
        return sum(float(np.sum(operator.calls)) for operator in every)

    def run(self) -> None:
        """Forward and backward."""
        self.forward().backward()


def working_layers(device: torch.device, rounds: int, *, quick: bool) -> list[WorkingLayers]:
    """Layers that compute, with the time of their forward and backward. CPUs only, float32.

    On several ranks all measure at the same time, and the time that passes counts, as in training:
    threads of the process groups take some of it. On one, other programs do, and CPU time counts.

    Args:
        quick: smaller.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    clock = time.perf_counter if several else time.process_time
    cases = [
        _case(device, width, 32 if quick else tokens, depth, width // HEAD_SIZE)
        for width, tokens in WORKING
        for depth in DEPTHS[: 1 if quick else None]
    ]
    measured = []
    for _ in range(rounds):
        if several:
            dist.barrier()
        measured.append([_forward_and_backward(case, clock) for case in cases])
    found = []
    for case, *times in zip(cases, *measured, strict=True):
        forward_s, backward_s = (median(own) for own in zip(*times, strict=True))
        operators = case.forward_operators, case.backward_operators
        found.append(WorkingLayers(*operators, forward_s, backward_s))
    return found


def _forward_and_backward(case: LayerCase, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of both, means over a few runs after one that does not count."""
    case.run()
    forward_s = backward_s = 0.0
    for _ in range(WORKING_RUNS):
        begin_s = clock()
        loss = case.forward()
        between_s = clock()
        loss.backward()
        forward_s += between_s - begin_s
        backward_s += clock() - between_s
    return forward_s / WORKING_RUNS, backward_s / WORKING_RUNS


def layer_cases(device: torch.device, width: int, tokens: int) -> list[LayerCase]:
    """Llamas of few layers, float32.

    Args:
        width: of the layers.
        tokens: in their microbatch.
    """
    return [_case(device, width, tokens, depth) for depth in DEPTHS]


def compiled_case(device: torch.device, width: int, tokens: int) -> LayerCase:
    """Return a Llama of compiled layers, float32.

    Args:
        device: Device to measure.
        width: Features of the layers.
        tokens: Tokens of a microbatch.
    """
    return _case(device, width, tokens, DEPTHS[-1], compiled=True)


def split_layers(device: torch.device, rounds: int, *, quick: bool) -> dict[str, SplitLayers]:
    """Layers split over all ranks, with the time of forward and backward; collective.

    On CPUs they compute as real ones do: Python's code for DTensors and FSDP2 is driven out of
    caches then, and ranks wait for each other. Elsewhere they are too small for anything but
    queueing.

    Args:
        quick: too small to compute anything.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    link = world_link()
    tiny = quick or device.type != "cpu"
    cases = {split: _split_case(device, split, mesh, link, tiny=tiny) for split in SPLITS}
    times: dict[Split, list[float]] = {split: [] for split in SPLITS}
    for _ in range(rounds):
        for split, (_, run) in cases.items():
            times[split].append(_seconds(run, device))
    return {
        split: SplitLayers(operators, median(times[split]))
        for split, (operators, _) in cases.items()
    }


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Mean time of a run, as many on every rank."""
    run()
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(SPLIT_RUNS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / SPLIT_RUNS


def _build(width: int, heads: int, depth: int) -> MultimodalModel:
    """A Llama on the meta device."""
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return build_model(ModelConfig(llm=LlmConfig(config=config)), FreezeConfig())


def _microbatch(tokens: int, device: torch.device) -> Microbatch:
    ids = torch.ones(tokens, dtype=torch.int64)
    meta = MicrobatchMeta((SampleMeta("small", 0, tokens),), tokens)
    return Microbatch(ids, ids, torch.arange(tokens), [0, tokens], {}, meta).to(device)


def _split_case(
    device: torch.device, split: Split, mesh: DeviceMesh, link: Link, *, tiny: bool
) -> tuple[list[Operator], Callable[[], None]]:
    """A model's operators on a rank, and its forward and backward; gradients stay where they are.

    Args:
        link: between all ranks.
        tiny: whether it is too small to compute anything.
    """
    ranks = mesh.size()
    heads = ranks * ceil(SPLIT_HEADS / ranks)
    tokens, width = (TINY_TOKENS, TINY_HEAD) if tiny else (SPLIT_TOKENS, HEAD_SIZE)
    model = _build(width * heads, heads, SPLIT_DEPTH)
    shards = ranks if split == "shard" else 1
    tensor = ranks if split in ("tensor", "sequence") else 1
    execution = Execution(tensor, split == "sequence", shard=shards)
    microbatch = _microbatch(tokens, device)
    setting = Setting(execution, 4, link, segment_calls=device.type == "cpu")
    module = model.llm.describe()
    forward, backward = _operators(module, microbatch.meta, setting)
    calls = sum(float(np.sum(o.calls)) for o in forward if o.kind not in HOST_KINDS)
    operators = [*forward, Operator("forward_call", calls=calls), *backward]
    if split == "shard":  # gathered for both
        links = ShardLinks(link)
        operators += 2 * gather_operators(module, 0, SPLIT_DEPTH, execution, 4, links)
        apply_fsdp(model.llm, mesh, torch.float32)
    elif tensor > 1:
        apply_tensor_parallel(model.llm, mesh, execution.sequence_parallel)
    materialize(model, device)
    init_weights(model, seed=0)
    sharding = LayerSharding(model.llm) if split == "shard" else None

    def run() -> None:
        if sharding is not None:
            sharding.begin_step(2)  # the last of two would reduce
        loss = model(microbatch)
        if sharding is not None:
            sharding.before_backward()
        loss.backward()

    return operators, run


def _operators(
    module: ModuleDescription, meta: MicrobatchMeta, setting: Setting
) -> tuple[list[Operator], list[Operator]]:
    """Of a whole model's forward, and of its backward."""
    sizes = llm_sizes([meta], [meta.tokens], padding=True)
    forward: list[Operator] = []
    backward: list[Operator] = []
    for block in stage_blocks(module, 0, len(module.layers)):
        passes = block.operators(sizes, setting)
        if not isinstance(block, Layers):  # nor compiled
            passes = Operators(*([o._replace(in_layer=False) for o in own] for own in passes))
        forward += passes.forward * block.count
        backward += [*passes.inputs, *passes.weights] * block.count
    return forward, backward


def _case(
    device: torch.device,
    width: int,
    tokens: int,
    depth: int,
    heads: int = 2,
    *,
    compiled: bool = False,
) -> LayerCase:
    model = _build(width, heads, depth)
    if compiled:
        apply_activation_checkpoint(model.llm, "none", Compilation())
    materialize(model, device)
    init_weights(model, seed=0)
    microbatch = _microbatch(tokens, device)
    setting = Setting(Execution(compiled=compiled), 4)
    operators = _operators(model.llm.describe(), microbatch.meta, setting)
    return LayerCase(*operators, lambda: model(microbatch))
