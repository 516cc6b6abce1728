"""Training steps that `benchmarks/one_gpu.py` measures: recipes, goals, published anchors, batches.

Weights are random and images are made on the machine, so a case needs neither files nor a network.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.one_gpu.inputs import encoder_inputs, text_microbatch
from torchmm.common.batch import IGNORE_TARGET, ImageMeta, Microbatch, MicrobatchMeta, SampleMeta
from torchmm.data.loader import StepBatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[3]
BATCHES = 4
LARGE_BYTES = 100 * 2**30
"""Device memory from which a card counts as an H200."""
IMAGE_TOKEN = 151_655
QWEN3_1_7B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = QWEN3_1_7B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_5_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
SO400M = {
    # google/siglip2-so400m-patch14-224
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "depth": 2,
    "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 64, "image_size": 28,
    "deepstack_visual_indexes": [0, 1], "mrope_section": [4, 2, 2], "image_token_id": 500,
    "image_token_index": 500, "video_token_id": 501, "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}  # fmt: skip
"""Values of `--small`, for the keys that a config has."""


class Goal(NamedTuple):
    """Required value and goal of a metric."""

    metric: str
    must: float
    aim: float


class Images(NamedTuple):
    """Images of a case.

    Attributes:
        patches: patches per image that the encoder reads.
        tokens: tokens per image in the LLM sequence.
        share: fraction of the tokens that are image tokens, on average.
    """

    patches: int
    tokens: int
    share: float


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        settings: recipe tables, merged over `COMMON`.
        segments: lengths of the samples of a packed sequence, in tokens.
        sequences: packed sequences per microbatch.
        microbatches: microbatches per step.
        goals: for a card of 80 GB.
        large_goals: for a card of 141 GB. If empty, `goals` apply.
        large_settings: further settings on a card of 141 GB.
        anchor: published figure, for the table.
        composite: zoo recipe whose model section is used.
    """

    name: str
    settings: Mapping[str, Any]
    segments: tuple[int, ...]
    sequences: int = 1
    microbatches: int = 4
    images: Images | None = None
    goals: tuple[Goal, ...] = ()
    large_goals: tuple[Goal, ...] = ()
    large_settings: Mapping[str, Any] = field(default_factory=dict)
    anchor: str = ""
    composite: str = ""

    @property
    def lora(self) -> bool:
        """Return True if adapters are trained."""
        return "adapters" in self.settings

    def recipe(self, folder: Path, device: torch.device, changes: Mapping[str, Any]) -> Recipe:
        """Return the recipe of the case with further settings.

        Args:
            folder: parent of the run directory.
            changes: recipe tables.
        """
        sequence = sum(self.segments)
        sizes = {
            "sequence_length": sequence,
            "microbatch_size": self.sequences,
            "global_batch_size": self.sequences * self.microbatches,
            "device": device.type,
        }
        table = _merged(COMMON, {"output_dir": str(folder), "training": sizes})
        if self.composite:
            model = load_recipe(ROOT / "recipes" / "zoo" / self.composite).recipe.model
            table = _merged(table, {"model": {"config": model.config}})
        large = self.large_settings if is_large(device) else {}
        for more in (self.settings, large, changes):
            table = _merged(table, more)
        return Recipe.model_validate(table)

    def goals_of(self, device: torch.device) -> tuple[Goal, ...]:
        """Return the goals on this card."""
        return self.large_goals if self.large_goals and is_large(device) else self.goals

    def small(self) -> Case:
        """Return the case with tiny sizes."""
        images = self.images and Images(4, 4 if self.images.tokens == 256 else 1, 0.3)
        segments = tuple(max(24, length // 64) for length in self.segments)
        settings = _shrink(_merged({}, self.settings))
        if self.composite:
            model = load_recipe(ROOT / "recipes" / "zoo" / self.composite).recipe.model
            settings = _merged({"model": {"config": _shrink(model.config or {})}}, settings)
        return replace(self, settings=settings, segments=segments, microbatches=2, images=images,
                       composite="")  # fmt: skip

    def metas(self, seed: int) -> list[MicrobatchMeta]:
        """Return the sizes of a step."""
        rng = random.Random(f"{self.name} {seed}")
        return [
            MicrobatchMeta(
                tuple(
                    self._sample(rng, i, length)
                    for i, length in enumerate(self.segments * self.sequences)
                ),
                sum(self.segments) * self.sequences,
            )
            for _ in range(self.microbatches)
        ]

    def _sample(self, rng: random.Random, index: int, length: int) -> SampleMeta:
        if self.images is None:
            return SampleMeta("synthetic", index, length)
        patches, tokens, share = self.images
        count = round(length * share / tokens) + rng.choice((-1, 0, 1))
        count = max(1, min(count, (length - 8) // tokens))
        images = (ImageMeta(224, 224, patches, tokens),) * count
        return SampleMeta("synthetic", index, length, images, "vision")

    def batches(self, model: MultimodalModel, device: torch.device) -> list[StepBatch]:
        """Return steps with random ids and images, in page-locked memory for a GPU."""
        torch.manual_seed(0)
        found = []
        for seed in range(BATCHES):
            microbatches = [make_microbatch(model, meta) for meta in self.metas(seed)]
            if device.type == "cuda":
                microbatches = [microbatch.pin_memory() for microbatch in microbatches]
            found.append(StepBatch(microbatches, {}))
        return found


def make_microbatch(model: MultimodalModel, meta: MicrobatchMeta) -> Microbatch:
    """Return a microbatch of these sizes on the CPU: targets are the next tokens of the text."""
    made = text_microbatch(model, meta, torch.device("cpu"))
    image_token = image_token_of(model)
    ids_T = made.input_ids_T % image_token
    is_image_T = torch.zeros(len(ids_T), dtype=torch.bool)
    encoders = {}
    for name, inputs in made.encoders.items():
        pixels = encoder_inputs(model.encoders[name], meta, torch.device("cpu"))
        encoders[name] = replace(pixels, positions_K=inputs.positions_K)
        is_image_T[inputs.positions_K] = True
    ids_T[is_image_T] = image_token
    targets_T = torch.full_like(ids_T, IGNORE_TARGET)
    for start, stop in pairwise(made.cu_seqlens):
        following = ids_T[start + 1 : stop].clone()
        following[is_image_T[start + 1 : stop]] = IGNORE_TARGET
        targets_T[start : stop - 1] = following
    return replace(
        made,
        input_ids_T=ids_T,
        targets_T=targets_T,
        position_ids=made.position_ids.contiguous(),  # expanded tensors cannot be page-locked
        encoders=encoders,
        target_positions_L=None,
    )


def image_token_of(model: MultimodalModel) -> int:
    """Return the id of image positions; the last id of the vocabulary if the model has none."""
    config = model.composite
    for key in ("image_token_id", "image_token_index"):
        if config is not None and getattr(config, key, None) is not None:
            return int(getattr(config, key))
    return int(model.llm.text_config.vocab_size) - 1


def is_large(device: torch.device) -> bool:
    """Return True if the card has more memory than an H100."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).total_memory > LARGE_BYTES)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in over.items():
        below = found.get(key)
        nested = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = _merged(below, value) if nested else value
    return found


def _shrink(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _shrink(value) if isinstance(value, Mapping) else SMALL.get(key, value)
        for key, value in table.items()
    }


COMMON: dict[str, Any] = {
    "name": "one_gpu",
    "data": {"workers": 0, "reorder": "none"},
    "parallel": {"slow_rank_threshold": 0, "pipeline": 1},
    "optimizer": {"lr": 1e-5, "lr_schedule": "constant"},
    "training": {"dtype": "bfloat16", "steps": 1_000_000},
    "checkpoint": {"resume": "none", "interval": 0, "export_hf": False},
    "validation": {"interval": 0},
    "metrics": {"timeline_step": 0, "html_report": False},
    "simulation": {"device": "h100"},
}
LORA: dict[str, Any] = {
    "adapters": {"llm": {"modules": ["llm"], "rank": 16, "alpha": 32.0}},
    "training": {"parameter_dtype": "bfloat16"},
}
IMAGES_441 = Images(1764, 441, 0.5)
SMALL_VLM = Case(
    "SigLIP2-so400m + Qwen3-1.7B",
    {
        "model": {
            "config": {
                "model_type": "llava", "vision_config": SO400M, "text_config": QWEN3_1_7B,
                "image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full", "tie_word_embeddings": True,
            }
        }
    },
    segments=(1024, 3072, 2048, 2048),
    images=Images(256, 256, 0.625),
    goals=(Goal("MFU", 38, 45),),
    anchor="over 15,000 tokens/s for a 2B model with a frozen encoder",
)  # fmt: skip
VL_LORA = Case(
    "Qwen3-VL-8B LoRA",
    _merged(LORA, {"freeze": {"modules": ["vision", "vision.connector"]}}),
    segments=(2048, 2048), sequences=2, images=IMAGES_441, composite="qwen3_vl_8b.toml",
    microbatches=2, goals=(Goal("MFU", 34, 40),),
    anchor="none published; full training on 16 GH200: 38 %",
)  # fmt: skip
TEXT_LORA_7B = Case(
    "Qwen2.5-7B LoRA", _merged(LORA, {"model": {"llm": {"config": QWEN2_5_7B}}}),
    segments=(4096,), sequences=2, microbatches=2, goals=(Goal("tokens/s", 12_700, 14_110),),
    anchor="14,110 tokens/s on one H100 (NeMo Automodel, mock data)",
)  # fmt: skip
TEXT_LORA_8B = Case(
    "Qwen3-8B LoRA", _merged(LORA, {"model": {"llm": {"config": QWEN3_8B}}}),
    segments=(768, 1280), sequences=4, microbatches=2, goals=(Goal("tokens/s", 8_900, 11_500),),
    anchor="8,429 tokens/s on one H100 (Megatron-Bridge, real packed data)",
)  # fmt: skip
TEXT_1_7B = Case(
    "Qwen3-1.7B", {"model": {"llm": {"config": QWEN3_1_7B}}},
    segments=(4096,), sequences=2, goals=(Goal("MFU", 42, 48),),
    anchor="51.8 % for 8B on 16 H100 (Megatron-Bridge)",
)  # fmt: skip
VL_FULL = Case(
    "Qwen3-VL-8B, all parameters",
    {
        "model": {"chunked_loss": True},
        "training": {"parameter_dtype": "bfloat16"},
        "optimizer": {"state_dtype": "int8", "offload": True},
        "activation_checkpoint": {"mode": "full"},
    },
    segments=(2048, 2048), sequences=2, images=IMAGES_441, composite="qwen3_vl_8b.toml",
    goals=(Goal("MFU", 30, 34),), large_goals=(Goal("MFU", 36, 40),),
    large_settings={"optimizer": {"offload": False}, "model": {"chunked_loss": False}},
    anchor="full training on 16 GH200: 38 %",
)  # fmt: skip
VL_KEPT = replace(
    VL_FULL, name="Qwen3-VL-8B, all parameters, nothing recomputed", goals=(), large_goals=(),
    large_settings={"optimizer": {"offload": False}, "activation_checkpoint": {"mode": "none"}},
)  # fmt: skip
FLOAT8 = Case(
    "12 layers of Qwen3-8B",
    {"model": {"llm": {"config": QWEN3_8B | {"num_hidden_layers": 12}}},
     "compile": {"enabled": True}},
    segments=(8192,), microbatches=2, anchor="1.28 x (torchtitan)",
)  # fmt: skip


def large_cases(device: torch.device) -> Iterator[Case]:
    """Return the cases of part "large", the most valuable first."""
    yield from (VL_LORA, TEXT_LORA_7B, TEXT_1_7B, VL_FULL, TEXT_LORA_8B)
    if is_large(device):
        yield VL_KEPT
