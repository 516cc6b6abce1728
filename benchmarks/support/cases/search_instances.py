"""Steps like those of PipeWeaver's VLM-L, with costs and memory in round numbers.

8 pipeline ranks, 64 microbatches of one packed sequence each; sequences have no, few (1 to 12) or
many (8 to 48) images, each kind as often. Sub-microbatches have at most 12 images, so 1 to 4 per
microbatch with images. The LLM has 4 to 6 segments, the encoder 1 or 2; a full sub-microbatch takes
60 to 100 % of an LLM stage's time, sampled by seed, as the partitioner makes stages of about equal
length. The LLM's stages take those of 80 layers of 10.5 ms together; backwards take two forwards.
A task keeps memory in proportion to its forward's time.

Memory caps are multiples of what interleaved 1F1B would keep on its first rank for the LLM alone,
(V-1) P + 2 (P-1) + 1 stages' activations: loose 2, medium 1.5, tight 1.2, very tight 1. Encoders
have to share that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil

from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout

RANKS, MICROBATCHES, IMAGES_PER_PART = 8, 64, 12
LLM_MS = 10.5 * 80
LOOSE, MEDIUM, TIGHT, VERY_TIGHT = 2.0, 1.5, 1.2, 1.0


@dataclass(frozen=True)
class Instance:
    """Step to schedule."""

    seed: int
    encoder_segments: int
    llm_segments: int
    cap: float
    microbatches: int = MICROBATCHES

    @property
    def name(self) -> str:
        """Name in the results table."""
        names = {LOOSE: "loose", MEDIUM: "medium", TIGHT: "tight", VERY_TIGHT: "very tight"}
        memory = names[self.cap]
        return (
            f"{self.encoder_segments} + {self.llm_segments} segments, {memory} cap "
            f"({self.cap:g}x), seed {self.seed}"
        )

    def build(self) -> tuple[StageGraph, PlanCosts]:
        """Return the task graph and its costs."""
        rng = random.Random(self.seed)
        share = rng.uniform(0.6, 1.0)
        images = [
            rng.choice((0, rng.randint(1, 12), rng.randint(8, 48)))
            for _ in range(self.microbatches)
        ]
        counts = tuple(ceil(n / IMAGES_PER_PART) for n in images)
        modules = [
            ModuleLayers("vision", "encoder", (1.0,) * 64, sub_microbatched=True),
            ModuleLayers("llm", "llm", (1.0,) * (RANKS * self.llm_segments)),
        ]
        segments = {"vision": self.encoder_segments, "llm": self.llm_segments}
        layout = separated_layout(modules, RANKS, segments)
        graph = StageGraph(layout, self.microbatches, {"vision": counts})
        stage_ms = LLM_MS / (RANKS * self.llm_segments)
        compute, kept = {}, {}
        for task in graph.tasks():
            forward_ms = stage_ms
            if layout.stages[task.stage].module == "vision":
                total, parts = images[task.microbatch], counts[task.microbatch]
                part_images = total // parts + (task.sub_microbatch < total % parts)
                forward_ms = share * stage_ms * part_images / IMAGES_PER_PART
            compute[Action(ActionType.F, *task)] = forward_ms
            compute[Action(ActionType.B, *task)] = 2 * forward_ms
            kept[task] = round(1000 * forward_ms / stage_ms)
        in_flight = (self.llm_segments - 1) * RANKS + 2 * (RANKS - 1) + 1
        return graph, PlanCosts(
            compute,
            saved_bytes=kept,
            static_bytes=(0,) * RANKS,
            memory_limit_bytes=round(1000 * self.cap * in_flight),
        )
