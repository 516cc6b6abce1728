"""Module descriptions, and steps of these modules, for tests of layouts and schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.schedules.layouts import ModuleLayers

VISION = ModuleLayers("vision", "encoder", (1.0,) * 8, sub_microbatched=True)
AUDIO = ModuleLayers("audio", "encoder", (0.5,) * 8, sub_microbatched=True)
LLM = ModuleLayers("llm", "llm", (2.0,) * 16, head_cost=1.5)
GENERATOR = ModuleLayers("generator", "generator", (1.0,) * 8, sub_microbatched=True)

MODELS = {
    "text": [LLM],
    "vision": [VISION, LLM],
    "two encoders": [VISION, AUDIO, LLM],
    "generator": [VISION, LLM, GENERATOR],
}


def with_frozen_layers(module: ModuleLayers) -> ModuleLayers:
    """Freeze a module except for its connector after the layers."""
    none = (False,) * len(module.costs)
    return replace(module, trainable=none, embedding_trainable=False)


def frozen(module: ModuleLayers) -> ModuleLayers:
    return replace(with_frozen_layers(module), head_trainable=False)


def freeze_cases(modules: Sequence[ModuleLayers]) -> dict[str, list[ModuleLayers]]:
    """Return the module lists for all freeze settings of recipes."""
    return {
        "nothing": list(modules),
        "encoder layers": [with_frozen_layers(m) if m.kind == "encoder" else m for m in modules],
        "encoders": [frozen(m) if m.kind == "encoder" else m for m in modules],
        "llm": [frozen(m) if m.kind == "llm" else m for m in modules],
        "all but connectors": [
            with_frozen_layers(m) if m.kind == "encoder" else frozen(m) for m in modules
        ],
    }


def steps(layout: StageLayout, microbatches: int, seed: int) -> Iterator[StageGraph]:
    """Yield a step with 0 to 3 sub-microbatches per microbatch and module, and one without."""
    rng = random.Random(seed)
    modules = layout.sub_microbatched
    for maximum in (3, 0):
        counts = {
            m: tuple(rng.randint(0, maximum) for _ in range(microbatches)) for m in sorted(modules)
        }
        yield StageGraph(layout, microbatches, counts)
