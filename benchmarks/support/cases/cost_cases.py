"""Models, plans and data for which predicted step times are compared with measured ones.

Calibration measures none of them, only operators. The cases have families with and without biases,
gates and query norms, frozen modules, recomputation, microbatches of real documents, and each type
of parallelism on two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from documents import Sample, load_documents, pack_documents

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig

VOCAB = 2048
SHORTEN = 4
"""Divides lengths of text in documents, as the models' sequences are that much shorter."""


@dataclass(frozen=True)
class Images:
    """An encoder's images: grids of patches to choose from, and what it takes."""

    grids: tuple[tuple[int, int], ...]
    """Rows and columns, all with the same number of patches."""
    fold: int = 1
    """Patches that become a token."""
    patch_px: int = 4
    packed: bool = False
    """Patches in a row, not images."""

    @property
    def patches(self) -> int:
        return prod(self.grids[0])

    @property
    def tokens(self) -> int:
        return self.patches // self.fold

    def pixels(self, grids: Sequence[tuple[int, int]], generator: torch.Generator) -> torch.Tensor:
        """Return random pixel values."""
        side, count = self.patch_px, len(grids)
        if self.packed:
            return torch.randn(count * self.patches, 3 * side * side, generator=generator)
        rows, columns = self.grids[0]
        return torch.randn(count, 3, rows * side, columns * side, generator=generator)


IMAGES = {
    "siglip": Images(((16, 16),), fold=16),
    "clip": Images(((10, 10),), patch_px=8),
    "siglip2": Images(((12, 12), (9, 16), (18, 8)), patch_px=8, packed=True),
}


def _llm(kind: str, width: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }


LLMS = {
    "tiny": _llm("llama", 32, 64, 2, 2),
    "llama": _llm("llama", 256, 688, 6, 8),
    "wide llama": _llm("llama", 640, 1728, 3, 10),
    "qwen2": _llm("qwen2", 320, 896, 6, 10),
    "qwen3": _llm("qwen3", 192, 512, 8, 6, head_dim=48, tie_word_embeddings=True),
    "starcoder2": _llm("starcoder2", 288, 1152, 6, 6),
}


def _tower(kind: str, width: int, ffn: int, layers: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    return {"model_type": f"{kind}_vision_model", **sizes, "num_attention_heads": 6, **more}


ENCODERS: dict[str, dict[str, Any]] = {
    "siglip": {
        "config": _tower("siglip", 192, 768, 6, image_size=64, patch_size=4),
        "connector": "pixel_shuffle_mlp",
        "pixel_shuffle_factor": 4,
    },
    "clip": {"config": _tower("clip", 264, 1024, 6, image_size=80, patch_size=8)},
    "siglip2": {"config": _tower("siglip2", 240, 640, 6, num_patches=256, patch_size=8)},
}


@dataclass(frozen=True)
class CostCase:
    """A combination of model, plan and data.

    Attributes:
        llm, encoder: Keys of LLMS and ENCODERS. None as encoder: text only.
        parallel: Parallel section of the recipe.
        tokens, microbatches: Size of a step of a data-parallel rank.
        seed: Seed of the order of documents and of values.
    """

    name: str
    llm: str
    encoder: str | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    recompute: str = "none"
    tokens: int = 512
    microbatches: int = 4
    seed: int = 0

    @property
    def config(self) -> ParallelConfig:
        """Parallel section of the recipe."""
        return ParallelConfig.model_validate(dict(self.parallel))

    @property
    def ranks(self) -> int:
        """Number of ranks that the case needs."""
        config = self.config
        return config.pipeline * config.tensor * max(1, config.shard) * config.replicate

    @property
    def checkpointing(self) -> ActivationCheckpointConfig:
        """Mode of activation checkpointing."""
        return ActivationCheckpointConfig.model_validate({"mode": self.recompute})

    def build(self) -> MultimodalModel:
        """Return the model on the meta device."""
        encoders = {} if self.encoder is None else {"vision": ENCODERS[self.encoder]}
        sections = {"llm": {"config": LLMS[self.llm]}, "encoders": encoders}
        model = ModelConfig.model_validate(sections)
        return build_model(model, FreezeConfig(modules=list(self.freeze)))

    def step(self, replica: int) -> list[Microbatch]:
        """Return microbatches of a data-parallel rank with the committed documents, shuffled."""
        images = IMAGES[self.encoder] if self.encoder else None
        image_tokens = images.tokens if images else 1
        packs = pack_documents(load_documents(), self.tokens, image_tokens, SHORTEN, self.seed)
        selected = packs[replica * self.microbatches :][: self.microbatches]
        return [
            make_microbatch(pack, self.tokens, images, 1000 * self.seed + 100 * replica + i)
            for i, pack in enumerate(selected)
        ]


def make_microbatch(
    samples: Sequence[Sample], tokens: int, images: Images | None, seed: int
) -> Microbatch:
    """Return a microbatch with random ids and pixels for text and images, padded at the end.

    Args:
        images: Image sizes. None: text replaces images.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ids_T = torch.randint(VOCAB - 1, (tokens,), generator=generator)
    targets_T = torch.full((tokens,), IGNORE_TARGET)
    starts, grids, places, metas = [0], [], [], []
    for index, sample in enumerate(samples):
        shown: tuple[ImageMeta, ...] = ()
        text = starts[-1]
        if images is not None and sample.images:
            text += sample.images * images.tokens
            sample_grids = [rng.choice(images.grids) for _ in range(sample.images)]
            side = images.patch_px
            shown = tuple(
                ImageMeta(c * side, r * side, images.patches, images.tokens)
                for r, c in sample_grids
            )
            grids += sample_grids
            places += range(starts[-1], text)
        starts.append(starts[-1] + sample.tokens)
        targets_T[text : starts[-1] - 1] = ids_T[text + 1 : starts[-1]]
        metas.append(
            SampleMeta("gimp_help", index, sample.tokens, shown, "vision" if shown else None)
        )
    if starts[-1] < tokens:
        starts.append(tokens)
    encoders = {}
    if grids and images is not None:
        shapes = [(1, *grid) for grid in grids]
        pixels = images.pixels(grids, generator)
        encoders["vision"] = EncoderInputs(pixels, shapes, torch.tensor(places))
    positions_T = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
    meta = MicrobatchMeta(tuple(metas), tokens)
    return Microbatch(ids_T, targets_T, positions_T, starts, encoders, meta)


ONE_RANK = (
    CostCase("Llama, text", "llama", microbatches=4),
    CostCase("SigLIP + Llama", "llama", "siglip", microbatches=2),
    CostCase(
        "CLIP (frozen) + Qwen2", "qwen2", "clip", freeze=("vision",), tokens=768, microbatches=2
    ),
    CostCase(
        "SigLIP2 + Qwen3, recomputed",
        "qwen3",
        "siglip2",
        recompute="full",
        tokens=1024,
        microbatches=2,
    ),
    CostCase(
        "SigLIP + Starcoder2 (frozen), 4 images at once",
        "starcoder2",
        "siglip",
        {"vision": {"sub_microbatch_images": 4}},
        freeze=("llm",),
        tokens=384,
        microbatches=3,
    ),
    CostCase("wide Llama, text", "wide llama", tokens=1024, microbatches=2),
    CostCase(
        "SigLIP2 + Qwen2, selective", "qwen2", "siglip2", recompute="selective", microbatches=3
    ),
)
TINY = (
    CostCase("tiny", "tiny", tokens=64, microbatches=2),
    CostCase("tiny, 1F1B", "tiny", None, {"pipeline": 2}, tokens=64, microbatches=2),
)
"""For tests."""
TWO_RANKS = (
    CostCase("Llama, text, 1F1B", "llama", None, {"pipeline": 2}, microbatches=6),
    CostCase(
        "SigLIP + Llama, GPipe", "llama", "siglip", {"pipeline": 2, "schedule": "gpipe"}, tokens=384
    ),
    CostCase(
        "SigLIP + Llama, separated",
        "llama",
        "siglip",
        {"pipeline": 2, "schedule": "separated", "vision": {"sub_microbatch_images": 4}},
    ),
    CostCase(
        "CLIP + Qwen2, Megatron balanced",
        "qwen2",
        "clip",
        {"pipeline": 2, "schedule": "megatron_balanced"},
        tokens=768,
    ),
    CostCase(
        "Starcoder2, text, zero bubble",
        "starcoder2",
        None,
        {"pipeline": 2, "schedule": "zero_bubble"},
        microbatches=6,
    ),
    CostCase(
        "SigLIP2 + Llama, interleaved, recomputed",
        "llama",
        "siglip2",
        {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
        recompute="full",
        tokens=384,
    ),
    CostCase("SigLIP + Llama, tensor 2", "llama", "siglip", {"tensor": 2}, microbatches=2),
    CostCase(
        "CLIP + Qwen2, tensor 2, sequence parallel",
        "qwen2",
        "clip",
        {"tensor": 2, "sequence_parallel": True},
        microbatches=2,
    ),
    CostCase("SigLIP + Llama, FSDP2 by layer", "llama", "siglip", {"shard": 2}, microbatches=2),
    CostCase(
        "CLIP (frozen) + wide Llama, FSDP2 by step",
        "wide llama",
        "clip",
        {"shard": 2, "reshard_after_forward": "never"},
        freeze=("vision",),
        microbatches=2,
    ),
)
