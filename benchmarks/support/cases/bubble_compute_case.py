"""Bubbles filled on two ranks that compute: Hugging Face layers, one thread per rank.

All programs run the same weights on the same microbatches in the same processes. Where both ranks
have the tower, its gradients are added up at the end of each step, as FSDP2 would, and that is
timed too; so is planning. Each of the two layouts may choose: candidates are simulated with
the layers' measured speed, the best few run for real, the fastest stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from support.cases.pipeline_model_case import (
    QUIET,
    RANKS,
    TOLERANCE,
    Costs,
    OurProgram,
    ProgramChoice,
    Setting,
    gradient_difference,
)
from support.models.pipeline_model import Size, load_steps
from support.ranks import Stopwatch
from torchmm.balance.online_calibration import ActionKind, scale_durations
from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.balance.schedules import OPTIMUS_SCHEDULE
from torchmm.common.batch import Microbatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import encoder_names
from torchmm.pipelining.view.timeline import simulate_order
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig

__all__ = ["SETTINGS", "TOLERANCE", "run_rank"]
ALL = 1 << 20
"""Images of a sub-microbatch that is the full microbatch."""
SETTINGS = {
    "full": [Setting(Size(12, 32, 96, 96), runs=3, patience_s=20, images=(2, 4, 8))],
    "quick": [
        Setting(
            Size(3, 8, 96, 96), microbatches=6, steps=1, runs=2, patience_s=0, tried=1, turns=1,
            images=(4,),
        )
    ],
    "tiny": [
        Setting(
            Size(2, 2, 32, 32), microbatches=4, steps=1, runs=1, patience_s=0, tried=1, turns=1,
            images=(4,),
        )
    ],
}  # fmt: skip


def outside(order: ComputeOrder, graph: StageGraph) -> ComputeOrder:
    """Return an order with the same work on each rank and without tasks in bubbles.

    The encoder forwards of a rank come first, its encoder backwards last.
    """
    encoders = set(encoder_names(graph.layout))
    stages = graph.layout.stages
    rows = []
    for row in order:
        encoder_actions = [a for a in row if stages[a.stage].module in encoders]
        forwards = [a for a in encoder_actions if a.type is ActionType.F]
        backwards = [a for a in encoder_actions if a.type is not ActionType.F]
        llm = (a for a in row if stages[a.stage].module not in encoders)
        rows.append((*forwards, *llm, *backwards))
    return tuple(rows)


@dataclass(frozen=True)
class SeparateEncoder(ProgramChoice):
    """Stages with the encoder in separate pipelines on the LLM ranks.

    `tower_segments` is the number of encoder stages per rank, `llm_segments` that of LLM stages.

    Attributes:
        tower_ranks: Number of ranks of each encoder pipeline.
    """

    tower_ranks: int = 1

    def config(self) -> ParallelConfig:
        vision = {
            "pipeline": self.tower_ranks,
            "segments": self.tower_segments,
            "sub_microbatch_images": self.images,
        }
        settings = {"placement": "colocated", "schedule": "optimus", "vision": vision}
        settings |= {"pipeline": RANKS, "virtual_stages": self.llm_segments}
        return ParallelConfig.model_validate(settings)

    def played(
        self, graph: StageGraph, rates: Mapping[ActionKind, float], flops: Callable
    ) -> tuple[StageGraph, ComputeOrder]:
        """Return the planned schedule of a step."""
        return OPTIMUS_SCHEDULE.plan(self.config(), graph, scale_durations(flops, graph, rates))

    def __str__(self) -> str:
        return (
            f"tower on {self.tower_ranks} rank(s), {self.tower_segments} stages per rank, LLM "
            f"{self.llm_segments}, at most {self.images} images at once"
        )


@dataclass(frozen=True)
class Front(ProgramChoice):
    """The full encoder before the first LLM stage."""

    def config(self) -> ParallelConfig:
        virtual = {"pipeline": RANKS, "virtual_stages": self.llm_segments}
        return ParallelConfig.model_validate({**virtual, "schedule": "megatron"})

    def played(
        self, graph: StageGraph, rates: Mapping[ActionKind, float], flops: Callable
    ) -> tuple[StageGraph, ComputeOrder]:
        """Return the schedule of a step."""
        return graph, interleaved_1f1b(graph)

    def __str__(self) -> str:
        return f"encoder in stage 0, LLM {self.llm_segments} stages per rank"


class Program(OurProgram):
    """Steps of a choice.

    Args:
        rates: seconds per FLOP, with which steps are planned.
        fills: whether encoder work may go into bubbles.
    """

    def __init__(
        self,
        name: str,
        model: MultimodalModel,
        steps: Sequence[Sequence[Microbatch]],
        choice: ProgramChoice,
        mesh: ParallelMesh,
        rates: Mapping[ActionKind, float],
        fills: bool = True,
    ) -> None:
        super().__init__(name, model, steps, choice, mesh)
        self.rates, self.fills = rates, fills
        layout = self.pipeline.layout
        self.shared = any(len(stage.ranks) > 1 for stage in layout.stages)

    def plan(self, index: int) -> PipelinePlan:
        metas = [m.task_meta for m in self.steps[index]]
        plan = plan_pipeline_step(self.pipeline, metas, factors=self.rates)
        return plan if self.fills else _unfilled(plan)

    def step(self, index: int) -> float:
        busy_s = super().step(index)
        if self.shared:
            gradients = [p.grad for p in self.model.encoders.parameters() if p.grad is not None]
            missing = [p for p in self.model.encoders.parameters() if p.grad is None]
            summed = [*gradients, *(torch.zeros_like(p) for p in missing)]
            # The model is a copy: `gradient_difference` sums the gradients of all ranks.
            dist.all_reduce(torch.cat([g.flatten() for g in summed]))
        return busy_s


def _unfilled(plan: PipelinePlan) -> PipelinePlan:
    order = tuple(tuple(a for a in row if a.type in COMPUTE) for row in plan.actions)
    lowered = lower_plan(outside(order, plan.graph), plan.graph, plan.specs)
    validate_plan(lowered).raise_for_problems()
    return lowered


def played_s(costs: Costs, choice: SeparateEncoder | Front) -> float:
    """Return the simulated time of all steps in seconds."""
    rates, total = costs.rates(choice), 0.0
    layout = plan_layout(choice.config(), costs.descriptions, costs.metas)
    for index in range(len(costs.steps)):
        graph, flops = costs.graph_of(layout, index, choice.parts)
        graph, order = choice.played(graph, rates, flops)
        records = simulate_order(order, graph, costs.seconds_of(layout, flops, rates))
        total += max(record.end_ms for record in records)
    return total


def candidates(setting: Setting) -> dict[str, list[Any]]:
    """Return the candidates of both layouts."""
    size = setting.size
    virtual = [n for n in (1, 2, 4) if n * RANKS <= size.llm_layers]
    beside = [
        SeparateEncoder(slices, llm, images, tower)
        for tower in (1, 2)
        for slices in sorted({1, 2, 4, size.tower_layers // tower})
        for llm in virtual
        for images in setting.images
        if tower * slices <= size.tower_layers
    ]
    return {"beside": beside, "front": [Front(1, llm, ALL) for llm in virtual]}


def run_rank(setting: Setting, names: tuple[str, str, str]) -> dict[str, Any]:
    """Measure all programs on this rank, and return the results.

    Args:
        names: of the filled program, the same without filling, and the encoder in stage 0.
    """
    filled, unfilled, front = names
    _, steps = load_steps(setting.steps, setting.microbatches)
    model = setting.size.build()
    descriptions = [module.describe() for module in model.modality_modules()]
    mesh = build_mesh(ParallelConfig(pipeline=RANKS), torch.device("cpu"))
    watch = Stopwatch(setting.patience_s, QUIET)
    timed = [OurProgram("", model, steps, ProgramChoice(1, 1, n), mesh) for n in setting.images]
    costs = Costs(descriptions, timed, watch)

    def make(name: str, choice: ProgramChoice, fills: bool = True) -> Program:
        return Program(name, model, steps, choice, mesh, costs.rates(choice), fills)

    best = {}
    for name, (kind, choices) in zip((filled, front), candidates(setting).items(), strict=True):
        fastest = sorted(choices, key=partial(played_s, costs))[: setting.tried]
        best[kind] = watch.fastest([make(name, choice) for choice in fastest], setting.turns)
    choice = best["beside"].choice
    programs = [best["beside"], make(unfilled, replace(choice), fills=False), best["front"]]
    return {
        "images": [[m.meta.image_count for m in step] for step in steps],
        "tower share": costs.tower_share,
        "choices": {program.name: str(program.choice) for program in programs},
        "difference": gradient_difference(model, programs),
        "comparison": watch.compare(programs, len(steps), setting.runs),
    }
