"""Published values that torchmm results are compared with, and their sources.

Nothing here is computed, except that a percentage is written as a fraction. What the papers print
twice and differently is noted; values that only figures show are omitted.

Optimus: arXiv 2408.03505. PipeWeaver: arXiv 2504.14145. DistTrain: arXiv 2408.04275.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Method = Literal["Megatron-LM", "Megatron-LM balanced", "Optimus"]


class Figure(NamedTuple):
    """Published value."""

    source: str
    """Paper, table or section, row, column."""
    value: float
    unit: str


# --- Optimus --------------------------------------------------------------------------------------

OPTIMUS_PEAK_FLOPS = Figure("Optimus table 5, implied by MFU and PFLOP/s", 989e12, "FLOP/s")
OPTIMUS_STEP = Figure("Optimus table 1, training step", 5.12, "s")


class Bubble(NamedTuple):
    """Row of Optimus table 1."""

    share: Figure
    duration: Figure


OPTIMUS_BUBBLES = {
    name: Bubble(
        Figure(f"Optimus table 1, {row}, percentage", share, ""),
        Figure(f"Optimus table 1, {row}, total time", seconds, "s"),
    )
    for name, row, share, seconds in (
        ("dp_all_gather", "DP bubble (all-gather)", 0.033, 0.167),
        ("dp_reduce_scatter", "DP bubble (reduce-scatter)", 0.089, 0.458),
        ("pp_warmup", "PP bubbles (warmup)", 0.050, 0.291),
        ("pp_cooldown", "PP bubbles (cooldown)", 0.092, 0.471),
        ("pp_other", "PP bubbles (other)", 0.087, 0.445),
        ("tp", "TP bubble", 0.112, 0.585),
    )
}
"""Values for "more than 3,000" GPUs, ViT and GPT over 100 B. The text has "over 48 %" in total."""

OPTIMUS_SMALL = {
    method: Figure(f"Optimus table 4, {method}", seconds, "s")
    for method, seconds in (
        ("Alpa", 8.61), ("FSDP", 3.20), ("Megatron-LM", 3.42),
        ("Megatron-LM balanced", 3.04), ("Optimus", 2.78),
    )
}  # fmt: skip
"""ViT-3B + GPT-11B, 8 A100, batch 16. Table 10 prints them again."""


class StrongScaling(NamedTuple):
    """Row of Optimus table 5."""

    seconds: Figure
    mfu: Figure
    flops_per_s: Figure


def _strong_scaling() -> dict[tuple[Method, int], StrongScaling]:
    printed: dict[Method, list[tuple[float, float, float]]] = {
        "Megatron-LM": [(10.65, 0.316, 480.7), (8.26, 0.306, 619.8), (5.91, 0.285, 866.3)],
        "Megatron-LM balanced": [(10.43, 0.323, 490.9), (8.06, 0.313, 635.2), (5.87, 0.287, 872.2)],
        "Optimus": [(9.80, 0.344, 522.4), (7.29, 0.346, 702.3), (4.87, 0.346, 1051.3)],
    }
    rows = {}
    for method, cells in printed.items():
        for gpus, (seconds, mfu, petaflops) in zip(STRONG_SCALING_GPUS, cells, strict=True):
            source = f"Optimus table 5, {method}, {gpus} GPUs"
            rows[method, gpus] = StrongScaling(
                Figure(f"{source}, iteration time", seconds, "s"),
                Figure(f"{source}, MFU", mfu, ""),
                Figure(f"{source}, aggregate", petaflops * 1e15, "FLOP/s"),
            )
    return rows


STRONG_SCALING_GPUS = (1536, 2048, 3072)
STRONG_SCALING_BATCH = 1536
OPTIMUS_STRONG_SCALING = _strong_scaling()
"""ViT-22B + GPT-175B. The text and table 7 print 3172 for 3072."""

OPTIMUS_SPEEDUPS = {
    gpus: Figure(f"Optimus table 5, Optimus, {gpus} GPUs, speedup", value, "x")
    for gpus, value in zip(STRONG_SCALING_GPUS, (1.06, 1.11, 1.21), strict=True)
}
"""Speedups over Megatron-LM balanced."""

OPTIMUS_MAX_SPEEDUP: dict[Method, Figure] = {
    "Megatron-LM": Figure("Optimus figure 15, most over Megatron-LM", 1.22, "x"),
    "Megatron-LM balanced": Figure("Optimus figure 15, most over balanced", 1.18, "x"),
}
"""Over models A to D; the times of each are in the figure only."""


OPTIMUS_TWO_ENCODERS = {
    name: Figure(f"Optimus figure 16, {name}, most over Megatron-LM", value, "x")
    for name, value in (
        ("DualEnc(11B, 5B)", 1.25), ("DualEnc(22B, 5B)", 1.26), ("DualEnc(22B, 11B)", 1.27),
    )
}  # fmt: skip
"""Values in the text of section 5.2.3; only the figure has the times."""

OPTIMUS_MEMORY_OVERHEAD = Figure(
    "Optimus figure 17, maximum over the baseline with the lowest memory", 0.12, ""
)


class Scheduler(NamedTuple):
    """Row of Optimus table 7."""

    microbatches: int
    coarse: Figure
    fine: Figure
    runtime: Figure


OPTIMUS_SCHEDULER = {
    gpus: Scheduler(
        microbatches,
        Figure(f"Optimus table 7, {gpus} GPUs, Eff_coarse", coarse, ""),
        Figure(f"Optimus table 7, {gpus} GPUs, Eff_fine", fine, ""),
        Figure(f"Optimus table 7, {gpus} GPUs, runtime", seconds, "s"),
    )
    for gpus, microbatches, coarse, fine, seconds in (
        (1536, 32, 0.343, 0.575, 322.2),
        (2048, 24, 0.458, 0.693, 89.6),
        (3072, 16, 0.687, 0.850, 15.1),
    )
}

# --- PipeWeaver -----------------------------------------------------------------------------------


class PartitionExample(NamedTuple):
    """PipeWeaver section 2.2: a ViT of 5 B and an LM of 32 B on 16 stages."""

    encoder_layers: int
    encoder_layer_ms: float
    llm_layers: int
    llm_layer_ms: float
    stages: int
    shortest: Figure
    longest: Figure
    variation: Figure


PIPEWEAVER_PARTITION = PartitionExample(
    64, 6.75, 64, 10.5, 16,
    Figure("PipeWeaver section 2.2, shortest stage", 63.0, "ms"),
    Figure("PipeWeaver section 2.2, longest stage", 73.5, "ms"),
    Figure("PipeWeaver section 2.2, variation", 0.167, ""),
)  # fmt: skip

PIPEWEAVER_PEAK_FLOPS = 989e12
"""Peak of an H800, which is not in the paper."""


class Imbalance(NamedTuple):
    """Row of PipeWeaver table 1 (8 GPUs)."""

    seconds: float
    flops: float
    mfu: Figure


PIPEWEAVER_IMBALANCE = {
    row: Imbalance(seconds, flops, Figure(f"PipeWeaver table 1, {row}, MFU", mfu, ""))
    for row, seconds, flops, mfu in (
        ("LM 7B", 4.068, 12.8e15, 0.400),
        ("ViT 2B + LM 5B (static)", 4.567, 12.7e15, 0.351),
        ("ViT 2B + LM 5B (dynamic)", 6.789, 12.8e15, 0.239),
    )
}
PIPEWEAVER_OVERHEADS = {
    "ViT 2B + LM 5B (static)": Figure("PipeWeaver section 2.3, overhead, static", 0.125, ""),
    "ViT 2B + LM 5B (dynamic)": Figure("PipeWeaver section 2.3, overhead, dynamic", 0.403, ""),
}


class Ablation(NamedTuple):
    """Row of PipeWeaver table 5 (VLM-S)."""

    seconds: Figure
    gain: Figure


PIPEWEAVER_ABLATION = {
    row: Ablation(
        Figure(f"PipeWeaver table 5, {row}, iteration time", seconds, "s"),
        Figure(f"PipeWeaver table 5, {row}, delta", gain, ""),
    )
    for row, seconds, gain in (
        ("Megatron-LM", 26.13, 0.0),
        ("+ partitioner", 22.27, 0.173),
        ("+ stage interleaving", 18.81, 0.389),
        ("+ module ranking", 17.61, 0.483),
        ("+ layer tuning", 16.05, 0.628),
    )
}
PIPEWEAVER_LARGE_MFU = {
    "pipeweaver_vlm_xl": Figure("PipeWeaver section 8.4, VLM-XL, MFU", 0.36, ""),
    "pipeweaver_t2v_xl": Figure("PipeWeaver section 8.4, T2V-XL, MFU", 0.39, ""),
}
"""Values by model; the text does not state the size. Figure 14 has no numbers."""
PIPEWEAVER_LARGE_GAIN = Figure("PipeWeaver section 8.4, most over baselines", 0.828, "")
PIPEWEAVER_GAINS = {
    "VLM": (
        Figure("PipeWeaver section 8.1, VLM, least over a baseline", 0.156, ""),
        Figure("PipeWeaver section 8.1, VLM, most over a baseline", 0.762, ""),
    ),
    "T2V": (
        Figure("PipeWeaver section 8.1, T2V, least over a baseline", 0.366, ""),
        Figure("PipeWeaver section 8.1, T2V, most over a baseline", 0.973, ""),
    ),
}
"""Values of figure 9a in the text."""
PIPEWEAVER_COARSE_PEAK = Figure("PipeWeaver figure 11, Optimus' peak above Megatron-LM", 0.253, "")
PIPEWEAVER_FLUCTUATION = Figure("PipeWeaver figure 11, fewer fluctuations", 0.529, "")
PIPEWEAVER_COARSE_GAIN = Figure("PipeWeaver figure 11, over Optimus", 0.122, "")
PIPEWEAVER_MIXED = Figure("PipeWeaver section 5, mixed stages over separated (figure 8)", 0.131, "")
PIPEWEAVER_GRID_MFU = Figure("PipeWeaver figure 13, MFU of the best sizes", 0.297, "")
PIPEWEAVER_GRID_BEST = (8, 4, 2)
"""Data-, pipeline- and tensor-parallel sizes."""
PIPEWEAVER_MAX_IMAGES = Figure("PipeWeaver section 8, images per sequence", 48, "images")
"""Images of 169 tokens each, in 8192 tokens."""

# --- parallel sizes -------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Data-, pipeline- and tensor-parallel sizes and their product."""

    recipe: str
    source: str
    data: int
    pipeline: int
    tensor: int
    gpus: int


PRINTED_SIZES = (
    Sizes("optimus_model_a", "Optimus table 11, Model A", 2, 4, 8, 64),
    Sizes("optimus_model_b", "Optimus table 11, Model B", 4, 4, 8, 128),
    Sizes("optimus_model_c", "Optimus table 11, Model C", 4, 8, 8, 256),
    Sizes("optimus_model_d", "Optimus table 11, Model D", 8, 8, 8, 512),
    Sizes("optimus_vit22b_gpt175b", "Optimus table 12, 1536 GPUs", 24, 8, 8, 1536),
    Sizes("optimus_vit22b_gpt175b", "Optimus table 12, 2048 GPUs", 32, 8, 8, 2048),
    Sizes("optimus_vit22b_gpt175b", "Optimus table 12, 3072 GPUs", 48, 8, 8, 3072),
    Sizes("pipeweaver_vlm_s", "PipeWeaver table 4, VLM-S", 1, 4, 4, 16),
    Sizes("pipeweaver_vlm_m", "PipeWeaver table 4, VLM-M", 1, 4, 8, 32),
    Sizes("pipeweaver_vlm_l", "PipeWeaver table 4, VLM-L", 1, 8, 8, 64),
    Sizes("pipeweaver_vlm_xl", "PipeWeaver table 6, VLM-XL-8k", 128, 8, 8, 8192),
    Sizes("pipeweaver_vlm_xl", "PipeWeaver table 6, VLM-XL-16k", 128, 16, 8, 16384),
    Sizes("pipeweaver_t2v_s", "PipeWeaver table 4, T2V-S", 1, 4, 4, 16),
    Sizes("pipeweaver_t2v_l", "PipeWeaver table 4, T2V-L", 1, 8, 8, 64),
    Sizes("pipeweaver_t2v_xl", "PipeWeaver table 6, T2V-XL-3k", 96, 4, 8, 3072),
    Sizes("pipeweaver_t2v_xl", "PipeWeaver table 6, T2V-XL-6k", 96, 8, 8, 6144),
)

# --- parameters -----------------------------------------------------------------------------------


class NamedSize(NamedTuple):
    """Parameter count in the name that a paper gives a module."""

    recipe: str
    module: str
    """Module of the recipe without its connector, which no paper describes."""
    name: Figure
    differs: str = ""
    """Reason if the printed shape differs by more than 2 %."""


def _size(recipe: str, module: str, source: str, billions: float, differs: str = "") -> NamedSize:
    return NamedSize(recipe, module, Figure(source, billions * 1e9, "parameters"), differs)


_VIT_11B = "table 8 has the same model as ViT-10B, 10 B"
_VIT_10B = "48 layers of 12 width^2 are 9.66 B"
_VIT_3B = "48 layers of 12 width^2 are 3.06 B; embeddings make it 2.1 %"
_VIT_5B = "63 layers of two matrices in the FFN are 4.28 B, of three 6.01 B"
_GPT_11B = "80 layers of 12 width^2 are 9.06 B"
_QWEN_32B = "Qwen2.5-32B itself has 32.8 B"
_DIT_30B = "48 layers of 16 width^2 (two attentions, two matrices in the FFN) are 29.0 B"
_LLAMA_7B = "Llama 2's 7 B, which has the same shape, are 6.74 B"
NAMED_SIZES = (
    _size("optimus_model_a", "vision", "Optimus table 3, ViT-11B", 11, _VIT_11B),
    _size("optimus_model_a", "vision", "Optimus table 8, ViT-10B", 10, _VIT_10B),
    _size("optimus_model_a", "llm", "Optimus table 9, LLAMA-70B", 70),
    _size("optimus_model_b", "vision", "Optimus table 8, ViT-22B", 22),
    _size("optimus_model_b", "llm", "Optimus table 9, LLAMA-70B", 70),
    _size("optimus_model_c", "vision", "Optimus table 8, ViT-10B", 10, _VIT_10B),
    _size("optimus_model_c", "llm", "Optimus table 9, GPT-175B", 175),
    _size("optimus_model_d", "vision", "Optimus table 8, ViT-22B", 22),
    _size("optimus_model_d", "llm", "Optimus table 9, GPT-175B", 175),
    _size("optimus_vit22b_gpt175b", "vision", "Optimus table 8, ViT-22B", 22),
    _size("optimus_vit22b_gpt175b", "llm", "Optimus table 9, GPT-175B", 175),
    _size("optimus_vit3b_gpt11b", "vision", "Optimus table 8, ViT-3B", 3, _VIT_3B),
    _size("optimus_vit3b_gpt11b", "llm", "Optimus table 9, GPT-11B", 11, _GPT_11B),
    _size("pipeweaver_vlm_s", "vision", "PipeWeaver table 3, ViT 5B", 5, _VIT_5B),
    _size("pipeweaver_vlm_s", "llm", "PipeWeaver table 3, Llama3 8B", 8),
    _size("pipeweaver_vlm_m", "vision", "PipeWeaver table 3, ViT 5B", 5, _VIT_5B),
    _size("pipeweaver_vlm_m", "llm", "PipeWeaver table 3, Qwen2 32B", 32, _QWEN_32B),
    _size("pipeweaver_vlm_l", "vision", "PipeWeaver table 3, ViT 22B", 22),
    _size("pipeweaver_vlm_l", "llm", "PipeWeaver table 3, Qwen2 72B", 72),
    _size("pipeweaver_vlm_xl", "vision", "PipeWeaver table 3, ViT 22B", 22),
    _size("pipeweaver_vlm_xl", "llm", "PipeWeaver table 6, GPT 175B", 175),
    _size("pipeweaver_t2v_s", "llm", "PipeWeaver table 3, Llama3 8B", 8),
    _size("pipeweaver_t2v_s", "generator", "PipeWeaver table 3, DiT 5B", 5),
    _size("pipeweaver_t2v_l", "llm", "PipeWeaver table 3, Qwen2 32B", 32, _QWEN_32B),
    _size("pipeweaver_t2v_l", "generator", "PipeWeaver table 3, DiT 30B", 30, _DIT_30B),
    _size("pipeweaver_t2v_xl", "llm", "PipeWeaver table 3, Qwen2 72B", 72),
    _size("pipeweaver_t2v_xl", "generator", "PipeWeaver table 3, DiT 30B", 30, _DIT_30B),
    _size("disttrain_mllm_9b", "vision", "DistTrain section 8, ViT-Huge", 0.63),
    _size("disttrain_mllm_9b", "llm", "DistTrain table 1, Llama3-7B", 7, _LLAMA_7B),
    _size("disttrain_mllm_9b", "generator", "DistTrain section 8, Stable Diffusion 2.1", 1),
    _size("disttrain_mllm_15b", "vision", "DistTrain section 8, ViT-Huge", 0.63),
    _size("disttrain_mllm_15b", "llm", "DistTrain table 1, Llama3-13B", 13),
    _size("disttrain_mllm_15b", "generator", "DistTrain section 8, Stable Diffusion 2.1", 1),
    _size("disttrain_mllm_72b", "vision", "DistTrain section 8, ViT-Huge", 0.63),
    _size("disttrain_mllm_72b", "llm", "DistTrain table 1, Llama3-70B", 70),
    _size("disttrain_mllm_72b", "generator", "DistTrain section 8, Stable Diffusion 2.1", 1),
)
