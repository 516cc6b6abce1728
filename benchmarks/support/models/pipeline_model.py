"""The image-text model that pipelines are timed on, its microbatches, and cuts of its layers.

Proportions follow SmolVLM (1024 patches and 64 tokens per image, 2048 tokens per microbatch): as
many layers as there, all lengths a quarter of that, and widths such that a step takes seconds on
one core per rank and the tower takes as much of the time as it takes of SmolVLM's FLOPs (0.57 of
the 500M model's, 0.76 of the 256M model's). What microbatches contain comes from real documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

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
from torchmm.models.initialize import init_weights
from torchmm.models.layered import LayeredModule, StageRange, stage_ranges
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

SHORTEN = 4
TOKENS, IMAGE_TOKENS = 2048 // SHORTEN, 64 // SHORTEN
GRID, PATCH_PX, FOLD = 16, 4, 4
"""Patches per row and column of an image; FOLD x FOLD of them become a token."""
VOCAB = 2048
SEED = 0


@dataclass(frozen=True)
class Size:
    """Depth and width."""

    tower_layers: int
    llm_layers: int
    tower_width: int
    llm_width: int

    def build(self) -> MultimodalModel:
        """Return the full model with the same random weights on every rank."""
        tower, llm = self.tower_width, self.llm_width
        config = {
            "llm": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": llm,
                    "intermediate_size": 2 * llm,
                    "num_hidden_layers": self.llm_layers,
                    "num_attention_heads": llm // 32,
                    "num_key_value_heads": max(1, llm // 128),
                    "vocab_size": VOCAB,
                    "max_position_embeddings": 2 * TOKENS,
                    "tie_word_embeddings": False,
                }
            },
            "encoders": {
                "vision": {
                    "config": {
                        "model_type": "siglip_vision_model",
                        "hidden_size": tower,
                        "intermediate_size": 4 * tower,
                        "num_hidden_layers": self.tower_layers,
                        "num_attention_heads": tower // 32,
                        "image_size": GRID * PATCH_PX,
                        "patch_size": PATCH_PX,
                    },
                    "connector": "pixel_shuffle_mlp",
                    "pixel_shuffle_factor": FOLD,
                }
            },
        }
        model = build_model(ModelConfig.model_validate(config), FreezeConfig())
        materialize(model, "cpu")
        init_weights(model, SEED)
        return model


def load_steps(steps: int, microbatches: int) -> tuple[str, list[list[Microbatch]]]:
    """Return a description and the first steps of a run over the real documents."""
    documents = load_documents()
    packs = pack_documents(documents, TOKENS, IMAGE_TOKENS, SHORTEN, SEED)
    microbatch_list = [
        make_microbatch(pack, seed) for seed, pack in enumerate(packs[: steps * microbatches])
    ]
    return documents.source, [
        microbatch_list[i * microbatches : (i + 1) * microbatches] for i in range(steps)
    ]


def steps_of(counts: Sequence[Sequence[int]], tokens: int) -> list[list[Microbatch]]:
    """Return steps with a document per microbatch, with these numbers of images."""
    seeds = count()
    return [[make_microbatch([Sample(n, tokens)], next(seeds), tokens) for n in step]
            for step in counts]  # fmt: skip


def make_microbatch(samples: Sequence[Sample], seed: int, tokens: int = TOKENS) -> Microbatch:
    """Return a microbatch with random ids and pixels for text and images, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(VOCAB - 1, (tokens,), generator=generator)
    targets_T = torch.full((tokens,), IGNORE_TARGET)
    starts, places, metas = [0], [], []
    for index, sample in enumerate(samples):
        begin, text = starts[-1], starts[-1] + sample.images * IMAGE_TOKENS
        starts.append(begin + sample.tokens)
        places += range(begin, text)
        targets_T[text : starts[-1] - 1] = ids_T[text + 1 : starts[-1]]
        image = ImageMeta(GRID * PATCH_PX, GRID * PATCH_PX, GRID**2, IMAGE_TOKENS)
        images = (image,) * sample.images
        encoder = "vision" if images else None
        metas.append(SampleMeta("gimp_help", index, sample.tokens, images, encoder))
    if starts[-1] < tokens:
        starts.append(tokens)
    encoders, total = {}, sum(sample.images for sample in samples)
    if total:
        side = GRID * PATCH_PX
        pixels = torch.randn(total, 3, side, side, generator=generator)
        encoders["vision"] = EncoderInputs(pixels, [(1, GRID, GRID)] * total, torch.tensor(places))
    positions_T = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
    meta = MicrobatchMeta(tuple(metas), tokens)
    return Microbatch(ids_T, targets_T, positions_T, starts, encoders, meta)


def stages_of_rank(
    model: MultimodalModel, layout: StageLayout, rank: int
) -> dict[int, LayeredModule]:
    """Return stages by index, as views of a full model, so that layouts can share its weights."""
    views: dict[int, LayeredModule] = {}
    for module in model.modality_modules():
        stages = [stage for stage in layout.stages if stage.module == module.name]
        ranges = stage_ranges([(stage.start, stage.stop) for stage in stages])
        for stage, part in zip(stages, ranges, strict=True):
            if rank in stage.ranks:
                views[stage.index] = module.stage_view(part)
    return views


def views_of_chain(
    model: MultimodalModel, start: int, stop: int
) -> tuple[LayeredModule | None, LayeredModule | None]:
    """Return the tower part and the LLM part of layers [start, stop) of the encoder and the LLM.

    The stage with the last layer of the tower also has the embedding of the LLM.
    """
    vision, llm = model.modality_modules()
    depth, last = len(vision.layers), len(vision.layers) + len(llm.layers)
    parts: list[LayeredModule | None] = [None, None]
    if start < depth:
        end = min(stop, depth)
        parts[0] = vision.stage_view(StageRange(start, end, start == 0, end == depth))
    if stop >= depth:
        begin = max(start - depth, 0)
        embeds = start < depth
        parts[1] = llm.stage_view(StageRange(begin, stop - depth, embeds, stop == last))
    return parts[0], parts[1]
