"""Compare measured memory of memory-saving settings with predictions.

States (`[optimizer]`, `training.parameter_dtype`): weights and optimizer states of a small LLM
between steps, and with gradients during the update. Recomputation (`[activation_checkpoint]`): peak
of a full step with weights, gradients and optimizer states. Both are compared with the predictions
of planners and `--dry-run`.

Chunked loss (`[model] chunked_loss`): LM head and cross entropy, forward and backward, compared
with the Hugging Face head with full logits and with the prediction. Peaks are exact, because every
allocation is counted. Memory that exists without a loss (weight, its gradient, hidden states) is
not included. Times are from interleaved pairs, one thread.

Training runs (`--device`): the quickstart recipe with one setting at a time, as counted by the
device allocator, compared with `--dry-run`. This needs GPUs, or emulated GPUs: `--device --through
tests/cuda_emulation/emulate.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from support.allocations import CountPeak, held_in_a_step
from support.device_peaks import SWITCHES, device_peaks
from support.harness import Row, describe_machine, make_parser, report, time_pairs
from support.memory_needs import memory_needs
from torch import Tensor, nn

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.dtypes import DTYPES
from torchmm.costs.blocks import HeadBlock
from torchmm.costs.execution import CostSetting, Execution, RecomputeSetting
from torchmm.costs.layers import stage_parameters
from torchmm.costs.sizes import llm_sizes
from torchmm.extensions.low_precision import low_precision_optimizer
from torchmm.models.build import build_model
from torchmm.models.layers.loss import (
    ChunkHead,
    chunk_rows,
    cross_entropy_in_chunks,
    summed_cross_entropy,
)
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import make_stage
from torchmm.pipelining.schedules.layouts import ModuleLayers, StageSplit, build_layout
from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.planning.executions import parameter_states
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import OptimizerConfig, TrainingConfig
from torchmm.training.optim import build_optimizer

CPU = torch.device("cpu")
MIB = 2**20
GOAL_SHARE = 0.10
GOAL_SPEED = 1 / 1.05


class Size(NamedTuple):
    """Shapes and dtype of a loss."""

    targets: int
    vocabulary: int
    hidden: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.targets:,} targets, vocabulary {self.vocabulary:,}, width {self.hidden}, {kind}"
        )


SIZES = [
    Size(8192, 151_936, 64, torch.bfloat16),
    Size(8192, 151_936, 64, torch.float32),
    Size(2048, 32_000, 256, torch.bfloat16),
]
QUICK = [Size(2048, 32_000, 64, torch.bfloat16), Size(2048, 32_000, 64, torch.float32)]


class Loss:
    """Output head and hidden states with random values.

    Args:
        size: Shapes and dtype.
        rows: Rows per chunk. 0 selects the number that models use.
    """

    def __init__(self, size: Size, rows: int = 0) -> None:
        torch.manual_seed(0)
        self.size = size
        self.rows = rows or chunk_rows(size.vocabulary)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False, dtype=size.dtype)
        self.rows_LD = torch.randn(size.targets, size.hidden, dtype=size.dtype, requires_grad=True)
        self.targets_L = torch.randint(size.vocabulary, (size.targets,))

    def in_chunks(self) -> Tensor:
        head = ChunkHead(self.head, self.rows)
        return cross_entropy_in_chunks(head, head, self.rows_LD, self.targets_L)

    def at_once(self) -> Tensor:
        return summed_cross_entropy(self.head(self.rows_LD), self.targets_L)

    def run(self, loss: Callable[[], Tensor]) -> None:
        """Run a forward and a backward pass."""
        self.head.weight.grad = self.rows_LD.grad = None
        loss().backward()

    def peak_bytes(self, loss: Callable[[], Tensor]) -> int:
        """Return the peak bytes, without head weight, its gradient and the hidden states."""
        self.run(loss)
        held = [self.head.weight, self.rows_LD, self.targets_L]
        gradient = self.head.weight.nbytes
        self.head.weight.grad = self.rows_LD.grad = None
        with CountPeak(held) as counter:
            loss().backward()
        return counter.peak_bytes - sum(t.nbytes for t in held) - gradient

    def planned_bytes(self) -> float:
        """Return the peak bytes that the cost model predicts."""
        size = self.size
        meta = MicrobatchMeta((SampleMeta("", 0, size.targets),), size.targets)
        sizes = llm_sizes([meta], [size.targets], padding=False)
        linear = (size.hidden, size.vocabulary)
        head = HeadBlock(trained=True, linear=linear, norm="rms", chunk_targets=self.rows)
        norm = HeadBlock(trained=False, linear=(size.hidden, 0), norm="rms")
        setting = CostSetting(Execution(), size.dtype.itemsize)
        found_N = head.saved_bytes(sizes, setting, weights=True)
        found_N = found_N - norm.saved_bytes(sizes, setting, weights=False)
        found_N = found_N + head.temporary_bytes(sizes, setting, has_backward=found_N > 0)
        return float(found_N[0]) - self.head.weight.nbytes


def loss_chunk_targets(size: Size, pairs: int) -> list[Row]:
    """Return the rows about output head and cross entropy."""
    loss = Loss(size)
    ours = loss.peak_bytes(loss.in_chunks)
    theirs = loss.peak_bytes(loss.at_once)
    chunks, whole = (partial(loss.run, f) for f in (loss.in_chunks, loss.at_once))
    times = time_pairs(chunks, whole, pairs, CPU)
    case = f"chunked loss, {size}"
    return [
        Row(case, "peak", "MiB", ours / MIB, theirs / MIB, better="lower"),
        Row(case, "peak / peak with full logits", "fraction", ours / theirs, 1.0, goal=GOAL_SHARE,
            better="lower"),
        Row(case, "peak / prediction", "x", ours / loss.planned_bytes(), better="lower"),
        Row(case, "time", "s", times.median_ours_s, times.median_baseline_s, better="lower"),
        Row(case, "speedup", "x", times.speed_ratio, 1.0, goal=GOAL_SPEED),
    ]  # fmt: skip


LLM = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
TOKENS = 512
STATES = [
    ("float32", {}),
    ("float32", {"state_dtype": "bfloat16"}),
    ("float32", {"state_dtype": "int8"}),
    ("float32", {"name": "muon"}),
    ("float32", {"offload": True}),
    ("bfloat16", {"state_dtype": "bfloat16"}),
    ("bfloat16", {"state_dtype": "int8"}),
    ("bfloat16", {"name": "muon", "state_dtype": "int8"}),
    ("bfloat16", {"offload": True}),
]
"""Parameter dtype and keys of [optimizer]."""
PORTION = 2**16
"""Number of parameters per update chunk. It is less than a matrix has, as in large models."""
MODES: list[RecomputeSetting] = ["none", "selective", "full"]


def small_llm(dtype: torch.dtype = torch.float32) -> MultimodalModel:
    """Return a small LLM on the meta device."""
    config = ModelConfig.model_validate({"llm": {"config": LLM}})
    return build_model(config, FreezeConfig(), dtype)


def state_rows() -> list[Row]:
    """Return the rows about weights and moments between steps and during the update."""
    rows = []
    for dtype, keys in STATES:
        optimizer = OptimizerConfig.model_validate(keys)
        recipe = Recipe(optimizer=optimizer, training=TrainingConfig(parameter_dtype=dtype))
        model = small_llm(DTYPES[dtype])
        llm = model.llm.describe()
        states = replace(parameter_states(recipe), update_chunk=PORTION * (not plain(recipe)))
        costs = CostModel(load_profile("cpu"), dtype, {"llm": Execution(states=states)})
        expected = costs.update_bytes(llm, 0, len(llm.layers))
        measured = update_bytes(model, optimizer, DTYPES[dtype])
        planned = stage_parameters(llm, 0, len(llm.layers), states=states)
        between = planned.weight_bytes + planned.optimizer_bytes
        said = ", ".join([f"parameters {dtype}", *(f"{k} {v}" for k, v in keys.items())])
        case = f"states, {said}"
        rows.append(Row(case, "between steps", "MiB", measured.between / MIB, better="lower"))
        rows.append(Row(case, "between steps / prediction", "x", measured.between / between))
        rows.append(Row(case, "update", "MiB", measured.most / MIB, better="lower"))
        rows.append(Row(case, "update / prediction", "x", measured.most / sum(expected)))
    return rows


def plain(recipe: Recipe) -> bool:
    """Return True if PyTorch updates all parameters in place."""
    return parameter_states(recipe).update_chunk == 0


class UpdateBytes(NamedTuple):
    """Device memory of weights, gradients and moments in bytes.

    Attributes:
        between: Memory between steps, without gradients.
        most: Peak memory during an update, including gradients.
    """

    between: int
    most: int


def update_bytes(
    model: MultimodalModel, optimizer: OptimizerConfig, dtype: torch.dtype
) -> UpdateBytes:
    """Return the device memory of the second update, whose moments are allocated.

    Moments in host memory are not included.
    """
    materialize(model, "cpu")
    parameters = [*model.parameters()]
    for parameter in parameters:
        parameter.data.zero_()
        parameter.grad = torch.ones_like(parameter)
    with patch.object(low_precision_optimizer, "CHUNK_ELEMENTS", PORTION):
        updates = build_optimizer(
            model, module_of, optimizer, (), model.layer_matrices(), dtype=dtype
        )
        updates.step()
        moments = [t for state in updates.state.values() for t in state.values()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        with CountPeak([*parameters, *gradients, *moments]) as counter:
            updates.step()
    of_host = sum(t.nbytes for t in moments) * optimizer.offload
    of_gradients = sum(g.nbytes for g in gradients)
    return UpdateBytes(counter.bytes - of_host - of_gradients, counter.peak_bytes - of_host)


def recompute_rows() -> list[Row]:
    """Return peaks of full steps of one microbatch, by recomputation mode."""
    rows = []
    for mode in MODES:
        measured, wanted = step_bytes(mode)
        case = f"recomputation {mode}, {TOKENS} tokens, {LLM['num_hidden_layers']} layers"
        rows.append(Row(case, "peak", "MiB", measured / MIB, better="lower"))
        rows.append(Row(case, "peak / prediction", "x", measured / wanted))
    return rows


def step_bytes(mode: RecomputeSetting) -> tuple[float, float]:
    """Return the (measured, predicted) peak bytes of a step, including AdamW moments."""
    model = small_llm()
    llm = model.llm.describe()
    count = len(llm.layers)
    shape = ModuleLayers("llm", "llm", (1.0,) * count, False, (True,) * count)
    layout = build_layout([shape], {"llm": [StageSplit(count, (0,))]})
    modules = {module.name: module for module in small_llm().modality_modules()}
    stages = split_model_for_rank(model, layout, 0)
    for stage in stages.values():
        apply_activation_checkpoint(stage, mode)
    materialize(model, "cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    meta = MicrobatchMeta((SampleMeta("", 0, TOKENS),), TOKENS)
    ids_T = torch.randint(LLM["vocab_size"], (TOKENS,))
    batch = [Microbatch(ids_T, ids_T, torch.arange(TOKENS), [0, TOKENS], {}, meta)]
    graph = StageGraph(layout, 1, {})
    specs = message_specs(graph, modules, [meta], torch.float32)
    plan = lower_plan(ORDERS["gpipe"](graph), graph, specs)
    costs = CostModel(load_profile("cpu"), "float32", {"llm": Execution(recompute=mode)})
    tuning = LayerTuning(costs, frozenset(), 0)
    (needs,) = memory_needs(plan, [llm], [meta], tuning, [TOKENS])
    with CountPeak(held_in_a_step(model, batch)) as counter:
        PipelineRuntime(0, {i: make_stage(s) for i, s in stages.items()}, None).step(plan, batch)
    moments = 8 * sum(p.numel() for p in model.parameters())
    return counter.peak_bytes + moments, needs.most_bytes


def device_rows(through: Path | None) -> list[Row]:
    """Return peaks of training runs, for the available devices."""
    rows = []
    devices = max(s.ranks for s in SWITCHES.values()) if through else torch.cuda.device_count()
    names = [name for name, switch in SWITCHES.items() if switch.ranks <= devices]
    for name, peak in device_peaks(through, names):
        case = f"run, {name}"
        rows.append(Row(case, "peak", "MiB", peak.measured / MIB, better="lower"))
        rows.append(Row(case, "peak / prediction", "x", peak.measured / peak.predicted))
    return rows


def main() -> None:
    """Print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--device", action="store_true", help="measure complete training runs on the device instead"
    )
    parser.add_argument(
        "--through", type=Path, help="script that starts the runs on emulated devices"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = CPU
    if arguments.device:
        device = CPU if arguments.through else torch.device("cuda")
        rows = device_rows(arguments.through)
    else:
        rows = [*state_rows(), *recompute_rows()]
        for size in QUICK if arguments.quick else SIZES:
            rows += loss_chunk_targets(size, arguments.pairs)
    report(f"Memory, seed 0; {describe_machine(device)}", rows, arguments.json)


if __name__ == "__main__":
    main()
