"""Modules, and steps of them, for tests of layouts and schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.schedules.layouts import ModuleLayers

VISION = ModuleLayers("vision", "encoder", (1.0,) * 8, sub_microbatched=True)
AUDIO = ModuleLayers("audio", "encoder", (0.5,) * 8, sub_microbatched=True)
LLM = ModuleLayers("llm", "llm", (2.0,) * 16, post_cost=1.5)
GENERATOR = ModuleLayers("generator", "generator", (1.0,) * 8, sub_microbatched=True)

MODELS = {
    "text": [LLM],
    "vision": [VISION, LLM],
    "two encoders": [VISION, AUDIO, LLM],
    "generator": [VISION, LLM, GENERATOR],
}


def tower_frozen(module: ModuleLayers) -> ModuleLayers:
    """All but what stands behind the layers: an encoder's connector."""
    none = (False,) * len(module.costs)
    return replace(module, trainable=none, pre_trainable=False)


def frozen(module: ModuleLayers) -> ModuleLayers:
    return replace(tower_frozen(module), post_trainable=False)


def freezing(modules: Sequence[ModuleLayers]) -> dict[str, list[ModuleLayers]]:
    """The ways recipes freeze."""
    return {
        "nothing": list(modules),
        "towers": [tower_frozen(m) if m.kind == "encoder" else m for m in modules],
        "encoders": [frozen(m) if m.kind == "encoder" else m for m in modules],
        "llm": [frozen(m) if m.kind == "llm" else m for m in modules],
        "all but connectors": [
            tower_frozen(m) if m.kind == "encoder" else frozen(m) for m in modules
        ],
    }


def steps(layout: StageLayout, microbatches: int, seed: int) -> Iterator[StageGraph]:
    """A step with 0..3 sub-microbatches per microbatch and module, and one with none at all."""
    rng = random.Random(seed)
    modules = layout.sub_microbatched
    for most in (3, 0):
        counts = {
            m: tuple(rng.randint(0, most) for _ in range(microbatches)) for m in sorted(modules)
        }
        yield StageGraph(layout, microbatches, counts)
