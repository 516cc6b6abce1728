"""Small models of a few layers, for measuring what a call costs among others.

Operators measured alone find their code and the framework's in caches. In a layer every call
follows another one, with views, modules and autograd's bookkeeping between them. Layers that are
split over ranks, or whose parameters are, have more of that: DTensors are dispatched in Python, and
so are FSDP2's hooks. On layers too small to compute anything, the difference is what that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmm.balance.calibration import WorkingLayers
from torchmm.balance.execution import Execution
from torchmm.balance.operators import Operator
from torchmm.balance.part_operators import Setting, part_operators
from torchmm.balance.parts import stage_parts
from torchmm.balance.task_sizes import llm_sizes
from torchmm.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.config import FreezeConfig, LlmConfig, ModelConfig
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.fsdp import LayerSharding, apply_fsdp
from torchmm.parallel.tensor import apply_tensor_parallel

DEPTHS = (2, 6)
Split = Literal["whole", "tensor", "sequence", "shard"]
"""How layers are on several ranks: on each of them, tensor-parallel without or with sequence
parallelism, or gathered by FSDP2 layer by layer."""
SPLITS: tuple[Split, ...] = ("whole", "tensor", "sequence", "shard")
TINY_TOKENS = 8
ROUNDS, RUNS = 5, 5


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


def working_layers(device: torch.device, *, quick: bool) -> list[WorkingLayers]:
    """Layers that compute, with the time of their forward and backward. CPUs only, float32.

    On several ranks all measure at the same time, and the time that passes counts, as in training:
    threads of the process groups take some of it. On one, other programs do, and CPU time counts.

    Args:
        quick: smaller, once.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    clock = time.perf_counter if several else time.process_time
    cases = [
        _case(device, width, 32 if quick else tokens, depth, width // HEAD_SIZE)
        for width, tokens in WORKING
        for depth in DEPTHS[: 1 if quick else None]
    ]
    rounds = []
    for _ in range(1 if quick else ROUNDS):
        if several:
            dist.barrier()
        rounds.append([_forward_and_backward(case, clock) for case in cases])
    found = []
    for case, *times in zip(cases, *rounds, strict=True):
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


def split_layer_seconds(device: torch.device, *, quick: bool) -> dict[str, float]:
    """Seconds of a tiny layer's forward and backward, by how it is split over all ranks.

    Collective. What does not depend on the number of layers cancels: models of two depths differ
    by layers alone.

    Args:
        quick: once only.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    runs = {
        split: [_split_run(device, 8 * ranks, ranks, depth, split, mesh) for depth in DEPTHS]
        for split in SPLITS
    }
    found: dict[str, list[float]] = {split: [] for split in SPLITS}
    for _ in range(1 if quick else ROUNDS):
        for split, (few, many) in runs.items():
            longer_s = _seconds(many, device) - _seconds(few, device)
            found[split].append(longer_s / (DEPTHS[1] - DEPTHS[0]))
    return {split: median(times) for split, times in found.items()}


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Mean time of a run, as many on every rank."""
    run()
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(RUNS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / RUNS


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


def _split_run(
    device: torch.device, width: int, heads: int, depth: int, split: Split, mesh: DeviceMesh
) -> Callable[[], None]:
    """Forward and backward of a tiny model; gradients stay where they are."""
    model = _build(width, heads, depth)
    if split in ("tensor", "sequence"):
        apply_tensor_parallel(model.llm, mesh, split == "sequence")
    elif split == "shard":
        apply_fsdp(model.llm, mesh, torch.float32)
    materialize(model, device)
    init_weights(model, seed=0)
    microbatch = _microbatch(TINY_TOKENS, device)
    sharding = LayerSharding(model.llm) if split == "shard" else None

    def run() -> None:
        if sharding is not None:
            sharding.begin_step(2)  # the last of two would reduce
        loss = model(microbatch)
        if sharding is not None:
            sharding.before_backward()
        loss.backward()

    return run


def _case(device: torch.device, width: int, tokens: int, depth: int, heads: int = 2) -> LayerCase:
    model = _build(width, heads, depth)
    materialize(model, device)
    init_weights(model, seed=0)
    microbatch = _microbatch(tokens, device)
    module = model.llm.describe()
    sizes = llm_sizes([microbatch.meta], [tokens], padding=True)
    forward: list[Operator] = []
    backward: list[Operator] = []
    for part in stage_parts(module, 0, depth):
        passes = part_operators(module, part, sizes, Setting(Execution(), 4))
        forward += passes.forward * part.count
        backward += [*passes.inputs, *passes.weights] * part.count
    return LayerCase(forward, backward, lambda: model(microbatch))
