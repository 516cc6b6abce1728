"""Compare a packed training step of every model type with Hugging Face on padded samples.

    python benchmarks/families.py [--quick] [--json FILE] [--families NAME ...]

Both programs start with the same weights, use the same captions (with images, or noise as audio)
and run forward, backward, gradient clipping and AdamW in float32. torchmm packs the samples into
one sequence. Hugging Face pads them to the longest and computes its own loss. Losses are compared
before timing. Models are small with random weights, so the results do not predict large models.
Token ids are renumbered among those in use, so that embeddings do not dominate. Rows of model types
that were not run stay in the JSON file. The last rows ("patch embedding") compare the convolution
over patches of Qwen with the matmul that torchmm uses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from support.captions import load_captions
from support.cases.family_batches import Sample, batches, renumbered
from support.cases.family_cases import FULL, QUICK, START, Family, families
from support.cases.family_models import build_family
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

from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.multimodal import MultimodalModel

SEED = 0
TOLERANCE = 1e-4
"""Relative difference of the two losses."""
CPU = torch.device("cpu")


class LossMismatchError(Exception):
    """Different losses of torchmm and the baseline."""


def main() -> int:
    """Run all model types and return 1 if losses differ, else 0."""
    args = _parse()
    captions = load_captions(SEED)
    print(f"machine: {describe_machine(CPU)}; transformers {transformers.__version__}")
    print(f"samples: {captions.source}; seed {SEED}")
    size, count, pairs = (QUICK, 8, 2) if args.quick else (FULL, 24, 5)
    samples, vocabulary = renumbered(captions, count)
    rows = []
    try:
        for family in families(size, vocabulary):
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
    report("Training step: packed torchmm and padded Hugging Face", rows, None)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--families", nargs="+", metavar="NAME", help="model types to measure (default: all)"
    )
    parser.add_argument("--pairs", type=int, help="timed pairs per model type")
    return parser.parse_args()


def compare(family: Family, samples: list[Sample], pairs: int) -> list[Row]:
    """Return the rows of one family.

    Raises:
        LossMismatchError: the losses on equal weights differ.
    """
    ours = build_family(family)
    theirs = _plain(family, ours)
    packed, padded = batches(ours, samples)
    loss = (ours(packed) / packed.target_count).item()
    expected = theirs(**padded).loss.item()
    if not abs(loss - expected) <= TOLERANCE * abs(expected):
        raise LossMismatchError(
            f"{family.name}: loss {loss:.6f} (torchmm), {expected:.6f} (Hugging Face)"
        )
    step = _step(ours, lambda: ours(packed) / packed.target_count)
    plain = _step(theirs, lambda: theirs(**padded).loss)
    step(), plain()
    times = time_pairs(step, plain, pairs, CPU)
    positions = padded["input_ids"].numel()
    padding = 1 - len(packed.input_ids_T) / positions
    return [
        Row(family.name, "speedup", "x", times.speed_ratio, baseline=1.0, goal=1.0),
        Row(family.name, "CPU time ratio", "x", times.cpu_ratio, baseline=1.0, goal=1.0),
        Row(family.name, "padding", "fraction", 0.0, padding, better="lower"),
    ]


def _plain(family: Family, ours: MultimodalModel) -> PreTrainedModel:
    """Return the Hugging Face model with the same weights."""
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
    if "omni" in family.name:
        model.config.vision_start_token_id = START  # in published configs, not in the class
    prefixes = hf_prefixes(ours)
    weights = {
        str(hf_name(prefixes, module.name, name)): value
        for module in ours.modality_modules()
        for name, value in module.state_dict().items()
    }
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
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


if __name__ == "__main__":
    sys.exit(main())
