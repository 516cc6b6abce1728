"""Measure text generation in tokens per second, compared with Hugging Face `generate`.

    python benchmarks/generation.py [--quick] [--json FILE] [--cases NAME ...]

Both programs have the same weights: the Hugging Face model is loaded from the torchmm export.
Prompts are random tokens. Decoding is greedy without an end token, and both programs have to
generate the same tokens. A run includes the prompts. Pairs are interleaved; ratios are medians over
pairs.

    one prompt          64 tokens
    eight prompts       16 to 128 tokens; Hugging Face pads on the left
    images              four prompts with one image each
    hybrid              one prompt for a model of delta nets and attention
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from support.harness import PairedTimes, Row, run_cases, time_pairs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.extensions.evaluation.text.generate import generate_tokens
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.models.build import build_model
from torchmm.models.hf.export import export_hf
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.pipeline import unsplit_pipeline

SEED = 0
CPU = torch.device("cpu")
GOAL = 1.0
"""Of Hugging Face's speed."""
NEW_TOKENS = {"full": 256, "quick": 48, "tiny": 6}
PAIRS = {"full": 7, "quick": 3, "tiny": 1}
PAIRS_WITHOUT_CACHE = {"full": 3, "quick": 1, "tiny": 1}
"""Without a cache, every token needs the full text, so fewer pairs are timed."""
WIDTHS = {"full": 384, "quick": 192, "tiny": 32}
LAYERS = {"full": 8, "quick": 4, "tiny": 2}
VOCABULARY = 8192
IMAGE_TOKEN = 8191
PATCHES = 16
"""Of an image, each of which is a token."""


@dataclass(frozen=True)
class Workload:
    """Workload of text generation."""

    config: dict[str, Any]
    """`[model]`, without sizes of layers."""
    lengths: Sequence[int]
    """Words of each prompt."""
    pictures: bool = False


_LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
_HYBRID = {
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_TOWER = {
    "model_type": "siglip_vision_model",
    "image_size": 56,
    "patch_size": 14,
    "num_attention_heads": 8,
}
WORKLOADS = {
    "one prompt": Workload(_LLAMA, [64]),
    "eight prompts": Workload(_LLAMA, [16, 32, 48, 64, 80, 96, 112, 128]),
    "images": Workload(_LLAMA, [8, 16, 24, 32], pictures=True),
    "hybrid": Workload(_HYBRID, [64]),
}


def main() -> None:
    """Measure the cases that the command line names."""
    for name, value in {"HF_HUB_OFFLINE": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    transformers.logging.set_verbosity_error()
    start_process_group(ParallelConfig(backend="gloo"), CPU)
    mesh = build_mesh(ParallelConfig(), CPU)

    def rows_of(name: str) -> Callable[[str], Iterator[list[Row]]]:
        return lambda size: iter([case_rows(name, size, mesh)])

    try:
        run_cases(
            "Text, tokens per second",
            __doc__,
            {name: rows_of(name) for name in WORKLOADS},
            f"random weights and prompts, seed {SEED}; float32; Hugging Face with sdpa",
        )
    finally:
        dist.destroy_process_group()


def case_rows(name: str, size: str, mesh: ParallelMesh) -> list[Row]:
    """Return the rows of a case.

    Raises:
        ValueError: torchmm and the baseline generate different tokens.
    """
    workload = WORKLOADS[name]
    new = NEW_TOKENS[size]
    model = make_model(workload, size)
    prompts = [make_prompt(workload, number) for number in range(len(workload.lengths))]
    with tempfile.TemporaryDirectory() as scratch:
        theirs = hugging_faces(model, Path(scratch))
    pipeline = unsplit_pipeline(model, mesh, torch.float32)
    again = unsplit_pipeline(model, mesh, torch.float32)
    again.caches_tokens = False
    sampling = Sampling(max_new_tokens=new)

    def cached() -> list[list[int]]:
        return generate_tokens(pipeline, prompts, mesh, sampling, ())

    def uncached() -> list[list[int]]:
        return generate_tokens(again, prompts, mesh, sampling, ())

    inputs = padded(prompts)

    def by_hugging_face() -> list[list[int]]:
        return written_by(theirs, inputs, new)

    texts = {"cache": cached(), "no cache": uncached(), "Hugging Face": by_hugging_face()}
    if texts["cache"] != texts["Hugging Face"] or texts["cache"] != texts["no cache"]:
        raise ValueError(f"{name}: torchmm and the baseline generate different tokens: {texts}")
    against = time_pairs(cached, by_hugging_face, PAIRS[size], CPU)
    without = time_pairs(cached, uncached, PAIRS_WITHOUT_CACHE[size], CPU)
    return _rows(f"{name}, {new} new tokens", new * len(prompts), against, without)


def _rows(case: str, tokens: int, against: PairedTimes, without: PairedTimes) -> list[Row]:
    ours = tokens / against.median_ours_s
    theirs = tokens / against.median_baseline_s
    alone = tokens / without.median_baseline_s
    return [
        Row(case, "throughput, Hugging Face generate", "tokens/s", ours, theirs),
        Row(case, "speedup over Hugging Face", "x", against.speed_ratio, goal=GOAL),
        Row(case, "CPU time ratio to Hugging Face", "x", against.cpu_ratio),
        Row(case, "throughput, no KV cache", "tokens/s", tokens / without.median_ours_s, alone),
        Row(case, "speedup over no KV cache", "x", without.speed_ratio, goal=GOAL),
    ]


def make_model(workload: Workload, size: str) -> MultimodalModel:
    """Return a model whose random weights are large enough to avoid a repeated token."""
    width = WIDTHS[size]
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS[size],
    }
    llm = {**workload.config, **sizes, "head_dim": width // 8, "vocab_size": VOCABULARY}
    if workload.config is _HYBRID:
        every = LAYERS[size]
        attends = {index for index in range(every) if index % 4 == 3} | {every - 1}
        llm["layer_types"] = [
            "full_attention" if index in attends else "linear_attention" for index in range(every)
        ]
    config: dict[str, Any] = {"llm": {"config": llm}}
    if workload.pictures:
        encoder = {"config": {**_TOWER, **sizes}, "connector": "mlp"}
        config |= {"encoders": {"vision": encoder}, "image_token": "<image>"}
    model = build_model(ModelConfig.model_validate(config), FreezeConfig())
    materialize(model, CPU)
    init_weights(model, SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


def make_prompt(workload: Workload, number: int) -> Microbatch:
    """Return random tokens, after an image if the workload has images."""
    draw = torch.Generator().manual_seed(SEED + number)
    words = workload.lengths[number]
    shown = PATCHES if workload.pictures else 0
    ids_T = torch.randint(5, IMAGE_TOKEN, (shown + words,), generator=draw)
    encoders: dict[str, EncoderInputs] = {}
    images: tuple[ImageMeta, ...] = ()
    if shown:
        ids_T[:shown] = IMAGE_TOKEN
        side = _TOWER["image_size"]
        pixels = torch.randn((1, 3, side, side), generator=draw)  # type: ignore[arg-type]
        encoders["vision"] = EncoderInputs(pixels, [(1, 4, 4)], torch.arange(shown))
        images = (ImageMeta(56, 56, PATCHES, PATCHES),)
    sample = SampleMeta("random", number, len(ids_T), images, "vision" if shown else None)
    return Microbatch(
        input_ids_T=ids_T,
        targets_T=torch.full_like(ids_T, IGNORE_TARGET),
        position_ids=torch.arange(len(ids_T)),
        cu_seqlens=[0, len(ids_T)],
        encoders=encoders,
        meta=MicrobatchMeta((sample,), len(ids_T)),
    )


def hugging_faces(model: MultimodalModel, directory: Path) -> Any:
    """Return the same model as a Hugging Face class, loaded from its export."""
    words = {"<unk>": 0, "<image>": IMAGE_TOKEN}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>"
    )
    export_hf(model, directory / "hf", tokenizer)
    kind: Any = AutoModelForCausalLM
    if model.encoders:
        kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(directory / "hf", attn_implementation="sdpa").eval()


def padded(prompts: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    """Return the inputs of the Hugging Face model, with left-padded prompts."""
    longest = max(len(prompt.input_ids_T) for prompt in prompts)
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    there_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        own = slice(longest - len(prompt.input_ids_T), longest)
        ids_BT[row, own] = prompt.input_ids_T
        there_BT[row, own] = 1
    inputs = {"input_ids": ids_BT, "attention_mask": there_BT}
    pixels = [e.pixels for prompt in prompts for e in prompt.encoders.values()]
    return {**inputs, "pixel_values": torch.cat(pixels)} if pixels else inputs


def written_by(model: Any, inputs: dict[str, torch.Tensor], new: int) -> list[list[int]]:
    """Return the highest-probability tokens of `generate` of Hugging Face."""
    with torch.no_grad():
        ids_BT = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[list[int]] = ids_BT[:, inputs["input_ids"].shape[1] :].tolist()
    return found


if __name__ == "__main__":
    main()
