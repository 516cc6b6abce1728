"""Small models with a few layers, for measuring the overhead of calls inside layers.

Operators that run alone have their code, and that of the framework, in caches. Calls in a layer
also have views, modules and autograd bookkeeping between them. Layers with sharded activations or
parameters have more overhead, because Python dispatches DTensors and FSDP2 hooks.

    overhead of a layer = time of the layer - time of its operators - time of its collectives

It includes the time in which ranks wait for each other. On CPUs, layers of realistic size are
measured. Layers without computation would leave Python code in caches and ranks synchronized.
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

from torchmm.balance.costs.calibration import RealisticLayers, TimedLayers
from torchmm.balance.costs.model import ShardLinks, all_gather_operators
from torchmm.balance.measurement.network import world_link
from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.blocks import LayerBlock, stage_blocks
from torchmm.costs.devices import LinkRanks
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.operators import HOST_KINDS, Operator, PassOperators
from torchmm.costs.sizes import llm_sizes
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.fsdp import LayerSharding, apply_fsdp
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

DEPTHS = (2, 6)
"""Numbers of layers of measured models."""
LayerParallelism = Literal["whole", "tensor", "sequence", "shard"]
"""Parallelism of layers: replicated, TP, TP with sequence parallelism, or FSDP2."""
LAYER_PARALLELISMS: tuple[LayerParallelism, ...] = ("whole", "tensor", "sequence", "shard")
PARALLEL_DEPTH, PARALLEL_RUNS = 4, 3
PARALLEL_HEADS, PARALLEL_TOKENS = 4, 512
"""Minimum number of heads of size `HEAD_SIZE`, and number of tokens."""
TINY_HEAD, TINY_TOKENS = 8, 8
"""Head size and number of tokens of layers with negligible computation."""
REALISTIC_SIZES = ((320, 448), (192, 640))
"""(width, tokens) of layers that are large enough to evict code of calls from caches."""
HEAD_SIZE = 64
REALISTIC_RUNS = 2


class LayerCase(NamedTuple):
    """Model and the operators that it runs."""

    forward_operators: list[Operator]
    backward_operators: list[Operator]
    forward: Callable[[], Tensor]
    """Forward pass of one microbatch, which returns the loss."""

    @property
    def calls(self) -> float:
        """Number of calls of all operators."""
        every = (*self.forward_operators, *self.backward_operators)
        return sum(float(np.sum(operator.calls)) for operator in every)

    def run(self) -> None:
        """Run a forward and a backward pass."""
        self.forward().backward()


def time_realistic_layers(
    device: torch.device, rounds: int, *, quick: bool
) -> list[RealisticLayers]:
    """Measure forward and backward passes of layers of realistic size (CPUs only, float32).

    Several ranks measure wall-clock time at the same time as in training, because threads of
    process groups use CPU time. A single rank measures CPU time, to exclude other programs.

    Args:
        device: Device to measure.
        rounds: Number of rounds. Results are medians over rounds.
        quick: Whether to use smaller layers.
    """
    is_distributed = dist.is_initialized() and dist.get_world_size() > 1
    clock = time.perf_counter if is_distributed else time.process_time
    cases = [
        _build_case(device, width, 32 if quick else tokens, depth, width // HEAD_SIZE)
        for width, tokens in REALISTIC_SIZES
        for depth in DEPTHS[: 1 if quick else None]
    ]
    measured = []
    for _ in range(rounds):
        if is_distributed:
            dist.barrier()
        measured.append([_forward_and_backward(case, clock) for case in cases])
    results = []
    for case, *times in zip(cases, *measured, strict=True):
        forward_s, backward_s = (median(seconds) for seconds in zip(*times, strict=True))
        operators = case.forward_operators, case.backward_operators
        results.append(RealisticLayers(*operators, forward_s, backward_s))
    return results


def _forward_and_backward(case: LayerCase, clock: Callable[[], float]) -> tuple[float, float]:
    """Return mean forward and backward times in seconds, after a warm-up run."""
    case.run()
    forward_s = backward_s = 0.0
    for _ in range(REALISTIC_RUNS):
        begin_s = clock()
        loss = case.forward()
        between_s = clock()
        loss.backward()
        forward_s += between_s - begin_s
        backward_s += clock() - between_s
    return forward_s / REALISTIC_RUNS, backward_s / REALISTIC_RUNS


def build_layer_cases(device: torch.device, width: int, tokens: int) -> list[LayerCase]:
    """Return float32 Llama models with a few layers.

    Args:
        device: Device to measure.
        width: Hidden size.
        tokens: Number of tokens of the microbatch.
    """
    return [_build_case(device, width, tokens, depth) for depth in DEPTHS]


def build_compiled_case(device: torch.device, width: int, tokens: int) -> LayerCase:
    """Return a Llama of compiled layers, float32.

    Args:
        device: Device to measure.
        width: Features of the layers.
        tokens: Tokens of a microbatch.
    """
    return _build_case(device, width, tokens, DEPTHS[-1], compiled=True)


def time_parallel_layers(
    device: torch.device, rounds: int, *, quick: bool
) -> dict[str, TimedLayers]:
    """Measure forward and backward passes of layers on all ranks (collective).

    On CPUs, layers have a realistic size, so that code of DTensor and FSDP2 is evicted from caches,
    and ranks wait for each other. On GPUs, layers have negligible computation, so that the time is
    queueing time.

    Args:
        device: Device to measure.
        rounds: Number of rounds. Results are medians over rounds.
        quick: Whether to use layers with negligible computation.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    link = world_link()
    tiny = quick or device.type != "cpu"
    cases = {
        split: _build_parallel_case(device, split, mesh, link, tiny=tiny)
        for split in LAYER_PARALLELISMS
    }
    times: dict[LayerParallelism, list[float]] = {split: [] for split in LAYER_PARALLELISMS}
    for _ in range(rounds):
        for split, (_, run) in cases.items():
            times[split].append(_seconds(run, device))
    return {
        split: TimedLayers(operators, median(times[split]))
        for split, (operators, _) in cases.items()
    }


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Return the mean time of a run in seconds, with the same number of runs on each rank."""
    run()
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(PARALLEL_RUNS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / PARALLEL_RUNS


def _build_model(width: int, heads: int, depth: int) -> MultimodalModel:
    """Return a Llama model on the meta device."""
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return build_model(ModelConfig(llm=LlmConfig(config=config)), FreezeConfig())


def _build_microbatch(tokens: int, device: torch.device) -> Microbatch:
    ids = torch.ones(tokens, dtype=torch.int64)
    meta = MicrobatchMeta((SampleMeta("small", 0, tokens),), tokens)
    return Microbatch(ids, ids, torch.arange(tokens), [0, tokens], {}, meta).to(device)


def _build_parallel_case(
    device: torch.device, split: LayerParallelism, mesh: DeviceMesh, link: LinkRanks, *, tiny: bool
) -> tuple[list[Operator], Callable[[], None]]:
    """Return the operators of a model on one rank, and a function for forward and backward.

    The function accumulates gradients without reducing them.

    Args:
        device: Device to measure.
        split: Parallelism of the layers.
        mesh: Mesh of all ranks.
        link: Placement of all ranks.
        tiny: Whether computation is negligible.
    """
    ranks = mesh.size()
    heads = ranks * ceil(PARALLEL_HEADS / ranks)
    tokens, width = (TINY_TOKENS, TINY_HEAD) if tiny else (PARALLEL_TOKENS, HEAD_SIZE)
    model = _build_model(width * heads, heads, PARALLEL_DEPTH)
    shards = ranks if split == "shard" else 1
    tensor = ranks if split in ("tensor", "sequence") else 1
    execution = Execution(tensor, split == "sequence", shard=shards)
    microbatch = _build_microbatch(tokens, device)
    setting = CostSetting(execution, 4, link, calls_per_segment=device.type == "cpu")
    module = model.llm.describe()
    forward, backward = _operators(module, microbatch.meta, setting)
    calls = sum(float(np.sum(o.calls)) for o in forward if o.kind not in HOST_KINDS)
    operators = [*forward, Operator("forward_call", calls=calls), *backward]
    if split == "shard":  # all-gather in forward and backward
        links = ShardLinks(link)
        operators += 2 * all_gather_operators(module, 0, PARALLEL_DEPTH, execution, 4, links)
        apply_fsdp(model.llm, mesh, torch.float32)
    elif tensor > 1:
        apply_tensor_parallel(model.llm, mesh, execution.sequence_parallel)
    materialize(model, device)
    init_weights(model, seed=0)
    sharding = LayerSharding(model.llm) if split == "shard" else None

    def run() -> None:
        if sharding is not None:
            sharding.begin_step(2)  # only the second backward pass would reduce
        loss = model(microbatch)
        if sharding is not None:
            sharding.before_backward()
        loss.backward()

    return operators, run


def _operators(
    module: ModuleDescription, meta: MicrobatchMeta, setting: CostSetting
) -> tuple[list[Operator], list[Operator]]:
    """Return the operators of the forward and of the backward pass of a model."""
    sizes = llm_sizes([meta], [meta.tokens], padding=True)
    forward: list[Operator] = []
    backward: list[Operator] = []
    for block in stage_blocks(module, 0, len(module.layers)):
        passes = block.operators(sizes, setting)
        if not isinstance(block, LayerBlock):  # not compiled
            passes = PassOperators(
                *([o._replace(in_layer=False) for o in of_pass] for of_pass in passes)
            )
        forward += passes.forward * block.count
        backward += [*passes.inputs, *passes.weights] * block.count
    return forward, backward


def _build_case(
    device: torch.device,
    width: int,
    tokens: int,
    depth: int,
    heads: int = 2,
    *,
    compiled: bool = False,
) -> LayerCase:
    model = _build_model(width, heads, depth)
    if compiled:
        apply_activation_checkpoint(model.llm, "none", Compilation())
    materialize(model, device)
    init_weights(model, seed=0)
    microbatch = _build_microbatch(tokens, device)
    setting = CostSetting(Execution(compiled=compiled), 4)
    operators = _operators(model.llm.describe(), microbatch.meta, setting)
    return LayerCase(*operators, lambda: model(microbatch))
