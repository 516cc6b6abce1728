"""One training step of every family, packed, against Hugging Face's own model on padded samples.

Both sides begin with the same weights, see the same captions (composites: with their images) and do
a forward, a backward, clipping and AdamW in float32. Ours gets the samples packed into one row;
Hugging Face's model gets them padded to the longest, with labels, and gives its own loss. Losses
are compared before anything is timed. The models are small and have random weights: what is shown
is that no family falls behind its own implementation, not how fast large models are. So that a
table of embeddings does not outweigh all layers, token ids are numbered anew among those in use.
Rows of families that were not run stay in the file: the whole takes minutes, and can be cut.
The last rows ("patch embedding") compare Qwen's convolution over patches with the matrix product
that takes its place.

    python benchmarks/families.py [--quick] [--json FILE] [--families NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
import transformers
from support.captions import Captions, load_captions
from support.cases.family_cases import FULL, IMAGE_PX, QUICK, Family, families
from support.cases.patch_cases import PATCH_EMBEDDING, patch_rows
from support.harness import (
    Row,
    describe_machine,
    kept_rows,
    make_parser,
    report,
    time_pairs,
    write_rows,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.data.media.images import decode_rgb
from torchmm.models.families.composites.table import COMPOSITES
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

SEED = 0
TOLERANCE = 1e-4
"""Relative difference of the two losses."""
CPU = torch.device("cpu")
PAD, BEGIN, END, IMAGE, FIRST_TEXT = 0, 1, 2, 6, 7
"""Token ids; below IMAGE are those of marks around images, which no sample has."""


ALWAYS_TILED = ("llava_next", "llava_onevision")
"""Composites left out: Hugging Face's models of them know no single images."""
NOT_COMPARED = (
    *("gemma4", "mistral3", "qwen3_omni_moe_thinker"),
    *("glm4v", "glm4v_moe", "glm46v"),
)
"""Composites without a case yet; Hugging Face's models of the first three want further inputs."""


class LossMismatchError(Exception):
    """The two sides did not compute the same."""


def main() -> int:
    """Runs all families; 0 whatever the speed, 1 if the two sides' losses differ."""
    args = _parse()
    captions = load_captions(SEED)
    print(f"machine: {describe_machine(CPU)}; transformers {transformers.__version__}")
    print(f"samples: {captions.source}; seed {SEED}")
    size, count, pairs = (QUICK, 8, 2) if args.quick else (FULL, 24, 5)
    samples, vocabulary = renumbered(captions, count)
    rows = []
    try:
        for family in families(size, vocabulary, IMAGE):
            if args.families and family.name not in args.families:
                continue
            rows += compare(family, samples, args.pairs or pairs)
            if args.json is not None:  # what was measured stays, whatever ends the run
                write_rows(kept_rows(args.json, [family.name]) + rows[-3:], args.json)
    except LossMismatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.families or PATCH_EMBEDDING in args.families:
        found = patch_rows(16 if args.quick else 256, args.pairs or pairs)
        rows += found
        if args.json is not None:
            cases = {row.case for row in found}
            write_rows(kept_rows(args.json, cases) + found, args.json)
    report("A packed step against Hugging Face's padded one", rows, None)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--pairs", type=int, help="timings of each side per family")
    return parser.parse_args()


@dataclass(frozen=True)
class Sample:
    """A caption and its image."""

    ids: list[int]
    image: bytes


def renumbered(captions: Captions, count: int) -> tuple[list[Sample], int]:
    """The first samples, with the tokens that occur in them numbered from `FIRST_TEXT`; how many
    numbers there are."""
    records = captions.records[:count]
    texts = [captions.tokenizer(r["text"], add_special_tokens=False).input_ids for r in records]
    numbers = {old: FIRST_TEXT + i for i, old in enumerate(sorted({i for t in texts for i in t}))}
    samples = [
        Sample([numbers[i] for i in text], record["image"]["bytes"])
        for text, record in zip(texts, records, strict=True)
    ]
    return samples, -(-(FIRST_TEXT + len(numbers)) // 64) * 64


def compare(family: Family, samples: list[Sample], pairs: int) -> list[Row]:
    """Rows of one family.

    Raises:
        LossMismatchError: the losses on equal weights differ.
    """
    ours = _build(family)
    theirs = _plain(family, ours)
    packed, padded = _batches(family, ours, theirs, samples)
    loss = (ours(packed) / packed.target_count).item()
    expected = theirs(**padded).loss.item()
    if not abs(loss - expected) <= TOLERANCE * abs(expected):
        raise LossMismatchError(f"{family.name}: ours {loss:.6f}, Hugging Face's {expected:.6f}")
    step = _step(ours, lambda: ours(packed) / packed.target_count)
    plain = _step(theirs, lambda: theirs(**padded).loss)
    step(), plain()
    times = time_pairs(step, plain, pairs, CPU)
    positions = padded["input_ids"].numel()
    padding = 1 - len(packed.input_ids_T) / positions
    return [
        Row(family.name, "speed ratio", "x", times.speed_ratio, baseline=1.0, goal=1.0),
        Row(family.name, "CPU time ratio", "x", times.cpu_ratio, baseline=1.0, goal=1.0),
        Row(family.name, "padding", "share", 0.0, padding, better="lower"),
    ]


def _build(family: Family) -> MultimodalModel:
    if family.composite:
        config = ModelConfig(config=family.config)
    else:
        config = ModelConfig(llm=LlmConfig(config=family.config))
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, SEED)
    return model.train()


def _plain(family: Family, ours: MultimodalModel) -> PreTrainedModel:
    """Hugging Face's model with the same weights."""
    attention = family.attention
    if not family.composite:
        model = AutoModelForCausalLM.from_config(
            ours.llm.config, attn_implementation=attention, trust_remote_code=False
        )
        model.load_state_dict(ours.llm.backbone.state_dict())
        return model.train()
    assert ours.composite is not None
    kind: Any = COMPOSITES[ours.composite.model_type].kind
    model = kind._from_config(ours.composite, attn_implementation=attention)
    prefixes = hf_prefixes(ours)
    with torch.no_grad():
        for module in ours.modality_modules():
            for name, value in module.state_dict().items():
                theirs = hf_name(prefixes, module.name, name)
                assert theirs is not None, name
                model.get_parameter(theirs).copy_(value)
    return model.train()


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _batches(
    family: Family, ours: MultimodalModel, theirs: Any, samples: list[Sample]
) -> tuple[Microbatch, dict[str, Any]]:
    """The same samples, packed for ours and padded for theirs: begin, image, caption, end."""
    image = _images(ours, samples) if family.composite else None
    tokens = [0] * len(samples)
    if image is not None:
        (spec,) = ours.image_specs().values()
        tokens = [prod(grid) // spec.merge**2 + spec.extra_tokens for grid in image.grids_thw]
    ids = [
        torch.tensor([BEGIN, *[IMAGE] * count, *sample.ids, END])
        for count, sample in zip(tokens, samples, strict=True)
    ]
    packed = _pack(ids, tokens, image)
    padded = _pad(ids, tokens)
    if image is not None:
        padded |= _arguments(family, padded, image)
        if ours.text.mrope:
            packed.position_ids = _mrope(theirs, padded)
    return packed, padded


def _images(ours: MultimodalModel, samples: list[Sample]) -> EncoderInputs:
    (spec,) = ours.image_specs().values()
    settings = dict(spec.processor)
    if spec.inputs == "patches":  # any size: up to as many patches as the others have
        settings["size"] = {"shortest_edge": (IMAGE_PX // 2) ** 2, "longest_edge": IMAGE_PX**2}
    processor = getattr(transformers, f"{spec.processor_class}Pil")(**settings)
    out = processor([decode_rgb(sample.image, 10**9) for sample in samples], return_tensors="pt")
    if "image_grid_thw" in out:
        grids = [tuple(grid) for grid in out["image_grid_thw"].tolist()]
    else:
        rows = out["pixel_values"].shape[-1] // spec.patch_size_px
        grids = [(1, rows, rows)] * len(samples)
    return EncoderInputs(out["pixel_values"], grids, torch.empty(0))


def _pack(ids: list[Tensor], tokens: list[int], image: EncoderInputs | None) -> Microbatch:
    starts = [0, *accumulate(len(sample) for sample in ids)]
    targets = []
    for sample, count in zip(ids, tokens, strict=True):
        shifted = torch.roll(sample, -1)
        shifted[:count] = IGNORE_TARGET  # what follows is an image's token
        shifted[-1] = IGNORE_TARGET
        targets.append(shifted)
    encoders = {}
    if image is not None:
        places = [
            torch.arange(start + 1, start + 1 + count)
            for start, count in zip(starts, tokens, strict=False)
        ]
        encoders["vision"] = replace(image, positions_K=torch.cat(places))
    positions = torch.cat([torch.arange(len(sample)) for sample in ids])
    meta = MicrobatchMeta(samples=(), tokens=starts[-1])
    return Microbatch(torch.cat(ids), torch.cat(targets), positions, starts, encoders, meta)


def _pad(ids: list[Tensor], tokens: list[int]) -> dict[str, Any]:
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(sample) for sample in ids])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    labels = padded.masked_fill(mask == 0, IGNORE_TARGET)
    for row, count in enumerate(tokens):
        labels[row, : 1 + count] = IGNORE_TARGET
    return {"input_ids": padded, "attention_mask": mask, "labels": labels, "use_cache": False}


def _arguments(family: Family, padded: dict[str, Any], image: EncoderInputs) -> dict[str, Any]:
    """What a composite takes in addition to ids."""
    kind = family.config["model_type"]
    shown = (padded["input_ids"] == IMAGE).long()
    arguments: dict[str, Any] = {"pixel_values": image.pixels}
    if kind in ("idefics3", "smolvlm"):
        arguments["pixel_values"] = image.pixels[:, None]
    elif kind == "gemma3":
        arguments["token_type_ids"] = shown
    elif kind == "paligemma":
        arguments["token_type_ids"] = (padded["labels"] != IGNORE_TARGET).long()
    elif kind.startswith("qwen"):
        grids = torch.tensor(image.grids_thw)
        arguments |= {"image_grid_thw": grids, "mm_token_type_ids": shown.int()}
    return arguments


def _mrope(theirs: Any, padded: dict[str, Any]) -> Tensor:
    """(3, T): Hugging Face's positions, without padding."""
    mask = padded["attention_mask"]
    positions, _ = theirs.model.get_rope_index(
        padded["input_ids"],
        image_grid_thw=padded["image_grid_thw"],
        mm_token_type_ids=padded["mm_token_type_ids"],
        attention_mask=mask,
    )
    return torch.cat([positions[:, i, mask[i].bool()] for i in range(len(mask))], dim=1)


if __name__ == "__main__":
    sys.exit(main())
