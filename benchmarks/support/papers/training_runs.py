"""Published training runs, and their simulation with the cost model.

Selective activation checkpointing of torchtitan ("op") saves every second matmul, that of torchmm
all of them. Its time and memory are interpolated between our "selective" and "full" modes by the
matmuls that it runs again (torchtitan/parallelisms/parallelize_llama.py, `_get_custom_policy`).
Published memory with float8 equals that of bfloat16, so float8 matmuls are counted the same.

torchtitan rotates queries and keys as complex numbers, for which Inductor generates no code ("does
not support code generation for complex operators"). So its compiled layers rotate in eager mode.

Under tensor parallelism torchtitan divides logits by vocabulary, as our chunked loss does. Its
other runs store logits, log-probabilities and a gradient in float32 and one gradient in bfloat16:
14 bytes per logit more than our loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.costs.components import HeadTransforms
from torchmm.costs.execution import RecomputeSetting
from torchmm.costs.layers import layer_operators, local_linears
from torchmm.costs.operators import operator_time_ms
from torchmm.costs.sizes import llm_sizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8}
LLAMA3_8B = LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA3_70B = LLAMA3 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA2_13B = {
    "vocab_size": 32000,
    "num_key_value_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
Stack = Literal["torchtitan, H100", "torchtitan, A100", "Megatron-Bridge, H100"]


@dataclass(frozen=True)
class Run:
    """A published run: its configuration and results.

    Attributes:
        case: Name of the row.
        stack: Software and hardware that share a calibration factor.
        model: Llama config.
        device: Device of the table.
        gpus: Number of GPUs.
        tokens_per_s: Published tokens per second and GPU.
        memory_gib: Published memory per GPU; None if not published.
        batch: Sequences per data-parallel rank and step.
        sequence: Tokens per sequence.
        recompute: Activation checkpointing; "op" is torchtitan's selective mode.
        compiled: Whether torch.compile compiles the layers.
        float8: Whether linears compute in float8, scaled per tensor.
        microbatch: Sequences per microbatch; 0: `batch`.
        tensor, pipeline, virtual_stages: Sizes of tensor and pipeline parallelism.
        async_tensor: Whether communication of tensor parallelism overlaps with matmuls.
    """

    case: str
    stack: Stack
    model: Mapping[str, int]
    device: str
    gpus: int
    tokens_per_s: float
    memory_gib: float | None = None
    batch: int = 2
    sequence: int = 8192
    recompute: RecomputeSetting | Literal["op"] = "op"
    compiled: bool = True
    float8: bool = False
    microbatch: int = 0
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    async_tensor: bool = False


_TP_70B: dict[str, Any] = {"model": LLAMA3_70B, "tensor": 8, "batch": 16, "recompute": "full"}
_TP_8B: dict[str, Any] = {"tensor": 8, "batch": 12}


def _titan(case: str, gpus: int, tokens_per_s: float, gib: float | None, **other: Any) -> Run:
    """Return a run of torchtitan on H100."""
    fields = {
        "model": LLAMA3_8B,
        "stack": "torchtitan, H100",
        "device": "h100_grand_teton",
        **other,
    }
    return Run(case, gpus=gpus, tokens_per_s=tokens_per_s, memory_gib=gib, **fields)


def _titan_a100(case: str, tokens_per_s: float, **other: Any) -> Run:
    """Return a run of torchtitan on 64 A100."""
    stack: Stack = "torchtitan, A100"
    return Run(
        case, stack, device="a100", gpus=64, tokens_per_s=tokens_per_s, compiled=False, **other
    )


def _bridge(case: str, gpus: int, tokens_per_s: float, **other: Any) -> Run:
    """Return a run of Megatron-Bridge on H100, with float8 and microbatches of one sequence."""
    fields = {"device": "h100", "recompute": "none", "float8": True, "microbatch": 1, **other}
    return Run(case, "Megatron-Bridge, H100", gpus=gpus, tokens_per_s=tokens_per_s, **fields)


RUNS: dict[str, Run] = {
    "8b": _titan("8B FSDP 8", 8, 5762, 82.4, compiled=False),
    "8b compile": _titan("8B FSDP 8, compile", 8, 6667, 77.0),
    "8b float8": _titan("8B FSDP 8, compile, float8", 8, 8532, 76.8, float8=True),
    "8b 128": _titan("8B FSDP 128", 128, 5605, 67.0, compiled=False),
    "8b 128 compile": _titan("8B FSDP 128, compile", 128, 6514, 62.0),
    "8b 128 float8": _titan("8B FSDP 128, compile, float8", 128, 8380, 61.8, float8=True),
    "8b tp": _titan("8B FSDP 8, TP 8", 64, 4378, None, **_TP_8B),
    "8b async": _titan("8B FSDP 8, TP 8, async", 64, 4809.4, None, async_tensor=True, **_TP_8B),
    "70b tp": _titan("70B FSDP 32, TP 8", 256, 597.3, None, **_TP_70B),
    "70b async": _titan("70B FSDP 32, TP 8, async", 256, 652.4, None, async_tensor=True, **_TP_70B),
    "70b float8": _titan("70B FSDP 32, TP 8, float8", 256, 809.8, 71.9, float8=True, **_TP_70B),
    "70b float8 async": _titan(
        "70B FSDP 32, TP 8, float8, async",
        256,
        942.4,
        67.6,
        float8=True,
        async_tensor=True,
        **_TP_70B,
    ),
    "a100 8b": _titan_a100("8B FSDP 64, op", 2973, model=LLAMA3_8B, batch=1),
    "a100 70b": _titan_a100("70B FSDP 64, full", 331, model=LLAMA3_70B, batch=1, recompute="full"),
    "a100 13b": _titan_a100(
        "Llama 2 13B FSDP 64", 2162, model=LLAMA2_13B, sequence=4096, recompute="none"
    ),
    "a100 13b op": _titan_a100("Llama 2 13B FSDP 64, op", 1904, model=LLAMA2_13B, sequence=4096),
    "bridge 8b": _bridge("8B FSDP 8, FP8", 8, 14451, model=LLAMA3_8B, batch=16),
    "bridge 70b": _bridge(
        "70B TP 4, PP 8, VP 5, FP8",
        64,
        1602,
        model=LLAMA3_70B,
        batch=64,
        tensor=4,
        pipeline=8,
        virtual_stages=5,
    ),
}
"""Sources: the docstring of `benchmarks/published_runs.py`."""


LOSS_BYTES = 14
"""Bytes per logit of a loss in float32, see above."""


class Result(NamedTuple):
    """Simulated speed and memory of a run."""

    tokens_per_s: float
    memory_gib: float


class _Forecaster(StepSimulator):
    """A forecaster that recomputes as the run does, eager layers on CUDA included."""

    def __init__(
        self,
        recipe: Recipe,
        gpus: int,
        device: str,
        recompute: RecomputeSetting,
        sample: StepSample,
    ) -> None:
        self.recompute: RecomputeSetting = recompute
        super().__init__(recipe, gpus, load_profile(device), sample=sample)

    def _costs(self, parallel: ParallelConfig) -> CostModel:
        model = super()._costs(parallel)
        executions = {
            name: replace(execution, recompute=self.recompute)
            for name, execution in model.executions.items()
        }
        return replace(model, executions=executions)


def simulate(run: Run) -> Result:
    """Return the simulated tokens per second and GPU, and the peak memory, of a run.

    Raises:
        ValueError: The run cannot be planned.
    """
    recipe = _recipe(run)
    sample = StepSample(recipe)

    def forecast(recompute: RecomputeSetting) -> tuple[float, float, CostModel]:
        forecaster = _Forecaster(recipe, run.gpus, run.device, recompute, sample)
        result = forecaster.simulate_schedule()
        if result.step is None:
            raise ValueError(f"{run.case}: {result.problem}")
        gib = max(result.step.peak_bytes) / 2**30
        return 1 / result.tokens_per_s, gib, forecaster._costs(recipe.parallel)

    if run.recompute == "op":
        inverse_s, gib, _ = forecast("selective")
        again_s, again_gib, model = forecast("full")
        time_share, memory_share = _recomputed_shares(run, sample, model)
        inverse_s += time_share * (again_s - inverse_s)
        gib += memory_share * (again_gib - gib)
    else:
        inverse_s, gib, model = forecast(run.recompute)
    if run.stack.startswith("torchtitan"):
        if run.compiled:
            inverse_s += _complex_rotation_s(run, sample, model) / run.gpus
        if run.tensor == 1:
            gib += LOSS_BYTES * run.batch * run.sequence * run.model["vocab_size"] / 2**30
    return Result(1 / inverse_s / run.gpus, gib)


def _complex_rotation_s(run: Run, sample: StepSample, model: CostModel) -> float:
    """Return the time per token and GPU that eager rotary embeddings add to compiled layers."""
    [module] = sample.modules
    sizes = llm_sizes(sample.packs[:1], [run.sequence], padding=True)
    compiled = model.setting(module, 1)
    eager = compiled._replace(execution=replace(compiled.execution, compiled=False))
    rotation = HeadTransforms(replace(module.layers[0], qk_norm=False))
    added_ms = 0.0
    for setting, sign in ((eager, 1), (compiled, -1)):
        operators = rotation.operators(sizes, setting)
        again = operators.forward if run.recompute != "none" else []
        for operator in (*operators.forward, *operators.inputs, *again):
            if operator.kind == "elementwise":
                added_ms += sign * operator_time_ms(operator, model.profile, "bfloat16").item()
    return added_ms / 1e3 * len(module.layers) * run.tensor / run.sequence


def _recomputed_shares(run: Run, sample: StepSample, model: CostModel) -> tuple[float, float]:
    """Return the fractions of the time and bytes between "selective" and "full" under "op"."""
    [module] = sample.modules
    layer = module.layers[0]
    execution = model.executions[module.name]
    sizes = llm_sizes(sample.packs[:1], [run.sequence], padding=True)
    operators = layer_operators(layer, sizes, model.setting(module, 1)).recomputed
    times: dict[str, list[float]] = {"matmul": [], "attention": []}
    for operator in operators:
        if operator.kind in times:
            times[operator.kind].append(
                operator_time_ms(operator, model.profile, "bfloat16").item()
            )
    every_second = slice(1, None, 2)
    share = sum(times["matmul"][every_second]) / sum(map(sum, times.values()))
    results = np.array([outputs for _, outputs in local_linears(layer, execution.tensor).values()])
    attended = layer.heads * layer.head_dim / execution.tensor
    return share, float(results[every_second].sum() / (results.sum() + attended))


def _recipe(run: Run) -> Recipe:
    """Return the recipe of a run: a text-only LLM with random weights."""
    config = {"model_type": "llama", "max_position_embeddings": 131072, **run.model}
    lines = [
        f'name = "published"\n[model]\nchunked_loss = {str(run.tensor > 1).lower()}\n',
        f"[model.llm.config]\ntie_word_embeddings = false\n{_toml(config)}",
        "[training]\n",
        _toml(
            {
                "dtype": "bfloat16",
                "steps": 1,
                "sequence_length": run.sequence,
                "microbatch_size": run.microbatch or run.batch,
                "global_batch_size": run.batch * run.gpus // (run.tensor * run.pipeline),
            }
        ),
        "[parallel]\nshard = -1\n",
        _toml(
            {
                "tensor": run.tensor,
                "pipeline": run.pipeline,
                "sequence_parallel": run.tensor > 1,
                "async_tensor_parallel": run.async_tensor,
                "virtual_stages": run.virtual_stages,
                **({"schedule": "interleaved_1f1b"} if run.virtual_stages > 1 else {}),
            }
        ),
        f"[compile]\nenabled = {str(run.compiled).lower()}\n",
        f'[simulation]\ndevice = "{run.device}"\n[[simulation.sequences]]\n',
    ]
    if run.float8:
        lines.append('[float8]\nscaling = "tensorwise"\nfirst_layers = 0\nlast_layers = 0\n')
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text("".join(lines))
        return load_recipe(path).recipe


def _toml(values: Mapping[str, object]) -> str:
    shown = {key: str(v).lower() if isinstance(v, bool) else repr(v) for key, v in values.items()}
    return "".join(f"{key} = {value}\n" for key, value in shown.items()).replace("'", '"')
